"""Records that another of their name replaces are moved to `earlier/` beside them: nothing that was measured is overwritten."""

from __future__ import annotations

from pathlib import Path

from assay.errors import AssayError
from assay.records.comparable import other_reference
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ledger_of, probes_place

EARLIER = "earlier"


def set_aside(path: Path, checkpoint_sha256: str | None) -> Path:
    """Move the record at `path` to earlier/LABEL.<6 hex of its checkpoint>.<n>.json; where it is now."""
    which = checkpoint_sha256[:6] if checkpoint_sha256 is not None else "unknown"
    folder, n = path.parent / EARLIER, 1
    folder.mkdir(exist_ok=True)
    while (place := folder / f"{path.stem}.{which}.{n}.json").exists():
        n += 1
    path.replace(place)
    return place


def make_room_for(measurement: Measurement, run_dir: Path) -> str | None:
    """Before `measurement` is written: a measurement of its label that is of something else is set aside. The line to print."""
    path = run_dir / "measurements" / f"{measurement.label}.json"
    if not path.is_file():
        return None
    try:
        there = Measurement.load(path)
    except AssayError:
        return _moved(run_dir, measurement.label, "cannot be read", set_aside(path, None))
    why = _how_other(there, measurement)
    return None if why is None else _moved(run_dir, there.label, why, set_aside(path, there.checkpoint_sha256))


def set_aside_label(label: str, run_dir: Path) -> list[str]:
    """Set aside what was measured of a label, and its noise floor, before it is measured anew; the lines to print."""
    there = [run_dir / "measurements" / f"{name}.json" for name in (label, f"{label}-repeat")]
    return [_moved(run_dir, path.stem, "is replaced", set_aside(path, None)) for path in there if path.is_file()]


def set_aside_others(reference: Measurement, run_dir: Path) -> list[str]:
    """Set aside what was not measured against this reference; the lines to print."""
    lines = []
    for path in sorted((run_dir / "measurements").glob("*.json")):
        try:
            there = Measurement.load(path)
        except AssayError:
            lines.append(_moved(run_dir, path.stem, "cannot be read", set_aside(path, None)))
            continue
        if there.label == reference.label:
            continue
        if (why := _why_it_does_not_belong(there, reference)) is not None:
            lines.append(_moved(run_dir, there.label, why, set_aside(path, there.checkpoint_sha256)))
    return lines


def _why_it_does_not_belong(there: Measurement, reference: Measurement) -> str | None:
    if there.is_reference and not there.is_noise_floor:
        return f"is of another reference than {reference.label}"
    if there.model != reference.model:
        return f"is of model {there.model}"
    other = other_reference(reference, there)
    return None if other is None else f"cannot be compared with {reference.label} any more ({other[0]})"


def make_room_for_probes(run_dir: Path, label: str, checkpoint_sha256: str | None) -> str | None:
    """Before probes of a checkpoint are written: a report of its label on another one is set aside, its requests too."""
    path = probes_place(run_dir, label)
    if not path.is_file():
        return None
    try:
        there = ProbeReport.load(path).checkpoint_sha256
    except AssayError:
        there = None
    if there is not None and there == checkpoint_sha256:
        return None
    place = set_aside(path, there)
    if ledger_of(path).is_file():
        ledger_of(path).replace(ledger_of(place))
    whose = "another checkpoint" if there and checkpoint_sha256 else "a server that may hold another checkpoint"
    return f"{label}: the earlier probes are of {whose}; moved to {place}"


def _how_other(there: Measurement, now: Measurement) -> str | None:
    """In what a measurement differs from the one that takes its place; None: it is the same one, made again."""
    pairs = {
        "is of another checkpoint": (there.checkpoint_sha256, now.checkpoint_sha256),
        "is against another reference": (there.reference_checkpoint_sha256, now.reference_checkpoint_sha256),
        "is of another suite": (there.suite_sha256, now.suite_sha256),
        "was served differently": (there.fingerprint.comparable_sha256, now.fingerprint.comparable_sha256),
        "is of another model": (there.model, now.model),
    }
    return next((why for why, (before, after) in pairs.items() if before != after), None)


def _moved(run_dir: Path, label: str, why: str, place: Path) -> str:
    # Verdicts are made from measurements; what was judged is no longer there. `assay gate` makes them again.
    (run_dir / "gates.json").unlink(missing_ok=True)
    return f"{label}: the earlier measurement {why}; moved to {place}"
