"""Which tasks are asked in a further round: those that can still change the overall verdict of a candidate's scores.

- A FAIL of a task or of the whole is final: sequential p values never rise from look to look, nor does Holm's adjustment of
  them. Nothing more is asked.
- While the mean use is open, every task goes on, also one that passed alone. Tasks that stop where chance let them look good,
  while others go on, bias the mean: with half of every margin lost the whole then passes in 8 %, not in 2.5 %.
- Once the mean is shown, an undecided task goes on that may still be beyond the limit of a single task, or whose seen loss lies
  above its margin, so that it may FAIL. Any other has no say.

Without `whole:`, or with `stopping: {until: every_task}`, every undecided task is asked to its last look. The second also
takes those along that passed, as long as the mean is open.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.records.verdict import Verdict, WholeClaim
from assay_evaluate.statistics.joint import worth_another_look
from assay_evaluate.verdicts.whole.claim import judge_whole

NOT_ASKED = "Not asked further: more replies would not have changed the overall verdict."


def asked_further(recipe: GateRecipe, scores: Mapping[str, Verdict], candidate: str) -> set[str]:
    """Of the verdicts of a candidate's score gates, task -> verdict, the tasks that are worth another look."""
    return _asked(recipe, scores, judge_whole(recipe, scores, candidate))


def with_reason(
    recipe: GateRecipe, scores: Mapping[str, Verdict], whole: WholeClaim | None
) -> dict[str, Verdict]:  # fmt: skip
    """The verdicts; one that is undecided and was not taken to its last look says why."""
    further = _asked(recipe, scores, whole)
    return {
        task: score.model_copy(update={"detail": f"{score.detail} {NOT_ASKED}"})
        if score.status == "UNDERPOWERED" and score.looks and score.looks[-1].share < 1 and task not in further
        else score
        for task, score in scores.items()
    }


def _asked(recipe: GateRecipe, scores: Mapping[str, Verdict], whole: WholeClaim | None) -> set[str]:
    """What is NOT MEASURED is not mended by asking more."""
    undecided = {task for task, score in scores.items() if score.status == "UNDERPOWERED"}
    if whole is None or whole.mean_use is None:
        return undecided
    tasks = [task.task for task in whole.tasks]
    both_ways = {gate.task for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.claim == "equivalent"}
    has_say = both_ways | {
        task.task for task in whole.tasks if not task.within_max or _loses_more_than_its_margin(scores[task.task])
    }
    is_over = whole.status == "FAIL" or any(score.status == "FAIL" for score in scores.values())
    asked = worth_another_look(
        np.array([[task in undecided] for task in tasks]), np.array([[task in has_say] for task in tasks]),
        np.array([is_over]), np.array([whole.mean_use.high < whole.max_mean_use]),
        every_task=recipe.stopping.until == "every_task",
    )  # fmt: skip
    return {task for task, again in zip(tasks, asked[:, 0], strict=True) if again}


def _loses_more_than_its_margin(verdict: Verdict) -> bool:
    """By what was seen; more replies may then make it FAIL."""
    return verdict.observed is not None and verdict.limit is not None and verdict.observed.value > verdict.limit
