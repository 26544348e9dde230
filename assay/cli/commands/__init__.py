"""One module for each command of `assay`: options in, one stage called, its record printed.

In: options. Out: a record, printed, and an exit code. May import everything. Commands do not import each other, except
`probe`, which passes `--lever` on to `lever`.
"""
