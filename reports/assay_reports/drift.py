"""What the report says about drift beyond the record itself: multiples of the noise floor, and flipped answers."""

from __future__ import annotations

from assay.records.base import Interval, Part
from assay.records.divergence import Drift, Estimate
from assay.records.measurement import Divergence, ItemResult, Measurement, TaskResult
from assay_evaluate.statistics.clustered import clustered_proportion
from assay_evaluate.statistics.item_pairs import find_task

TIMED = (
    "kl_mean", "kl_median", "kl_p90", "kl_p95", "kl_p99", "kl_p999", "kl_max", "kl_cvar95", "kl_unbiased_mean",
    "probability_change_rms",
)  # fmt: skip
"""Statistics of a `Drift` that grow from 0, so that a multiple means something."""
GROUPS = ("by_span", "by_confidence", "by_domain", "by_language", "by_part")


class TimesFloor(Part):
    """One set of texts: its statistics over those of the reference against itself. What is 0 there is left out."""

    texts: str
    statistics: dict[str, float]
    """Name in `Drift` -> multiple."""
    groups: dict[str, float]
    """`by_span: 512 to 1023` -> multiple of the mean KL of the same group."""


class TaskFlips(Part):
    """One task: items whose answer changed, against the reference."""

    task: str
    num_pairs: int
    num_lost: int
    """Right in the reference only."""
    num_gained: int
    num_other_wrong: int
    """Wrong on both sides with different answers."""
    flip_rate: Interval
    """Lost and gained, of all pairs (arXiv 2407.09141); n counts items, or clusters of them."""


def times_floor(divergence: Divergence | None, floor: Divergence | None) -> tuple[TimesFloor, ...]:
    """For every set of texts that both were measured on."""
    if divergence is None or floor is None:
        return ()
    floors = {drift.texts: drift for drift in floor.drift}
    return tuple(_times(drift, floors[drift.texts]) for drift in divergence.drift if drift.texts in floors)


def _times(drift: Drift, floor: Drift) -> TimesFloor:
    pairs = {name: (_value(getattr(drift, name)), _value(getattr(floor, name))) for name in TIMED}
    groups = {
        f"{kind}: {group.name}": (group.kl_mean, other.kl_mean)
        for kind in GROUPS
        for group in getattr(drift, kind)
        for other in getattr(floor, kind)
        if other.name == group.name
    }
    return TimesFloor(
        texts=drift.texts,
        statistics={name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs},
        groups={name: ours / theirs for name, (ours, theirs) in groups.items() if theirs},
    )


def _value(number: Interval | Estimate | float | None) -> float | None:
    return number.value if isinstance(number, Interval | Estimate) else number


def flips(reference: Measurement, measurement: Measurement, level: float) -> tuple[TaskFlips, ...]:
    """For every task that both were scored on."""
    found = []
    for task in measurement.tasks:
        other = find_task(reference, task.task)
        if other is not None and (pairs := _pairs(other, task)):
            lost = sum(bool(ours.correct) and not theirs.correct for ours, theirs in pairs)
            gained = sum(bool(theirs.correct) and not ours.correct for ours, theirs in pairs)
            found.append(
                TaskFlips(
                    task=task.task,
                    num_pairs=len(pairs),
                    num_lost=lost,
                    num_gained=gained,
                    num_other_wrong=sum(
                        not ours.correct and not theirs.correct and ours.answer != theirs.answer for ours, theirs in pairs
                    ),
                    flip_rate=clustered_proportion(
                        [ours.correct != theirs.correct for ours, theirs in pairs],
                        [theirs.cluster or theirs.item for _, theirs in pairs],
                        level,
                    ),
                )
            )
    return tuple(found)


def _pairs(reference: TaskResult, candidate: TaskResult) -> list[tuple[ItemResult, ItemResult]]:
    """Replies to the same item and sample that came on both sides."""
    ours = {(item.item, item.sample): item for item in reference.items if item.correct is not None}
    theirs = {(item.item, item.sample): item for item in candidate.items if item.correct is not None}
    return [(ours[key], item) for key, item in theirs.items() if key in ours]
