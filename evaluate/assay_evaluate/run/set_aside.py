"""Records that another of their name replaces are moved to `earlier/` beside them: nothing that was measured is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from assay.errors import AssayError
from assay.records.comparable import other_reference
from assay.records.declared import without_address
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ledger_of, probes_place

EARLIER = "earlier"


def make_room_for(measurement: Measurement, run_dir: Path) -> str | None:
    """Before `measurement` is written: a measurement of its label that is of something else is set aside. The line to print."""
    path = run_dir / "measurements" / f"{measurement.label}.json"
    if not path.is_file():
        return None
    try:
        earlier = Measurement.load(path)
    except AssayError:
        return _set_aside(path, run_dir, "cannot be read")
    pairs = {
        "is of another checkpoint": (earlier.checkpoint_sha256, measurement.checkpoint_sha256),
        "is against another reference": (earlier.reference_checkpoint_sha256, measurement.reference_checkpoint_sha256),
        "is of another suite": (earlier.suite_sha256, measurement.suite_sha256),
        "was served differently": (earlier.fingerprint.comparable_sha256, measurement.fingerprint.comparable_sha256),
        "was declared otherwise": (without_address(earlier.declared), without_address(measurement.declared)),
        "is of another model": (earlier.model, measurement.model),
    }
    reason = next((reason for reason, (before, after) in pairs.items() if before != after), None)
    return None if reason is None else _set_aside(path, run_dir, reason, earlier)


def set_aside_label(label: str, run_dir: Path) -> list[str]:
    """Set aside what was measured of a label, and its noise floor, before it is measured anew; the lines to print."""
    paths = [run_dir / "measurements" / f"{name}.json" for name in (label, f"{label}-repeat")]
    return [_set_aside(path, run_dir, "is replaced") for path in paths if path.is_file()]


def set_aside_others(reference: Measurement, run_dir: Path) -> list[str]:
    """Set aside what was not measured against this reference; the lines to print."""
    lines = []
    for path in sorted((run_dir / "measurements").glob("*.json")):
        try:
            measurement = Measurement.load(path)
        except AssayError:
            lines.append(_set_aside(path, run_dir, "cannot be read"))
            continue
        if measurement.label == reference.label:
            continue
        if measurement.is_reference and not measurement.is_noise_floor:
            reason = f"is of another reference than {reference.label}"
        elif measurement.model != reference.model:
            reason = f"is of model {measurement.model}"
        elif other := other_reference(reference, measurement):
            reason = f"cannot be compared with {reference.label} any more ({other[0]})"
        else:
            continue
        lines.append(_set_aside(path, run_dir, reason, measurement))
    return lines


def make_room_for_probes(
    run_dir: Path, label: str, checkpoint_sha256: str | None, declared: Mapping[str, Any] = MappingProxyType({})
) -> str | None:  # fmt: skip
    """Before probes of a checkpoint are written: a report of its label on another one is set aside, its requests too.

    declared: of a variant, whose label may have been that of another way of serving the same checkpoint.
    """
    path = probes_place(run_dir, label)
    if not path.is_file():
        return None
    try:
        report = ProbeReport.load(path)
        earlier, before = report.checkpoint_sha256, report.declared
    except AssayError:
        earlier, before = None, {}
    if earlier is not None and earlier == checkpoint_sha256 and before == dict(declared):
        return None
    place = _move(path, earlier)
    if ledger_of(path).is_file():
        ledger_of(path).replace(ledger_of(place))
    whose = "another checkpoint" if earlier and checkpoint_sha256 else "a server that may hold another checkpoint"
    whose = "another way of serving it" if earlier is not None and earlier == checkpoint_sha256 else whose
    return f"{label}: the earlier probes are of {whose}; moved to {place}"


def _set_aside(path: Path, run_dir: Path, reason: str, measurement: Measurement | None = None) -> str:
    place = _move(path, None if measurement is None else measurement.checkpoint_sha256)
    # Verdicts are made from measurements; what was judged is no longer there. `assay gate` makes them again.
    (run_dir / "gates.json").unlink(missing_ok=True)
    label = path.stem if measurement is None else measurement.label
    return f"{label}: the earlier measurement {reason}; moved to {place}"


def _move(path: Path, checkpoint_sha256: str | None) -> Path:
    """To earlier/LABEL.<6 hex of its checkpoint>.<n>.json; where it is now."""
    checkpoint = "unknown" if checkpoint_sha256 is None else checkpoint_sha256[:6]
    folder, n = path.parent / EARLIER, 1
    folder.mkdir(exist_ok=True)
    while (place := folder / f"{path.stem}.{checkpoint}.{n}.json").exists():
        n += 1
    path.replace(place)
    return place
