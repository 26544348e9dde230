"""What a server adds to a loss: the candidate's own checkpoint, served other ways, on the questions that it lost.

A variant that brings lost answers back names the cause: a backend, drafts, the KV cache, the engine. Some come back by
themselves where replies are sampled, so the candidate is asked again as it was, and only what a variant has beyond that counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from assay.callbacks import Say
from assay.errors import AssayError
from assay.quantities import and_more
from assay.records.base import Interval, write_text_atomically
from assay.records.declared import difference_words
from assay.records.diagnosis.blame import ServingCause

if TYPE_CHECKING:
    from assay.records.measurement import Measurement

Reply = tuple[str, str, int]
"""Task, item, sample."""
_SUITE, _GATES = "suite.yaml", "gates.yaml"
_MOST_LOST_SHARE = 0.5
"""Of the gates that a suite needs; what they say of variants is not used."""


def serving_causes(
    folder: Path, variants: Sequence[str], reference: Measurement, candidate: Measurement, *, run_dir: Path, work: Path,
    profile: str | None, say: Say,
) -> tuple[ServingCause, ...]:  # fmt: skip
    """Each variant of the candidate's checkpoint in `folder`, that of the largest share first. work: for the questions.

    AssayError: the candidate lost no answer, a variant means nothing, or one cannot be served.
    """
    from assay_pipeline.evaluating import evaluate, prepare

    lost = lost_replies(reference, candidate)
    if not lost:
        raise AssayError(
            f"--variant: {candidate.label} has no answer wrong that {reference.label} has right, so there is nothing to ask "
            "other ways of serving; leave --variant out"
        )
    tasks = sorted({task for task, _, _ in lost})
    say(f"{len(lost)} lost answers in {and_more(tasks)}: asked again, and of each variant")
    name = f"{run_dir.name}-blame-{candidate.label}"
    evaluation = prepare(
        reference=f"{candidate.label}={folder}", variants=variants, suite=str(_suite_of(candidate, tasks, work)),
        gates=str(work / _GATES), profile=profile or candidate.fingerprint.profile, runs=run_dir.parent, name=name, say=say,
    )  # fmt: skip
    judged = evaluate(evaluation, runs=run_dir.parent, name=name, own_texts=False, say=say)
    measured = {measurement.label: measurement for measurement in judged.measurements}
    again = right_replies(measured[candidate.label])
    causes = [
        ServingCause(
            label=other.variant.name,
            what=difference_words(other.variant.declared),
            num_lost=len(lost),
            num_recovered=len(lost & right_replies(measured[other.label])),
            num_again=len(lost & again),
            share=recovered_share(lost, again, right_replies(measured[other.label])),
        )
        for other in evaluation.compared.candidates
        if other.variant is not None
    ]
    return tuple(sorted(causes, key=lambda cause: -cause.share.value))


def lost_replies(reference: Measurement, candidate: Measurement) -> set[Reply]:
    """Right in the reference and wrong in the candidate, both with an answer that could be judged."""
    wrong = {
        (task.task, item.item, item.sample) for task in candidate.tasks for item in task.items if item.correct is False
    }  # fmt: skip
    return right_replies(reference) & wrong


def right_replies(measurement: Measurement) -> set[Reply]:
    """Of all its tasks."""
    return {(task.task, item.item, item.sample) for task in measurement.tasks for item in task.items if item.correct}


def recovered_share(lost: Collection[Reply], again: Collection[Reply], variant: Collection[Reply]) -> Interval:
    """Of the lost replies, how many more are right as the variant serves them than as the candidate was served, asked again."""
    from assay_evaluate.statistics.paired import paired_difference

    more = sum(reply in variant and reply not in again for reply in lost)
    fewer = sum(reply in again and reply not in variant for reply in lost)
    return paired_difference(more, fewer, len(lost))


def _suite_of(candidate: Measurement, tasks: Sequence[str], work: Path) -> Path:
    """The run's suite with these tasks alone, and gates for them beside it."""
    told: Mapping[str, Any] = candidate.suite_recipe
    kept = [task for task in told["tasks"] if task["name"] in tasks]
    suite = {**told, "name": Path(_SUITE).stem, "tasks": kept, "acceptance": False}
    for part in ("divergence", "probes", "gates"):
        suite.pop(part, None)
    gates = {
        "schema": 1, "name": Path(_GATES).stem, "level": 0.95, "max_excluded": 0.5, "min_items": 1,
        "gates": [{"kind": "score", "task": task, "max_drop": _MOST_LOST_SHARE} for task in tasks],
    }  # fmt: skip
    work.mkdir(parents=True, exist_ok=True)
    for name, recipe in ((_SUITE, suite), (_GATES, gates)):
        write_text_atomically(work / name, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    return work / _SUITE
