"""How many items, or how many replies to each of them, a gate needs so that a candidate passes it 4 times in 5.

One reply to each item: the exact power. Several: the normal test of a mean whose variance is the lasting part of the
discordance and, of its noise, a share for each reply of either side. Of clusters, Student's t with Bell and McCaffrey's degrees
as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy import stats

from assay_evaluate.statistics.clustered import ClusteredMean, clustered_values_needed, satterthwaite_degrees
from assay_evaluate.statistics.joint.chances import Rules
from assay_evaluate.statistics.joint.drawn import Assumption, ScoreDesign
from assay_evaluate.statistics.power import items_needed
from assay_evaluate.statistics.proportions import normal_quantile

MOST_ITEMS = 1_000_000
MOST_REPLIES = 100
"""More of either are not proposed: what is lost is then the margin, as far as anybody can tell."""


class Needed(NamedTuple):
    """items: with as many replies to each as the suite asks at most. replies: to each of the suite's items, of either side.
    None: no number up to `MOST_ITEMS` or `MOST_REPLIES` would do; of replies also where greedy ones are all alike."""

    items: int | None
    replies: int | None


def needed(design: ScoreDesign, rules: Rules, power: float, *, loss: float = 0.0, can_repeat: bool = True) -> Needed:
    """For a PASS of this gate with chance `power` if `loss` is the true one."""
    if not loss < design.margin:
        return Needed(None, None)
    return Needed(_items(design, rules, power, loss), _replies(design, rules, power, loss) if can_repeat else None)


def _items(design: ScoreDesign, rules: Rules, power: float, loss: float) -> int | None:
    last, room = design.looks[-1], design.margin - loss
    variance = _variance(design.assumed, (1 / last.reference_samples + 1 / last.candidate_samples) / 2)
    by_normal = (_quantiles(rules, power) / room) ** 2 * variance
    if by_normal > MOST_ITEMS:
        return None
    if (last.reference_samples, last.candidate_samples) == (1, 1):
        discordance = max(design.assumed.discordance, abs(loss))
        found = items_needed(design.margin, discordance, power, loss=loss, level=rules.level)
    else:
        found = max(math.ceil(by_normal), items_needed(room, 0.0, power, level=rules.level))
    if design.cluster_sizes and variance > 0:
        error, degrees = math.sqrt(variance / design.num_items), satterthwaite_degrees(design.cluster_sizes)
        clustered = ClusteredMean(loss, error, degrees, len(design.cluster_sizes))
        by_cluster = clustered_values_needed(clustered, design.num_items, design.margin, rules.level, power, loss=loss)
        found = max(found, by_cluster)
    return max(found, rules.min_items)


def _replies(design: ScoreDesign, rules: Rules, power: float, loss: float) -> int | None:
    n, room, (discordance, noise) = design.num_items, design.margin - loss, design.assumed
    if n < max(rules.min_items, items_needed(room, 0.0, power, level=rules.level)):
        return None
    quantiles = _quantiles(rules, power)
    if design.cluster_sizes:
        degrees = satterthwaite_degrees(design.cluster_sizes)
        quantiles = float(stats.t.ppf(0.5 + rules.level / 2, degrees) + stats.t.ppf(power, degrees))
    left = n * (room / quantiles) ** 2 - discordance * (1 - noise)  # of the variance of a difference, for noise
    if discordance * noise == 0:
        return 1 if left >= 0 else None
    found = math.ceil(discordance * noise / left) if left > 0 else MOST_REPLIES + 1
    return found if found <= MOST_REPLIES else None


def _variance(assumed: Assumption, share: float) -> float:
    """Of an item's difference. share: of the noise that is left, 1 for one reply of either side."""
    discordance, noise = assumed
    return discordance * (1 - noise) + discordance * noise * share


def _quantiles(rules: Rules, power: float) -> float:
    return normal_quantile(rules.level) + normal_quantile(2 * power - 1)
