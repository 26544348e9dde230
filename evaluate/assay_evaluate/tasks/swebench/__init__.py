"""SWE-bench on a served checkpoint: mini-swe-agent runs the agent, the official `swebench` harness grades, this orchestrates.

    dataset        rows of the current schema, checked                 trajectories   which count, whose fault an end was
    container_runtime  Docker, Podman, Singularity: there? images?     agents         all trajectories: queue, retries, resume
    agent_worker   a process that drives mini-swe-agent (agent_model)  server_gate    requests wait for a server that is gone
    grading        gold first, then the candidate's patches            grading_worker a process that drives `swebench`
    settings       what mini-swe-agent is told, pinned and hashed      worker_process a module as a process, heard by lines
    task           one SWE-bench task of a suite

Both tools run in processes of their own: they print, read the environment and the working directory, and set limits of the
process on import. What they leave on disk has their layout, so that either can be used on it by hand.

In: a session with a served checkpoint, a `swe` task. Out: a `TaskResult`. May import what `tasks` may.
"""
