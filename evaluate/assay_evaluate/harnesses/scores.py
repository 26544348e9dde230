"""What every format is read into: scores of one task, reply by reply; and how values of a foreign file are taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import one_line, shown
from assay.records.base import sha256_of
from assay_evaluate.transport.foreign_json import clean_json, text_of

MOST_NAME = 500
"""Characters of an item's, task's or metric's name."""
MOST_ANSWER = 200
"""Characters of an answer that are kept."""
MOST_REPLIES = 5_000_000
"""Of one task."""
MOST_SAMPLES = 10_000
"""Replies to one item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredReply:
    """One reply. `score` is None where infrastructure failed, or nothing was scored: never a wrong answer."""

    item: str
    score: float | None
    """0..1."""
    sample: int = 0
    error: str | None = None
    """Why there is no score."""
    question: str | None = None
    """Hash of the question and the right answer. None: the file has neither."""
    prompt: str | None = None
    """Hash of the prompt, with examples. None: the file has none, or `question` is of it."""
    answer: str | None = None
    cluster: str | None = None
    subtask: str | None = None
    cut: bool | None = None
    """Whether the reply was cut off. None: the file does not say."""
    output_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """One task as one side's results have it."""

    task: str
    harness: str
    version: str | None
    """Of the harness. None: the files do not say."""
    metric: str
    replies: Sequence[ScoredReply]
    files: Mapping[Path, str]
    """That it was read from -> SHA-256."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides the questions and the sampling: both sides must agree on what both state."""
    model: str | None = None
    asked_through: str | None = None
    """Which client or backend of the harness asked."""
    max_tokens: int | None = None
    chance: float | None = None
    """Share that guessing gets right. None: the files do not say."""
    started: str | None = None
    """ISO 8601."""


def wrong(where: object, what: str) -> MeasureError:
    """An error about a foreign file, on one line. what: what is wrong, and what to do."""
    return MeasureError(f"{shown(where)}: {what}")


# ------------------------------------------------------------------------------------------------ values
def name_of(value: Any, where: object, what: str) -> str:
    """An item's, task's or metric's name: text or a whole number."""
    if type(value) is int:
        value = str(value) if abs(value) < 2**63 else None
    if type(value) is not str or not value:
        raise wrong(where, f"{what} is {shown(repr(value), 60)}; a name or a whole number was expected")
    if len(value) > MOST_NAME:
        raise wrong(where, f"{what} is {len(value):,} characters long, at most {MOST_NAME} are read")
    return one_line(text_of(value) or "")


def score_of(value: Any, where: object, other_metrics: Iterable[str] = ()) -> float:
    """A score between 0 and 1, or whether the reply is right. MeasureError: it is something else, and which metrics there
    are besides."""
    if isinstance(value, bool | int | float) and math.isfinite(value) and 0 <= value <= 1:
        return float(value)
    others = ", ".join(other_metrics)
    choose = f"; choose another with --metric: {others}" if others else ""
    raise wrong(where, f"score {shown(repr(value), 60)} is no number between 0 and 1{choose}")


def whole_number(value: Any, where: object, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise wrong(where, f"{what} is {shown(repr(value), 60)}; a whole number from 0 to {most:,} was expected")
    return value


def answer_of(value: Any) -> str | None:
    return None if value is None else shown(value, MOST_ANSWER)


def hash_of(*parts: Any) -> str:
    """Of what was asked: of its JSON, whatever the order of names; also of text that is no Unicode."""
    return sha256_of(json.dumps(parts, sort_keys=True))[:16]


def settings_of(where: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are stated, as they can be written down again."""
    try:
        return {name: clean_json(value) for name, value in given.items() if value is not None and value != {}}
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong(where, f"its settings cannot be read: {one_line(str(error))}") from None


def choose_metric(where: object, metrics: Sequence[str], requested: str | None) -> str:
    """The one that was asked for, or the first. MeasureError: there is none of that name, or none at all."""
    if not metrics:
        raise wrong(where, "has no scores of single items; write them out with the harness")
    if requested is None:
        return metrics[0]
    if requested not in metrics:
        raise wrong(where, f"has no metric {shown(requested)}; --metric takes one of: {', '.join(map(shown, metrics))}")
    return requested


def without_doubles(replies: Iterable[ScoredReply], where: object) -> tuple[ScoredReply, ...]:
    """The replies; MeasureError if one sample of an item stands there twice: nobody can say which counts."""
    known: dict[tuple[str, int], ScoredReply] = {}
    for reply in replies:
        if (reply.item, reply.sample) in known:
            again = f", sample {reply.sample}," if reply.sample else ""
            raise wrong(where, f"item {shown(reply.item, 60)}{again} stands there twice; leave one of them")
        if len(known) >= MOST_REPLIES:
            raise wrong(where, f"has more than {MOST_REPLIES:,} replies; import a part of them")
        known[reply.item, reply.sample] = reply
    if not known:
        raise wrong(where, "has no item")
    return tuple(known.values())
