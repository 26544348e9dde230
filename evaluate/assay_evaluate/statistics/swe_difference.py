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
from assay.records.measurement import TaskResult
from assay.records.swe import SweDifference
from assay_evaluate.statistics.clustered import clustered_difference
from assay_evaluate.statistics.decisions import wider_interval
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.item_pairs import replies_by_item
from assay_evaluate.statistics.paired import mcnemar_midp, paired_difference
from assay_evaluate.statistics.proportions import normal_quantile
from assay_evaluate.statistics.uneven_clusters import chance_of_none, effective_number, too_few_clusters


class InstancePair(NamedTuple):
    """One instance: shares of its trajectories that resolve it."""

    instance: str
    repository: str
    reference: float
    candidate: float


def pair_instances(reference: TaskResult, candidate: TaskResult) -> list[InstancePair]:
    """Instances with a result on both sides; of several trajectories, those that have one count."""
    before, after = (
        replies_by_item((item.item, item.correct) for item in task.items if item.correct is not None)
        for task in (reference, candidate)
    )
    repositories = {item.item: item.cluster or item.item for item in reference.items if item.correct is not None}
    return [
        InstancePair(instance, repositories[instance], sum(right) / len(right), sum(after[instance]) / len(after[instance]))
        for instance, right in before.items()
        if instance in after
    ]


def difference(
    pairs: Sequence[InstancePair], level: float = 0.95, *, of_these_repositories: bool = False
) -> SweDifference:  # fmt: skip
    """What was lost. of_these_repositories: as the gates ask. ValueError without pairs."""
    if not pairs:
        raise ValueError("no instance has a result on both sides")
    b, c = sum(pair.reference > pair.candidate for pair in pairs), sum(pair.reference < pair.candidate for pair in pairs)
    n = len(pairs)
    shares = [pair.reference for pair in pairs], [pair.candidate for pair in pairs]
    if n < 2 or all(share in (0.0, 1.0) for side in shares for share in side):
        by_instance = paired_difference(b, c, n, level)
    else:
        by_instance = graded_difference(*shares, level=level)
    repositories = [pair.repository for pair in pairs]
    clustered = by_repository = None
    if len(set(repositories)) not in {1, n}:
        clustered = clustered_difference([pair.reference - pair.candidate for pair in pairs], repositories)
        interval = clustered.interval(level)
        within = {"low": max(interval.low, -1.0), "high": min(interval.high, 1.0)}
        by_repository = interval.model_copy(update=within)
    mean_square = sum((pair.reference - pair.candidate) ** 2 for pair in pairs) / n
    return SweDifference(
        num_instances=n,
        num_repositories=len(set(repositories)),
        reference_only=b,
        candidate_only=c,
        drop=by_instance if of_these_repositories else wider_interval(by_instance, clustered),
        by_instance=by_instance,
        by_repository=by_repository,
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


def resolution_sentence(compared: SweDifference) -> str:
    """What one run can tell apart, in one sentence."""
    assert compared.mean_square is not None
    share = (compared.reference_only + compared.candidate_only) / compared.num_instances
    if math.isclose(compared.mean_square, share):
        noise = f"{100 * share:.0f} % of the instances come out differently"
    else:
        spread = 100 * math.sqrt(compared.mean_square)
        noise = f"the shares of resolved trajectories differ by {spread:.0f} points, root mean square"
    wide = ""
    if compared.resolution_by_repository is not None:
        wide = f", ±{points(compared.resolution_by_repository)} for repositories like these"
    return (
        f"One run of {compared.num_instances} instances resolves about ±{points(compared.resolution)} points{wide} ({noise})."
    )


def sentence(pairs: Sequence[InstancePair], level: float, *, of_these_repositories: bool = False) -> str:
    """How the interval came about, what it is about, and what a run of this size can tell apart."""
    compared = difference(pairs, level, of_these_repositories=of_these_repositories)
    by_instance = f"By instance {lost_or_gained(compared.by_instance.low, compared.by_instance.high)}"
    count = f"{compared.num_repositories} repositor{'y' if compared.num_repositories == 1 else 'ies'}"
    if of_these_repositories:
        judged = (
            f"The interval is for instances like these of {'this' if count.startswith('1 ') else 'these'} {count}, not for "
            f"other repositories."
        )
    elif compared.by_repository is None or _claims_nothing(pairs, level):
        judged = f"{by_instance}; {too_few_clusters(_sizes(pairs), level, 'repository', 'repositories')}."
    else:
        by_repository = lost_or_gained(compared.by_repository.low, compared.by_repository.high)
        judged = (
            f"{by_instance}, with {compared.num_repositories} repositories as clusters {by_repository} (t with "
            f"{compared.degrees_of_freedom:.1f} degrees of freedom); the wider end counts: the verdict is about repositories "
            "like these, not these instances only."
        )
    return f"{judged} {resolution_sentence(compared)}"


def _sizes(pairs: Sequence[InstancePair]) -> list[int]:
    return list(Counter(pair.repository for pair in pairs).values())


def _claims_nothing(pairs: Sequence[InstancePair], level: float) -> bool:
    return chance_of_none(_sizes(pairs)) >= (1 - level) / 2
