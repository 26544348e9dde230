"""One module for each command of `assay`: options in, one stage called, its record printed.

May import everything. Commands do not import each other, but for `probe`, which hands `--lever` on to `lever`.
"""
