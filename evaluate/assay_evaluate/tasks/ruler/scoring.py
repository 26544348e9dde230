"""The published metrics, on the text of a reply."""

from __future__ import annotations

from collections.abc import Sequence

from assay_evaluate.tasks.ruler.items import RulerItem


def match_all(text: str, expected: Sequence[str]) -> float:
    """Share of the expected strings found in `text`, upper and lower case alike."""
    lower = text.lower()
    return sum(one.lower() in lower for one in expected) / len(expected)


def match_any(text: str, expected: Sequence[str]) -> float:
    """1.0 if any of the expected strings (aliases of one answer) is found in `text`, else 0.0."""
    lower = text.lower()
    return float(any(one.lower() in lower for one in expected))


def score(item: RulerItem, text: str) -> float:
    """Score in 0..1 of a reply to `item`: without its reasoning, and without the beginning that the prompt gave it."""
    return (match_all if item.match == "all" else match_any)(text, item.expected)
