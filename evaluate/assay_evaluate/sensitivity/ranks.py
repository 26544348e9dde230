"""Spearman's rank correlation of two ways to order parts, with a bootstrap interval over the parts."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import RankCorrelation
from assay.records.plan import Role

FEWEST_PARTS = 4
DRAWS = 2000

PartOf = tuple[int | None, Role, str]
"""layer, role, scheme."""


def rank_correlation(
    of: str, ours: Mapping[PartOf, float], beside: str, theirs: Mapping[PartOf, float], *, seed: str
) -> RankCorrelation:
    """Over the parts that both know. The interval (percentiles of resampled parts) is rough below twenty parts."""
    both = [part for part in ours if part in theirs]
    pairs = tuple((*part, ours[part], theirs[part]) for part in both)
    if len(both) < FEWEST_PARTS:
        why = f"{len(both)} parts in both; {FEWEST_PARTS} are needed"
        return RankCorrelation(of=of, beside=beside, spearman=None, parts=pairs, why_not=why)
    values = np.array([[ours[part], theirs[part]] for part in both])
    if (np.ptp(values, axis=0) == 0).any():
        return RankCorrelation(of=of, beside=beside, spearman=None, parts=pairs, why_not="one side gives all parts the same")
    draw = random.Random(f"{seed}:{of}:{beside}")
    resampled = (values[[draw.randrange(len(both)) for _ in both]] for _ in range(DRAWS))
    found = [_spearman(one) for one in resampled if (np.ptp(one, axis=0) > 0).all()]
    low, high = np.quantile(found, [0.025, 0.975])
    value = _spearman(values)
    interval = Interval(value=value, low=min(float(low), value), high=max(float(high), value), n=len(both), coverage="about")
    return RankCorrelation(of=of, beside=beside, spearman=interval, parts=pairs)


def _spearman(pairs_P2: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(pairs_P2[:, 0], pairs_P2[:, 1]).statistic)
