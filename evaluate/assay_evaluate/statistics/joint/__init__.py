"""What all score gates of a suite decide together, of candidates whose true losses are known, by simulation.

    drawn    replies drawn for many runs of one task, and what the gate sees of them at each look
    chances  the looks of all tasks to the verdicts of every run, and how often each comes
    further  which tasks are asked further: the rule that the gates have too

In: designs of the gates and assumptions. Out: chances. May import `assay.records` and the other modules of `statistics` only.
"""

from assay_evaluate.statistics.joint.chances import (
    Chances,
    Path,
    Rules,
    asked_further,
    chances_of,
    draw,
    expected,
    judged,
    resolve,
)
from assay_evaluate.statistics.joint.drawn import Assumed, Evidence, LookDesign, ScoreDesign
from assay_evaluate.statistics.joint.further import worth_another_look

__all__ = [
    "Assumed", "Chances", "Evidence", "LookDesign", "Path", "Rules", "ScoreDesign", "asked_further", "chances_of", "draw",
    "expected", "judged", "resolve", "worth_another_look",
]  # fmt: skip
