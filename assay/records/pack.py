"""`pack.json`: what candidates are screened against without their reference.

That is its states behind the last layer over stated texts, its head, and hashes of all of it. `read_sealed` compares the files
of a folder with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from assay.errors import AssayError, CheckpointError
from assay.quantities import and_more
from assay.records.base import Part, Record, sha256_of, sha256_of_file
from assay.records.screening import Numerics, Panel

PACK_NAME = "pack.json"
NOT_SEALED = ("README.md", ".gitattributes")
"""What a hub has beside the files of a pack: its card, and what git is told. `.cache` is where a download notes what it has."""


class Floor(Part):
    """KL of the reference from itself, in nats, computed another way, over the first few texts.

    batch shape: two copies of a text at once in place of one, which changes the order of additions as another device or
    version does. arithmetic: in the other one of fp32 and bf16.
    """

    cause: Literal["batch shape", "arithmetic"]
    num_texts: int
    kl_mean: float
    kl_largest: float
    """Mean of the text that differs most: what is put into intervals."""


class Pack(Record):
    """A reference over texts. files: every other file of the folder, with its SHA-256; seal: `seal_of` of the record."""

    kind: Literal["pack"] = "pack"
    reference: str
    """Name of its folder or repository; no path."""
    reference_sha256: str
    reference_stored_as: str
    foreign_reference: str | None = None
    """As `Screening.foreign_reference`."""
    numerics: Numerics
    panel: Panel
    num_layers: int
    holds_head: bool
    """False: candidates whose head has other values than `head_sha256` are refused."""
    head_sha256: str
    no_drafts: str | None
    """Why no drafts of an MTP block are held."""
    floors: tuple[Floor, ...]
    files: dict[str, str]
    seal: str

    @model_validator(mode="after")
    def _is_sealed(self) -> Self:
        if self.seal != seal_of(self.model_dump(mode="json", exclude_unset=True)):
            raise ValueError("its seal does not fit what it says: it was changed")
        return self


def seal_of(fields: dict[str, object]) -> str:
    """SHA-256 of a record's fields but the seal itself."""
    return sha256_of({name: value for name, value in fields.items() if name != "seal"})


def read_sealed(folder: Path) -> Pack:
    """The record of a folder whose files are those that it names, every byte of them read.

    AssayError: it is no pack, or not the one that was sealed; the first file that is other is named.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give what `assay pack` wrote")
    record = Pack.load(folder / PACK_NAME)
    files = sealed_files(folder)
    if files != record.files:
        lacking, surplus = sorted(record.files.keys() - files.keys()), sorted(files.keys() - record.files.keys())
        changed = sorted(name for name in files.keys() & record.files.keys() if files[name] != record.files[name])
        parts = ((lacking, "lacks"), (surplus, "has besides"), (changed, "was changed in"))
        problem = "; ".join(f"{word} {and_more(names)}" for names, word in parts if names)
        raise AssayError(f"{folder}: is not the pack that was sealed: it {problem}; get or make it again")
    return record


def sealed_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that belongs to a pack but the record, by its path in the folder.

    AssayError: something is no plain file.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in NOT_SEALED or name.split("/")[0] == ".cache":
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise AssayError(f"{path}: is no plain file; a pack has no others")
        if path.is_file() and name != PACK_NAME:
            hashes[name] = sha256_of_file(path)
    return hashes
