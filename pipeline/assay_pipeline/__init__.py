"""The stages as functions: `from assay_pipeline import plan, quantize, verify, prepare, evaluate, judge, report, run`.

In: the words of a command (a target, names of recipes, folders, URLs). Out: records. Nothing is printed: lines of progress go
to `say`, bytes to `track` (`QuantizeOptions`, or a parameter), a checkpoint that is done to `on_made`. Errors that a user can
mend are `assay.errors.AssayError`, one line each. The command line (`assay_cli`) is a layer of words and tables on top.

torch, lm-eval and vLLM are imported when a function needs them.
"""

from assay_pipeline.evaluating import Evaluation, Judged, SweOptions, check_budgets, evaluate, prepare
from assay_pipeline.judging import judge, report
from assay_pipeline.planning import plan
from assay_pipeline.quantize_options import QuantizeOptions, TextOptions
from assay_pipeline.quantizing import MadeCheckpoint, quantize, verify
from assay_pipeline.running import RunResult, run

__all__ = [
    "Evaluation", "Judged", "MadeCheckpoint", "QuantizeOptions", "RunResult", "SweOptions", "TextOptions", "check_budgets",
    "evaluate", "judge", "plan", "prepare", "quantize", "report", "run", "verify",
]  # fmt: skip
