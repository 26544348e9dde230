"""`RUNS/attempts.jsonl`: what was judged in a folder of runs, so that an evaluation done again is known as one.

One line for every measurement of a candidate that was judged: its weights, the reference's, the suite, and the verdict. A
candidate that is measured until it passes would pass whatever it lost, so earlier attempts stand in the verdict.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from assay.atomic_files import replacing
from assay.records.base import Part
from assay.records.declared import without_address
from assay.records.measurement import Measurement
from assay.records.verdict import Attempt, GateReport, Overall
from assay.safe_files import open_own_file

NAME = "attempts.jsonl"
MOST_BYTES = 64 << 20
"""Of the file that are read, from its end."""


class JudgedAttempt(Part):
    """One line of the file."""

    reference_sha256: str
    candidate_sha256: str
    suite: str
    suite_sha256: str
    run: str
    """Name of its folder."""
    label: str
    started: str
    """When its measurement began: with `run` and `label` what tells two attempts apart."""
    status: Overall
    declared: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda declared: not declared)
    """As `Measurement.declared`, without the address: another way of serving the same weights is another candidate."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run, self.label, self.started


def earlier_attempts(run_dir: Path, measurements: Sequence[Measurement]) -> dict[str, tuple[Attempt, ...]]:
    """Label of every candidate -> attempts on the same two checkpoints with a suite of this name, judged before, oldest first.

    The reference's own repeat is no attempt. A line that cannot be read is none.
    """
    known = list(_read(run_dir.parent / NAME))
    attempts_by_label = {}
    for candidate, reference in _candidates(measurements):
        same = {
            attempt.key: attempt
            for attempt in known
            if (attempt.reference_sha256, attempt.candidate_sha256)
            == (reference.checkpoint_sha256, candidate.checkpoint_sha256)
            and attempt.suite == candidate.suite
            and attempt.declared == without_address(candidate.declared)
            and attempt.key != (run_dir.name, candidate.label, candidate.started)
            and attempt.started < candidate.started
        }
        attempts_by_label[candidate.label] = tuple(
            Attempt(
                run=attempt.run,
                label=attempt.label,
                started=attempt.started,
                suite_sha256=attempt.suite_sha256,
                status=attempt.status,
            )
            for attempt in sorted(same.values(), key=lambda attempt: attempt.started)
        )
    return {label: attempts for label, attempts in attempts_by_label.items() if attempts}


def note_attempts(run_dir: Path, measurements: Sequence[Measurement], judged: GateReport) -> None:
    """Add what is not there yet; a verdict that changed (other gates) is noted again, and the last one counts.

    OSError: the file cannot be written, and is as it was.
    """
    path = run_dir.parent / NAME
    if not _new_attempts(run_dir, measurements, judged, path):
        return
    with _lock_of(path):
        new = _new_attempts(run_dir, measurements, judged, path)  # another run may have added its own meanwhile
        lines = [attempt.model_dump_json() for attempt in new]
        with replacing(path) as partial:
            partial.write_bytes(_whole_lines(path) + "".join(f"{line}\n" for line in lines).encode())


def _new_attempts(
    run_dir: Path, measurements: Sequence[Measurement], judged: GateReport, path: Path
) -> list[JudgedAttempt]:  # fmt: skip
    known = {attempt.key: attempt for attempt in _read(path)}
    return [attempt for attempt in _attempts(run_dir, measurements, judged.overall) if known.get(attempt.key) != attempt]


@contextmanager
def _lock_of(path: Path) -> Iterator[None]:
    """Only this process may replace the file, which is made if it is not there."""
    while True:
        descriptor = open_own_file(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, "list of attempts")
        try:
            with suppress(OSError):  # a file system that locks nothing
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # another process may have put a new file in the place of the one that this lock is on
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                yield
                return
        finally:
            os.close(descriptor)


def _whole_lines(path: Path) -> bytes:
    """What the file holds, without a last line that a kill cut short."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]


def _candidates(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    """Each candidate with the reference."""
    reference = next(
        (measurement for measurement in measurements if measurement.is_reference and not measurement.is_noise_floor), None
    )
    if reference is not None:
        yield from (
            (measurement, reference)
            for measurement in measurements
            if measurement is not reference and not measurement.is_noise_floor
        )


def _attempts(
    run_dir: Path, measurements: Sequence[Measurement], overall: Mapping[str, Overall]
) -> Iterable[JudgedAttempt]:  # fmt: skip
    for candidate, reference in _candidates(measurements):
        if candidate.label in overall:
            yield JudgedAttempt(
                reference_sha256=reference.checkpoint_sha256, candidate_sha256=candidate.checkpoint_sha256,
                suite=candidate.suite, suite_sha256=candidate.suite_sha256, run=run_dir.name, label=candidate.label,
                started=candidate.started, status=overall[candidate.label],
                declared=without_address(candidate.declared),
            )  # fmt: skip


def _read(path: Path) -> Iterator[JudgedAttempt]:
    try:
        with open(open_own_file(str(path), os.O_RDONLY | os.O_CLOEXEC, "list of attempts"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            yield JudgedAttempt.model_validate(json.loads(line))
        except (ValueError, ValidationError, RecursionError):
            continue
