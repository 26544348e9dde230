"""Items of a tools task -> shares with intervals, by cell and over all; and the candidate's triggers against the reference's.

Trigger F1 against the reference is Moonshot's K2-Vendor-Verifier measure; intervals are Wilson's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.records.base import Interval
from assay.records.measurement import ItemResult, ToolCalls, ToolCell, ToolFigures, ToolItem, TriggerFidelity
from assay_evaluate.statistics.paired import mcnemar_midp
from assay_evaluate.statistics.proportions import wilson


def tool_calls(items: Sequence[ItemResult], reference: Sequence[ItemResult] | None) -> ToolCalls:
    """Figures of one checkpoint's answered items. reference: its results for the same items; None: this is the reference."""
    done = [one for item in items if (one := _answered(item)) is not None]
    cells: dict[tuple[int, int | None], list[ToolItem]] = {}
    for one in done:
        cells.setdefault((one.num_tools, one.prompt_tokens), []).append(one)
    return ToolCalls(
        overall=ToolFigures(**_figures(done)),
        cells=tuple(
            ToolCell(num_tools=num_tools, prompt_tokens=length, **_figures(ones)) for (num_tools, length), ones in cells.items()
        ),
        against_reference=None if reference is None else trigger_fidelity(reference, items),
    )


def _answered(item: ItemResult) -> ToolItem | None:
    return None if item.correct is None else item.tool


def _figures(items: Sequence[ToolItem]) -> dict[str, Any]:
    triggered = [one for one in items if one.called]
    callable_ = [one for one in items if one.expected_tool is not None]
    both = [one for one in triggered if one.expected_tool is not None]
    right = [one for one in both if one.arguments_equal is not None]
    return {
        "num_items": len(items),
        "trigger_precision": _share(len(both), len(triggered)),
        "trigger_recall": _share(len(both), len(callable_)),
        "right_tool": _share(sum(one.called == (one.expected_tool,) for one in both), len(both)),
        "schema_valid": _share(sum(one.schema_valid is True for one in triggered), len(triggered)),
        "arguments_equal": _share(sum(one.arguments_equal is True for one in right), len(right)),
        "num_left_in_text": sum(one.left_in_text for one in items),
    }


def _share(num: int, of: int) -> Interval | None:
    return wilson(num, of) if of else None


def trigger_fidelity(reference: Sequence[ItemResult], candidate: Sequence[ItemResult]) -> TriggerFidelity | None:
    """Triggers of both sides on the items that both answered; None without any. Whether a tool was right plays no part."""
    ours = {item.item: bool(one.called) for item in reference if (one := _answered(item)) is not None}
    pairs = [
        (ours[item.item], bool(one.called))
        for item in candidate
        if (one := _answered(item)) is not None and item.item in ours
    ]  # fmt: skip
    if not pairs:
        return None
    both, first, second = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True)))
    return TriggerFidelity(
        num_both=both,
        num_reference_only=first,
        num_candidate_only=second,
        num_neither=len(pairs) - both - first - second,
        precision=_share(both, both + second),
        recall=_share(both, both + first),
        f1=2 * both / (2 * both + first + second) if both + first + second else None,
        p_value=mcnemar_midp(first, second),
    )
