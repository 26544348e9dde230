"""Many subgroups of a candidate's tasks at once: which lose, and which lose more than they may.

Of some sixty subgroups a few look bad by chance. Losses are shown at a false-discovery rate (Benjamini & Hochberg 1995, JRSS B
57:289-300): of a candidate that lost nothing, some subgroup is named in no more than that share of runs. Subgroups overlap (a
language and a length share items), which keeps the rate where their tests are positively dependent (Benjamini & Yekutieli 2001,
Ann. Stat. 29:1165-1188).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Bools = NDArray[np.bool_]


class Screened(NamedTuple):
    """Of each subgroup [..., subgroups]. beyond: surely lost more than its limit. shown: surely lost something. unbounded:
    shown, and a loss of the limit is not excluded."""

    beyond: Bools
    shown: Bools
    unbounded: Bools


def screen(
    p_loss: ArrayLike, p_beyond: ArrayLike, high: ArrayLike, limits: ArrayLike, *, false_discovery: float, alpha: float
) -> Screened:  # fmt: skip
    """p_loss, p_beyond: one-sided, of no loss and of one of the limit at most. high: upper ends of the losses. alpha: rate at
    which subgroups are said to be beyond their limits. Without subgroups all are empty."""
    ends, most = np.asarray(high, dtype=np.float64), np.asarray(limits, dtype=np.float64)
    beyond = adjusted(p_beyond) < alpha
    shown = (adjusted(p_loss) < false_discovery) | beyond
    return Screened(beyond, shown, shown & (ends >= most) & ~beyond)


def adjusted(p_values: ArrayLike) -> NDArray[np.float64]:
    """By Benjamini and Hochberg, over the last axis."""
    p = np.asarray(p_values, dtype=np.float64)
    return p if p.shape[-1] == 0 else np.asarray(stats.false_discovery_control(p, axis=-1))
