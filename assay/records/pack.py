"""`pack.json`: what candidates are screened against without their reference.

That is its states behind the last layer over stated texts, its head, and hashes of all of it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from assay.records.base import Part, Record, sha256_of
from assay.records.screening import Numerics, Panel

PACK_NAME = "pack.json"


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
        if self.seal != seal_of(self.model_dump(mode="json")):
            raise ValueError("its seal does not fit what it says: it was changed")
        return self


def seal_of(fields: dict[str, object]) -> str:
    """SHA-256 of a record's fields but the seal itself."""
    return sha256_of({name: value for name, value in fields.items() if name != "seal"})
