"""Which folder under RUNS a command works in: told by what a run is about (`run.json`), not by the name of a folder.

RUNS/NAME for the first model called NAME; RUNS/NAME-HEX for another model of that name, or the same one retrained in place;
RUNS/NAME-SUITE for another suite on the same model. A folder from before run.json is taken over if its records agree.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from assay.atomic_files import naming, remove_leftovers
from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import MOST_NAME_BYTES, safe_name, shown
from assay.records.manifest import MANIFEST, Manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import RUN_RECORD, ReferenceCheckpoint, RunRecord, SourceData, SuiteIdentity, source_of
from assay.safe_files import open_own_file
from assay_pipeline.gate_choice import REGISTERED_GATES
from assay_pipeline.targets import run_name

JOURNAL = "journal.db"
LOCK = ".lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@contextmanager
def open_run(
    runs: Path,
    about: RunRecord,
    *,
    name: str | None = None,
    lock: bool = False,
    keep_suite: bool = True,
    say: Say = say_nothing,
) -> Iterator[Path]:
    """The folder for `about`, its run.json written; says so if it is not RUNS/MODEL.

    name: of the folder, if the user gave one. lock: no other evaluation is at work in it meanwhile. keep_suite: the run is one
    of this suite from now on. A start that is refused before anything was made or answered leaves the name free.
    AssayError: a run about something else has that name; another evaluation; a damaged run.json.
    """
    for _ in range(5):  # another process may take the folder between the choice and the claim
        folder, difference_text = choose_run(runs, about, name)
        with locked_run(folder) if lock else nullcontext():
            was_free = read_run(folder) is None
            if not _claim(folder, about if keep_suite else about.model_copy(update={"suite": None})):
                continue
            if difference_text is not None:
                say(f"{difference_text}; writing to {folder}")
            with _freed_if_nothing_came(folder) if was_free else nullcontext():
                yield folder
            return
    raise AssayError(f"{runs}: other commands took every folder that was chosen for {about.model}; say --name NAME")


@contextmanager
def _freed_if_nothing_came(folder: Path) -> Iterator[None]:
    """After an error, take back what a claim left in the folder, if there is nothing else."""
    from assay_evaluate.client.journal_reading import count_replies

    try:
        yield
    except BaseException:
        # The journal stays: it remembers the hashes of checkpoints, which take hours to make.
        kept = {LOCK, "logs", JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"}
        claim = {RUN_RECORD, REGISTERED_GATES}
        if {path.name for path in folder.iterdir()} <= claim | kept and not count_replies(folder / JOURNAL):
            for name in claim:
                (folder / name).unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()
        raise


def choose_run(runs: Path, about: RunRecord, name: str | None = None) -> tuple[Path, str | None]:
    """(folder, what holds RUNS/MODEL if that is another one). Writes nothing."""
    if name is not None:
        _check_name(name)
        record = read_run(runs / name)
        if record is not None and not record.takes(about):
            raise AssayError(
                f"--name {name}: {runs / name} {difference(record, about)}; give another name, or leave --name out"
            )
        return runs / name, None
    first = runs / safe_name(about.model)
    record = read_run(first)
    if record is None or record.takes(about):
        return first, None
    difference_text = f"{first} {difference(record, about)}"
    same_data = find_runs(runs, about)
    for folder in same_data:
        other_record = read_run(folder)
        if other_record is not None and other_record.takes(about):
            return folder, difference_text
    return _new_folder(first, about, same_data), difference_text


def _check_name(name: str) -> None:
    """AssayError if `--name` cannot be the name of a folder."""
    if not _NAME.fullmatch(name):
        raise AssayError(f"--name {shown(name)}: say letters, digits, `.`, `_` and `-`, a letter or digit first")
    if len(name) > MOST_NAME_BYTES:
        raise AssayError(f"--name {shown(name)}: is {len(name)} bytes long, {MOST_NAME_BYTES} are allowed")


def find_runs(runs: Path, about: RunRecord) -> list[Path]:
    """Runs about the same model and data, whatever their suite: RUNS/MODEL first, then those that hold checkpoints."""
    first = runs / safe_name(about.model)
    folders = [first, *sorted(runs.glob(f"{first.name}-*"))]
    same = [folder for folder in folders if (record := read_run(folder)) is not None and record.is_about(about)]
    return sorted(same, key=lambda folder: (folder != first, not any(folder.glob(f"*/checkpoint/{MANIFEST}"))))


def _new_folder(first: Path, about: RunRecord, same_data: list[Path]) -> Path:
    """A free name that tells people the difference."""
    data = about.data_sha256[:6]
    names = [f"{first.name}-{data}"]
    if same_data and about.suite is not None:
        suite = f"{same_data[0].name}-{safe_name(about.suite.name)}"
        names = [suite, f"{suite}-{about.suite.sha256[:6]}"]
    for name in names:
        if read_run(first.with_name(name)) is None:
            return first.with_name(name)
    raise AssayError(f"{first.with_name(names[-1])}: holds another run; say --name NAME for this one")


def find_run(run: str, runs: Path) -> Path:
    """The run that `run` names: its folder, a name under `runs`, or a model or checkpoint whose run it is.

    AssayError: there is none, or there are several.
    """
    for folder in (Path(run), runs / run):
        if holds_records(folder):
            return folder
    named = runs / run_name(run)
    if "/" not in run and not Path(run).is_dir():
        if holds_records(named):
            return named
    else:
        known = [folder for folder in (named, *sorted(runs.glob(f"{named.name}-*"))) if holds_records(folder)]
        matches = [folder for folder in known if _is_of(run, read_run(folder))]
        if matches and (matches[0] == named or len(matches) == 1):
            return matches[0]
        if matches:
            raise AssayError(f"{run}: has several runs: {', '.join(map(str, matches))}; name one of them")
        if known:
            raise AssayError(f"{run}: {named.name} is the name of other runs: {', '.join(map(str, known))}; name one of them")
    names = sorted(path.name for path in runs.glob("*") if holds_records(path))
    there = f"the folder {runs} has {', '.join(names)}" if names else f"the folder {runs} has no runs"
    if (Path(run) / "config.json").is_file():
        raise AssayError(
            f"{run}: is a checkpoint, and no run here is about it; {there}; `assay run {run}` makes one of a source, "
            f"`assay judge REFERENCE {run}` one of a candidate"
        )
    raise AssayError(f"{run}: no run of that name; {there}; `assay run TARGET` makes one")


def run_of(checkpoint: Path, model: str, runs: Path) -> Path | None:
    """The run that was made from, or compares with, a checkpoint. None: there is none."""
    first = runs / safe_name(model)
    for folder in (first, *sorted(runs.glob(f"{first.name}-*"))):
        if _is_of(str(checkpoint), read_run(folder)):
            return folder
    return None


def _is_of(target: str, record: RunRecord | None) -> bool:
    """Whether a run was made from, or compares with, a checkpoint folder as it is now, or a model on the hub."""
    folder = Path(target).expanduser()
    if record is None:
        return False
    if record.reference is not None:
        reference = Path(record.reference.location)
        return reference.exists() and folder.exists() and reference.samefile(folder)
    if record.source is None:
        return False
    return record.source.is_same(folder_data(folder)) if folder.is_dir() else record.source.location == target


def folder_data(folder: Path) -> SourceData:
    """The data of a checkpoint folder as it is now; its files are None where they cannot be read."""
    from assay_quantize.checkpoint.checkpoint import open_checkpoint

    try:
        files = dict(open_checkpoint(folder, allow_quantized=True).data)
    except AssayError:
        files = None
    return SourceData(location=str(folder), files=files)


# ------------------------------------------------------------------------------------------------ run.json
def holds_records(folder: Path) -> bool:
    """Whether there is a run to report on."""
    return (folder / RUN_RECORD).is_file() or (folder / "measurements").is_dir() or any(folder.glob("*/plan.json"))


def read_run(folder: Path) -> RunRecord | None:
    """What a run is about, from run.json or, of an older run, from its records. None: the folder is free."""
    if (record := RunRecord.load_if_there(folder / RUN_RECORD)) is not None:
        return record
    if not any((folder / "measurements").glob("*.json")) and not any(folder.glob("*/plan.json")):
        return None
    try:
        return _from_records(folder)
    except AssayError:  # records of an older schema
        return RunRecord(model=folder.name)


def _from_records(folder: Path) -> RunRecord:
    """Of a folder without run.json; without source and reference where its records disagree."""
    plans: list[Plan | Manifest] = [Plan.load(path) for path in sorted(folder.glob("*/plan.json"))]
    plans += [Manifest.load(path) for path in sorted(folder.glob(f"*/checkpoint/{MANIFEST}"))]
    measured = [Measurement.load(path) for path in sorted((folder / "measurements").glob("*.json"))]
    sources = [source_of(plan) for plan in plans]
    references = [
        ReferenceCheckpoint(location=m.checkpoint, checkpoint_sha256=m.checkpoint_sha256)
        for m in measured
        if m.is_reference and not m.is_noise_floor
    ]
    suites = {m.suite_sha256: SuiteIdentity(name=m.suite, sha256=m.suite_sha256) for m in measured}
    models = {record.model for record in (*plans, *measured)}
    unknown = RunRecord(model=min(models))
    if len(models) > 1 or len(suites) > 1 or any(not sources[0].is_same(source) for source in sources):
        return unknown
    if not sources and len(references) != 1:
        return unknown
    return unknown.model_copy(
        update={
            "source": sources[0] if sources else None,
            "reference": None if sources else references[0],
            "suite": next(iter(suites.values()), None),
        }
    )


def _claim(folder: Path, about: RunRecord) -> bool:
    """Write run.json, or fill in what it does not say yet. False: meanwhile it is about something else."""
    path, before = folder / RUN_RECORD, read_run(folder)
    if before is not None and not before.takes(about):
        return False
    record = about if before is None else before.filled_in(about)
    if not path.is_file():
        try:
            record.save(path, only_new=True)
        except FileExistsError:
            if not path.is_file():
                raise
            return False
    elif record != before:
        record.save(path)
    else:
        remove_leftovers(path)
    return True


def difference(record: RunRecord, about: RunRecord) -> str:
    """`holds ...`: what the run that is there is about, where `about` differs."""
    from assay.file_data import other_data

    if record.source is None and record.reference is None:
        return "holds an older run whose records do not say what it was made from"
    if record.model != about.model:
        return f"holds model {record.model}"
    if record.is_about(about):
        assert record.suite is not None and about.suite is not None
        same_name = record.suite.name == about.suite.name
        return f"holds measurements of suite {record.suite.name}" + (" as it was before it was changed" if same_name else "")
    if record.reference is not None:
        return f"holds comparisons with {record.reference.location} (checkpoint {record.reference.checkpoint_sha256[:12]})"
    assert record.source is not None
    what = f"holds checkpoints made from {record.source.location}"
    if about.source is None or record.source.location != about.source.location:
        return what
    if record.source.revision != about.source.revision:
        return f"{what} at commit {str(record.source.revision)[:12]}"
    how = other_data(record.source.files or {}, about.source.files or {})
    return f"{what} before its data changed ({how})"


@contextmanager
def locked_run(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` against a second evaluation, which would serve the same checkpoints again and write the same records.

    AssayError, with the other's process id, while another process holds it. Gate, report and card take no lock: they read
    records and write theirs by rename, and an evaluation at work writes them again at its end. The lock goes with the process,
    however it ends. Python opens files close-on-exec, so no server that is started inherits it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = open_own_file(str(run_dir / LOCK), os.O_RDWR | os.O_CREAT, "lock")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise AssayError(
                f"{run_dir}: another evaluation is at work in it (pid {holder or 'unknown'}); wait for it, "
                "or give this one --name"
            ) from None
        with naming(run_dir / LOCK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
