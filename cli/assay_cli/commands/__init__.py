"""One module for each command of `assay`: options in, one stage called, its record printed.

`make/` makes checkpoints, `measure/` serves and measures them, `diagnose/` looks for what is wrong, `results/` reads a run's
records, `about/` tells about this installation. In: options. Out: a record, printed, and an exit code. May import everything.
Commands do not import each other.
"""
