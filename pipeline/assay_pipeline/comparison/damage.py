"""Whether a folder holds a damaged checkpoint, as far as headers, small files and scales show; or another model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say
from assay.errors import AssayError
from assay.foreign_text import shown
from assay.records.base import sha256_of_file
from assay.safe_files import read_json_object

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


def damage_in_repository(hub_id: str, revision: str) -> str | None:
    """The same of a repository of the hub at a commit, as far as headers and small files show."""
    from assay_quantize.inspection.files import HubFiles
    from assay_quantize.inspection.inspect import inspect

    try:
        return _damage(inspect(HubFiles(hub_id, revision), scales=False).findings)
    except AssayError:
        return None


def _damage(findings: Iterable[Finding]) -> str | None:
    damages = [finding for finding in findings if finding.severity in ("fails", "wrong")]
    if not damages:
        return None
    named = "; ".join(map(_in_words, damages[:MOST_FINDINGS]))
    more = f"; {len(damages) - MOST_FINDINGS} more" if len(damages) > MOST_FINDINGS else ""
    return named + more


def unlike_reference(reference: Path, folder: Path) -> tuple[str, ...]:
    """How the config.json and tokenizer of a candidate say that it computes another model, or reads other tokens, than the
    reference: a divergence over the reference's tokens may show neither.

    reference: its folder, or its pack. QuantizeError: transformers knows no such model; CheckpointError: a file is no JSON.
    """
    from assay_quantize.calibration.quiet import loading
    from assay_quantize.screen.same_model import config_differences

    configs = [read_json_object(place, "config.json") for place in (reference, folder)]
    with loading(f"{folder}: transformers cannot read its config.json"):
        differences = tuple(map(str, config_differences(*configs)))
    tokenizer = _tokenizer_unlike(reference, folder)
    return differences if tokenizer is None else (*differences, tokenizer)


def _tokenizer_unlike(reference: Path, folder: Path) -> str | None:
    from assay_quantize.inspection.file_checks import TOKENIZERS
    from assay_quantize.inspection.source_checks import tokenizer_difference

    name = next((name for name in TOKENIZERS if all((place / name).is_file() for place in (reference, folder))), None)
    if name == "tokenizer.json":
        part = tokenizer_difference(*(read_json_object(place, name) for place in (reference, folder)))
        return None if part is None else f"{shown(part, 60)} of its {name} is not the reference's"
    if name is None or sha256_of_file(reference / name) == sha256_of_file(folder / name):
        return None
    return f"its {name} is not the reference's"


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
