"""Reference against candidate: paired by instance, with repositories as clusters; what the report shows and the verdict says.

Two analyses, and at each end the wider counts. By instance: Tango's interval for one trajectory each, a bootstrap of the shares
for several; it is about these instances. By repository: instances of one repository rise and fall together (231 of the 500 of
SWE-bench Verified are Django), so the difference is a mean over a dozen clusters (`clustered`); it is about repositories like
these, of which so few of so unequal sizes allow no PASS. Gates may ask about these repositories (`estimand: these_clusters`):
instances are then the sample, and their interval counts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

from assay.quantities import lost_or_gained, points
from assay.records.base import Interval
from assay.records.measurement import ItemResult, TaskResult
from assay.records.swe import SweDifference
from assay_evaluate.statistics import (
    ClusteredMean,
    clustered_difference,
    graded_difference,
    mcnemar_midp,
    normal_quantile,
    paired_difference,
    wider,
)
from assay_evaluate.statistics.uneven.clusters import chance_of_none, effective_number, too_few


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


def difference(
    pairs: Sequence[InstancePair], level: float = 0.95, *, of_these_repositories: bool = False
) -> SweDifference:  # fmt: skip
    """What was lost. of_these_repositories: as the gates ask. ValueError without pairs."""
    if not pairs:
        raise ValueError("no instance has a result on both sides")
    b, c, n = _discordant(pairs)
    by_instance = _by_instance(pairs, level)
    clustered = _by_repository(pairs)
    mean_square = sum((pair.reference - pair.candidate) ** 2 for pair in pairs) / n
    return SweDifference(
        num_instances=n,
        num_repositories=len({pair.repository for pair in pairs}),
        reference_only=b,
        candidate_only=c,
        drop=by_instance if of_these_repositories else wider(by_instance, clustered),
        by_instance=by_instance,
        by_repository=None if clustered is None else _within_bounds(clustered.interval(level)),
        degrees_of_freedom=None if clustered is None else clustered.degrees,
        p_value=mcnemar_midp(b, c),
        mean_square=mean_square,
        resolution=resolution(mean_square, n, level),
        resolution_by_repository=None
        if clustered is None or _claims_nothing(pairs, level)
        else resolution(mean_square, n, level, clustered.degrees),
        num_equal_repositories=effective_number(_sizes(pairs)),
        of_these_repositories=of_these_repositories,
    )


def resolution(mean_square: float, n: int, level: float = 0.95, degrees: float = math.inf) -> float:
    """Half-width of the interval of n paired instances of which nothing is lost: quantile x sqrt(mean square / n).

    mean_square: of the differences between the instances' shares of resolved trajectories; with one trajectory each it is the
    share that comes out differently, with k it is smaller, since each share has a k-th of the noise. degrees: of the quantile,
    for repositories as clusters that differ by no more than chance. Never less than Tango's z^2 / (n + z^2) without any
    difference. 500 instances, 17 % of them differently: 0.036.
    """
    z = normal_quantile(level)
    quantile = float(stats.t.ppf(0.5 + level / 2, degrees))
    return max(quantile * math.sqrt(mean_square / n), z * z / (n + z * z))


def resolution_sentence(found: SweDifference) -> str:
    """What one run can tell apart, in one sentence."""
    assert found.mean_square is not None
    share = (found.reference_only + found.candidate_only) / found.num_instances
    if math.isclose(found.mean_square, share):
        noise = f"{100 * share:.0f} % of the instances come out differently"
    else:
        noise = (
            f"the shares of resolved trajectories differ by {100 * math.sqrt(found.mean_square):.0f} points, root mean square"
        )
    wide = ""
    if found.resolution_by_repository is not None:
        wide = f", ±{points(found.resolution_by_repository)} for repositories like these"
    return f"One run of {found.num_instances} instances resolves about ±{points(found.resolution)} points{wide} ({noise})."


def sentence(pairs: Sequence[InstancePair], level: float, *, of_these_repositories: bool = False) -> str:
    """How the interval came about, what it is about, and what a run of this size can tell apart."""
    found = difference(pairs, level, of_these_repositories=of_these_repositories)
    by_instance = f"By instance {lost_or_gained(found.by_instance.low, found.by_instance.high)}"
    count = f"{found.num_repositories} repositor{'y' if found.num_repositories == 1 else 'ies'}"
    if of_these_repositories:
        judged = (
            f"The interval is for instances like these of {'this' if count.startswith('1 ') else 'these'} {count}, not for "
            f"other repositories."
        )
    elif found.by_repository is None or _claims_nothing(pairs, level):
        judged = f"{by_instance}; {too_few(_sizes(pairs), level, 'repository', 'repositories')}."
    else:
        by_repository = lost_or_gained(found.by_repository.low, found.by_repository.high)
        judged = (
            f"{by_instance}, with {found.num_repositories} repositories as clusters {by_repository} (t with "
            f"{found.degrees_of_freedom:.1f} degrees of freedom); the wider end counts: the verdict is about repositories like "
            "these, not these instances only."
        )
    return f"{judged} {resolution_sentence(found)}"


def _discordant(pairs: Sequence[InstancePair]) -> tuple[int, int, int]:
    """Instances resolved (more often) by one side only, and all."""
    b = sum(pair.reference > pair.candidate for pair in pairs)
    return b, sum(pair.reference < pair.candidate for pair in pairs), len(pairs)


def _by_instance(pairs: Sequence[InstancePair], level: float) -> Interval:
    shares = [share for pair in pairs for share in (pair.reference, pair.candidate)]
    if all(share in (0.0, 1.0) for share in shares) or len(pairs) < 2:
        return paired_difference(*_discordant(pairs), level)
    return graded_difference([pair.reference for pair in pairs], [pair.candidate for pair in pairs], level=level)


def _by_repository(pairs: Sequence[InstancePair]) -> ClusteredMean | None:
    repositories = [pair.repository for pair in pairs]
    if len(set(repositories)) in {1, len(pairs)}:
        return None
    return clustered_difference([pair.reference - pair.candidate for pair in pairs], repositories)


def _sizes(pairs: Sequence[InstancePair]) -> list[int]:
    return list(Counter(pair.repository for pair in pairs).values())


def _claims_nothing(pairs: Sequence[InstancePair], level: float) -> bool:
    return chance_of_none(_sizes(pairs)) >= (1 - level) / 2


def _within_bounds(interval: Interval) -> Interval:
    return interval.model_copy(update={"low": max(interval.low, -1.0), "high": min(interval.high, 1.0)})
