"""At which amounts of replies or items a task of a suite is looked at: planned before the run, from the two recipes alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from assay.recipes.gate import Stopping
from assay.recipes.suite import GeneratedTask, LmEvalTask, Range, TaskBase
from assay.records.measurement import ItemResult

T = TypeVar("T", bound=TaskBase)
FEWEST_OF_REFERENCE = 2
"""Replies of the reference to each item of an adaptive task that is sampled: the second, against the first, is the noise
floor."""
GROWTH = 2
"""Each look at new items has so many times those of the look before..."""
LAST_GROWTH = 1.25
"""...and the last one at least so many."""


class Look(NamedTuple):
    """What is asked when a task is looked at."""

    reference_samples: int
    """To each item."""
    candidate_samples: int
    limit: int | None = None
    """Items of each part of a task (lm-eval: of each task behind a name), where that is a range. None: as many as it says."""

    @property
    def planned_information(self) -> float:
        """In the unit of one pair of replies: 1 / variance of the difference, if replies of both sides vary alike."""
        total = self.reference_samples + self.candidate_samples
        return self.reference_samples * self.candidate_samples / total * (self.limit or 1)


def planned_looks(task: TaskBase, stopping: Stopping) -> tuple[Look, ...]:
    """The looks at a task, the last one at its max; a single one unless a range says otherwise.

    Greedy replies to one question are alike: whatever the range, a task without temperature is asked once about each item.
    """
    if isinstance(task.items, Range):
        candidate = task.fewest_samples if task.temperature > 0 else 1
        reference = max(candidate, FEWEST_OF_REFERENCE) if task.temperature > 0 else 1
        return tuple(Look(reference, candidate, limit) for limit in growing_limits(task.items))
    if not isinstance(task.num_samples, Range):
        return (Look(task.num_samples, task.num_samples),)
    if task.temperature == 0:
        return (Look(1, 1),)
    fewest, most = task.num_samples.min, task.num_samples.max
    most_of_reference = max(most, FEWEST_OF_REFERENCE)
    looks = [
        Look(min(max(reference, fewest, FEWEST_OF_REFERENCE), most_of_reference), min(max(candidate, fewest), most))
        for reference, candidate in stopping.looks
    ]
    return tuple(dict.fromkeys([*looks, Look(most_of_reference, most)]))


def growing_limits(items: Range) -> list[int]:
    """Items at each look; of a range that ends at one of them, those up to there."""
    limits = [items.min]
    while limits[-1] * GROWTH * LAST_GROWTH <= items.max:
        limits.append(limits[-1] * GROWTH)
    return list(dict.fromkeys([*limits, items.max]))


def added_by_looks(task: GeneratedTask) -> list[range]:
    """Of each part of a task, the indices of the items that each look adds; of a plain number of items all at once.

    What is made for one look has the same text however many looks follow.
    """
    if not isinstance(task.num_items, Range):
        return [range(task.num_items)]
    return [range(before, limit) for before, limit in pairwise([0, *growing_limits(task.num_items)])]


def look_key(task: GeneratedTask, added: range) -> dict[str, Any]:
    """What the text of the items that one look adds depends on, as a key of the journal: the task, of a range which items."""
    if not isinstance(task.num_items, Range):
        return task.model_dump(mode="json", exclude={"num_samples"})
    return task.model_dump(mode="json", exclude={"num_samples", "num_items"}) | {"items": [added.start, added.stop]}


def planned_shares(looks: tuple[Look, ...]) -> tuple[float, ...]:
    """Of the planned information, the share at each look; 1 at the last one. Alpha is spent by them."""
    whole = looks[-1].planned_information
    return tuple(look.planned_information / whole for look in looks)


def has_second_replies(task: TaskBase) -> bool:
    """The reference answers each item of the first look at least twice: its second replies stand for asking all once more."""
    return task.is_adaptive and task.temperature > 0


# ------------------------------------------------------------------------------------------------ what a look asks, and holds
def task_at_look(task: T, num_samples: int, limit: int | None) -> T:
    """The task as it is asked at one look: so many replies to each item, and a range of items that ends at `limit`."""
    changes: dict[str, int | Range] = {"num_samples": num_samples}
    if isinstance(task.items, Range) and task.items_field is not None and limit is not None:
        changes[task.items_field] = Range(min=task.items.min, max=limit)
    return task.model_copy(update=changes)


def in_drawn_order(seed: str, name: str, documents: Iterable[int]) -> list[int]:
    """Documents of a task of lm-eval in the order in which a range of items takes them: the same from any number of them on."""
    return sorted(documents, key=lambda document: hashlib.sha256(f"{seed}:{name}:{document}".encode()).digest())


def items_at(
    task: TaskBase, items: Iterable[ItemResult], num_samples: int, limit: int | None, seed: str
) -> tuple[ItemResult, ...]:
    """Of all replies to a task, those that a look holds: the first `num_samples` to each item, of the first `limit` items of
    each part (None: of all). The items of a data set are drawn by the seed of the suite."""
    first = [item for item in items if item.sample < num_samples]
    if limit is None:
        return tuple(first)
    if not isinstance(task, LmEvalTask):
        return tuple(item for item in first if int(item.item.rpartition("/")[2]) < limit)
    documents: dict[str, set[int]] = {}
    for item in first:
        name, _, document = item.item.rpartition("/")
        documents.setdefault(name, set()).add(int(document))
    drawn = {
        f"{name}/{document}" for name, numbers in documents.items() for document in in_drawn_order(seed, name, numbers)[:limit]
    }
    return tuple(item for item in first if item.item in drawn)
