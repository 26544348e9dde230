"""Rates of rare events with their bounds, and the sentence that goes with them.

0 events in n do not mean 0: the one-sided Clopper-Pearson bound at 95 % is 1 - 0.05^(1/n), about 3/n. A fault of 4 in 10,000
requests shows itself at least once in 7,488 requests with 95 %, and in 300 with 11 %.
"""

from __future__ import annotations

import math

from scipy import stats

from assay.quantities import percent_of_events, percent_plain

TYPICAL_FAULT = 4e-4
"""Rate of garbled replies that was found in production (3 to 5 in 10,000; z.ai, "Scaling Pain")."""


def upper_bound(events: int, trials: int, level: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound of a rate. ValueError if there was no trial."""
    if trials < 1 or not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    return 1.0 if events == trials else float(stats.beta.ppf(level, events + 1, trials - events))


def lower_bound(events: int, trials: int, level: float = 0.95) -> float:
    """One-sided Clopper-Pearson lower bound of a rate; 0 when nothing happened."""
    if trials < 1 or not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    return 0.0 if events == 0 else float(stats.beta.ppf(1 - level, events, trials - events + 1))


def trials_needed(rate: float, level: float = 0.95) -> int:
    """Trials after which a fault of `rate` has shown itself at least once with probability `level`."""
    return math.ceil(math.log1p(-level) / math.log1p(-rate))


def sentence(events: int, trials: int, unit: str, level: float = 0.95) -> str:
    """`0 of 2,000 requests: below 0.15 % at 95 %; to see a fault of 4 in 10,000 requests takes 7,500`."""
    upper = upper_bound(events, trials, level)
    if events:
        low = lower_bound(events, trials, level)
        between = f"between {percent_of_events(low)} and {percent_of_events(upper)}"
        return f"{events:,} of {trials:,} {unit}s: {percent_of_events(events / trials)}, {between}"
    seen = f"0 of {trials:,} {unit}s: below {percent_of_events(upper)} at {percent_plain(level)}"
    needed = trials_needed(TYPICAL_FAULT, level)
    if unit != "request" or trials >= needed:  # the rate is one of requests; of tokens it means nothing
        return seen
    return f"{seen}; to see a fault of {TYPICAL_FAULT * 1e4:g} in 10,000 requests takes {math.ceil(needed / 100) * 100:,}"
