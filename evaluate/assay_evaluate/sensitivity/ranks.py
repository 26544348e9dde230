"""Spearman's rank correlation of two ways to order parts, with an interval over the parts of a model.

Schemes of one part fare alike, so parts are resampled with all their schemes. Of few parts, or of parts in nearly the same
order, resampling finds too little (of the very same order nothing else): ends are at least as far as those of Bonett and Wright
(Psychometrika 65, 2000, 23-28).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import RankCorrelation
from assay.records.plan import Role

FEWEST_PARTS = 4
DRAWS = 2000
Z_95 = 1.959963984540054

PartOf = tuple[int | None, Role, str]
"""layer, role, scheme."""


def rank_correlation(
    of: str, first_values: Mapping[PartOf, float], beside: str, other_values: Mapping[PartOf, float], *, seed: str
) -> RankCorrelation:
    """Over the parts and schemes that both know."""
    common = [part for part in first_values if part in other_values]
    pairs = tuple((*part, first_values[part], other_values[part]) for part in common)
    if len(common) < FEWEST_PARTS:
        reason = f"{len(common)} parts in both; {FEWEST_PARTS} are needed"
        return RankCorrelation(of=of, beside=beside, spearman=None, parts=pairs, why_not=reason)
    values = np.array([[first_values[part], other_values[part]] for part in common])
    if (np.ptp(values, axis=0) == 0).any():
        return RankCorrelation(of=of, beside=beside, spearman=None, parts=pairs, why_not="one side gives all parts the same")
    rows_of: dict[tuple[int | None, Role], list[int]] = defaultdict(list)
    for row, (layer, role, _) in enumerate(common):
        rows_of[layer, role].append(row)
    rows, draw = list(rows_of.values()), random.Random(f"{seed}:{of}:{beside}")
    return RankCorrelation(of=of, beside=beside, spearman=spearman_interval(values, rows, draw), parts=pairs)


def spearman_interval(values_P2: np.ndarray, rows: Sequence[Sequence[int]], draw: random.Random) -> Interval:
    """Of two columns that both have more than one value, `FEWEST_PARTS` rows at least. rows: numbers of rows that are drawn
    together, again and again."""
    resampled = (values_P2[[row for _ in rows for row in rows[draw.randrange(len(rows))]]] for _ in range(DRAWS))
    correlations = [_spearman(resample) for resample in resampled if (np.ptp(resample, axis=0) > 0).all()]
    value = _spearman(values_P2)
    ends = _bonett_wright(value, len(rows) if abs(value) > 1 - 1e-12 else len(values_P2))
    low, high = np.quantile(correlations, [0.025, 0.975]) if correlations else ends
    low, high = min(float(low), ends[0], value), max(float(high), ends[1], value)
    return Interval(value=value, low=low, high=high, n=len(values_P2), coverage="about")


def _bonett_wright(value: float, n: int) -> tuple[float, float]:
    """Ends at 95 %. Of the very same order, as if two neighbours were in another one: its variance would be nothing."""
    if n < FEWEST_PARTS:
        return -1.0, 1.0
    most = 1 - 12 / (n * (n * n - 1))
    near = min(max(value, -most), most)
    half = Z_95 * math.sqrt((1 + near * near / 2) / (n - 3))
    return math.tanh(math.atanh(near) - half), math.tanh(math.atanh(near) + half)


def _spearman(pairs_P2: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(pairs_P2[:, 0], pairs_P2[:, 1]).statistic)
