"""What an evaluation is told of each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from assay.recipes.profile import GivenServer


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of a run. `label` names its measurement: a precision, or `bf16` for the source.

    checkpoint: its folder; None: only a server is known. sha256: its `checkpoint_sha256`, if it is known already. notes: what
    the report must say of it (`Measurement.notes`). endpoint: the server that runs already for it; None: assay starts one.
    """

    label: str
    checkpoint: Path | None
    is_reference: bool = False
    sha256: str | None = None
    notes: tuple[str, ...] = ()
    endpoint: GivenServer | None = None
