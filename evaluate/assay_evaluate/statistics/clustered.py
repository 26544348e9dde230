"""Means of values that are not independent: cluster bootstrap (BCa), clustered standard errors, paired means.

Values of one cluster (a document, a haystack, a repository, the samples of one item) rise and fall together; an interval that
took them for independent would be too narrow. Clusters are what is sampled, so `n` of every interval counts clusters.

Sources: Efron 1987 (BCa, JASA 82:171-185); Efron & Tibshirani 1993, ch. 14; Liang & Zeger 1986;
Miller 2024 (arXiv 2411.00640).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from assay.records.base import Interval

NUM_RESAMPLES = 2000
Floats = NDArray[np.float64]


# ------------------------------------------------------------------------------------------------ bootstrap
def cluster_bootstrap_mean(
    values: ArrayLike, clusters: ArrayLike, *, level: float = 0.95, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """Mean of all `values` with a BCa bootstrap interval that resamples whole clusters.

    If all cluster means are equal the interval is that point; a single cluster allows no interval: ValueError, as do
    non-finite values.
    """
    data, index, num_clusters = checked(values, clusters)
    return _bootstrap(
        np.bincount(index, weights=data), np.bincount(index).astype(np.float64), num_clusters, level, seed, num_resamples
    )  # fmt: skip


def cluster_bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, clusters: ArrayLike, *, level: float = 0.95, seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:  # fmt: skip
    """sum(numerators) / sum(denominators) of paired values, with a BCa interval: 1.12 = the candidate writes 12 % more tokens.

    ValueError as `cluster_bootstrap_mean`, and unless every cluster's denominators add up to more than 0.
    """
    above, index, num_clusters = checked(numerators, clusters)
    below, _, _ = checked(denominators, clusters)
    totals = np.bincount(index, weights=below).astype(np.float64)
    if (totals <= 0).any():
        raise ValueError("denominators must add up to more than 0 in every cluster")
    return _bootstrap(np.bincount(index, weights=above), totals, num_clusters, level, seed, num_resamples)


def checked(values: ArrayLike, clusters: ArrayLike) -> tuple[Floats, NDArray[np.intp], int]:
    """Finite 1-D values, the number of each one's cluster, and how many clusters there are (at least two)."""
    data: Floats = np.asarray(values, dtype=np.float64)
    labels = np.asarray(clusters)
    if data.ndim != 1 or data.shape != labels.shape:
        raise ValueError(f"values {data.shape} and clusters {labels.shape} must be 1-D and of equal length")
    if not np.isfinite(data).all():
        raise ValueError("values must be finite; count and report the others apart")
    names, index = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"{len(names)} cluster: an interval needs at least two")
    return data, index, len(names)


def _bootstrap(sums: NDArray[Any], counts: Floats, num_clusters: int, level: float, seed: int, num_resamples: int) -> Interval:
    estimate = float(sums.sum() / counts.sum())
    if np.ptp(sums / counts) == 0:
        return Interval(value=estimate, low=estimate, high=estimate, n=num_clusters, level=level)
    resampled = resampled_ratios(sums, counts, num_resamples, np.random.default_rng(seed))
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    low, high = bca_interval(resampled, estimate, left_out, level)
    return Interval(value=estimate, low=low, high=high, n=num_clusters, level=level)


def resampled_ratios(sums: Floats, counts: Floats, num_resamples: int, rng: np.random.Generator) -> Floats:
    """Ratios over clusters drawn with replacement; drawn in pieces, so that memory stays small for many clusters."""
    at_once = max(1, 2_000_000 // len(sums))
    pieces = []
    for start in range(0, num_resamples, at_once):
        drawn = rng.integers(0, len(sums), (min(at_once, num_resamples - start), len(sums)))
        pieces.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(pieces)


def bca_interval(resampled: Floats, estimate: float, left_out: Floats, level: float = 0.95) -> tuple[float, float]:
    """Ends of the BCa interval of any statistic: bootstrap replicates, its value, its values with one unit left out each."""
    low, high = np.quantile(resampled, _bca_probabilities(resampled, estimate, left_out, level))
    return float(low), float(high)


def _bca_probabilities(resampled: Floats, estimate: float, left_out: Floats, level: float) -> list[float]:
    """The two quantiles of the bootstrap distribution that bound a BCa interval (Efron 1987)."""
    tails = [0.5 - level / 2, 0.5 + level / 2]
    below = float((resampled < estimate).mean() + (resampled == estimate).mean() / 2)
    if not 0 < below < 1:  # every resample on one side: no bias correction exists, the plain percentiles remain
        return tails
    bias = float(stats.norm.ppf(below))
    deviations = left_out.mean() - left_out
    acceleration = float((deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5))
    shifted = [bias + float(stats.norm.ppf(tail)) for tail in tails]
    return [float(stats.norm.cdf(bias + z / (1 - acceleration * z))) for z in shifted]


# ------------------------------------------------------------------------------------------------ standard errors
def clustered_standard_error(values: ArrayLike, clusters: ArrayLike) -> float:
    """Standard error of the mean when values of one cluster depend on each other: sqrt(sum_c (sum_i (x_i - mean))^2) / n.

    With clusters of one it is the usual one, with divisor n (Miller 2024; Liang & Zeger without small-sample factor).
    """
    data, index, _ = checked(values, clusters)
    return float(np.sqrt((np.bincount(index, weights=data - data.mean()) ** 2).sum()) / len(data))


def clustered_mean(values: ArrayLike, clusters: ArrayLike, level: float = 0.95) -> Interval:
    """Mean with the clustered standard error, widened for few clusters: factor sqrt(G / (G - 1)), t with G - 1 degrees."""
    data, _, num_clusters = checked(values, clusters)
    error = clustered_standard_error(values, clusters) * float(np.sqrt(num_clusters / (num_clusters - 1)))
    half = float(stats.t.ppf(0.5 + level / 2, num_clusters - 1)) * error
    mean = float(data.mean())
    return Interval(value=mean, low=mean - half, high=mean + half, n=num_clusters, level=level)


# ------------------------------------------------------------------------------------------------ paired means
def paired_mean_difference(
    reference: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """Mean of reference - candidate over paired values with a BCa interval; without `clusters` each item is one."""
    ours, theirs = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(f"reference {ours.shape} and candidate {theirs.shape} must be paired")
    groups = np.arange(len(ours)) if clusters is None else clusters
    return cluster_bootstrap_mean(ours - theirs, groups, level=level, seed=seed)
