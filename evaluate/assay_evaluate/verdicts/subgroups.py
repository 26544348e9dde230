"""Subgroups of the tasks: a language, a part (subject, kind, number of tools) or a length that is ruined while its task passes.

A subgroup that lost all of its accuracy moves the mean of its task by a thirteenth, so gates on tasks do not see it. Every
subgroup that a suite's tasks declare by their items is tested by itself; a language that several tasks ask in also over all of
them. FAIL: one surely lost more than the stated multiple of its task's margin. UNDERPOWERED: one surely lost something, and
that multiple is not excluded. Otherwise the gate says that no such loss is shown, which certifies no subgroup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, points_short
from assay.recipes.gate import GateRecipe, SubgroupBy, SubgroupsGate
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, SubgroupLoss, SubgroupWord, Verdict
from assay_evaluate.statistics.decisions import benjamini_hochberg, screen_subgroups
from assay_evaluate.statistics.item_pairs import Pairs, find_task, join_pairs, pair_some_items
from assay_evaluate.verdicts.score_sentences import change, interval_of

GATE = "subgroups"
MOST_NAMED = 3
"""Subgroups that a sentence names."""


@dataclass(frozen=True)
class Subgroup:
    """Items of one task, or of one language over several, that both sides answered. margin: of its items, on average."""

    by: SubgroupBy
    name: str
    tasks: tuple[str, ...]
    task_title: str
    """Of the first task."""
    pairs: Pairs
    margin: float

    @property
    def num_items(self) -> int:
        return len(set(self.pairs.items))

    @property
    def title(self) -> str:
        """`es of tool calls`, `zh over 3 tasks`"""
        return f"{self.name} of {self.task_title}" if len(self.tasks) == 1 else f"{self.name} over {len(self.tasks)} tasks"


def judge_subgroups(
    gate: SubgroupsGate, recipe: GateRecipe, reference: Measurement, candidate: Measurement, scores: Mapping[str, Verdict]
) -> tuple[Verdict | None, tuple[SubgroupLoss, ...]]:
    """scores: the verdict of each score gate, task -> verdict; those without one are left out. No verdict: the tasks declare no
    subgroups."""
    judged = {task: score for task, score in scores.items() if score.status != "NOT MEASURED" and score.limit is not None}
    declared = list(subgroups_of(gate, reference, candidate, judged))
    if not declared:
        return None, ()
    large = [subgroup for subgroup in declared if subgroup.num_items >= gate.min_items]
    small = [subgroup.title for subgroup in declared if subgroup.num_items < gate.min_items]
    not_looked_at = ""
    if small:
        more = f" and {len(small) - MOST_NAMED} more" if len(small) > MOST_NAMED else ""
        names = ", ".join(small[:MOST_NAMED])
        not_looked_at = f" Not looked at, for fewer than {gate.min_items} items: {names}{more}."
    losses = _losses(gate, recipe, candidate.label, large)
    if not losses:
        none = f"No subgroup has {gate.min_items} items or more.{not_looked_at}"
        return Verdict(
            gate=GATE, candidate=candidate.label, status="NOT MEASURED", observed=None, limit=None, detail=none, has_say=False
        ), ()
    ranked = sorted(losses, key=lambda loss: (loss.word != "beyond", loss.p_loss_adjusted))
    beyond, unbounded, shown = (
        [loss for loss in ranked if loss.word == word] for word in ("beyond", "loses, and its limit is not excluded", "loses")
    )
    status: Status = "FAIL" if beyond else "UNDERPOWERED" if unbounded else "PASS"
    named = beyond or unbounded or shown
    return Verdict(
        gate=GATE, candidate=candidate.label, status=status, observed=named[0].drop if named else None,
        limit=named[0].limit if named else None, detail=f"{_detail(gate, losses, named)}{not_looked_at}",
        clause=_clause(gate, losses, named, status),
    ), losses  # fmt: skip


def _losses(gate: SubgroupsGate, recipe: GateRecipe, candidate: str, subgroups: Sequence[Subgroup]) -> tuple[SubgroupLoss, ...]:
    limits = [gate.max_margins * subgroup.margin for subgroup in subgroups]
    drops = [subgroup.pairs.drop(recipe.level) for subgroup in subgroups]
    p_loss = [_p_loss(subgroup.pairs, drop.value) for subgroup, drop in zip(subgroups, drops, strict=True)]
    p_beyond = [
        subgroup.pairs.evidence(limit, level=recipe.level).p_fail if drop.value > limit else 1.0
        for subgroup, limit, drop in zip(subgroups, limits, drops, strict=True)
    ]
    screened = screen_subgroups(
        p_loss, p_beyond, [drop.high for drop in drops], limits, false_discovery=gate.false_discovery,
        alpha=(1 - recipe.level) / 2,
    )  # fmt: skip
    words: list[SubgroupWord] = [
        "beyond" if beyond else "loses, and its limit is not excluded" if unbounded else "loses" if shown else "no loss shown"
        for beyond, shown, unbounded in zip(screened.beyond, screened.shown, screened.unbounded, strict=True)
    ]
    loss_adjusted, beyond_adjusted = benjamini_hochberg(p_loss), benjamini_hochberg(p_beyond)
    return tuple(
        SubgroupLoss(
            candidate=candidate, by=subgroup.by, name=subgroup.name, tasks=subgroup.tasks, title=subgroup.title,
            num_items=subgroup.num_items, drop=drops[at], limit=limits[at], p_loss=p_loss[at],
            p_loss_adjusted=float(loss_adjusted[at]), p_beyond=p_beyond[at], p_beyond_adjusted=float(beyond_adjusted[at]),
            minimum_detectable_effect=subgroup.pairs.detectable(recipe.level), word=words[at],
        )
        for at, subgroup in enumerate(subgroups)
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
    for name, verdict in judged.items():
        task, candidate_task = find_task(reference, name), find_task(candidate, name)
        assert task is not None and candidate_task is not None and verdict.limit is not None  # it was judged
        for by in gate.by:
            values = list(dict.fromkeys(value for item in task.items if (value := _value(by, task, item)) is not None))
            for value in values if len(values) > 1 or by == "language" else ():
                names = {item.item for item in task.items if _value(by, task, item) == value}
                pairs = pair_some_items(task, candidate_task, names)
                if not pairs.n:
                    continue
                subgroup = Subgroup(by, value, (name,), verdict.title or name, pairs, verdict.limit)
                if by == "language":
                    by_language.setdefault(value, []).append(subgroup)
                if len(values) > 1:
                    yield subgroup
    for language, parts in by_language.items() if len(by_language) > 1 else ():
        if len(parts) > 1:
            margin = sum(part.margin * part.num_items for part in parts) / sum(part.num_items for part in parts)
            tasks = tuple(part.tasks[0] for part in parts)
            yield Subgroup("language", language, tasks, parts[0].task_title, join_pairs([part.pairs for part in parts]), margin)


def _value(by: SubgroupBy, task: TaskResult, item: ItemResult) -> str | None:
    """A part is RULER's task or the number of tools; of lm-eval the task behind a name that stands for several, such as a
    subject."""
    match by:
        case "language":
            return item.language
        case "length":
            return None if item.length_tokens is None else f"{item.length_tokens:,} tokens"
        case "part":
            if item.subtask is not None:
                return item.subtask
            return item.item.rsplit("/", 1)[0] if task.kind == "lm_eval" and "/" in item.item else None


# ------------------------------------------------------------------------------------------------ in words
def _clause(gate: SubgroupsGate, losses: Sequence[SubgroupLoss], named: Sequence[SubgroupLoss], status: Status) -> str:
    """`loses 30.0 points on law of MMLU-Pro; 4 (2 margins) allowed in a subgroup`"""
    if status == "PASS":
        return f"no loss beyond {gate.max_margins:g} margins is shown in {_count(losses)}"
    allowed = f"{points_short(named[0].limit)} ({gate.max_margins:g} margins) allowed in a subgroup"
    is_open = ": there is a real loss, but the data cannot tell whether it exceeds that" if status == "UNDERPOWERED" else ""
    return f"{change(named[0].drop)} on {named[0].title}; {allowed}{is_open}"


def _count(losses: Sequence[SubgroupLoss]) -> str:
    *others, last = dict.fromkeys(loss.by for loss in losses)
    by = f"{', '.join(others)} and {last}" if others else last
    return f"{len(losses)} subgroup{'s' if len(losses) > 1 else ''} by {by}"


def _detail(gate: SubgroupsGate, losses: Sequence[SubgroupLoss], named: Sequence[SubgroupLoss]) -> str:
    """What is shown, or that nothing is; and how large a loss may go unnoticed."""
    among = f"{_count(losses)} (false-discovery rate {percent_short(gate.false_discovery)})"
    if named:
        listed = "; ".join(
            f"{change(loss.drop)} on {loss.title} ({interval_of(loss.drop)}; {loss.num_items} items; "
            f"{points_short(loss.limit)} allowed)"
            for loss in named[:MOST_NAMED]
        )
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        shown = f"{capital(listed)}{more}: shown among {among}."
    else:
        shown = f"No loss is shown in any of {among}."
    effects = sorted(loss.minimum_detectable_effect for loss in losses)
    return (
        f"{shown} In the middle one of them a loss of {points_short(effects[len(effects) // 2])} points is missed 1 "
        f"time in 5, taken by itself."
    )
