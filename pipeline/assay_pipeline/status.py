"""`assay status`: what of a run is made, verified, measured, judged, missing or in work. Reads records, starts nothing."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.errors import AssayError
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe, is_automatic
from assay.records.base import Part, Record
from assay.records.choice.record import CHOICE_RECORD, Choice
from assay.records.deployment.record import load_deployments
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.measurement import Measurement
from assay.records.run import RUN_RECORD, RunRecord, judged_bytes
from assay.records.speed import SPEED_RECORD, SpeedRecord
from assay.records.verdict import GateReport, Overall, Status
from assay.records.verification import Verification, is_as_verified
from assay.safe_files import open_own_file
from assay_pipeline.run_folders import LOCK, find_run, read_run


class CheckpointStatus(Part):
    """One checkpoint of a run, by its label."""

    label: str
    made: Literal["finished", "unfinished", "elsewhere", "missing"] | None
    """elsewhere: measured here, made in another place (a source, another run, `--out`). missing: the model's recipe has it.
    None: the reference's repeat, which is no checkpoint of its own."""
    num_bytes: int | None
    num_shards_finished: int | None
    """Of an unfinished one. None: of any other."""
    verified: Literal["passed", "failed", "changed since"] | None
    """changed since: files were touched after the verification. None: not verified, or made elsewhere."""
    measured: Literal["measured", "another checkpoint"] | None
    """another checkpoint: it was made again after it was measured. None: not measured."""
    is_reference: bool
    num_tasks: int | None
    """That the suite asked. None: not measured."""
    num_tasks_scored: int | None
    not_measured: dict[str, str]
    """What the suite asked for and was not measured -> why."""
    num_replies: int
    """In the journal, of the same bytes."""
    tasks_without_verdict: tuple[str, ...]
    """Scored, and NOT MEASURED for the gate all the same: too many replies were cut off, say."""
    verdict: Overall | None
    reason: str | None
    deployments: dict[str, Status] = Field(default_factory=dict)
    """Profile -> PASS: this verdict travels there. Empty: `assay deployment` was not run, or for an earlier verdict."""


class WorkStatus(Part):
    """One command at work in a run."""

    what: Literal["evaluate", "quantize"]
    label: str | None
    """Of quantize: the checkpoint."""
    pid: int | None
    """None: not known."""


class SpeedStatus(Part):
    """Of `speed.json`."""

    points: dict[str, int]
    """Origin (`measured`, `imported`, `predicted`) -> rows of the bytes that are here."""
    checkpoints: tuple[str, ...]
    """That have a measured row."""
    other_bytes: tuple[str, ...]
    """That have rows of bytes which they no longer have."""
    not_measured: dict[str, str]
    """Checkpoint -> why it has no row."""


class ChoiceStatus(Part):
    """Of `choice.json`."""

    recommendation: str
    outdated: str | None
    """Why it is not about what is here now. None: it is."""


class RunStatus(Record):
    """One run."""

    kind: Literal["status"] = "status"
    run: str
    model: str
    source: str | None
    reference: str | None
    """Folder that the others are compared with, of `evaluate --reference`."""
    suite: str | None
    checkpoints: tuple[CheckpointStatus, ...]
    at_work: tuple[WorkStatus, ...]
    speed: SpeedStatus | None = None
    """None: nothing was measured, imported or predicted."""
    choice: ChoiceStatus | None = None
    """None: `assay choose` was not run."""
    problem: str | None = None
    """Why nothing else is known: a record is damaged."""


# ------------------------------------------------------------------------------------------------ runs
def status_of(run: str, runs: Path) -> RunStatus:
    """AssayError: there is no such run, or a record of it is damaged."""
    for folder in (Path(run), runs / run):
        if (folder / RUN_RECORD).exists():
            return read_status(folder)
    return read_status(find_run(run, runs))


def status_of_all(runs: Path) -> list[RunStatus]:
    """Of every folder in `runs` that holds a run; of one with a damaged record what is wrong."""
    statuses = []
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()) if runs.is_dir() else ():
        try:
            if read_run(folder) is not None:
                statuses.append(read_status(folder))
        except AssayError as error:
            statuses.append(RunStatus(
                run=str(folder), model=folder.name, source=None, reference=None, suite=None, checkpoints=(), at_work=(),
                problem=str(error),
            ))  # fmt: skip
    return statuses


def read_status(folder: Path) -> RunStatus:
    """AssayError: a record is damaged."""
    from assay_evaluate.client.journal_reading import count_replies

    about = read_run(folder)
    assert about is not None, "the callers saw to it"
    measured = {path.stem: Measurement.load(path) for path in sorted((folder / "measurements").glob("*.json"))}
    gates = GateReport.load_if_there(folder / "gates.json")
    replies = count_replies(folder / "journal.db")  # of each checkpoint, by its hash
    made = [path.parent.name for path in sorted(folder.glob("*/checkpoint")) if path.is_dir()]
    labels = dict.fromkeys([*_expected(about), *made, *measured])
    deployments, _ = load_deployments(folder, measured.values(), gates)
    deployed = {
        label: {deployment.profile: deployment.outcome for deployment in deployments if deployment.label == label}
        for label in labels
    }
    checkpoints = [_checkpoint(folder, label, measured.get(label), gates, replies, deployed[label]) for label in labels]
    return RunStatus(
        run=str(folder),
        model=about.model,
        source=None if about.source is None else about.source.location,
        reference=None if about.reference is None else about.reference.location,
        suite=None if about.suite is None else about.suite.name,
        checkpoints=tuple(sorted(checkpoints, key=lambda deployment: not deployment.is_reference)),
        at_work=tuple(_at_work(folder, made)),
        speed=_speed(folder),
        choice=_choice(folder, about.model, gates),
    )


def _expected(about: RunRecord) -> list[str]:
    """Precisions of the model's recipe, if it has one."""
    if about.source is None or about.model not in recipe_names("models"):
        return []
    recipe = load_recipe(ModelRecipe, about.model)
    first = [recipe.reference.precision] if recipe.reference.precision is not None else []
    return [*first, *(name if is_automatic(name) else Path(name).stem for name in recipe.precisions)]


def _speed(folder: Path) -> SpeedStatus | None:
    if (record := SpeedRecord.load_if_there(folder / SPEED_RECORD)) is None:
        return None
    of_these_bytes, other = record.of_bytes(judged_bytes(folder))
    return SpeedStatus(
        points=dict(Counter(row.origin for row in of_these_bytes.rows)),
        checkpoints=tuple(dict.fromkeys(row.checkpoint for row in of_these_bytes.rows if row.origin == "measured")),
        other_bytes=other,
        not_measured={point.checkpoint: point.reason for point in of_these_bytes.not_measured if point.concurrency is None},
    )


def _choice(folder: Path, model: str, gates: GateReport | None) -> ChoiceStatus | None:
    if (record := Choice.load_if_there(folder / CHOICE_RECORD)) is None:
        return None
    reason = record.why_outdated(model, judged_bytes(folder), None if gates is None else gates.overall)
    return ChoiceStatus(recommendation=record.recommendation, outdated=reason)


# ------------------------------------------------------------------------------------------------ one checkpoint
def _checkpoint(
    run_dir: Path,
    label: str,
    measured: Measurement | None,
    gates: GateReport | None,
    replies: dict[str, int],
    deployments: dict[str, Status],
) -> CheckpointStatus:
    from assay_quantize.engine.journal import num_finished

    folder = run_dir / label / "checkpoint"
    manifest = load_manifest(folder)
    newest = manifest or measured
    sha256 = None if newest is None else newest.checkpoint_sha256
    judged = gates is not None and label in gates.overall
    open_gates = {
        verdict.gate for verdict in (() if gates is None else gates.verdicts)
        if (verdict.candidate, verdict.status) == (label, "NOT MEASURED")
    }  # fmt: skip
    scored = () if measured is None else [task.task for task in measured.tasks if task.accuracy is not None]
    return CheckpointStatus(
        label=label,
        made=_made(folder, manifest, measured),
        num_bytes=_num_bytes(manifest, measured),
        num_shards_finished=num_finished(folder) if manifest is None and folder.is_dir() else None,
        verified=None if manifest is None else _verified(folder),
        measured=None if measured is None else "measured" if measured.checkpoint_sha256 == sha256 else "another checkpoint",
        is_reference=measured is not None and measured.is_reference,
        num_tasks=None if measured is None else len(measured.tasks),
        num_tasks_scored=None if measured is None else len(scored),
        not_measured={} if measured is None else measured.not_measured,
        num_replies=0 if sha256 is None else replies.get(sha256, 0),
        tasks_without_verdict=tuple(task for task in scored if f"score {task}" in open_gates),
        verdict=gates.overall[label] if gates is not None and judged else None,
        reason=gates.reasons.get(label) if gates is not None and judged else None,
        deployments=deployments,
    )


def _made(
    folder: Path, manifest: Manifest | None, measured: Measurement | None
) -> Literal["finished", "unfinished", "elsewhere", "missing"] | None:
    if measured is not None and measured.is_noise_floor:
        return None
    if manifest is not None:
        return "finished"
    if folder.is_dir():
        return "unfinished"
    return "missing" if measured is None else "elsewhere"


def _num_bytes(manifest: Manifest | None, measured: Measurement | None) -> int | None:
    if measured is not None and (manifest is None or manifest.checkpoint_sha256 == measured.checkpoint_sha256):
        return measured.checkpoint_bytes
    return None if manifest is None else sum(shard.num_bytes for shard in manifest.shards)


def _verified(folder: Path) -> Literal["passed", "failed", "changed since"] | None:
    record = Verification.load_if_there(folder.parent / "verify.json")
    if record is None:
        return None
    if not is_as_verified(folder, record):
        return "changed since"
    return "passed" if record.passed else "failed"


# ------------------------------------------------------------------------------------------------ at work
def _at_work(folder: Path, made: Iterable[str]) -> list[WorkStatus]:
    from assay_quantize.checkpoint.file_names import JOURNAL

    works = []
    if is_held(folder / LOCK):
        words = (folder / LOCK).read_text(errors="replace").split()
        works.append(WorkStatus(what="evaluate", label=None, pid=int(words[0]) if words and words[0].isdecimal() else None))
    for label in made:
        if not (folder / label / "checkpoint" / MANIFEST).exists() and is_held(folder / label / "checkpoint" / JOURNAL):
            works.append(WorkStatus(what="quantize", label=label, pid=None))
    return works


def is_held(path: Path) -> bool:
    """Whether another process holds the exclusive lock of a file. The lock is asked for and given back at once."""
    try:
        descriptor = open_own_file(str(path), os.O_RDONLY, "lock")
    except (OSError, AssayError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
