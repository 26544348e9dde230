"""What all score gates of a suite decide together, of candidates whose true losses are known, by simulation.

    drawn    replies drawn for many runs of one task, and what the gate sees of them at each look
    chances  the looks of all tasks to the verdicts of every run, and how often each comes

In: designs of the gates and assumptions. Out: chances. May import `assay.records` and the other modules of `statistics` only.
"""
