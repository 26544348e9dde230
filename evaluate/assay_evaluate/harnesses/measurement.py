"""Scores of other harnesses as measurements, which gates and reports take as those that were made here."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import MeasureError
from assay.recipes.imported import ImportedSuite, ImportedTask
from assay.records.base import sha256_of
from assay.records.measurement import ImportedFrom, ItemResult, Measurement, TaskResult
from assay.records.serving import IMPORTED, Fingerprint
from assay_evaluate.harnesses.pairing import check_same_questions
from assay_evaluate.harnesses.scores import ScoredReply, TaskScores
from assay_evaluate.statistics.item_pairs import accuracy_of

SUITE = "imported"
SERVING_NOT_KNOWN = (
    "engine and version",
    "flags and environment",
    "hardware and kernels",
    "speculative decoding",
    "faults of serving",
)
UNKNOWN_SERVING = Fingerprint(
    server=IMPORTED, versions={}, hardware={}, profile="not known", flags={}, environment={}, speculation=None,
    checkpoint_flags={}, emulated=None, kernels=(),
)  # fmt: skip


@dataclass(frozen=True)
class ImportedSide:
    """Results of one checkpoint. path: file or folder that was named."""

    label: str
    path: Path
    tasks: Sequence[TaskScores]

    @property
    def sha256(self) -> str:
        """Identity of the results: of the replies as they were read, for one table may hold both sides."""
        return sha256_of(
            [[scores.task, scores.metric, [dataclasses.astuple(reply) for reply in scores.replies]] for scores in self.tasks]
        )


def measurements_of(reference: ImportedSide, candidates: Sequence[ImportedSide]) -> list[Measurement]:
    """The reference's measurement, then the candidates'.

    MeasureError: a candidate was asked otherwise, has no task of the reference's, or two sides have one label.
    """
    suite = _suite(reference)
    sides = [reference, *candidates]
    labels = [side.label for side in sides]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise MeasureError(f"two sides are called {twice[0]}; name them: {twice[0]}-2=PATH")
    model = next((scores.model for scores in reference.tasks if scores.model), None) or reference.label
    return [_measurement(side, reference, suite, model) for side in sides]


def _suite(reference: ImportedSide) -> ImportedSuite:
    tasks = tuple(
        ImportedTask(
            name=scores.task,
            harness=scores.harness,
            metric=scores.metric,
            settings=dict(scores.settings),
            knows_cuts=_knows_cuts(scores.replies),
        )
        for scores in reference.tasks
    )
    return ImportedSuite(schema=1, name=SUITE, tasks=tasks)


def _measurement(side: ImportedSide, reference: ImportedSide, suite: ImportedSuite, model: str) -> Measurement:
    is_reference = side is reference
    by_task, of_reference = ({scores.task: scores for scores in tasks} for tasks in (side.tasks, reference.tasks))
    common = [task.name for task in suite.tasks if task.name in by_task]
    if not common:
        raise MeasureError(
            f"{side.label} has no task of {reference.label}'s: {', '.join(by_task)}, not "
            f"{', '.join(task.name for task in suite.tasks)}; import results of the same benchmarks"
        )
    notes = [
        f"{name}: {note}"
        for name in common
        for note in (
            _how(by_task[name]),
            *(() if is_reference else check_same_questions(of_reference[name], by_task[name], (reference.label, side.label))),
        )
    ]
    if extra := [name for name in by_task if name not in common]:
        notes.append(f"tasks without results of the reference, left out: {', '.join(extra)}")
    if not is_reference and side.sha256 == reference.sha256:
        notes.append("its results are the reference's, reply by reply")
    used = [by_task[name] for name in common]
    return Measurement(
        model=model,
        label=side.label,
        is_reference=is_reference,
        is_noise_floor=False,
        checkpoint=str(side.path),
        checkpoint_sha256=side.sha256,
        checkpoint_bytes=None,
        suite=suite.name,
        suite_sha256=suite.sha256,
        suite_recipe=suite.model_dump(mode="json", by_alias=True),
        fingerprint=UNKNOWN_SERVING,
        tasks=tuple(_task_result(scores) for scores in used),
        divergence=None,
        acceptance=None,
        not_measured={task.name: "its results do not have it" for task in suite.tasks if task.name not in by_task},
        started=_started(used),
        seconds=None,
        reference_checkpoint_sha256=reference.sha256,
        notes=tuple(notes),
        imported=ImportedFrom(
            harnesses=tuple(dict.fromkeys(_harness(scores) for scores in used)),
            files={_inside(file, side.path): sha256 for scores in used for file, sha256 in scores.files.items()},
            model=next((scores.model for scores in used if scores.model), None),
            not_known=tuple(_not_known(used)),
        ),
    )


def _how(scores: TaskScores) -> str:
    return f"scored by {_harness(scores)}, {scores.metric}"


def _harness(scores: TaskScores) -> str:
    return f"{scores.harness} {scores.version}" if scores.version else scores.harness


def _inside(file: Path, named: Path) -> str:
    return str(file.relative_to(named)) if file != named and file.is_relative_to(named) else file.name


def _started(used: Sequence[TaskScores]) -> str:
    """When the first task was evaluated, or its file written."""
    if stated := [scores.started for scores in used if scores.started]:
        return min(stated)
    written = min(file.stat().st_mtime for scores in used for file in scores.files)
    return datetime.datetime.fromtimestamp(written, datetime.UTC).isoformat(timespec="seconds")


def _not_known(used: Sequence[TaskScores]) -> Iterator[str]:
    """What no file says of how these results came about."""
    yield from SERVING_NOT_KNOWN
    lacking: Mapping[str, list[str]] = {
        "which replies were cut off": [scores.task for scores in used if not _knows_cuts(scores.replies)],
        "how often a guess is right": [
            scores.task for scores in used if scores.harness != "swe-bench" and scores.chance is None
        ],
        "sampling, prompts and budget": [scores.task for scores in used if not scores.settings],
        "whether items of one name are the same question": [
            scores.task
            for scores in used
            if scores.harness != "swe-bench" and any(reply.question is None for reply in scores.replies)
        ],
    }
    for what, tasks in lacking.items():
        if tasks:
            yield f"{what} ({', '.join(tasks)})"


# ------------------------------------------------------------------------------------------------ one task
def _knows_cuts(replies: Sequence[ScoredReply]) -> bool:
    return all(reply.cut is not None for reply in replies if reply.score is not None)


def _task_result(scores: TaskScores) -> TaskResult:
    """Samples are numbered from 0, whatever the harness calls the first."""
    numbers = {sample: number for number, sample in enumerate(sorted({reply.sample for reply in scores.replies}))}
    items = tuple(_item(reply, numbers[reply.sample]) for reply in scores.replies)
    is_graded = any(item.score not in (None, 0, 1) for item in items)
    answered = [item for item in items if item.correct is not None]
    accuracy, pass_at_k, num_samples = accuracy_of(items, is_graded=is_graded)
    tokens = [item.output_tokens for item in items if item.output_tokens is not None]
    num_cut = sum(item.truncated for item in items)
    error = next((item.error for item in items if item.error), None)
    return TaskResult(
        task=scores.task,
        kind="imported",
        num_items=len(items),
        num_failed=len(items) - len(answered),
        num_truncated=num_cut,
        accuracy=accuracy,
        mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
        max_tokens=scores.max_tokens,
        items=items,
        note=None if answered else f"no item has a score; the first error: {error}",
        truncated_by={"length": num_cut} if num_cut else {},
        num_samples=num_samples,
        pass_at_k=pass_at_k,
        chance=scores.chance,
        is_graded=is_graded,
        knows_cuts=_knows_cuts(scores.replies),
    )


def _item(reply: ScoredReply, sample: int) -> ItemResult:
    return ItemResult(
        item=reply.item,
        language="und",
        correct=None if reply.score is None else reply.score == 1,
        truncated=bool(reply.cut),
        wrong_script=False,
        finish_reason=None,
        prompt_tokens=None,
        output_tokens=reply.output_tokens,
        answer=reply.answer,
        error=reply.error,
        truncated_by="length" if reply.cut else None,
        score=reply.score,
        sample=sample,
        cluster=reply.cluster,
        subtask=reply.subtask,
    )
