"""`RUN/run.json`: what a run is about, by content; and where in its folder, or beside a checkpoint, the records lie.

Names of folders identify nothing: two fine-tunes are both called checkpoint-1000, and a model is retrained in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from assay.foreign_text import safe_name
from assay.records.base import Part, Record, sha256_of
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.serving import Signature

RUN_RECORD = "run.json"
PLAN_INSIDE, VERIFICATION_INSIDE, CALIBRATION_INSIDE = "assay_plan.json", "assay_verify.json", "assay_calibration.json"
"""In the folder of a checkpoint that lies in no run (`--out`); in a run they are its neighbours plan.json, verify.json
and calibration.json."""
CARD = "README.md"
WRITTEN_ABOUT = frozenset({MANIFEST, PLAN_INSIDE, VERIFICATION_INSIDE, CALIBRATION_INSIDE, CARD})
"""Files in the folder of a checkpoint that are written about it: no loader reads them."""


class SourceData(Part):
    """What checkpoints are made from."""

    location: str
    """Folder or hub id, as `Plan.source`."""
    revision: str | None = None
    """Commit on the hub. None: a folder, or not known."""
    files: dict[str, str] | None = None
    """As `Plan.source_files`. None: not known (a model on the hub that nobody asked)."""

    def is_same(self, other: SourceData) -> bool:
        """By content where both sides know it, else by location."""
        if self.files is not None and other.files is not None:
            return (self.revision, self.files) == (other.revision, other.files)
        return self.location == other.location and None in (self.revision, other.revision)


def source_of(made: Plan | Manifest) -> SourceData:
    """What a plan or a checkpoint is made from."""
    return SourceData(location=made.source, revision=made.source_revision, files=made.source_files)


class ReferenceCheckpoint(Part):
    """The checkpoint that the others are compared with (`evaluate --reference`)."""

    location: str
    checkpoint_sha256: str
    files: dict[str, str] | None = None
    """Its files -> their stamps when they were hashed: unchanged, they need not be hashed again. None: not recorded."""
    signature: Signature | None = None
    """Of a checkpoint of which only a server is known."""


class SuiteIdentity(Part):
    """`SuiteRecipe`: its name, and the hash of everything in it."""

    name: str
    sha256: str


class RunRecord(Record):
    """What a run is about. Written when the folder is first used; what was not known then is filled in, nothing is changed.

    Either `source` (runs of a TARGET) or `reference` (runs of `--reference DIR --candidate DIR`). Neither: an older run whose
    records do not say.
    """

    kind: Literal["run"] = "run"
    model: str
    source: SourceData | None = None
    reference: ReferenceCheckpoint | None = None
    suite: SuiteIdentity | None = None
    """None until something is evaluated."""
    choices: tuple[str, ...] = ()
    """Precisions that were chosen because of the checkpoint's shapes, in sentences. Empty: none was."""
    foreign_reference: str | None = None
    """How the reference is quantized, where it is a quantized copy of its model that was named as the reference: what it lost
    itself is in no verdict. None: it is not, or only its server is known."""

    screened_out: dict[str, str] = Field(default_factory=dict)
    """Label -> why a screening excluded it from what is measured."""

    def is_about(self, other: RunRecord) -> bool:
        """Whether both are about one model and the same data, whatever the suite."""
        if self.model != other.model:
            return False
        if self.source is not None and other.source is not None:
            return self.source.is_same(other.source)
        if self.reference is not None and other.reference is not None:
            return self.reference.checkpoint_sha256 == other.reference.checkpoint_sha256
        return False

    def takes(self, other: RunRecord) -> bool:
        """Whether what `other` describes belongs into this run."""
        return self.is_about(other) and (self.suite is None or other.suite is None or self.suite.sha256 == other.suite.sha256)

    def filled_in(self, other: RunRecord) -> Self:
        """This record, with what `other`, which it takes, knows and it does not."""
        more: dict[str, object] = {}
        if self.suite is None and other.suite is not None:
            more["suite"] = other.suite
        if self.source is not None and self.source.files is None and other.source is not None:
            more["source"] = other.source
        if self.reference is not None and other.reference is not None and other.reference.files is not None:
            more["reference"] = self.reference.model_copy(update={"files": other.reference.files})
        if self.foreign_reference is None and other.foreign_reference is not None:
            more["foreign_reference"] = other.foreign_reference
        if other.screened_out:
            more["screened_out"] = self.screened_out | other.screened_out
        if new := tuple(choice for choice in other.choices if choice not in self.choices):
            more["choices"] = self.choices + new
        return self.model_copy(update=more)

    @property
    def data_sha256(self) -> str:
        """Hash of the data alone: of the reference, or of the source's files (of its location if they are not known)."""
        if self.reference is not None:
            return self.reference.checkpoint_sha256
        assert self.source is not None, "an older run, which nobody starts"
        return sha256_of([self.source.revision, self.source.files or self.source.location])


# ------------------------------------------------------------------------------------------------ where records lie
def folder_name(folder: Path) -> str:
    """What a checkpoint folder is called: its name, its parent's if it is called `checkpoint`, the model's in a hub's cache."""
    whole = folder.resolve()
    if whole.parent.name == "snapshots" and whole.parent.parent.name.startswith("models--"):
        return safe_name(whole.parent.parent.name.split("--")[-1])
    return safe_name(whole.parent.name if whole.name == "checkpoint" else whole.name)


def plan_of(checkpoint: Path) -> Path:
    """Where the plan of a checkpoint lies, if there is one."""
    return _beside_or_inside(checkpoint, PLAN_INSIDE, "plan.json")


def verification_of(checkpoint: Path) -> Path:
    """Where the verification of a checkpoint lies, if there is one."""
    return _beside_or_inside(checkpoint, VERIFICATION_INSIDE, "verify.json")


def calibration_of(checkpoint: Path) -> Path:
    """Where the record of the calibration that a checkpoint was made with lies, if there is one."""
    return _beside_or_inside(checkpoint, CALIBRATION_INSIDE, "calibration.json")


def _beside_or_inside(checkpoint: Path, inside: str, beside: str) -> Path:
    is_inside = (checkpoint / PLAN_INSIDE).is_file() or checkpoint.name != "checkpoint"
    return checkpoint / inside if is_inside else checkpoint.parent / beside


def judged_bytes(run_dir: Path) -> dict[str, str]:
    """Label -> `checkpoint_sha256` that the verdicts are about; of what was not measured, of the checkpoint that is there."""
    made = {path.parent.parent.name: load_manifest(path.parent) for path in sorted(run_dir.glob(f"*/checkpoint/{MANIFEST}"))}
    measured = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    made_hashes = {label: manifest.checkpoint_sha256 for label, manifest in made.items() if manifest is not None}
    return made_hashes | {measurement.label: measurement.checkpoint_sha256 for measurement in measured}
