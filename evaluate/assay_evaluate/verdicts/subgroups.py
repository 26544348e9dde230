"""Subgroups of the tasks: a language, a part (subject, kind, number of tools) or a length that is ruined while its task passes.

A subgroup that lost all of its accuracy moves the mean of its task by a thirteenth, so gates on tasks do not see it. Every
subgroup that a suite's tasks declare by their items is tested by itself; a language that several tasks ask in also over all of
them. FAIL: one surely lost more than the stated multiple of its task's margin. UNDERPOWERED: one surely lost something, and
that multiple is not excluded. Otherwise the gate says that no such loss is shown, which certifies no subgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, points_short
from assay.recipes.gate import GateRecipe, SubgroupBy, SubgroupsGate
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, SubgroupLoss, SubgroupWord, Verdict
from assay_evaluate.statistics.item_pairs import Pairs, find_task
from assay_evaluate.statistics.uneven.subgroups import adjusted, screen
from assay_evaluate.verdicts.long_context import joined, pairs_where
from assay_evaluate.verdicts.score_sentences import change, interval_of

GATE = "subgroups"
MOST_NAMED = 3
"""Subgroups that a sentence names."""
CALLED: dict[SubgroupBy, str] = {"language": "language", "part": "part", "length": "length"}


@dataclass(frozen=True)
class Subgroup:
    """Items of one task, or of one language over several, that both sides answered. margin: of its items, on average."""

    by: SubgroupBy
    name: str
    tasks: tuple[str, ...]
    titles: tuple[str, ...]
    pairs: Pairs
    margin: float

    @property
    def num_items(self) -> int:
        return len(set(self.pairs.items))

    @property
    def title(self) -> str:
        """`es of tool calls`, `zh over 3 tasks`"""
        return f"{self.name} of {self.titles[0]}" if len(self.tasks) == 1 else f"{self.name} over {len(self.tasks)} tasks"


def judge_subgroups(
    gate: SubgroupsGate, recipe: GateRecipe, reference: Measurement, candidate: Measurement, scores: Mapping[str, Verdict]
) -> tuple[Verdict | None, tuple[SubgroupLoss, ...]]:
    """scores: the verdict of each score gate, task -> verdict; those without one are left out. No verdict: the tasks declare no
    subgroups."""
    judged = {task: score for task, score in scores.items() if score.status != "NOT MEASURED" and score.limit is not None}
    declared = list(subgroups_of(gate, reference, candidate, judged))
    if not declared:
        return None, ()
    enough = [one for one in declared if one.num_items >= gate.min_items]
    small = [one for one in declared if one.num_items < gate.min_items]
    losses = _losses(gate, recipe, candidate.label, enough)
    if not losses:
        none = f"No subgroup has {gate.min_items} items or more.{_not_looked_at(gate, small)}"
        return _verdict(candidate, "NOT MEASURED", none, has_say=False), ()
    worst = sorted(losses, key=lambda loss: (loss.word != "beyond", loss.p_loss_adjusted))
    beyond = [one for one in worst if one.word == "beyond"]
    unbounded = [one for one in worst if one.word == "loses, and its limit is not excluded"]
    status: Status = "FAIL" if beyond else "UNDERPOWERED" if unbounded else "PASS"
    named = beyond or unbounded or [one for one in worst if one.word == "loses"]
    detail = f"{_seen(gate, losses, named)}{_not_looked_at(gate, small)}"
    return _verdict(candidate, status, detail, named, clause=_clause(gate, losses, named, status)), losses


def _losses(
    gate: SubgroupsGate, recipe: GateRecipe, candidate: str, subgroups: Sequence[Subgroup]
) -> tuple[SubgroupLoss, ...]:  # fmt: skip
    limits = [gate.max_margins * subgroup.margin for subgroup in subgroups]
    drops = [subgroup.pairs.drop(recipe.level) for subgroup in subgroups]
    p_loss = [_p_loss(subgroup.pairs, drop.value) for subgroup, drop in zip(subgroups, drops, strict=True)]
    p_beyond = [
        subgroup.pairs.evidence(limit, level=recipe.level).p_fail if drop.value > limit else 1.0
        for subgroup, limit, drop in zip(subgroups, limits, drops, strict=True)
    ]
    alpha = (1 - recipe.level) / 2
    found = screen(p_loss, p_beyond, [drop.high for drop in drops], limits, false_discovery=gate.false_discovery, alpha=alpha)
    words: list[SubgroupWord] = [
        "beyond" if beyond else "loses, and its limit is not excluded" if unbounded else "loses" if shown else "no loss shown"
        for beyond, shown, unbounded in zip(found.beyond, found.shown, found.unbounded, strict=True)
    ]
    rows = zip(subgroups, drops, limits, p_loss, adjusted(p_loss), p_beyond, adjusted(p_beyond), words, strict=True)
    return tuple(
        SubgroupLoss(
            candidate=candidate, by=one.by, name=one.name, tasks=one.tasks, title=one.title, num_items=one.num_items, drop=drop,
            limit=limit, p_loss=p, p_loss_adjusted=float(p_adjusted), p_beyond=beyond, p_beyond_adjusted=float(beyond_adjusted),
            minimum_detectable_effect=one.pairs.detectable(recipe.level), word=word,
        )
        for one, drop, limit, p, p_adjusted, beyond, beyond_adjusted, word in rows
    )  # fmt: skip


def _p_loss(pairs: Pairs, lost: float) -> float:
    """One-sided, of no loss: by items, and by clusters where they have some. Items that share a text are lost together by
    chance as well."""
    if lost <= 0:
        return 1.0
    by_item, clustered = pairs.p_difference / 2, pairs.clustered
    return by_item if clustered is None else max(by_item, clustered.p_at_most(0.0))


# ------------------------------------------------------------------------------------------------ which there are
def subgroups_of(
    gate: SubgroupsGate, reference: Measurement, candidate: Measurement, judged: Mapping[str, Verdict]
) -> Iterator[Subgroup]:
    """Of every task by every property that its items have several values of, then languages over several tasks."""
    by_language = dict[str, list[Subgroup]]()
    for task, verdict in judged.items():
        ours, theirs = find_task(reference, task), find_task(candidate, task)
        assert ours is not None and theirs is not None and verdict.limit is not None  # it was judged
        for by in gate.by:
            values = list(dict.fromkeys(value for item in ours.items if (value := VALUES[by](ours, item)) is not None))
            for value in values:
                if len(values) < 2 and by != "language":
                    continue
                one = _subgroup(by, value, task, verdict, ours, theirs)
                if one is None:
                    continue
                if by == "language":
                    by_language.setdefault(value, []).append(one)
                if len(values) > 1:
                    yield one
    if len(by_language) > 1:
        yield from (_over_tasks(name, parts) for name, parts in by_language.items() if len(parts) > 1)


def _subgroup(
    by: SubgroupBy, value: str, task: str, verdict: Verdict, ours: TaskResult, theirs: TaskResult
) -> Subgroup | None:  # fmt: skip
    pairs = pairs_where(ours, theirs, lambda item: VALUES[by](ours, item) == value)
    assert verdict.limit is not None
    return Subgroup(by, value, (task,), (verdict.title or task,), pairs, verdict.limit) if pairs.n else None


def _over_tasks(language: str, parts: Sequence[Subgroup]) -> Subgroup:
    num_items = sum(part.num_items for part in parts)
    margin = sum(part.margin * part.num_items for part in parts) / num_items
    pairs = joined([part.pairs for part in parts])
    return Subgroup(
        "language", language, tuple(part.tasks[0] for part in parts), tuple(part.titles[0] for part in parts), pairs, margin
    )


def _part(task: TaskResult, item: ItemResult) -> str | None:
    """RULER's task or the number of tools; of lm-eval the task behind a name that stands for several, such as a subject."""
    if item.subtask is not None:
        return item.subtask
    return item.item.rsplit("/", 1)[0] if task.kind == "lm_eval" and "/" in item.item else None


def _length(_: TaskResult, item: ItemResult) -> str | None:
    return None if item.length_tokens is None else f"{item.length_tokens:,} tokens"


VALUES: dict[SubgroupBy, Callable[[TaskResult, ItemResult], str | None]] = {
    "language": lambda _, item: item.language, "part": _part, "length": _length,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ in words
def _verdict(
    candidate: Measurement, status: Status, detail: str, named: Sequence[SubgroupLoss] = (), *, clause: str | None = None,
    has_say: bool = True,
) -> Verdict:  # fmt: skip
    observed: Interval | None = named[0].drop if named else None
    return Verdict(
        gate=GATE, candidate=candidate.label, status=status, observed=observed, limit=named[0].limit if named else None,
        detail=detail, clause=clause, has_say=has_say,
    )  # fmt: skip


def _clause(gate: SubgroupsGate, losses: Sequence[SubgroupLoss], named: Sequence[SubgroupLoss], status: Status) -> str:
    """`loses 30.0 points on law of MMLU-Pro; 4 (2 margins) allowed in a subgroup`"""
    if status == "PASS":
        return f"no loss beyond {gate.max_margins:g} margins is shown in {_count(losses)}"
    allowed = f"{points_short(named[0].limit)} ({gate.max_margins:g} margins) allowed in a subgroup"
    is_open = ": a loss is shown, whether it is more is open" if status == "UNDERPOWERED" else ""
    return f"{change(named[0].drop)} on {named[0].title}; {allowed}{is_open}"


def _count(losses: Sequence[SubgroupLoss]) -> str:
    names = list(dict.fromkeys(CALLED[loss.by] for loss in losses))
    return f"{len(losses)} subgroup{'s' if len(losses) > 1 else ''} by {_and(names)}"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _seen(gate: SubgroupsGate, losses: Sequence[SubgroupLoss], named: Sequence[SubgroupLoss]) -> str:
    """What is shown, or that nothing is; and how large a loss may go unnoticed."""
    rate = percent_short(gate.false_discovery)
    if not named:
        found = f"No loss is shown in any of {_count(losses)} (false-discovery rate {rate})."
    else:
        listed = "; ".join(
            f"{change(one.drop)} on {one.title} ({interval_of(one.drop)}; {one.num_items} items; "
            f"{points_short(one.limit)} allowed)"
            for one in named[:MOST_NAMED]
        )
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        found = f"{capital(listed)}{more}: shown among {_count(losses)} (false-discovery rate {rate})."
    effects = sorted(loss.minimum_detectable_effect for loss in losses)
    return (
        f"{found} In the middle one of them a loss of {points_short(effects[len(effects) // 2])} points is missed 1 "
        f"time in 5, taken by itself."
    )


def _not_looked_at(gate: SubgroupsGate, small: Sequence[Subgroup]) -> str:
    if not small:
        return ""
    names = ", ".join(one.title for one in small[:MOST_NAMED])
    more = f" and {len(small) - MOST_NAMED} more" if len(small) > MOST_NAMED else ""
    return f" Not looked at, for fewer than {gate.min_items} items: {names}{more}."
