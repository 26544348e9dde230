"""`RUNS/attempts.jsonl`: what was judged in a folder of runs, so that an evaluation done again is known as one.

One line for every measurement of a candidate that was judged: its weights, the reference's, the suite, and the verdict. A
candidate that is measured until it passes would pass whatever it lost, so earlier attempts stand in the verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from assay.records.base import Part
from assay.records.measurement import Measurement
from assay.records.verdict import Attempt, GateReport, Status

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
    status: Status

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run, self.label, self.started


def earlier_attempts(run_dir: Path, measurements: Sequence[Measurement]) -> dict[str, tuple[Attempt, ...]]:
    """Label of every candidate -> attempts on the same two checkpoints with a suite of this name, judged before, oldest first.

    The reference's own repeat is no attempt. A line that cannot be read is none.
    """
    known = list(_read(run_dir.parent / NAME))
    found = {}
    for candidate, reference in _candidates(measurements):
        same = {
            one.key: one
            for one in known
            if (one.reference_sha256, one.candidate_sha256) == (reference.checkpoint_sha256, candidate.checkpoint_sha256)
            and one.suite == candidate.suite
            and one.key != (run_dir.name, candidate.label, candidate.started)
            and one.started < candidate.started
        }
        found[candidate.label] = tuple(
            Attempt(run=one.run, label=one.label, started=one.started, suite_sha256=one.suite_sha256, status=one.status)
            for one in sorted(same.values(), key=lambda one: one.started)
        )
    return {label: attempts for label, attempts in found.items() if attempts}


def note_attempts(run_dir: Path, measurements: Sequence[Measurement], judged: GateReport) -> None:
    """Append what is not there yet; a verdict that changed (other gates) is noted again, and the last one counts. OSError: a
    folder that takes no file keeps none."""
    path = run_dir.parent / NAME
    known = {one.key: one for one in _read(path)}
    new = [one for one in _attempts(run_dir, measurements, judged.overall) if known.get(one.key) != one]
    if not new:
        return
    text = "".join(f"\n{one.model_dump_json()}\n" for one in new)  # a line that a kill cut short is left by itself
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.write(descriptor, text.encode())  # one write: lines of two runs do not mix
    finally:
        os.close(descriptor)


def _candidates(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    """Each candidate with the reference."""
    reference = next((one for one in measurements if one.is_reference and not one.is_noise_floor), None)
    if reference is not None:
        yield from ((one, reference) for one in measurements if one is not reference and not one.is_noise_floor)


def _attempts(
    run_dir: Path, measurements: Sequence[Measurement], overall: Mapping[str, Status]
) -> Iterable[JudgedAttempt]:  # fmt: skip
    for candidate, reference in _candidates(measurements):
        if candidate.label in overall:
            yield JudgedAttempt(
                reference_sha256=reference.checkpoint_sha256, candidate_sha256=candidate.checkpoint_sha256,
                suite=candidate.suite, suite_sha256=candidate.suite_sha256, run=run_dir.name, label=candidate.label,
                started=candidate.started, status=overall[candidate.label],
            )  # fmt: skip


def _read(path: Path) -> Iterator[JudgedAttempt]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            yield JudgedAttempt.model_validate(json.loads(line))
        except (ValueError, ValidationError, RecursionError):
            continue
