"""vLLM as a process: its command line and environment, start, watch and stop; or a server that already runs.

In: a checkpoint folder, a profile, what the model needs. Out: a `Server` with its address and its `Fingerprint`. May import
`assay` and transport.
"""
