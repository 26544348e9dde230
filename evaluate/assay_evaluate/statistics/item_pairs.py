"""Replies of reference and candidate to the same questions, side by side: what is compared, and the statistics that fit it.

One reply to each item: exact tests of right and wrong. Several, on one side or both, or scores with partial credit: each item's
share of right replies, or its mean score, and the mean over items. Items that share a question, a text or a repository are a
cluster: clusters are then what is sampled, the wider of both intervals counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from assay.errors import MeasureError
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay_evaluate.statistics.clustered import (
    ClusteredMean,
    cluster_bootstrap_mean,
    clustered_difference,
    clustered_minimum_detectable_effect,
    clustered_values_needed,
)
from assay_evaluate.statistics.decisions import Claim, PairedEvidence, paired_evidence, widen_by_clusters, wider_interval
from assay_evaluate.statistics.fixed_items import FixedItems, fixed_items
from assay_evaluate.statistics.graded import (
    graded_difference,
    graded_evidence,
    graded_items_needed,
    graded_minimum_detectable_effect,
    mean_of_shares,
)
from assay_evaluate.statistics.paired import Flips, count_flips, discordant_counts, mcnemar_midp, paired_difference
from assay_evaluate.statistics.power import POWER, items_for_margin, minimum_detectable_effect
from assay_evaluate.statistics.proportions import detection_quantile, wilson


class Pairs(NamedTuple):
    """Answers to the same items by reference and candidate. `num_excluded`: items without a reply on either side."""

    reference: list[bool]
    candidate: list[bool]
    num_excluded: int
    reference_answers: list[str | None]
    candidate_answers: list[str | None]
    items: list[str]
    """Which item each pair answers: the same one several times if there are several samples of it."""
    clusters: list[str]
    """Of each pair's item: its cluster, or the item itself."""
    unequal: tuple[list[float], list[float]] | None = None
    """Of each item, the share of right replies of either side, where one side has more of them than can be paired; of a graded
    task the mean score. None: right or wrong, and every reply is in a pair."""
    num_replies: tuple[list[int], list[int]] | None = None
    """Of each item, of either side, as `unequal`."""
    of_these_items: bool = False
    """Whether the items are what is asked about, and not a sample of such items (`fixed`)."""
    of_these_clusters: bool = False
    """Whether the clusters are what is asked about, and their items a sample of such items."""

    @property
    def n(self) -> int:
        """Pairs of replies."""
        return len(self.reference)

    @property
    def is_sampled(self) -> bool:
        """Some item has several samples on some side: pairs are not independent, items are."""
        return self.unequal is not None or len(set(self.items)) < self.n

    @property
    def shares(self) -> tuple[list[float], list[float]]:
        """Of each item, the share of right replies: reference, candidate."""
        if self.unequal is not None:
            return self.unequal
        reference, candidate = (
            replies_by_item(zip(self.items, right, strict=True)) for right in (self.reference, self.candidate)
        )
        return _shares(reference), _shares(candidate)

    @property
    def fixed(self) -> FixedItems | None:
        """The mean difference on these items. None: such items are asked about, or a side has one reply to each item, so that
        nothing says how its replies vary: the interval over such items is then wider than one over these would be."""
        if not self.of_these_items or not self.is_sampled:
            return None
        counts = self.num_replies
        if counts is None:
            replies = Counter(self.items)
            counts = (list(replies.values()), list(replies.values()))
        return fixed_items(*self.shares, *counts)

    @property
    def variance(self) -> float:
        """Of the mean difference over items, from one draw of replies (and items) to another; never 0.

        As if two items more had been asked, of which one half is lost and one half gained (Agresti & Min 2005, Stat. Med.
        24:729-740); by clusters if that is more.
        """
        if (fixed := self.fixed) is not None:
            return fixed.standard_error**2
        differences = np.asarray(self.differences)
        n = len(differences) + 2
        by_item = ((differences @ differences + 1) / n - (differences.sum() / n) ** 2) / n
        clustered = self.clustered
        return float(by_item if clustered is None else max(by_item, clustered.standard_error**2))

    @property
    def differences(self) -> list[float]:
        """Of each item, reference minus candidate."""
        return [reference - candidate for reference, candidate in zip(*self.shares, strict=True)]

    @property
    def has_clusters(self) -> bool:
        """Some cluster holds several items."""
        return len(set(self.clusters)) < len(set(self.items))

    @property
    def clustered(self) -> ClusteredMean | None:
        """The mean difference over clusters. None: the interval is for these items or these clusters, or every item stands for
        itself."""
        if self.fixed is not None or self.of_these_clusters or not self.has_clusters:
            return None
        return clustered_difference(self.differences, list(dict(zip(self.items, self.clusters, strict=True)).values()))

    @property
    def discordant(self) -> tuple[int, int]:
        """(b, c): pairs right in the reference only, in the candidate only; with several samples, items more often right."""
        if not self.is_sampled:
            return discordant_counts(self.reference, self.candidate)
        differences = self.differences
        return sum(lost > 0 for lost in differences), sum(lost < 0 for lost in differences)

    def evidence(self, margin: float, *, level: float, claim: Claim = "non_inferior") -> PairedEvidence:
        """What the pairs say about a margin: exact for one reply to each item, else over the items' means; by clusters too."""
        if (fixed := self.fixed) is not None:
            better, worse = self.discordant
            return fixed.evidence(margin, b=better, c=worse, level=level, claim=claim)
        if self.is_sampled:
            by_item = graded_evidence(*self.shares, margin, level=level, claim=claim)
        else:
            by_item = paired_evidence(*self.discordant, self.n, margin, level=level, claim=claim)
        return widen_by_clusters(by_item, self.clustered)

    @property
    def p_difference(self) -> float:
        """Two-sided: does one side do better? Mid-p McNemar; of several samples, a t corrected for skewness."""
        if (fixed := self.fixed) is not None:
            return fixed.p_difference
        return graded_evidence(*self.shares, 0.5).p_difference if self.is_sampled else mcnemar_midp(*self.discordant)

    def drop(self, level: float) -> Interval:
        """Reference minus candidate, with its interval: the wider one where items have clusters."""
        return wider_interval(self.drop_by_item(level), self.clustered)

    def drop_by_item(self, level: float) -> Interval:
        """The same with items taken for independent."""
        if (fixed := self.fixed) is not None:
            return fixed.interval(level)
        if self.is_sampled:
            return graded_difference(*self.shares, level=level)
        return paired_difference(*self.discordant, self.n, level)

    def detectable(self, level: float = 0.95) -> float:
        """The minimum detectable effect of the interval of `drop`."""
        if (fixed := self.fixed) is not None:
            return min(1.0, detection_quantile(level, POWER) * fixed.standard_error)
        clustered = self.clustered
        by_cluster = 0.0 if clustered is None else clustered_minimum_detectable_effect(clustered, level)
        if self.is_sampled:
            return max(by_cluster, graded_minimum_detectable_effect(self.differences, level))
        return max(by_cluster, minimum_detectable_effect(*self.discordant, self.n, level))

    def needed(self, margin: float, level: float, power: float) -> int:
        """Items with which a candidate that loses nothing would pass the margin, at the spread that was seen; where items have
        clusters, items of as many more clusters."""
        clustered, num_items = self.clustered, len(set(self.items))
        by_cluster = 0 if clustered is None else clustered_values_needed(clustered, num_items, margin, level, power)
        if self.is_sampled:
            return max(by_cluster, graded_items_needed(self.differences, margin, level, power))
        return max(by_cluster, items_for_margin(*self.discordant, self.n, margin, level, power))

    @property
    def excluded_share(self) -> float:
        """Of all items that either side was asked; 0 without any."""
        return self.num_excluded / max(self.n + self.num_excluded, 1)

    @property
    def flips(self) -> Flips:
        return count_flips(self.reference, self.candidate, self.reference_answers, self.candidate_answers)


class TokenCost(NamedTuple):
    """Length of the replies to the items for which both sides report it."""

    reference_mean: float
    candidate_mean: float
    extra: Interval
    """Candidate minus reference, per item."""


def replies_by_item(replies: Iterable[tuple[str, float]], items: Iterable[str] = ()) -> dict[str, list[float]]:
    """Whether each reply is right, or its score; `items` come first, in their order."""
    by_item: dict[str, list[float]] = {item: [] for item in items}
    for item, score in replies:
        by_item.setdefault(item, []).append(score)
    return by_item


def _shares(by_item: Mapping[str, Sequence[float]]) -> list[float]:
    return [sum(scores) / len(scores) for scores in by_item.values()]


def _score_of(item: ItemResult, is_graded: bool) -> float | None:
    return item.score if is_graded and item.score is not None else item.correct


def find_task(measurement: Measurement, name: str) -> TaskResult | None:
    """The task called `name`, or None."""
    return next((task for task in measurement.tasks if task.task == name), None)


def common_tasks(reference: Measurement, candidate: Measurement) -> list[tuple[TaskResult, TaskResult]]:
    """Both sides of every task that both were asked, in the order of the reference's."""
    return [(task, other) for task in reference.tasks if (other := find_task(candidate, task.task)) is not None]


def pair_items(reference: TaskResult, candidate: TaskResult) -> Pairs:
    """Answers paired by item and sample; a question that either side has no reply to is left out and counted.

    Where one side has more replies to each item than the other, those that cannot be paired count in its shares all the same;
    items that were drawn for one side only, which was asked in more rounds, do not count. Second replies of the reference stand
    against its first. MeasureError if a sample of an item occurs twice on one side: pairing would then be arbitrary.
    """
    reference_items, candidate_items = (
        {(item.item, item.sample): item for item in task.items} for task in (reference, candidate)
    )
    for task, by_key in ((reference, reference_items), (candidate, candidate_items)):
        if len(by_key) != len(task.items):
            raise MeasureError(f"task {task.task}: an item id occurs twice, so items cannot be paired; measure it again")
    if candidate.is_second_replies:
        reference_items = {key: item for key, item in reference_items.items() if key[1] == 0}
    limits = [task.rounds[-1].limit if task.rounds else None for task in (reference, candidate)]
    if limits[0] != limits[1]:  # of tasks that draw their items in rounds
        drawn = {item for item, _ in reference_items} & {item for item, _ in candidate_items}
        reference_items, candidate_items = (
            {key: item for key, item in side.items() if key[0] in drawn} for side in (reference_items, candidate_items)
        )
    num_reference, num_candidate = (
        1 + max((sample for _, sample in side), default=0) for side in (reference_items, candidate_items)
    )
    common = min(num_reference, num_candidate)
    keys = [key for key in dict.fromkeys([*reference_items, *candidate_items]) if key[1] < common]
    answered = [
        (r, k)
        for key in keys
        if (r := reference_items.get(key)) is not None and (k := candidate_items.get(key)) is not None
        if r.correct is not None and k.correct is not None
    ]
    pairs = Pairs(
        reference=[r.correct is True for r, _ in answered],
        candidate=[k.correct is True for _, k in answered],
        num_excluded=len(keys) - len(answered),
        reference_answers=[r.answer for r, _ in answered],
        candidate_answers=[k.answer for _, k in answered],
        items=[r.item for r, _ in answered],
        clusters=[r.cluster or k.cluster or r.item for r, k in answered],
    )
    is_graded = reference.is_graded or candidate.is_graded
    if num_reference == num_candidate and not is_graded:
        return pairs
    sides = (reference_items, candidate_items)
    lacking = sum(item.correct is None for side in sides for (_, sample), item in side.items() if sample >= common)
    compared = dict.fromkeys(pairs.items)
    replies: Iterable[Iterable[ItemResult]] = (
        zip(*answered, strict=True) if num_reference == num_candidate and answered else [side.values() for side in sides]
    )
    before, after = (
        replies_by_item(
            (
                (item.item, score)
                for item in side
                if item.item in compared and (score := _score_of(item, is_graded)) is not None
            ),
            compared,
        )
        for side in replies
    )
    return pairs._replace(
        num_excluded=pairs.num_excluded + lacking,
        unequal=(_shares(before), _shares(after)),
        num_replies=([len(right) for right in before.values()], [len(right) for right in after.values()]),
    )


def pair_some_items(reference: TaskResult, candidate: TaskResult, names: Collection[str]) -> Pairs:
    """Pairs of the items of these names."""
    sides = (
        task.model_copy(update={"items": tuple(item for item in task.items if item.item in names)})
        for task in (reference, candidate)
    )
    return pair_items(*sides)


def join_pairs(parts: Sequence[Pairs]) -> Pairs:
    """Pairs of several tasks as one; items and clusters of two tasks are never the same."""
    unequal = None
    if any(pairs.unequal is not None for pairs in parts):
        reference, candidate = zip(*(pairs.shares for pairs in parts), strict=True)
        unequal = (list(chain(*reference)), list(chain(*candidate)))
    return Pairs(
        reference=list(chain(*(pairs.reference for pairs in parts))),
        candidate=list(chain(*(pairs.candidate for pairs in parts))),
        num_excluded=sum(pairs.num_excluded for pairs in parts),
        reference_answers=list(chain(*(pairs.reference_answers for pairs in parts))),
        candidate_answers=list(chain(*(pairs.candidate_answers for pairs in parts))),
        items=[f"{number}/{item}" for number, pairs in enumerate(parts) for item in pairs.items],
        clusters=[f"{number}/{cluster}" for number, pairs in enumerate(parts) for cluster in pairs.clusters],
        unequal=unequal,
    )


def compare_output_tokens(reference: TaskResult, candidate: TaskResult, level: float = 0.95) -> TokenCost | None:
    """Length of replies on both sides with a paired BCa interval. None with fewer than two items that both sides counted."""
    before = {(item.item, item.sample): item.output_tokens for item in reference.items}
    counted = [
        (item.item, tokens, item.output_tokens)
        for item in candidate.items
        if (tokens := before.get((item.item, item.sample))) is not None and item.output_tokens is not None
    ]
    num_items = len({item for item, *_ in counted})
    if num_items < 2:
        return None
    items, reference_tokens, candidate_tokens = zip(*counted, strict=True)
    extra = cluster_bootstrap_mean(
        np.array(candidate_tokens, dtype=np.float64) - np.array(reference_tokens, dtype=np.float64),
        items if num_items < len(items) else np.arange(len(items)), level=level,
    )  # fmt: skip
    return TokenCost(sum(reference_tokens) / len(items), sum(candidate_tokens) / len(items), extra)


def accuracy_of(
    items: Sequence[ItemResult], level: float = 0.95, *, is_graded: bool = False
) -> tuple[Interval | None, Interval | None, int]:
    """(accuracy, pass@k, k) of a task's replies; k is the largest number of samples that an item has.

    One sample each: Wilson's interval, and no pass@k. Several: the mean over items of each item's mean, with an interval over
    items, and the share of items with at least one right reply. is_graded: the mean score in place of accuracy, and no pass@k.
    None: no reply.
    """
    by_item = replies_by_item((item.item, score) for item in items if (score := _score_of(item, is_graded)) is not None)
    num_samples = 1 + max((item.sample for item in items), default=0)
    if not by_item:
        return None, None, num_samples
    if is_graded:
        return mean_of_shares(_shares(by_item), level), None, num_samples
    if num_samples == 1:
        right = [is_right for replies in by_item.values() for is_right in replies]
        return wilson(round(sum(right)), len(right), level), None, 1
    means = _shares(by_item)
    return mean_of_shares(means, level), wilson(sum(mean > 0 for mean in means), len(means), level), num_samples


def truncation_share(task: TaskResult) -> float | None:
    """Truncated replies / replies. None without any reply, or where nobody knows which were cut off."""
    replies = task.num_items - task.num_failed
    return task.num_truncated / replies if replies > 0 and task.knows_cuts else None
