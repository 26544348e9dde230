"""The claim about the whole: how much of their margins the tasks used on average, and that none lost far more than its own.

A mean over tasks is much more certain than each task, so it can be decided where single margins cannot. Two tests, both
of which must hold at the level of one (intersection-union, Berger 1982): the mean use of the margins lies below `max_mean_use`,
and each task's loss below `max_task` margins. Chance of a false PASS: (1 - level) / 2 at either limit.

A gain on one task offsets a loss on another in the mean; the second test bounds what that can hide, and a task that FAILs its
own margin fails the candidate whatever the whole says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from assay.quantities import capital, interval_name, percent_plain
from assay.recipes.gate import GateRecipe, ScoreGate, WholeGate
from assay.records.base import Interval
from assay.records.verdict import Status, TaskUse, Verdict, WholeClaim
from assay_evaluate.statistics.pooled import p_at_least, weighted_sum

GATE = "whole"
"""Name of its verdict."""
IF_CUT = "It does not hold with every cut reply counted against the candidate; what would settle it is said of"
"""And the tasks: replies that loop need another remedy than those that a budget cuts off."""
Word = Literal["within its margin", "beyond its margin", "undecided alone"]
WORDS: dict[Status, Word] = {"PASS": "within its margin", "FAIL": "beyond its margin"}


def judge_whole(recipe: GateRecipe, scores: Mapping[str, Verdict], candidate: str) -> WholeClaim | None:
    """From the verdicts of the score gates, task -> verdict. None: the gates claim nothing of the whole, or have no score."""
    gate = recipe.whole
    if gate is None or not scores:
        return None
    left_out = tuple(task for task, score in scores.items() if score.status == "NOT MEASURED" and not score.has_say)
    missing = [task for task, score in scores.items() if score.status == "NOT MEASURED" and score.has_say]
    judged = {task: score for task, score in scores.items() if score.status != "NOT MEASURED"}
    uses = tuple(_use(task, one, gate) for task, one in judged.items())
    if missing or not uses:
        what = f"{', '.join(missing)} not measured" if missing else "no score was measured"
        return _claim(gate, candidate, "NOT MEASURED", None, uses, left_out, f"Nothing is said of the whole: {what}.")
    mean = weighted_sum([use.use for use in uses], [1 / len(uses)] * len(uses))
    few = [task for task, one in judged.items() if one.observed is not None and one.observed.n < recipe.min_items]
    status, detail = _status(gate, mean, uses, few), _detail(gate, mean, uses, few, recipe.min_items)
    still_open = _open(gate, mean, uses, few, recipe.min_items)
    if status == "PASS" and not _holds_with_cut_replies(gate, judged):
        cut = ", ".join(task for task, one in judged.items() if one.worst_case is not None and one.worst_case != one.observed)
        status, detail, still_open = (
            "UNDERPOWERED",
            f"{detail} {IF_CUT} {cut}.",
            ["not with every cut reply counted against it"],
        )
    clause = f"{_used(mean)}; {_limit(gate)}" + (f": {'; '.join(still_open)}" if status == "UNDERPOWERED" else "")
    return _claim(gate, candidate, status, mean, uses, left_out, detail).model_copy(update={"clause": clause})


def settled(recipe: GateRecipe, whole: WholeClaim | None, scores: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts of the tasks; one undecided alone has no say where the whole decides.

    An equivalence claim also excludes gains, of which the whole says nothing: it keeps its say.
    """
    if whole is None or whole.status == "NOT MEASURED":
        return dict(scores)
    one_sided = {gate.task for gate in recipe.gates if isinstance(gate, ScoreGate) and gate.claim == "non_inferior"}
    return {
        task: score.model_copy(update={"has_say": False}) if score.status == "UNDERPOWERED" and task in one_sided else score
        for task, score in scores.items()
    }


def verdict_of(whole: WholeClaim) -> Verdict:
    """As one of the candidate's verdicts; observed and limit are shares of the margins, not points."""
    return Verdict(
        gate=GATE, candidate=whole.candidate, status=whole.status, observed=whole.mean_use, limit=whole.max_mean_use,
        detail=whole.detail, clause=whole.clause,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the parts
def _use(task: str, verdict: Verdict, gate: WholeGate) -> TaskUse:
    drop, margin = verdict.observed, verdict.limit
    assert drop is not None and margin is not None  # it was judged
    use = Interval(value=drop.value / margin, low=drop.low / margin, high=drop.high / margin, n=drop.n, level=drop.level)
    return TaskUse(task=task, use=use, word=WORDS.get(verdict.status, "undecided alone"), within_max=use.high < gate.max_task)


def _holds_with_cut_replies(gate: WholeGate, judged: Mapping[str, Verdict]) -> bool:
    """Whether the claim also holds with every cut reply counted against the candidate."""
    worst = {task: one.model_copy(update={"observed": one.worst_case or one.observed}) for task, one in judged.items()}
    uses = tuple(_use(task, one, gate) for task, one in worst.items())
    mean = weighted_sum([use.use for use in uses], [1 / len(uses)] * len(uses))
    return _status(gate, mean, uses, ()) == "PASS"


def _status(gate: WholeGate, mean: Interval, uses: Sequence[TaskUse], few: Sequence[str]) -> Status:
    if mean.low > gate.max_mean_use:
        return "FAIL"
    holds = mean.high < gate.max_mean_use and all(use.within_max for use in uses) and not few
    return "PASS" if holds else "UNDERPOWERED"


def _claim(
    gate: WholeGate, candidate: str, status: Status, mean: Interval | None, uses: tuple[TaskUse, ...],
    left_out: tuple[str, ...], detail: str,
) -> WholeClaim:  # fmt: skip
    if left_out:
        detail += f" Left out, for the reference cannot do it: {', '.join(left_out)}."
    return WholeClaim(
        candidate=candidate, status=status, mean_use=mean, max_mean_use=gate.max_mean_use, max_task=gate.max_task,
        p_value=None if mean is None else p_at_least(mean, gate.max_mean_use), tasks=uses, left_out=left_out, detail=detail,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ in words
def _detail(gate: WholeGate, mean: Interval, uses: Sequence[TaskUse], few: Sequence[str], min_items: int) -> str:
    """`Loses 12 % of the margins of 3 tasks on average (95 % interval: 8 % gained to 31 % lost); less than 50 % allowed; no
    task lost 2 margins.`"""
    found = f"{capital(_used(mean))} ({interval_name(mean.level, mean.coverage)}: {_ends(mean)}); {_limit(gate)}"
    still_open = _open(gate, mean, uses, few, min_items)
    if all(use.within_max for use in uses):
        still_open.append(f"no task lost {gate.max_task:g} margins")
    words = [(word, [use.task for use in uses if use.word == word]) for word in (*WORDS.values(), "undecided alone")]
    said = "; ".join(f"{word.capitalize()}: {', '.join(names)}" for word, names in words if names)
    return f"{'; '.join([found, *still_open])}. {said}."


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


def _limit(gate: WholeGate) -> str:
    return f"less than {percent_plain(gate.max_mean_use)} allowed"


def _open(gate: WholeGate, mean: Interval, uses: Sequence[TaskUse], few: Sequence[str], min_items: int) -> list[str]:
    """What is not shown."""
    found = ["whether it is less is open"] if mean.low <= gate.max_mean_use <= mean.high else []
    beyond = [f"{use.task} (up to {use.use.high:.1f} margins)" for use in uses if not use.within_max]
    found += [f"a loss of {gate.max_task:g} margins is not excluded on {', '.join(beyond)}"] if beyond else []
    return found + ([f"fewer than {min_items} items on {', '.join(few)}"] if few else [])
