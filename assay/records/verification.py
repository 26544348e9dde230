"""The result of `assay verify`: what was checked, and everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.file_data import data_of_files
from assay.records.base import Part, Record
from assay.records.manifest import load_manifest
from assay.records.run import WRITTEN_ABOUT


class Damage(Part):
    """One thing that is wrong in a checkpoint."""

    check: str
    where: str
    """Tensor, file or config key."""
    what: str


class Verification(Record):
    """Result of reopening a checkpoint and trusting nothing."""

    kind: Literal["verification"] = "verification"
    checkpoint: str
    checkpoint_sha256: str
    source: str | None
    passed: bool
    damages: tuple[Damage, ...]
    checks: dict[str, int]
    """Check name -> how many things it looked at."""
    files: dict[str, str] = Field(default_factory=dict)
    """`stamps_of_files`, before the files were read: as long as all are as they were, and none has come in, it still holds."""
    not_checked: tuple[str, ...]
    """What could not be checked and why (no source given, ...)."""
    worst_relative_error: dict[str, float]
    """Role -> largest relative weight error seen; `role (scheme)` where the layers of a role have several schemes."""
    mean_relative_error: dict[str, float]
    bytes_by_role: dict[str, int]
    seconds: float


def is_as_verified(folder: Path, record: Verification) -> bool:
    """Whether no file of a checkpoint was touched since `record` was made, and none came in."""
    manifest = load_manifest(folder)
    if manifest is None or manifest.checkpoint_sha256 != record.checkpoint_sha256:
        return False
    return stamps_of_files(folder) == record.files


def stamps_of_files(checkpoint: Path) -> dict[str, str]:
    """Every file of the folder -> its stamp (`Plan.source_files`), without what is written about it (`WRITTEN_ABOUT`).

    Hidden files are let be, as a verification does: a card that was half written, what clients of the hub leave.
    """
    names = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*"))
    return data_of_files(checkpoint, sorted(name for name in names if name not in WRITTEN_ABOUT and not _is_hidden(name)))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
