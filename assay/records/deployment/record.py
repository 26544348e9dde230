"""`RUN/deployment/PROFILE/LABEL.json`: a candidate on a deployment profile, compared with itself where it was judged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from assay.records.base import Record
from assay.records.measurement import Acceptance, Divergence, Measurement
from assay.records.serving import Fingerprint
from assay.records.verdict import GateReport, Overall, Status, Verdict

FOLDER = "deployment"
"""In a run's folder."""


class Deployment(Record):
    """One candidate on one deployment profile. No task was scored there: what is compared is the candidate with itself."""

    schema_version: Literal[2] = 2  # type: ignore[assignment]
    kind: Literal["deployment"] = "deployment"
    model: str
    label: str
    profile: str
    """Where it is deployed."""
    checkpoint: str
    checkpoint_sha256: str
    """The same as that of the measurement."""
    suite_sha256: str
    verdict: Overall
    """What the gates said of the candidate where it was judged."""
    gate_recipe_sha256: str | None
    """Limits that this verdict was given by, and from which those of `checks` follow."""
    judged_on: Fingerprint
    deployed_on: Fingerprint
    served_differently: tuple[str, ...]
    """Every field in which the two fingerprints differ, with both values."""
    divergence: Divergence | None
    """Of the deployed candidate from itself where it was judged, on texts that it wrote there. None: see `not_measured`."""
    noise_floor: Divergence | None
    """The same texts scored twice by one server where it was judged."""
    acceptance_judged: Acceptance | None
    """While it wrote these texts."""
    acceptance: Acceptance | None
    """While the deployed candidate answered the same questions."""
    alarms_judged: tuple[str, ...] | None
    """Probes that alarmed where it was judged. None: it was not probed there."""
    alarms: tuple[str, ...] | None
    not_measured: dict[str, str]
    """What could not be had -> why."""
    checks: tuple[Verdict, ...]
    outcome: Status
    """The worst of the checks that have a say. PASS: the verdict travels. NOT MEASURED, UNDERPOWERED: nobody knows."""
    sentence: str
    started: str
    seconds: float

    def is_about(self, measured: Measurement, gates: GateReport | None) -> bool:
        """Whether this is of a measurement and of a verdict that are still those of the run."""
        return (
            (self.label, self.checkpoint_sha256, self.suite_sha256)
            == (measured.label, measured.checkpoint_sha256, measured.suite_sha256)
            and self.judged_on.comparable_sha256 == measured.fingerprint.comparable_sha256
            and gates is not None
            and self.verdict == gates.overall.get(self.label)
            and self.gate_recipe_sha256 == gates.gate_recipe_sha256
        )


def deployment_place(run_dir: Path, profile: str, label: str) -> Path:
    """Where a record belongs. Its probes are in `probes/` beside it."""
    return run_dir / FOLDER / profile / f"{label}.json"


def load_deployments(
    run_dir: Path, measured: Iterable[Measurement], gates: GateReport | None
) -> tuple[tuple[Deployment, ...], tuple[Deployment, ...]]:
    """(those that are about the run as it is now, those that are not any more); AssayError: a file is no such record."""
    by_label = {measurement.label: measurement for measurement in measured}
    deployments = [Deployment.load(path) for path in sorted((run_dir / FOLDER).glob("*/*.json"))]
    holds = [
        deployment.label in by_label and deployment.is_about(by_label[deployment.label], gates) for deployment in deployments
    ]
    return (
        tuple(deployment for deployment, still in zip(deployments, holds, strict=True) if still),
        tuple(deployment for deployment, still in zip(deployments, holds, strict=True) if not still),
    )
