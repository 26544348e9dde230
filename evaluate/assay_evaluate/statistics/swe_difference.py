"""Reference against candidate: paired by instance, with repositories as clusters; the tests and the interval a gate uses.

Two analyses, and at each end the wider counts. By instance: Tango's interval for one trajectory each, a bootstrap of the shares
for several. By repository: instances of one repository rise and fall together (231 of the 500 of SWE-bench Verified are
Django), so the difference is a sum over a dozen clusters, with a t of as many degrees less one (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from assay.quantities import points
from assay.records.base import Interval
from assay.records.measurement import ItemResult, TaskResult
from assay.records.swe import SweDifference
from assay_evaluate.statistics import (
    PairedEvidence,
    clustered_mean,
    clustered_standard_error,
    graded_difference,
    mcnemar_midp,
    normal_quantile,
    paired_difference,
)


class InstancePair(NamedTuple):
    """One instance: shares of its trajectories that resolve it."""

    instance: str
    repository: str
    reference: float
    candidate: float


def pair_instances(reference: TaskResult, candidate: TaskResult) -> list[InstancePair]:
    """Instances with a result on both sides; of several trajectories, those that have one count."""
    ours, theirs = _shares(reference.items), _shares(candidate.items)
    return [
        InstancePair(instance, repository, share, theirs[instance][1])
        for instance, (repository, share) in ours.items()
        if instance in theirs
    ]


def _shares(items: Sequence[ItemResult]) -> dict[str, tuple[str, float]]:
    found: dict[str, list[bool]] = {}
    repositories: dict[str, str] = {}
    for item in items:
        if item.correct is not None:
            found.setdefault(item.item, []).append(item.correct)
            repositories[item.item] = item.cluster or item.item
    return {instance: (repositories[instance], sum(one) / len(one)) for instance, one in found.items()}


def difference(pairs: Sequence[InstancePair], level: float = 0.95) -> SweDifference:
    """What was lost. ValueError without pairs."""
    if not pairs:
        raise ValueError("no instance has a result on both sides")
    b, c, n = _discordant(pairs)
    by_instance = _by_instance(pairs, level)
    by_repository = _by_repository(pairs, level)
    return SweDifference(
        num_instances=n,
        num_repositories=len({pair.repository for pair in pairs}),
        reference_only=b,
        candidate_only=c,
        drop=_wider(by_instance, by_repository),
        by_instance=by_instance,
        by_repository=by_repository,
        p_value=mcnemar_midp(b, c),
        resolution=resolution((b + c) / n, n, level),
    )


def resolution(discordant_share: float, n: int, level: float = 0.95) -> float:
    """Half-width of the interval of n paired instances of which this share comes out differently and nothing is lost.

    z sqrt(D / n), and never less than Tango's z^2 / (n + z^2) without any. 500 instances, 17 % of them differently: 0.036.
    """
    z = normal_quantile(level)
    return max(z * math.sqrt(discordant_share / n), z * z / (n + z * z))


def resolution_sentence(n: int, discordant_share: float, level: float = 0.95) -> str:
    """What one run can tell apart, in one sentence."""
    return (
        f"One run of {n} instances resolves about ±{points(resolution(discordant_share, n, level))} points "
        f"({100 * discordant_share:.0f} % of the instances come out differently)."
    )


def sentence(pairs: Sequence[InstancePair], level: float) -> str:
    """How the interval came about, and what a run of this size can tell apart."""
    found = difference(pairs, level)
    clusters = "repositories as clusters say nothing"
    if found.by_repository is not None:
        low, high = 100 * found.by_repository.low, 100 * found.by_repository.high
        clusters = f"with {found.num_repositories} repositories as clusters {low:+.1f} to {high:+.1f}"
    low, high = 100 * found.by_instance.low, 100 * found.by_instance.high
    share = (found.reference_only + found.candidate_only) / found.num_instances
    return (
        f"By instance {low:+.1f} to {high:+.1f} points, {clusters}; the wider end counts. "
        f"{resolution_sentence(found.num_instances, share, level)}"
    )


def widen(by_instance: PairedEvidence, pairs: Sequence[InstancePair]) -> PairedEvidence:
    """Evidence that took instances for independent, with repositories as clusters besides: a word only where both would say it.

    The interval is the wider at each end; each p is the larger of the two.
    """
    level, margin = by_instance.drop.level, by_instance.margin
    clustered = _by_repository(pairs, level)
    if clustered is None or clustered.high == clustered.low:  # every repository lost the same share
        return by_instance
    degrees = clustered.n - 1
    drops = [pair.reference - pair.candidate for pair in pairs]
    error = clustered_standard_error(drops, [pair.repository for pair in pairs]) * math.sqrt(clustered.n / degrees)

    def at_least(loss: float) -> float:
        return float(stats.t.cdf((clustered.value - loss) / error, degrees))

    equivalent = by_instance.claim == "equivalent"
    p_pass, p_fail = at_least(margin), 1 - at_least(margin)
    if equivalent:
        p_pass, p_fail = max(p_pass, 1 - at_least(-margin)), min(p_fail, at_least(-margin))
    return dataclasses.replace(
        by_instance, drop=_wider(by_instance.drop, clustered), p_pass=max(by_instance.p_pass, p_pass),
        p_fail=max(by_instance.p_fail, p_fail),
    )  # fmt: skip


def _discordant(pairs: Sequence[InstancePair]) -> tuple[int, int, int]:
    """Instances resolved (more often) by one side only, and all."""
    b = sum(pair.reference > pair.candidate for pair in pairs)
    return b, sum(pair.reference < pair.candidate for pair in pairs), len(pairs)


def _by_instance(pairs: Sequence[InstancePair], level: float) -> Interval:
    shares = [share for pair in pairs for share in (pair.reference, pair.candidate)]
    if all(share in (0.0, 1.0) for share in shares) or len(pairs) < 2:
        return paired_difference(*_discordant(pairs), level)
    return graded_difference([pair.reference for pair in pairs], [pair.candidate for pair in pairs], level=level)


def _by_repository(pairs: Sequence[InstancePair], level: float) -> Interval | None:
    repositories = [pair.repository for pair in pairs]
    drops = np.array([pair.reference - pair.candidate for pair in pairs])
    if len(set(repositories)) < 2 or np.ptp(drops) == 0:
        return None
    found = clustered_mean(drops, repositories, level)
    return found.model_copy(update={"low": max(found.low, -1.0), "high": min(found.high, 1.0)})


def _wider(by_instance: Interval, by_repository: Interval | None) -> Interval:
    if by_repository is None:
        return by_instance
    low, high = min(by_instance.low, by_repository.low), max(by_instance.high, by_repository.high)
    return by_instance.model_copy(update={"low": low, "high": high})
