"""A run folder's records, loaded and put in the order in which a report names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from assay.errors import AssayError
from assay.measurement_records import Measurement
from assay.probe_records import ProbeReport, load_probes
from assay.records import Manifest, Plan, Record, Verification, load_manifest
from assay.verdict_records import GateReport, Status, Verdict

UNQUANTIZED_LABELS = ("bf16", "fp16", "fp32", "source")
"""Labels under which an unquantized source is measured."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Run:
    """Every record of one run. Dictionaries are keyed by precision name; whatever is missing is absent or None."""

    model: str
    measurements: tuple[Measurement, ...]
    """Reference, its repeat, then the others from large to small."""
    gates: GateReport | None
    plans: dict[str, Plan]
    manifests: dict[str, Manifest]
    verifications: dict[str, Verification]
    probes: tuple[ProbeReport, ...] = ()

    @property
    def reference(self) -> Measurement | None:
        return next((m for m in self.measurements if m.is_reference and not m.is_noise_floor), None)

    @property
    def noise_floor(self) -> Measurement | None:
        return next((m for m in self.measurements if m.is_noise_floor), None)

    @property
    def candidates(self) -> tuple[Measurement, ...]:
        """What is compared with the reference, its own repeat left out."""
        return tuple(m for m in self.measurements if not m.is_reference and not m.is_noise_floor)

    def status(self, label: str) -> Status:
        """The overall verdict; NOT MEASURED for what nobody judged."""
        return "NOT MEASURED" if self.gates is None else self.gates.overall.get(label, "NOT MEASURED")

    def verdict(self, label: str, gate: str) -> Verdict | None:
        """Of one gate on one candidate, if there is such a gate."""
        found = self.gates.verdicts if self.gates is not None else ()
        return next((v for v in found if (v.candidate, v.gate) == (label, gate)), None)


def load_run(run_dir: Path) -> Run:
    """All records of `run_dir`. AssayError when there is neither a plan nor a measurement, or a record is not valid."""
    found = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    folders = sorted(path.parent for path in run_dir.glob("*/plan.json"))
    if not found and not folders:
        raise AssayError(f"{run_dir}: no plan and no measurement there; `assay quantize` and `assay evaluate` make them")
    plans = _load(Plan, {folder.name: folder / "plan.json" for folder in folders})
    gates = run_dir / "gates.json"
    return Run(
        model=found[0].model if found else next(iter(plans.values())).model,
        measurements=tuple(sorted(found, key=_order)),
        gates=GateReport.load(gates) if gates.is_file() else None,
        plans=plans,
        manifests={f.name: manifest for f in folders if (manifest := load_manifest(f / "checkpoint")) is not None},
        verifications=_load(Verification, {f.name: f / "verify.json" for f in folders}),
        probes=tuple(load_probes(run_dir)),
    )


def _load(kind: type[R], paths: dict[str, Path]) -> dict[str, R]:
    return {name: kind.load(path) for name, path in paths.items() if path.is_file()}


def _order(measurement: Measurement) -> tuple[bool, bool, int, str]:
    is_candidate = not measurement.is_reference and not measurement.is_noise_floor
    return is_candidate, measurement.is_noise_floor, -measurement.checkpoint_bytes, measurement.label
