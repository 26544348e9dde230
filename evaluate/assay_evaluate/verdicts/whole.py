"""The claim about all score gates together: how much of their margins the tasks used on average, and that none lost far more.

A mean over tasks is much more certain than each task, so it can be decided where single margins cannot. Two tests, both
of which must hold at the level of one (intersection-union, Berger 1982): the mean use of the margins lies below `max_mean_use`,
and each task's loss below `max_task` margins. Chance of a false PASS: (1 - level) / 2 at either limit.

A gain on one task offsets a loss on another in the mean; the second test bounds what that can hide, and a task that FAILs its
own margin fails the candidate whatever the whole says.

Only tasks that can still change the overall verdict of a candidate's scores are asked in a further round:

- A FAIL of a task or of the whole is final: sequential p values never rise from look to look, nor does Holm's adjustment of
  them. Nothing more is asked.
- While the mean use is open, every task goes on, also one that passed alone. Tasks that stop where chance let them look good,
  while others go on, bias the mean: with half of every margin lost the whole then passes in 8 %, not in 2.5 %.
- Once the mean is shown, an undecided task goes on that may still be beyond the limit of a single task, or whose observed loss
  lies above its margin, so that it may FAIL. Any other has no say.

Without `whole:`, or with `stopping: {until: every_task}`, every undecided task is asked to its last look. The second also
takes those along that passed, as long as the mean is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from assay.quantities import capital, interval_name, percent_plain
from assay.recipes.gate import GateRecipe, ScoreGate, WholeGate
from assay.records.base import Interval
from assay.records.verdict import Status, TaskUse, Verdict, WholeClaim
from assay_evaluate.statistics.joint.chances import worth_another_look
from assay_evaluate.statistics.proportions import p_at_least, weighted_sum

GATE = "whole"
"""Name of its verdict."""
IF_CUT = "It does not hold with every cut reply counted against the candidate; what would settle it is said of"
"""And the tasks: replies that loop need another remedy than those that a budget cuts off."""
NOT_ASKED = "Not asked further: more replies would not have changed the overall verdict."
Word = Literal["within its margin", "beyond its margin", "undecided alone"]
WORDS: dict[Status, Word] = {"PASS": "within its margin", "FAIL": "beyond its margin", "UNDERPOWERED": "undecided alone"}


def judge_whole(recipe: GateRecipe, scores: Mapping[str, Verdict], candidate: str) -> WholeClaim | None:
    """From the verdicts of the score gates, task -> verdict. None: the gates claim nothing of the whole, or have no score."""
    gate = recipe.whole
    if gate is None or not scores:
        return None
    unmeasured = {task: score for task, score in scores.items() if score.status == "NOT MEASURED"}
    left_out = tuple(task for task, score in unmeasured.items() if not score.has_say)
    missing = [task for task, score in unmeasured.items() if score.has_say]
    judged = {task: score for task, score in scores.items() if score.status != "NOT MEASURED"}
    uses = tuple(_use(task, score, score.observed, gate) for task, score in judged.items())

    def claim(status: Status, detail: str, mean: Interval | None = None, clause: str | None = None) -> WholeClaim:
        if left_out:
            detail += f" Left out, for the reference cannot do it: {', '.join(left_out)}."
        return WholeClaim(
            candidate=candidate, status=status, mean_use=mean, max_mean_use=gate.max_mean_use, max_task=gate.max_task,
            p_value=None if mean is None else p_at_least(mean, gate.max_mean_use), tasks=uses, left_out=left_out,
            detail=detail, clause=clause,
        )  # fmt: skip

    if missing or not uses:
        what = f"{', '.join(missing)} not measured" if missing else "no score was measured"
        return claim("NOT MEASURED", f"Nothing is said of the whole: {what}.")
    mean = _mean_use(uses)
    few = [task for task, score in judged.items() if score.observed is not None and score.observed.n < recipe.min_items]
    status = _status(gate, mean, uses, few)
    is_open = ["whether it is less is open"] if mean.low <= gate.max_mean_use <= mean.high else []
    beyond = [f"{use.task} (up to {use.use.high:.1f} margins)" for use in uses if not use.within_max]
    if beyond:
        is_open.append(f"a loss of {gate.max_task:g} margins is not excluded on {', '.join(beyond)}")
    if few:
        is_open.append(f"fewer than {recipe.min_items} items on {', '.join(few)}")
    within = [] if beyond else [f"no task lost {gate.max_task:g} margins"]
    limit = f"less than {percent_plain(gate.max_mean_use)} allowed"
    tasks_by_word = {word: [use.task for use in uses if use.word == word] for word in WORDS.values()}
    words = "; ".join(f"{word.capitalize()}: {', '.join(tasks)}" for word, tasks in tasks_by_word.items() if tasks)
    interval = f"{interval_name(mean.level, mean.coverage)}: {_ends(mean)}"
    detail = f"{'; '.join([f'{capital(_used(mean))} ({interval}); {limit}', *is_open, *within])}. {words}."
    if status == "PASS":
        worst = [_use(task, score, score.worst_case or score.observed, gate) for task, score in judged.items()]
        if _status(gate, _mean_use(worst), worst, ()) != "PASS":
            cut = [task for task, score in judged.items() if score.worst_case not in (None, score.observed)]
            status, detail = "UNDERPOWERED", f"{detail} {IF_CUT} {', '.join(cut)}."
            is_open = ["not with every cut reply counted against it"]
    clause = f"{_used(mean)}; {limit}" + (f": {'; '.join(is_open)}" if status == "UNDERPOWERED" else "")
    return claim(status, detail, mean, clause)


def verdict_of(whole: WholeClaim) -> Verdict:
    """As one of the candidate's verdicts; observed and limit are shares of the margins, not points."""
    return Verdict(
        gate=GATE, candidate=whole.candidate, status=whole.status, observed=whole.mean_use, limit=whole.max_mean_use,
        detail=whole.detail, clause=whole.clause,
    )  # fmt: skip


def _use(task: str, score: Verdict, drop: Interval | None, gate: WholeGate) -> TaskUse:
    margin = score.limit
    assert drop is not None and margin is not None  # it was judged
    use = Interval(value=drop.value / margin, low=drop.low / margin, high=drop.high / margin, n=drop.n, level=drop.level)
    return TaskUse(task=task, use=use, word=WORDS[score.status], within_max=use.high < gate.max_task)


def _mean_use(uses: Sequence[TaskUse]) -> Interval:
    return weighted_sum([use.use for use in uses], [1 / len(uses)] * len(uses))


def _status(gate: WholeGate, mean: Interval, uses: Sequence[TaskUse], few: Sequence[str]) -> Status:
    if mean.low > gate.max_mean_use:
        return "FAIL"
    holds = mean.high < gate.max_mean_use and all(use.within_max for use in uses) and not few
    return "PASS" if holds else "UNDERPOWERED"


def _used(mean: Interval) -> str:
    """`loses 12 % of the margins of 3 tasks on average`"""
    verb = "gains" if round(100 * mean.value) < 0 else "loses"
    return f"{verb} {abs(round(100 * mean.value))} % of the margins of {mean.n} task{'s' if mean.n > 1 else ''} on average"


def _ends(mean: Interval) -> str:
    """`87 to 168 % lost`, `43 % gained to 43 % lost`"""
    low, high = abs(round(100 * mean.low)), abs(round(100 * mean.high))
    if mean.low >= 0:
        return f"{low} to {high} % lost"
    return f"{high} to {low} % gained" if mean.high <= 0 else f"{low} % gained to {high} % lost"


# ------------------------------------------------------------------------------------------------ what it does to the tasks
def tasks_to_ask_further(recipe: GateRecipe, scores: Mapping[str, Verdict], candidate: str) -> set[str]:
    """Of the verdicts of a candidate's score gates, task -> verdict, the tasks that are worth another look."""
    return _worth_asking(recipe, scores, judge_whole(recipe, scores, candidate))


def settle_scores(recipe: GateRecipe, scores: Mapping[str, Verdict], whole: WholeClaim | None) -> dict[str, Verdict]:
    """The verdicts of the tasks; one that is undecided and was not taken to its last look says why, and one that is undecided
    alone has no say where the whole decides.

    An equivalence claim also excludes gains, of which the whole says nothing: it keeps its say.
    """
    further = _worth_asking(recipe, scores, whole)
    one_sided = {gate.task for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.claim == "non_inferior"}
    decides = whole is not None and whole.status != "NOT MEASURED"
    settled = dict(scores)
    for task, score in scores.items():
        if score.status != "UNDERPOWERED":
            continue
        is_stopped = bool(score.looks) and score.looks[-1].share < 1 and task not in further
        settled[task] = score.model_copy(
            update={
                "detail": f"{score.detail} {NOT_ASKED}" if is_stopped else score.detail,
                "has_say": score.has_say and not (decides and task in one_sided),
            }
        )
    return settled


def _worth_asking(recipe: GateRecipe, scores: Mapping[str, Verdict], whole: WholeClaim | None) -> set[str]:
    """What is NOT MEASURED is not mended by asking more."""
    undecided = {task for task, score in scores.items() if score.status == "UNDERPOWERED"}
    if whole is None or whole.mean_use is None:
        return undecided
    tasks = [use.task for use in whole.tasks]
    has_say = {gate.task for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.claim == "equivalent"}
    for use in whole.tasks:
        drop, margin = scores[use.task].observed, scores[use.task].limit
        if not use.within_max or (drop is not None and margin is not None and drop.value > margin):
            has_say.add(use.task)
    is_over = whole.status == "FAIL" or any(score.status == "FAIL" for score in scores.values())
    asked = worth_another_look(
        np.array([[task in undecided] for task in tasks]), np.array([[task in has_say] for task in tasks]),
        np.array([is_over]), np.array([whole.mean_use.high < whole.max_mean_use]),
        every_task=recipe.stopping.until == "every_task",
    )  # fmt: skip
    return {task for task, again in zip(tasks, asked[:, 0], strict=True) if again}
