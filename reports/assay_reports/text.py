"""Numbers as people read them: one function per kind of quantity, each with its unit. None is NOT MEASURED, never 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from markupsafe import Markup, escape

from assay import quantities
from assay.records.base import Interval
from assay.records.divergence import Estimate, StopChance, TextMean
from assay.records.measurement import Divergence
from assay.records.speed import SpeedRow
from assay.records.verdict import Chosen
from assay_evaluate.speed.ratio import mean_of, tpot_s, ttft_s
from assay_reports.schema import Row
from assay_reports.sentences import page as english

NOT_MEASURED = "NOT MEASURED"
K = TypeVar("K")
V = TypeVar("V")
SMALLEST_NATS = 1e-9
"""Log-probabilities in single precision tell nothing below."""
LEAST_CHANGE = 0.0005
"""Of a chance to stop: less is 0.0 points in print."""


def and_list(names: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def count_of(number: int, noun: str) -> str:
    """1 text, 1,200 texts"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key -> its values, both in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def percent(share: float | None) -> str:
    """0.975 -> 97.5 %"""
    return NOT_MEASURED if share is None else quantities.percent(share)


def coverage(level: float) -> str:
    """What the intervals of a table cover, whose cells have no room to say it one by one."""
    return english.COVERAGE.format(level=quantities.percent_plain(level))


def percent_interval(interval: TextMean | None) -> str:
    """97.5 % [94.3, 98.9]"""
    return _interval(interval, points, " %")


def points(share: float | None) -> str:
    """0.015 -> 1.5: percentage points, the unit stands in the heading."""
    return NOT_MEASURED if share is None else quantities.points(share)


def points_interval(interval: TextMean | None) -> str:
    """+1.5 [-0.9, +4.2]: percentage points, the unit stands in the heading."""
    return _interval(interval, quantities.points_signed)


def change_interval(lost: Interval | None) -> str:
    """A loss of 9.0 points as a change: -9.0 [-16.6, -3.1]. lost: reference minus candidate."""
    if lost is None:
        return NOT_MEASURED
    return points_interval(lost.model_copy(update={"value": -lost.value, "low": -lost.high, "high": -lost.low}))


def nats(number: float | None) -> str:
    """Three significant digits: 0.0213; 0 where it is exactly 0."""
    if number is None:
        return NOT_MEASURED
    return "0" if number == 0 else f"{number:.3g}"


def nats_interval(interval: TextMean | None) -> str:
    """0.0213 [0.0197, 0.0231]; of too few texts for an interval 0.0213 (8 texts)"""
    return _interval(interval, nats)


def _interval(interval: TextMean | None, shown: Callable[[float], str], unit: str = "") -> str:
    if interval is None:
        return NOT_MEASURED
    if isinstance(interval, Estimate):
        return f"{shown(interval.value)}{unit} {_texts(interval)}"
    return f"{shown(interval.value)}{unit} [{shown(interval.low)}, {shown(interval.high)}]"


def stop_sentence(stop: StopChance) -> str:
    """Whether a checkpoint ends its replies where the reference did, and elsewhere."""
    change = stop.change_at_stops
    if change is None:
        return english.NO_STOPS
    outcome = english.STOPS_ALIKE
    if isinstance(change, Estimate):
        outcome = english.STOPS_UNKNOWN
    elif change.high < -LEAST_CHANGE:
        outcome = english.STOPS_LESS
    elif change.low > LEAST_CHANGE:
        outcome = english.STOPS_MORE
    return english.STOPS.format(
        candidate=percent(stop.candidate_at_stops), reference=percent(stop.reference_at_stops), outcome=outcome,
        ends=count(stop.num_stops), change=points_interval(change), candidate_elsewhere=stop.candidate_elsewhere,
        reference_elsewhere=stop.reference_elsewhere,
    )  # fmt: skip


def _texts(mean: Estimate) -> str:
    return english.TEXTS.format(texts=count_of(mean.n, "text"))


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units, as disks and GPUs are sold: 12.3 MB, 372 GB."""
    return NOT_MEASURED if num_bytes is None else quantities.size(num_bytes)


def ratio(number: float | None, unit: str = "x") -> str:
    """3.9x; beyond 10,000 only that it is: a floor that small is rounding, and its digits say nothing."""
    if number is None:
        return NOT_MEASURED
    return f"> 10,000{unit}" if number > 10_000 else f"{number:.3g}{unit}"


def one_digit(number: float | None) -> str:
    """50x: of two noisy numbers that are divided no further digit says anything."""
    if number is None:
        return NOT_MEASURED
    return "> 10,000x" if number > 10_000 else f"{float(f'{number:.1g}'):,g}x"


def bound_over_floor(row: Row, floor: Row | None) -> str:
    """The lower bound as a multiple of the noise floor; of none where the floor is 0, or only rounding."""
    if row.kl_times_floor is None and (floor is None or floor.divergence is None):
        return NOT_MEASURED
    is_rounding = floor is not None and floor.divergence is not None and floor.divergence.kl_mean.value < SMALLEST_NATS
    return english.FLOOR_IS_ZERO if row.kl_times_floor is None or is_rounding else one_digit(row.kl_times_floor)


def kl_by_text(divergence: Divergence) -> TextMean | None:
    """Unbiased KL as a mean over sampled texts. None: recorded before it was."""
    return next((drift.kl_text_mean for drift in divergence.drift if drift.texts == "all"), None)


def tokens(number: float | None) -> str:
    """182.4"""
    return NOT_MEASURED if number is None else f"{number:,.1f}"


def tokens_interval(interval: Interval | None) -> str:
    """+3.1 [-0.2, +6.9]"""
    if interval is None:
        return NOT_MEASURED
    value, low, high = map(quantities.signed, (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def times_interval(interval: TextMean | None) -> str:
    """1.023 [1.018, 1.029]: a ratio near 1."""
    if interval is None:
        return NOT_MEASURED
    if isinstance(interval, Estimate):
        return f"{interval.value:.3f} {_texts(interval)}"
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def count(number: int | None) -> str:
    return NOT_MEASURED if number is None else f"{number:,}"


def pvalue(number: float | None) -> str:
    if number is None:
        return NOT_MEASURED
    return "< 0.001" if number < 0.001 else f"{number:.3f}"


def error(number: float | None) -> str:
    """A relative weight error, three significant digits."""
    return NOT_MEASURED if number is None else f"{number:.3g}"


def gates_title(chosen: Chosen | None) -> str:
    """When the limits were chosen, as a heading. None: nothing was judged."""
    return english.GATES_TITLES[chosen]


def missing_part(suite: str, asked: bool, reasons: Iterable[str | None]) -> str:
    """Why no checkpoint of a run has a part of a report; `reasons`: what the measurements say, each once."""
    if not asked:
        return english.NOT_IN_SUITE.format(suite=suite)
    listed = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    return english.MISSING_PART.format(status=NOT_MEASURED, reasons=listed or english.NO_REASON)


def yes_no(value: bool | None) -> str:
    return english.YES_NO[value]


def computed(emulated: bool | None) -> str:
    """How quantized formats were computed, as it continues "they were"."""
    return english.COMPUTED[emulated]


def flag_value(value: Any) -> str:
    return english.ON_OFF[value] if isinstance(value, bool) else str(value)


def latency_s(row: SpeedRow, what: str) -> float | None:
    """`ttft` (of medians) or `tpot` (of means) of a row, as `assay speed` prints it. None: not measured."""
    mean = mean_of(row, ttft_s if what == "ttft" else tpot_s)
    return None if mean is None else mean.value


def with_code(text: str) -> Markup:
    """HTML of a sentence: what stands in backticks is code, whose options are not broken at their hyphens."""
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"(?<= )(--[\w-]+)(?=[^<>]*</code>)", r"<span>\1</span>", html))


FILTERS = {
    function.__name__: function
    for function in (
        percent, coverage, percent_interval, points, points_interval, change_interval, nats, nats_interval, size, ratio,
        tokens, tokens_interval, times_interval, count, pvalue, error, yes_no, computed, flag_value, gates_title,
        stop_sentence, one_digit, kl_by_text, latency_s, bound_over_floor, with_code,
    )
}  # fmt: skip
"""Names under which the templates know them."""
