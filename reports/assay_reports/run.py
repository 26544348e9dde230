"""A run folder's records, loaded and put in the order in which a report names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from assay.errors import AssayError
from assay.records.base import Record, sha256_of_file
from assay.records.calibration import Calibration
from assay.records.choice.record import CHOICE_RECORD, Choice
from assay.records.comparable import check_measurements
from assay.records.deployment.record import Deployment, load_deployments
from assay.records.diagnosis.sensitivity import SENSITIVITY_NAME, Sensitivity
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.preflight.gpu_check import CHECK_NAME, GpuCheck
from assay.records.probe import ProbeReport, load_probes
from assay.records.reached import REACHED_NAME, Reached, ReachedAndLost
from assay.records.run import RUN_RECORD, RunRecord, calibration_of, plan_of, verification_of
from assay.records.screening import SCREENED, SCREENING_NAME, Screening
from assay.records.speed import SPEED_RECORD, SpeedRecord
from assay.records.upgrade import UPGRADE_RECORD, UpgradeCheck
from assay.records.verdict import GateReport, Overall, Verdict
from assay.records.verification import Verification
from assay_reports.choice import choice_words
from assay_reports.schema import ChoiceWords

UNQUANTIZED_LABELS = ("bf16", "fp16", "fp32", "source")
"""Labels under which an unquantized source is measured."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Run:
    """Every record of one run. Dictionaries are keyed by label; whatever is missing is absent or None.

    A checkpoint that was measured here and made elsewhere (in another run, or with `--out`) is there with its own records.
    """

    model: str
    measurements: tuple[Measurement, ...]
    """Reference, its repeat, then the others from large to small."""
    gates: GateReport | None
    plans: dict[str, Plan]
    manifests: dict[str, Manifest]
    verifications: dict[str, Verification]
    calibrations: dict[str, Calibration]
    """Of checkpoints that were made with one."""
    checkpoints: dict[str, Path]
    """Folders of the checkpoints that have a plan."""
    probes: tuple[ProbeReport, ...] = ()
    choices: tuple[str, ...] = ()
    """As `RunRecord.choices`."""
    foreign_reference: str | None = None
    """As `RunRecord.foreign_reference`."""
    screened_out: Mapping[str, str] = field(default_factory=dict)
    """As `RunRecord.screened_out`."""
    gpu_check: GpuCheck | None = None
    """Of `assay diagnose gpu-check --run`."""
    deployments: tuple[Deployment, ...] = ()
    """Of `assay deployment`, about the measurements and verdicts that are here."""
    old_deployments: tuple[Deployment, ...] = ()
    """About earlier ones."""
    speed: SpeedRecord | None = None
    """Of `assay speed`; also what was imported or predicted for the run."""
    old_speeds: tuple[str, ...] = ()
    """Checkpoints of which `speed.json` has rows of other bytes than those that are reported; these rows are left out."""
    choice: ChoiceWords | None = None
    """Of `assay choose`. None: it did not run, or `choice_outdated` says why it is left out."""
    choice_outdated: str | None = None
    screening: Screening | None = None
    """Of `assay screen`, of these checkpoints or others."""
    sensitivity: Sensitivity | None = None
    """Of `assay sensitivity --run`."""
    upgrade: UpgradeCheck | None = None
    """Of `assay upgrade-check`, about the verdicts that are here."""
    reached: tuple[Reached, ...] = ()
    """Of `reached.json`, about the measurements that are here."""
    name: str | None = None
    """Of its folder. None: a checkpoint by itself."""
    places: dict[str, str] = field(default_factory=dict)
    """Label -> where its checkpoint lies, as seen from the folder of runs: `tiny-glm/w4a16/checkpoint`. Absent: elsewhere."""

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

    def measurement_of(self, label: str) -> Measurement | None:
        """Of the very bytes that its manifest names: one of an older checkpoint with this name does not count."""
        sha256 = self.manifests[label].checkpoint_sha256
        return next((m for m in self.measurements if (m.label, m.checkpoint_sha256) == (label, sha256)), None)

    def status(self, label: str) -> Overall:
        """The overall verdict; NOT MEASURED for what nobody judged."""
        return "NOT MEASURED" if self.gates is None else self.gates.overall.get(label, "NOT MEASURED")

    def verdict(self, label: str, gate: str) -> Verdict | None:
        """Of one gate on one candidate, if there is such a gate."""
        verdicts = self.gates.verdicts if self.gates is not None else ()
        return next((v for v in verdicts if (v.candidate, v.gate) == (label, gate)), None)


def load_run(run_dir: Path) -> Run:
    """All records of `run_dir`.

    AssayError: there is neither a plan nor a measurement, a record is not valid, or a measurement does not belong to the
    reference: what the gates refuse stands in no row.
    """
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    folders = {path.parent.name: path.parent / "checkpoint" for path in sorted(run_dir.glob("*/plan.json"))}
    if not measurements and not folders:
        raise AssayError(f"{run_dir}: no plan and no measurement there; `assay quantize` and `assay evaluate` make them")
    if measurements:
        check_measurements(measurements)
    runs = run_dir.absolute().parent
    for measurement in measurements:
        if measurement.label not in folders and (made := _made_elsewhere(measurement, runs)) is not None:
            folders[measurement.label] = made
    about = RunRecord.load_if_there(run_dir / RUN_RECORD)
    run = _run_of(folders, measurements, _gates_of(run_dir / "gates.json", measurements), tuple(load_probes(run_dir)))
    deployments, old_deployments = load_deployments(run_dir, run.measurements, run.gates)
    places = {label: folder.absolute() for label, folder in folders.items()}
    run = replace(
        run,
        choices=about.choices if about is not None else (),
        foreign_reference=None if about is None else about.foreign_reference,
        screened_out={} if about is None else about.screened_out,
        gpu_check=GpuCheck.load_if_there(run_dir / CHECK_NAME),
        deployments=deployments,
        old_deployments=old_deployments,
        screening=Screening.load_if_there(run_dir / SCREENED / SCREENING_NAME),
        sensitivity=Sensitivity.load_if_there(run_dir / SENSITIVITY_NAME),
        upgrade=_upgrade_in(run_dir, run.gates),
        reached=_reached_in(run_dir),
        name=run_dir.absolute().name,
        places={label: str(place.relative_to(runs)) for label, place in places.items() if place.is_relative_to(runs)},
    )
    # hashes of the bytes that are reported: those that were measured, else those that were made
    hashes = {label: manifest.checkpoint_sha256 for label, manifest in run.manifests.items()}
    hashes |= {m.label: m.checkpoint_sha256 for m in run.measurements}
    if (record := SpeedRecord.load_if_there(run_dir / SPEED_RECORD)) is not None:
        speed, old_speeds = record.of_bytes(hashes)  # rows that name no bytes were imported or predicted, and stay
        run = replace(run, speed=speed, old_speeds=old_speeds)
    if (choice := Choice.load_if_there(run_dir / CHOICE_RECORD)) is not None:
        reason = choice.why_outdated(run.model, hashes, None if run.gates is None else run.gates.overall)
        verdicts = run.gates.verdicts if run.gates is not None else ()
        undecided = {v.candidate for v in verdicts if v.status == "UNDERPOWERED" and v.has_say}
        run = replace(run, choice_outdated=reason, choice=None if reason else choice_words(choice, undecided))
    return run


def _upgrade_in(run_dir: Path, gates: GateReport | None) -> UpgradeCheck | None:
    """None: there is none, or another verdict was reached since."""
    check = UpgradeCheck.load_if_there(run_dir / UPGRADE_RECORD)
    if check is None or gates is None or gates.overall.get(check.after.label) != check.status:
        return None
    return check


def load_checkpoint(checkpoint: Path, label: str) -> Run:
    """A checkpoint by itself, as if nothing had been measured."""
    return _run_of({label: checkpoint}, [], None, ())


def _run_of(
    folders: dict[str, Path], measured: list[Measurement], gates: GateReport | None, probes: tuple[ProbeReport, ...]
) -> Run:
    plans = _load(Plan, {label: plan_of(folder) for label, folder in folders.items()})
    manifests = {label: manifest for label, folder in folders.items() if (manifest := load_manifest(folder)) is not None}
    calibrations = _load(Calibration, {label: calibration_of(folder) for label, folder in folders.items()})
    return Run(
        model=measured[0].model if measured else next(iter(plans.values())).model,
        measurements=tuple(sorted(measured, key=_order)),
        gates=gates,
        plans=plans,
        manifests=manifests,
        verifications=_load(Verification, {label: verification_of(folder) for label, folder in folders.items()}),
        # of the file that the checkpoint was made with, not of one that was calibrated before or elsewhere
        calibrations={
            label: calibration
            for label, calibration in calibrations.items()
            if (of := manifests.get(label) or plans.get(label)) is not None and of.importance_sha256 == calibration.file_sha256
        },
        checkpoints=folders,
        probes=probes,
    )


def _gates_of(path: Path, measured: list[Measurement]) -> GateReport | None:
    """The verdicts, unless they are about measurements that are no longer there: then nothing is judged yet."""
    gates, labels = GateReport.load_if_there(path), {m.label for m in measured}
    return gates if gates is not None and {gates.reference, *gates.overall} <= labels else None


def _reached_in(run_dir: Path) -> tuple[Reached, ...]:
    """What was found in replies to measurements that are still the same."""
    record = ReachedAndLost.load_if_there(run_dir / REACHED_NAME)
    if record is None:
        return ()
    files = {label: run_dir / "measurements" / f"{label}.json" for label in record.measurements}
    same = {label for label, file in files.items() if file.is_file() and sha256_of_file(file) == record.measurements[label]}
    return tuple(reached for reached in record.tasks if reached.label in same)


def _made_elsewhere(measurement: Measurement, runs: Path) -> Path | None:
    """The measured checkpoint, if it lies where it was measured or in another of `runs`, unchanged, with its plan. None of a
    variant, whose checkpoint is the reference's."""
    if measurement.is_noise_floor or measurement.is_variant:  # a card of the weights is about how they are served usually
        return None
    measured_at = Path(measurement.checkpoint)
    for folder in (measured_at, runs.joinpath(*measured_at.parts[-3:])):  # the second: reported from another directory
        if not (folder / MANIFEST).is_file() or not plan_of(folder).is_file():
            continue
        try:
            manifest, plan = Manifest.load(folder / MANIFEST), Plan.load(plan_of(folder))
        except AssayError:  # of another version
            continue
        whole = (manifest.checkpoint_sha256, manifest.recipe_sha256, manifest.source_sha256)
        if whole == (measurement.checkpoint_sha256, plan.recipe_sha256, plan.source_sha256):
            return folder
    return None


def _load(kind: type[R], paths: dict[str, Path]) -> dict[str, R]:
    return {name: record for name, path in paths.items() if (record := kind.load_if_there(path)) is not None}


def _order(m: Measurement) -> tuple[bool, bool, int, str]:
    return not m.is_reference and not m.is_noise_floor, m.is_noise_floor, -(m.checkpoint_bytes or 0), m.label
