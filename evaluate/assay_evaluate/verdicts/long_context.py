"""Losses by length, by length and depth, and by part of a task: what a heat map shows. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from assay.records.long_context import CellLoss, LongContext
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay_evaluate.statistics.item_pairs import Pairs, find_task, pair_items

QUARTERS = 4
"""Depths are shown in quarters, as the needle grid asks for them: 0, 0.25, 0.5, 0.75, 1."""


def long_context(reference: Measurement, candidate: Measurement, level: float) -> list[LongContext]:
    """Of every task whose items have several lengths or depths, in the order of the reference's tasks."""
    found = []
    for ours in reference.tasks:
        theirs = find_task(candidate, ours.task)
        if theirs is None:
            continue
        one = _of_task(candidate.label, ours, theirs, level)
        if one is not None:
            found.append(one)
    return found


def _of_task(label: str, ours: TaskResult, theirs: TaskResult, level: float) -> LongContext | None:
    subtasks = dict.fromkeys(item.subtask for item in ours.items if item.length_tokens is not None)
    lengths = lengths_of(ours.items)
    depths = sorted({depth for item in ours.items if item.length_tokens is not None and (depth := quarter(item)) is not None})
    if len(lengths) < 2 and len(depths) < 2:
        return None

    def cells(parts: Iterable[tuple[str | None, int, float | None]]) -> tuple[CellLoss, ...]:
        made = (_cell(ours, theirs, *part, level) for part in parts)
        return tuple(cell for cell in made if cell is not None)

    named = [subtask for subtask in subtasks if subtask is not None]
    return LongContext(
        candidate=label,
        task=ours.task,
        by_subtask=cells((name, length, None) for name in named for length in lengths) if len(named) > 1 else (),
        by_length=cells((None, length, None) for length in lengths),
        by_depth=cells((None, length, depth) for length in lengths for depth in depths),
    )


def _cell(
    ours: TaskResult, theirs: TaskResult, subtask: str | None, length_tokens: int, depth: float | None, level: float
) -> CellLoss | None:
    """None: no item of it was answered by both sides."""

    def inside(item: ItemResult) -> bool:
        is_part = subtask is None or item.subtask == subtask
        return is_part and item.length_tokens == length_tokens and (depth is None or quarter(item) == depth)

    pairs = pairs_where(ours, theirs, inside)
    if pairs.n == 0:
        return None
    return CellLoss(
        subtask=subtask,
        length_tokens=length_tokens,
        depth=depth,
        num_pairs=pairs.n,
        reference=sum(pairs.reference) / pairs.n,
        candidate=sum(pairs.candidate) / pairs.n,
        drop=pairs.drop(level),
    )


def pairs_where(ours: TaskResult, theirs: TaskResult, inside: Callable[[ItemResult], bool]) -> Pairs:
    """Pairs of the items that the reference's side says are `inside`."""
    names = {item.item for item in ours.items if inside(item)}
    only = [one.model_copy(update={"items": tuple(i for i in one.items if i.item in names)}) for one in (ours, theirs)]
    return pair_items(*only)


def lengths_of(items: Iterable[ItemResult]) -> list[int]:
    """Lengths that the items have, ascending."""
    return sorted({item.length_tokens for item in items if item.length_tokens is not None})


def quarter(item: ItemResult) -> float | None:
    """Its depth to the nearest quarter."""
    return None if item.depth is None else round(item.depth * QUARTERS) / QUARTERS


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Pairs of several tasks as one; items and clusters of two tasks are never the same."""
    return Pairs(
        [one for pairs in parts for one in pairs.reference],
        [one for pairs in parts for one in pairs.candidate],
        sum(pairs.num_excluded for pairs in parts),
        [reference_answer for pairs in parts for reference_answer in pairs.reference_answers],
        [candidate_answer for pairs in parts for candidate_answer in pairs.candidate_answers],
        [f"{number}/{item}" for number, pairs in enumerate(parts) for item in pairs.items],
        [f"{number}/{cluster}" for number, pairs in enumerate(parts) for cluster in pairs.clusters],
        _all_shares(parts) if any(pairs.unequal is not None for pairs in parts) else None,
    )


def _all_shares(parts: Sequence[Pairs]) -> tuple[list[float], list[float]]:
    """Also of replies that cannot be paired, because one side has more of them."""
    sides = [pairs.shares for pairs in parts]
    return [share for ours, _ in sides for share in ours], [share for _, theirs in sides for share in theirs]
