"""What more tokens would show of candidates that were screened: half-widths of their KL, and how many decide at a limit.

From the spread of the texts that were screened: an end of the interval comes to the value with the root of the number of
tokens, but for what computing otherwise than the reference adds. A text with a KL that none of these has changes it. Of fewer
tokens nothing is foretold, since intervals over few texts are wider than that root says (benchmarks/screen/intervals.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from assay.errors import AssayError
from assay.records.base import Interval
from assay.records.divergence import Ranking
from assay.records.preflight.power import HalfWidth, RankingPower, ScreenedPower, ScreeningPower
from assay.records.screening import AppliedFloor, Screened, Screening

MULTIPLES = (1, 2, 4, 10)
"""Of the tokens that were screened, if no number is asked for."""


def screening_power(record: Screening, *, limit: float | None = None, tokens: Sequence[int] = ()) -> ScreeningPower:
    """limit: instead of that of each candidate's bits, nats. tokens: numbers to foretell a half-width of; none: multiples of
    those that were screened.

    AssayError: a limit that is none, a number below those screened, of which nothing is foretold; no candidate has an interval.
    """
    screened = record.panel.num_tokens
    if limit is not None and limit <= 0:
        raise AssayError(f"--kl-limit {limit:g}: must be a number of nats above 0")
    if few := [number for number in tokens if number < screened]:
        raise AssayError(
            f"--tokens {few[0]}: {screened} were screened, and of fewer nothing is foretold; name {screened} or more"
        )
    if not any(isinstance(candidate.drift.kl_mean, Interval) for candidate in record.candidates):
        raise AssayError(
            f"--screening: {record.panel.num_texts} texts have no interval and tell nothing of more; screen 20 texts or more"
        )
    numbers = tuple(sorted(set(tokens))) or tuple(screened * times for times in MULTIPLES)
    return ScreeningPower(
        reference=record.reference, num_texts=record.panel.num_texts, num_tokens=screened,
        is_foreign=record.surprise.is_foreign,
        candidates=tuple(
            _of_candidate(candidate, screened, candidate.limit if limit is None else limit, numbers)
            for candidate in record.candidates
        ),
        rankings=tuple(_of_ranking(ranking, screened) for ranking in record.rankings),
    )  # fmt: skip


def tokens_that_decide(mean: Interval, num_tokens: int, limit: float, floor: AppliedFloor | None = None) -> int | None:
    """Scored tokens at which the interval would exclude the limit if its value is the truth. num_tokens: that it is of.

    floor: what it was widened by, which no token takes away. None: no number of tokens would do.
    """
    root = _root(floor)
    low, high = _before_floor(mean, root)
    if mean.value <= limit:
        reach, gap = high - mean.value, root_moved(limit, -root) - mean.value
    else:
        reach, gap = mean.value - low, mean.value - root_moved(limit, root)
    return math.ceil(num_tokens * (reach / gap) ** 2) if gap > 0 else None


def root_moved(kl: float, by: float) -> float:
    """The KL whose root lies further by `by`, and not below 0: near 0 the root of a divergence is a distance."""
    return max(0.0, math.sqrt(kl) + by) ** 2 if by else kl


def _root(floor: AppliedFloor | None) -> float:
    return 0.0 if floor is None else math.sqrt(floor.kl)


def _before_floor(mean: Interval, root: float) -> tuple[float, float]:
    """The ends of the interval before the floor moved their roots; 0 stays, for it may have been cut off there."""
    low = root_moved(mean.low, root) if mean.low > 0 else 0.0
    return min(mean.value, low), max(mean.value, root_moved(mean.high, -root))


def _of_candidate(candidate: Screened, screened: int, limit: float, numbers: Sequence[int]) -> ScreenedPower:
    mean, needed, half_widths = candidate.drift.kl_mean, None, []
    if isinstance(mean, Interval):
        needed = tokens_that_decide(mean, screened, limit, candidate.floor)
        half_widths = list(_half_widths(mean, _root(candidate.floor), screened, numbers))
    return ScreenedPower(
        label=candidate.label, kl=mean, limit=limit, tokens_needed=None if needed is None else max(needed, screened),
        half_widths=tuple(half_widths),
    )  # fmt: skip


def _half_widths(mean: Interval, root: float, screened: int, numbers: Sequence[int]) -> Iterator[HalfWidth]:
    low, high = _before_floor(mean, root)
    for number in numbers:
        shrunk = math.sqrt(screened / number)
        least, most = mean.value - shrunk * (mean.value - low), mean.value + shrunk * (high - mean.value)
        half = (root_moved(most, root) - root_moved(least, -root)) / 2
        yield HalfWidth(num_tokens=number, nats=half, share=half / mean.value if mean.value > 0 else None)


def _of_ranking(ranking: Ranking, screened: int) -> RankingPower:
    """The end of the ratio's interval on the side of 1 comes to the ratio in the same way."""
    ratio, needed = ranking.ratio, None
    if ratio is not None and ratio.value != 1:
        near = ratio.high if ratio.value < 1 else ratio.low
        needed = max(screened, math.ceil(screened * ((near - ratio.value) / (1 - ratio.value)) ** 2))
    return RankingPower(first=ranking.first, second=ranking.second, ratio=ratio, tokens_needed=needed)
