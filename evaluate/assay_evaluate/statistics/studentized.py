"""Mean of skewed values in clusters: the bootstrap-t interval, for KL per position of texts.

A few texts carry most of a mean KL, so a sample without them looks both smaller and more certain than the truth: percentile and
BCa intervals miss upward. Studentized resamples carry that dependence of the error on the mean. What is left of the miss with
tens of clusters lies on the side of the longer tail, and that end is taken at `LONG_TAIL` of the nominal tail.
`benchmarks/verdicts/divergence_coverage.py` chose it and measures what the interval covers.

Sources: Efron & Tibshirani 1993, ch. 12.5; Hall 1992 (The Bootstrap and Edgeworth Expansion), ch. 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from assay.records.base import Interval
from assay_evaluate.statistics.clustered import Floats, checked

NUM_RESAMPLES = 2000
LONG_TAIL = 0.2
"""Of the nominal tail of (1 - level) / 2, at the end that the clusters' deviations are skewed towards: 0.5 % of 2.5 %."""
MOST_AT_ONCE = 2_000_000
"""Weights held at a time, for memory's sake."""


def studentized_mean(
    values: ArrayLike, clusters: ArrayLike, *, least: float = -np.inf, most: float = np.inf, level: float = 0.95,
    seed: int = 0, num_resamples: int = NUM_RESAMPLES,
) -> Interval:  # fmt: skip
    """Mean of all `values`, with a bootstrap-t interval that resamples whole clusters.

    least, most: what the mean can be; no end lies beyond. If all cluster means are equal the interval is that point.
    ValueError as `cluster_bootstrap_mean`.
    """
    data, index, n = checked(values, clusters)
    sums = np.bincount(index, weights=data).astype(np.float64)
    counts = np.bincount(index).astype(np.float64)
    mean = float(sums.sum() / counts.sum())
    if np.ptp(sums / counts) == 0:
        return Interval(value=mean, low=mean, high=mean, n=n, level=level)
    low, high = studentized_ends(sums, counts, level, seed, num_resamples)
    return Interval(value=mean, low=max(low, least), high=min(high, most), n=n, level=level)


def studentized_ends(
    sums: Floats, counts: Floats, level: float = 0.95, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """Ends of the interval of sum(sums) / sum(counts), one pair for each cluster."""
    n, mean = len(sums), float(sums.sum() / counts.sum())
    apart = sums - mean * counts
    error = float(np.sqrt((apart**2).sum() * n / (n - 1)) / counts.sum())
    t = np.concatenate(list(_studentized(apart, counts, num_resamples, seed)))
    tail, is_right = (1 - level) / 2, bool((apart**3).sum() > 0)
    below, above = (LONG_TAIL * tail, tail) if is_right else (tail, LONG_TAIL * tail)
    from_low, from_high = np.quantile(t, [1 - above, below]) if len(t) else (0.0, 0.0)
    student = float(stats.t.ppf(1 - tail, n - 1))
    # Where few clusters differ from the rest, resamples without them have no error of their own and say nothing.
    if is_right:
        from_high = min(float(from_high), -student)
    else:
        from_low = max(float(from_low), student)
    return mean - float(from_low) * error, mean - float(from_high) * error


def _studentized(apart: Floats, counts: Floats, num_resamples: int, seed: int) -> Iterator[Floats]:
    """(resample's mean - mean) / resample's own standard error, in pieces; resamples whose error is 0 are left out.

    apart: each cluster's sum minus its count times the mean. A resample is a row of weights, so that its five sums are one
    product of matrices.
    """
    n = len(apart)
    columns = np.stack([apart, counts, apart**2, apart * counts, counts**2], axis=1)
    for weights in resample_weights(n, num_resamples, seed):
        apart_sum, count, squares, crosses, count_squares = (weights @ columns).T
        shift = apart_sum / count
        variance = squares - 2 * shift * crosses + shift**2 * count_squares
        has_error = variance > 1e-12 * squares
        error = np.sqrt(variance[has_error] * n / (n - 1)) / count[has_error]
        yield shift[has_error] / error


def resample_weights(n: int, num_resamples: int, seed: int) -> Iterator[Floats]:
    """How often each of n clusters is drawn, a row for each resample, in pieces."""
    at_once = max(1, MOST_AT_ONCE // n)
    for piece, start in enumerate(range(0, num_resamples, at_once)):
        yield _weights(n, min(at_once, num_resamples - start), seed, piece)


@lru_cache(maxsize=4)
def _weights(n: int, rows: int, seed: int, piece: int) -> Floats:
    """Kept, because a record has a dozen intervals over the same texts."""
    drawn = np.random.default_rng([seed, piece]).integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
    weights: Floats = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)
    weights.flags.writeable = False
    return weights
