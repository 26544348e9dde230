"""From a measured damage and its interval to the number that is added up.

A divergence cannot be negative, but its estimate can be small by luck, and a choice among many estimates takes the lucky ones.
So an estimate of x with standard error s counts as the mean of what the truth can be, given that it is not negative (a normal
distribution cut off at zero): x where x is many s, 0.8 s where x is 0, never less than 0.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr, ndtri

from assay.records.base import Interval

Z_95 = 1.959963984540054


def standard_error(interval: Interval | None) -> float | None:
    """Half the interval's width over the normal quantile of its level. None: there is no interval."""
    if interval is None:
        return None
    return (interval.high - interval.low) / (2 * float(ndtri((1 + interval.level) / 2)))


def damage_used(value: float, interval: Interval | None) -> float:
    """Nats that count for a part whose damage was estimated as `value`; without an interval the value itself, 0 at least."""
    spread = standard_error(interval)
    if not spread:
        return max(0.0, value)
    at = value / spread
    density = math.exp(-0.5 * at * at - 0.5 * math.log(2 * math.pi) - float(log_ndtr(at)))
    return max(0.0, value + spread * density)
