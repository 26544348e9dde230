"""What every recipe is made of: strict, frozen sections, and the file they stand in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from assay.records.base import sha256_of


class Section(BaseModel):
    """Base of every recipe and part of one: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def _contradictions(self) -> Iterator[str]:
        """What in this section cannot be meant, a sentence each. Sections that can contradict themselves override this."""
        yield from ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """One error for all contradictions, a line each: pydantic would stop at the first validator that raises."""
        if found := list(self._contradictions()):
            raise ValueError("\n".join(found))
        return self


class Recipe(Section):
    """A whole file. `schema: 1` is its first line."""

    loader_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the file that are gone when it is read: what they say is in the other fields then."""
    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str = ""

    @property
    def sha256(self) -> str:
        """Identity of the recipe's meaning: comments and order do not count."""
        return sha256_of(self.model_dump(mode="json"))
