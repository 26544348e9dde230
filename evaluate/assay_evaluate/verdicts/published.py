"""The reference's score beside the one that was published for the model: a harness that cuts replies, or asks through the wrong
chat template, lowers both sides alike, so no paired comparison shows it.

A reference that misses its published score by more than chance makes the task's verdicts NOT MEASURED. One above it is said
and not judged. Scores by another protocol (sampling, shots, tools) are shown and not compared. A published mean over several
replies to each item has the same expectation as one reply each, so it is compared, with the interval of one reply each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assay.quantities import percent, percent_short, points
from assay.recipes.model import PublishedScore
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import PublishedComparison, PublishedOutcome
from assay_evaluate.statistics.item_pairs import find_task
from assay_evaluate.statistics.proportions import difference_of, wilson


def compare_published(
    published: Mapping[str, PublishedScore], reference: Measurement, level: float
) -> tuple[PublishedComparison, ...]:
    """One for every published score whose task the reference was asked."""
    found = ((find_task(reference, task), score) for task, score in published.items())
    return tuple(_compare(task, score, reference, level) for task, score in found if task is not None)


def suspect_tasks(found: tuple[PublishedComparison, ...]) -> dict[str, str]:
    """Task -> why none of its verdicts is believed."""
    return {one.task: one.detail for one in found if one.outcome == "missed"}


def _compare(task: TaskResult, score: PublishedScore, reference: Measurement, level: float) -> PublishedComparison:
    title = task.title or task.task

    def said(outcome: PublishedOutcome, detail: str, difference: Interval | None = None) -> PublishedComparison:
        return PublishedComparison(
            task=task.task, outcome=outcome, score=score.value, difference=difference, detail=detail,
            given=score.model_dump(mode="json"),
        )  # fmt: skip

    if task.accuracy is None:
        return said("not comparable", f"{reference.label} has no score on {title}.")
    if differs := "; ".join(_protocol_differs(score, _asked(reference, task.task))):
        return said("not comparable", f"The published {percent(score.value)} on {title} is by another protocol: {differs}.")
    difference = difference_of(_published_interval(score, level), task.accuracy)
    ours = f"{reference.label} scores {percent(task.accuracy.value)} on {title}"
    seen = f"{ours}; published: {percent(score.value)} ({score.source})"
    if difference.low > 0:
        return said(
            "missed",
            f"{seen}. It misses by {points(difference.value)} points ({_ends(difference)}), more than chance explains: the "
            "harness is suspect, so no verdict of this task is believed. Check the budget "
            f"({task.max_tokens:,} tokens), the chat template and the parsers.",
            difference,
        )
    if difference.high < 0:
        return said("above", f"{seen}. It is above by {points(-difference.value)} points; this is not judged.", difference)
    return said("agrees", f"{seen}. The difference is within the interval ({_ends(difference)}).", difference)


def _published_interval(score: PublishedScore, level: float) -> Interval:
    """Wilson's, as if each item was asked once."""
    around = wilson(round(score.value * score.num_items), score.num_items, level)
    return around.model_copy(update={"value": score.value})


def _ends(difference: Interval) -> str:
    low, high = points(difference.low), points(difference.high)
    return f"{percent_short(difference.level)} interval of published minus measured: {low} to {high} points"


def _asked(reference: Measurement, name: str) -> dict[str, Any]:
    return next((task for task in reference.suite_recipe.get("tasks", ()) if task.get("name") == name), {})


def _protocol_differs(score: PublishedScore, asked: Mapping[str, Any]) -> Iterator[str]:
    if score.tools:
        yield "it was measured with tools"
    if score.temperature is None:
        yield "its sampling is not stated"
        return
    for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", -1)):
        theirs, ours = getattr(score, name), asked.get(name, neutral)
        if theirs != ours:
            yield f"{name} {theirs:g}, here {ours:g}"
    if score.num_fewshot is not None and asked.get("num_fewshot") not in {None, score.num_fewshot}:
        yield f"{score.num_fewshot} shots, here {asked['num_fewshot']}"
