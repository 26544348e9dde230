"""Whether a folder holds a damaged checkpoint, as far as headers, small files and scales show."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say
from assay.errors import AssayError
from assay.foreign_text import shown

if TYPE_CHECKING:
    from assay.records.inspection import Finding

MOST_FINDINGS = 3
"""In the sentence; `assay inspect` has all of them."""


def damage_in(folder: Path) -> str | None:
    """What is damaged, in a clause; None: nothing is, or the folder cannot be inspected, and then it is not served.

    Costs seconds: all scales of W4A16 in groups of 128 are a 32nd of the checkpoint, which is hashed afterwards in any case.
    """
    from assay_quantize.inspection.files import FolderFiles
    from assay_quantize.inspection.inspect import inspect

    try:
        return _damage(inspect(FolderFiles(folder)).findings)
    except AssayError:
        return None


def damage_in_repository(hub_id: str) -> str | None:
    """The same of a repository of the hub, as far as headers and small files show."""
    from assay_quantize.inspection.files import HubFiles
    from assay_quantize.inspection.inspect import inspect

    try:
        return _damage(inspect(HubFiles(hub_id), scales=False).findings)
    except AssayError:
        return None


def _damage(findings: Iterable[Finding]) -> str | None:
    damages = [finding for finding in findings if finding.severity in ("fails", "wrong")]
    if not damages:
        return None
    named = "; ".join(map(_in_words, damages[:MOST_FINDINGS]))
    more = f"; {len(damages) - MOST_FINDINGS} more" if len(damages) > MOST_FINDINGS else ""
    return named + more


def say_damage(folder: Path, say: Say) -> None:
    """A note of what is damaged in a checkpoint that is about to be served: faults are looked for elsewhere then."""
    if (damage := damage_in(folder)) is not None:
        say(f"note: {damage_note(folder, damage)}")


def damage_note(location: Path | str, damage: str) -> str:
    """The clause in a sentence that names the command which tells all."""
    return f"`assay inspect {shlex.quote(str(location))}` finds it damaged: {damage}"


def _in_words(finding: Finding) -> str:
    places = "" if finding.num_places == 1 else f" in {finding.num_places:,} places"
    first = finding.places[0]
    return f"{finding.defect}{places} ({shown(first.where)}: {shown(first.what)})"
