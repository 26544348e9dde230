"""The looks that are planned for a task, and what each holds."""

from __future__ import annotations

from typing import Any

import pytest

from assay.recipes.gate import Stopping
from assay.recipes.suite import ArithmeticTask, LmEvalTask, Range
from assay_evaluate.tasks.looks import (
    Look,
    added_by_looks,
    growing_limits,
    has_second_replies,
    planned_looks,
    planned_shares,
    task_at_look,
)

STOPPING = Stopping()


def task(**options: Any) -> LmEvalTask:
    return LmEvalTask(**{"kind": "lm_eval", "name": "t", "tasks": ("x",), "max_tokens": 8, "temperature": 1.0, **options})


@pytest.mark.parametrize(
    ("written", "looks", "shares"),
    [
        ({"num_samples": Range(min=1, max=5)}, [(2, 1), (2, 2), (3, 3), (5, 5)], [4 / 15, 2 / 5, 3 / 5, 1]),
        ({"num_samples": Range(min=1, max=4)}, [(2, 1), (2, 2), (3, 3), (4, 4)], [1 / 3, 1 / 2, 3 / 4, 1]),
        ({"num_samples": Range(min=1, max=8)}, [(2, 1), (2, 2), (3, 3), (5, 5), (8, 8)], [1 / 6, 1 / 4, 3 / 8, 5 / 8, 1]),
        ({"num_samples": Range(min=3, max=5)}, [(3, 3), (5, 5)], [3 / 5, 1]),
        ({"num_samples": Range(min=1, max=1)}, [(2, 1)], [1]),
        ({"num_samples": 3}, [(3, 3)], [1]),
        ({}, [(1, 1)], [1]),
        ({"limit": 50}, [(1, 1)], [1]),
        ({"limit": Range(min=100, max=400)}, [(2, 1, 100), (2, 1, 200), (2, 1, 400)], [1 / 4, 1 / 2, 1]),
        ({"limit": Range(min=100, max=450)}, [(2, 1, 100), (2, 1, 200), (2, 1, 450)], [2 / 9, 4 / 9, 1]),
        ({"limit": Range(min=100, max=100)}, [(2, 1, 100)], [1]),
        ({"limit": Range(min=10, max=20), "temperature": 0.0}, [(1, 1, 10), (1, 1, 20)], [1 / 2, 1]),
    ],
)
def test_planned_looks(written: dict[str, Any], looks: list[tuple[int, ...]], shares: list[float]) -> None:
    result = planned_looks(task(**written), STOPPING)
    assert result == tuple(Look(*look) for look in looks)
    assert planned_shares(result) == pytest.approx(shares)


def test_a_range_that_ends_at_a_look_has_the_looks_before() -> None:
    """So that an item is asked in the same part, after the same others, however many looks follow."""
    for least in (1, 7, 100):
        for most in range(least, 12 * least, max(1, least // 3)):
            limits = growing_limits(Range(min=least, max=most))
            for place, limit in enumerate(limits):
                assert growing_limits(Range(min=least, max=limit)) == limits[: place + 1]


def test_what_a_look_asks() -> None:
    asked = task_at_look(task(limit=Range(min=100, max=400)), 2, 200)
    assert (asked.num_samples, asked.limit) == (2, Range(min=100, max=200))
    assert task_at_look(task(num_samples=Range(min=1, max=5)), 3, None) == task(num_samples=3)


def test_generated_items_grow_as_drawn_ones_do() -> None:
    made = ArithmeticTask(kind="arithmetic", name="t", max_tokens=8, num_items=Range(min=100, max=450))
    assert planned_looks(made, STOPPING) == (Look(1, 1, 100), Look(1, 1, 200), Look(1, 1, 450))
    assert planned_looks(made.model_copy(update={"num_items": 100}), STOPPING) == (Look(1, 1),)
    assert task_at_look(made, 1, 200).num_items == Range(min=100, max=200)
    assert [added_by_looks(task_at_look(made, 1, limit)) for limit in (100, 450)] == [
        [range(100)], [range(100), range(100, 200), range(200, 450)],
    ]  # fmt: skip


def test_second_replies_are_those_of_sampled_tasks_with_a_range() -> None:
    ranged: dict[str, Any] = {"limit": Range(min=1, max=2)}
    assert [has_second_replies(one) for one in (task(**ranged), task(**ranged, temperature=0.0), task(num_samples=3))] == [
        True, False, False,
    ]  # fmt: skip
