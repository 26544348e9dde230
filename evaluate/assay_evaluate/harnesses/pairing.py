"""Whether two sides were asked the same: the same harness, metric and settings, and items that are the same question.

What one side alone states cannot be compared, and is no difference. What differs in serving or in the harness's version may
have any effect; it is said, not judged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import shown
from assay_evaluate.harnesses.scores import ScoredReply, TaskScores

MOST_NAMED = 3
"""Items in a message."""


def check_same_questions(reference: TaskScores, candidate: TaskScores, labels: tuple[str, str]) -> list[str]:
    """What differs and does not keep the two from being compared, one clause each. labels: of reference and candidate.

    MeasureError, naming items or settings: another harness, metric, setting, question or prompt.
    """
    task = reference.task
    where = f"{shown(task)}: {labels[1]} cannot be compared with {labels[0]}"
    for what in ("harness", "metric"):
        before, after = getattr(reference, what), getattr(candidate, what)
        if before != after:
            raise MeasureError(f"{where}: {what} {before}, {labels[1]} {after}; evaluate both alike, or use --metric")
    known = bool(reference.settings and candidate.settings)
    if differences := list(_differences(reference.settings, candidate.settings, labels[1])) if known else []:
        raise MeasureError(f"{where}: asked differently: {'; '.join(differences)}; evaluate both with the same settings")
    _check_items(reference.replies, candidate.replies, where)
    return list(_other_ways(reference, candidate, labels[1]))


def _differences(reference: Mapping[str, Any], candidate: Mapping[str, Any], label: str, path: str = "") -> Iterator[str]:
    """`num_fewshot (5, fp8 0)` for every setting that differs."""
    for name in sorted(reference.keys() | candidate.keys()):
        before, after = reference.get(name), candidate.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, label, f"{path}{name}.")
        elif before != after:
            yield shown(f"{path}{name} ({_told(before)}, {label} {_told(after)})")


def _told(value: Any) -> str:
    return "not set" if value is None else shown(json.dumps(value, ensure_ascii=False), 60)


# ------------------------------------------------------------------------------------------------ items
def _check_items(reference: Sequence[ScoredReply], candidate: Sequence[ScoredReply], where: str) -> None:
    for what in ("question", "prompt"):
        before, after = _hashes(reference, what, where), _hashes(candidate, what, where)
        common = [item for item in before if item in after]
        others = [item for item in common if before[item] != after[item]]
        if not others:
            continue
        named = ", ".join(shown(item, 60) for item in others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        if what == "prompt":
            raise MeasureError(
                f"{where}: {len(others)} of {len(common)} items were asked with other prompts ({named}{more}): other examples, "
                "system prompt or chat template; evaluate both alike"
            )
        is_order = Counter(before[item] for item in common) == Counter(after[item] for item in common)
        order = " (the same questions under other names)" if is_order else ""
        raise MeasureError(
            f"{where}: {len(others)} of {len(common)} items of the same name are other questions{order}: {named}{more}; "
            "evaluate both on the same data, in the same order"
        )


def _hashes(replies: Sequence[ScoredReply], what: str, where: str) -> dict[str, str]:
    """Item -> hash, of items that have one. MeasureError: samples of one item are of two questions."""
    hashes: dict[str, str] = {}
    for reply in replies:
        if (value := getattr(reply, what)) is not None and hashes.setdefault(reply.item, value) != value:
            raise MeasureError(f"{where}: samples of item {shown(reply.item, 60)} are of two {what}s; export the results again")
    return hashes


# ------------------------------------------------------------------------------------------------ said, not judged
def _other_ways(reference: TaskScores, candidate: TaskScores, label: str) -> Iterator[str]:
    for what, before, after in (
        (reference.harness, reference.version, candidate.version),
        ("asked through", reference.asked_through, candidate.asked_through),
    ):
        if before != after:
            yield f"{what} {shown(before or 'not stated', 60)}, for {label} {shown(after or 'not stated', 60)}"
    before_items, after_items = ({reply.item: None for reply in side.replies} for side in (reference, candidate))
    for side, only in (
        ("the reference", [item for item in before_items if item not in after_items]),
        (label, [item for item in after_items if item not in before_items]),
    ):
        if only:
            named = ", ".join(shown(item, 60) for item in only[:MOST_NAMED])
            more = ", …" if len(only) > MOST_NAMED else ""
            yield f"{len(only)} items have results of {side} only ({named}{more})"
