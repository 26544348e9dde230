"""What an evaluation is told of each checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import MeasureError
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


def sorted_out(candidates: Sequence[Candidate]) -> tuple[Candidate, list[Candidate]]:
    """(the reference, all others). MeasureError: not one reference, or a label that is no name of a file or is used twice."""
    references = [one for one in candidates if one.is_reference]
    if len(references) != 1:
        raise MeasureError(f"a run needs one reference, {len(references)} are marked as such")
    labels = [one.label for one in candidates] + [f"{references[0].label}-repeat"]
    twice = sorted({label for label in labels if labels.count(label) > 1 or "/" in label})
    if twice:
        raise MeasureError(f"label {twice[0]!r} is used twice or holds a slash; labels are names of files")
    return references[0], [one for one in candidates if not one.is_reference]
