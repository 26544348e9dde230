"""What every recipe is made of: strict, frozen sections, and the file they stand in."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from assay.records import sha256_of


class Section(BaseModel):
    """Base of every recipe and part of one: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipe(Section):
    """A whole file. `schema: 1` is its first line."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str = ""

    @property
    def sha256(self) -> str:
        """Identity of the recipe's meaning: comments and order do not count."""
        return sha256_of(self.model_dump(mode="json"))
