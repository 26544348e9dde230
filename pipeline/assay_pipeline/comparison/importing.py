"""`assay gate --import`: results of other harnesses in, the verdicts and the report of a run out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import safe_name, shown
from assay.recipes.imported import ImportedSuite
from assay.records.measurement import Measurement
from assay.records.run import ReferenceCheckpoint, RunRecord, SuiteIdentity
from assay.records.verdict import GateReport
from assay_pipeline.comparison.sides import split_label
from assay_pipeline.gate_choice import describe_gates, gates_of_suite, load_gates
from assay_pipeline.judging import judge
from assay_pipeline.run_folders import open_run

if TYPE_CHECKING:
    from assay_evaluate.harnesses.measurement import ImportedSide

REFERENCE_SIDE = "reference"
"""What a table of both sides calls the reference, if the user does not say."""


def import_results(
    reference: str,
    candidates: Sequence[str],
    *,
    gates: str | None = None,
    metric: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
    say: Say = say_nothing,
) -> tuple[Path, GateReport]:
    """Judge what another harness scored, as a run of its own: its folder, and the verdicts. What was imported against the same
    reference before stays in it.

    reference, candidates: `[LABEL=]PATH`, files or folders of results. Without candidates, reference is a table of both sides,
    and LABEL its side that is the reference. gates: name or file; None: `default`. metric: the score to take where there are
    several. AssayError: a file cannot be read, or the sides were not asked the same.
    """
    from assay_evaluate.harnesses.measurement import measurements_of

    first, others = _sides(reference, candidates, metric)
    measurements = measurements_of(first, others)
    suite = ImportedSuite.model_validate(measurements[0].suite_recipe)
    limits = load_gates(gates or gates_of_suite(suite), suite)
    about = RunRecord(
        model=measurements[0].model,
        reference=ReferenceCheckpoint(location=str(first.path), checkpoint_sha256=first.sha256),
        suite=SuiteIdentity(name=suite.name, sha256=suite.sha256),
    )
    with open_run(runs, about, name=name, lock=True, say=say) as run_dir:
        _check_reference(run_dir, first)
        say(describe_gates(limits, suite))
        for measurement in measurements:
            measurement.save(run_dir / "measurements" / f"{measurement.label}.json")
        return run_dir, judge(run_dir, limits, published={}, say=say)


def _check_reference(run_dir: Path, reference: ImportedSide) -> None:
    """AssayError: what was imported before is compared with the same results under another label."""
    for path in sorted((run_dir / "measurements").glob("*.json")):
        measured = Measurement.load(path)
        if measured.is_reference and measured.label != reference.label:
            raise AssayError(
                f"{run_dir}: its reference is called {measured.label}; call it so here: {measured.label}={reference.path}, or "
                "give another --name"
            )


def _sides(reference: str, candidates: Sequence[str], metric: str | None) -> tuple[ImportedSide, list[ImportedSide]]:
    """The reference and the candidates, each by its own name."""
    from assay_evaluate.harnesses.find import read_results
    from assay_evaluate.harnesses.measurement import ImportedSide

    named = [split_label(text) for text in (reference, *candidates)]
    paths = [Path(path) for _, path in named]
    read = [read_results(path, metric) for path in paths]
    if not candidates:
        (label, _), path, sides = named[0], paths[0], read[0]
        there = ", ".join(shown(side) for side in sides if side is not None)
        if None in sides or len(sides) < 2:
            raise AssayError(
                f"gate --import {shown(reference)}: what it is compared with is missing; give REFERENCE and CANDIDATE, or one "
                "table with a column `side`"
            )
        chosen = label or REFERENCE_SIDE
        if chosen not in sides:
            raise AssayError(f"{path}: has no side {chosen}; it has {there}; say which is the reference: SIDE={path}")
        by_name = {side: ImportedSide(safe_name(side), path, tasks) for side, tasks in sides.items() if side is not None}
        return by_name.pop(chosen), list(by_name.values())
    for path, sides in zip(paths, read, strict=True):
        if None not in sides or len(sides) > 1:
            raise AssayError(f"{path}: names sides itself; import it alone, or leave its column `side` out")
    labels = [
        label or safe_name(path.name if path.is_dir() else path.stem) for (label, _), path in zip(named, paths, strict=True)
    ]
    first, *others = (ImportedSide(label, path, sides[None]) for label, path, sides in zip(labels, paths, read, strict=True))
    return first, others
