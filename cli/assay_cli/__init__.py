"""The `assay` command: its commands (`commands/`), and what they share.

In: a command line. Out: the record of one stage, printed or as JSON; progress on stderr; exit code 0, 1 or 2. The only place
that may import everything; nothing imports it. Stages are imported inside functions, so that `assay --help` needs neither
torch nor lm-eval.
"""

from assay_cli.root import app, main

__all__ = ["app", "main"]
