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

MOST_TRIALS = 10_000_000


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


def exceeds_p(events: int, trials: int, other_events: int, other_trials: int) -> float:
    """P value that the first rate is not above the other: Fisher's exact test, one-sided.

    Given all events, how they fall on the two sides is hypergeometric if the rates are equal, whatever the rate is: a side is
    called worse with p <= alpha in at most a share alpha of cases. (Boschloo's test rejects a little more often, and takes
    minutes for 7,500 trials.) ValueError if a side has no trial.
    """
    for some, of in ((events, trials), (other_events, other_trials)):
        if of < 1 or not 0 <= some <= of:
            raise ValueError(f"{some} events in {of} trials")
    return float(stats.hypergeom.sf(events - 1, trials + other_trials, events + other_events, trials))


def trials_to_tell(rate: float, other_rate: float, alpha: float, power: float = 0.8) -> int | None:
    """Trials on each side after which `exceeds_p` is at most alpha with probability `power`, for rare events of these rates.

    Two digits, rounded up. None: the first rate is not the larger one, or ten million would not tell.
    """
    if rate <= other_rate:
        return None

    def tells(trials: int) -> bool:
        most = int(stats.poisson.ppf(1 - 1e-6, trials * other_rate)) if other_rate else 0
        chance = 0.0
        for other in range(most + 1):
            # of equally many trials each event falls on either side like a coin
            least = next(k for k in range(other, 10**9) if stats.binom.sf(k - 1, k + other, 0.5) <= alpha)
            chance += float(stats.poisson.pmf(other, trials * other_rate) * stats.poisson.sf(least - 1, trials * rate))
            if chance >= power:
                return True
        return False

    high = 16
    while not tells(high):
        high *= 2
        if high > MOST_TRIALS:
            return None
    low = high // 2
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle, high)
    step = int(10 ** max(0, len(str(high)) - 2))
    return int(math.ceil(high / step) * step)


def sentence(events: int, trials: int, unit: str, level: float = 0.95) -> str:
    """`0 of 2,000 requests at fault: below 0.15 % at 95 %; to see a fault of 4 in 10,000 requests takes 7,500`."""
    upper = upper_bound(events, trials, level)
    if events:
        low = lower_bound(events, trials, level)
        between = f"between {percent_of_events(low)} and {percent_of_events(upper)}"
        return f"{events:,} of {trials:,} {unit}s at fault: {percent_of_events(events / trials)}, {between}"
    text = f"0 of {trials:,} {unit}s at fault: below {percent_of_events(upper)} at {percent_plain(level)}"
    needed = trials_needed(TYPICAL_FAULT, level)
    if unit != "request" or trials >= needed:  # the rate is one of requests; of tokens it means nothing
        return text
    return f"{text}; to see a fault of {TYPICAL_FAULT * 1e4:g} in 10,000 requests takes {math.ceil(needed / 100) * 100:,}"
