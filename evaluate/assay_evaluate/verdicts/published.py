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
    return tuple(
        _compare(task, score, reference, level)
        for name, score in published.items()
        if (task := find_task(reference, name)) is not None
    )


def _compare(task: TaskResult, score: PublishedScore, reference: Measurement, level: float) -> PublishedComparison:
    title = task.title or task.task

    def comparison(outcome: PublishedOutcome, detail: str, difference: Interval | None = None) -> PublishedComparison:
        return PublishedComparison(
            task=task.task, outcome=outcome, score=score.value, difference=difference, detail=detail,
            given=score.model_dump(mode="json"),
        )  # fmt: skip

    if task.accuracy is None:
        return comparison("not comparable", f"{reference.label} has no score on {title}.")
    asked: dict[str, Any] = next(
        (asked for asked in reference.suite_recipe.get("tasks", ()) if asked.get("name") == task.task), {}
    )
    if differs := "; ".join(_protocol_differs(score, asked)):
        return comparison(
            "not comparable", f"The published {percent(score.value)} on {title} is by another protocol: {differs}."
        )
    # Wilson's interval, as if each item was asked once.
    interval = wilson(round(score.value * score.num_items), score.num_items, level)
    difference = difference_of(interval.model_copy(update={"value": score.value}), task.accuracy)
    low, high = points(difference.low), points(difference.high)
    ends = f"{percent_short(difference.level)} interval of published minus measured: {low} to {high} points"
    measured = f"{reference.label} scores {percent(task.accuracy.value)} on {title}"
    text = f"{measured}; published: {percent(score.value)} ({score.source})"
    if difference.low > 0:
        return comparison(
            "missed",
            f"{text}. It misses by {points(difference.value)} points ({ends}), more than chance explains: the "
            "harness is suspect, so no verdict of this task is believed. Check the budget "
            f"({task.max_tokens:,} tokens), the chat template and the parsers.",
            difference,
        )
    if difference.high < 0:
        return comparison(
            "above", f"{text}. It is above by {points(-difference.value)} points; this is not judged.", difference
        )
    return comparison("agrees", f"{text}. The difference is within the interval ({ends}).", difference)


def _protocol_differs(score: PublishedScore, asked: Mapping[str, Any]) -> Iterator[str]:
    if score.tools:
        yield "it was measured with tools"
    if score.temperature is None:
        yield "its sampling is not stated"
        return
    for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", -1)):
        published, here = getattr(score, name), asked.get(name, neutral)
        if published != here:
            yield f"{name} {published:g}, here {here:g}"
    if score.num_fewshot is not None and asked.get("num_fewshot") not in {None, score.num_fewshot}:
        yield f"{score.num_fewshot} shots, here {asked['num_fewshot']}"
