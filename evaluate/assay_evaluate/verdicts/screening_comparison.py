"""Two screenings side by side: what changed in the KL of each candidate, where both figures mean the same. Gives no verdict.

They do if reference, texts and numerics are the same; otherwise what differs is named and nothing is ranked. A record has no
values by text, so that nothing is paired: two candidates are told apart where their intervals have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from assay.records.base import Interval, Part, Record
from assay.records.divergence import TextMean
from assay.records.screening import Numerics, Screened, Screening, ScreenWord

Change = Literal["the same weights", "less", "more", "not told apart"]


class ScreeningSide(Part):
    """place: of the record."""

    place: str
    reference: str
    reference_sha256: str
    num_texts: int
    num_tokens: int
    panel_sha256: str
    numerics: Numerics


class ScreenedChange(Part):
    """One candidate of both, by its label or else by its weights. Pairs: (first, second); None: it is not there."""

    label: str
    weights_sha256: tuple[str | None, str | None]
    words: tuple[ScreenWord | None, ScreenWord | None]
    kl: tuple[TextMean | None, TextMean | None]
    ratio: float | None
    """KL in the second over that in the first. None: not compared, or the first is 0."""
    change: Change | None
    """From the first to the second. None: not compared."""
    not_compared: str | None
    """Why."""
    note: str | None = None
    """What else differs, where figures are compared."""


class ScreeningComparison(Record):
    """differences: in sentences, what keeps figures from being compared; none: reference, texts and numerics are the same."""

    kind: Literal["screening_comparison"] = "screening_comparison"
    first: ScreeningSide
    second: ScreeningSide
    differences: tuple[str, ...]
    candidates: tuple[ScreenedChange, ...]


def compare_screenings(places: tuple[str, str], first: Screening, second: Screening) -> ScreeningComparison:
    """places: of the records, as they were named."""
    differences = tuple(_differences(first, second))
    pairs = _pairs(first, second)
    return ScreeningComparison(
        first=_side(places[0], first), second=_side(places[1], second), differences=differences,
        candidates=tuple(_change(*pair, is_alike=not differences) for pair in pairs),
    )  # fmt: skip


def _side(place: str, record: Screening) -> ScreeningSide:
    panel = record.panel
    return ScreeningSide(
        place=place, reference=record.reference, reference_sha256=record.reference_sha256, num_texts=panel.num_texts,
        num_tokens=panel.num_tokens, panel_sha256=panel.sha256, numerics=record.numerics,
    )  # fmt: skip


def _differences(first: Screening, second: Screening) -> Iterator[str]:
    if first.reference_sha256 != second.reference_sha256:
        yield f"other references: checkpoints {first.reference_sha256:.12} and {second.reference_sha256:.12}"
    if first.panel.sha256 != second.panel.sha256:
        texts = (f"{side.panel.num_texts} ({side.panel.sha256:.12})" for side in (first, second))
        yield f"other texts: {' and '.join(texts)}"
    fields = [
        f"{name} {getattr(first.numerics, name)}, second {getattr(second.numerics, name)}"
        for name in Numerics.model_fields
        if getattr(first.numerics, name) != getattr(second.numerics, name)
    ]
    if fields:
        yield f"other numerics: {'; '.join(fields)}"


def _pairs(first: Screening, second: Screening) -> list[tuple[Screened | None, Screened | None]]:
    """By label; those left by their weights."""
    left = {candidate.label: candidate for candidate in second.candidates}
    partners = [left.pop(candidate.label, None) for candidate in first.candidates]
    renamed = {candidate.weights_sha256: label for label, candidate in left.items()}
    pairs: list[tuple[Screened | None, Screened | None]] = []
    for candidate, partner in zip(first.candidates, partners, strict=True):
        label = None if partner is not None else renamed.pop(candidate.weights_sha256, None)
        pairs.append((candidate, partner if label is None else left.pop(label)))
    return [*pairs, *((None, candidate) for candidate in left.values())]


def _change(first: Screened | None, second: Screened | None, *, is_alike: bool) -> ScreenedChange:
    either = first or second
    assert either is not None, "a pair has a side"
    reason, change, ratio, note = None, None, None, None
    if first is None or second is None:
        reason = f"only in the {'second' if first is None else 'first'}"
    elif not is_alike:
        reason = "figures of other references, texts or numerics are not ranked"
    elif first.floor != second.floor:
        reason = "computed otherwise than its reference in one of the two, or in another way"
    else:
        change, ratio = _told_apart(first, second), _ratio(first.drift.kl_mean, second.drift.kl_mean)
        if first.fp8_kv_cache != second.fp8_kv_cache:
            note = f"keys and values were rounded in the {'second' if second.fp8_kv_cache else 'first'} alone"
    return ScreenedChange(
        label=either.label,
        weights_sha256=(None if first is None else first.weights_sha256, None if second is None else second.weights_sha256),
        words=(None if first is None else first.word, None if second is None else second.word),
        kl=(None if first is None else first.drift.kl_mean, None if second is None else second.drift.kl_mean),
        ratio=ratio, change=change, not_compared=reason, note=note,
    )  # fmt: skip


def _told_apart(first: Screened, second: Screened) -> Change:
    if first.weights_sha256 == second.weights_sha256 and first.fp8_kv_cache == second.fp8_kv_cache:
        return "the same weights"
    before, after = first.drift.kl_mean, second.drift.kl_mean
    if not isinstance(before, Interval) or not isinstance(after, Interval):
        return "not told apart"
    return "less" if after.high < before.low else "more" if after.low > before.high else "not told apart"


def _ratio(first: TextMean, second: TextMean) -> float | None:
    return second.value / first.value if first.value > 0 else None
