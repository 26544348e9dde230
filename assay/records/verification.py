"""The result of `assay verify`: what was checked, and everything that is wrong."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.records.base import Part, Record


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
    """Every file of the manifest -> its stamp (`Plan.source_files`) before it was read: unchanged, the result still holds."""
    not_checked: tuple[str, ...]
    """What could not be checked and why (no source given, ...)."""
    worst_relative_error: dict[str, float]
    """Role -> largest relative weight error seen; `role (scheme)` where the layers of a role have several schemes."""
    mean_relative_error: dict[str, float]
    bytes_by_role: dict[str, int]
    seconds: float
