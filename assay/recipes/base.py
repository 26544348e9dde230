"""What every recipe is made of: strict, frozen sections, and the file they stand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from assay.installation import data_file
from assay.records.base import sha256_of
from assay.secret_text import secrets_in

WHOLE_ONLY = "whole recipe only"
MOST_AT_ONCE = 4096
"""Requests in flight, tokens drafted, repeats."""


class Section(BaseModel):
    """Base of every recipe and part of one: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def _contradictions(self) -> Iterator[str]:
        """Contradictions within this section, one sentence each; sections that have such rules override this."""
        yield from ()

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        """One error with all contradictions, one per line: pydantic stops at the first validator that raises.

        With the context `WHOLE_ONLY` those inside sections are passed over, so that those of the whole recipe are reached.
        """
        if info.context == WHOLE_ONLY and not isinstance(self, Recipe):
            return self
        if contradictions := list(self._contradictions()):
            raise ValueError("\n".join(contradictions))
        return self


class Recipe(Section):
    """A whole file. `schema: 1` is its first line."""

    loader_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that the loader handles before validation; they are not fields."""
    explained: ClassVar[Mapping[str, str]] = {}
    """Key -> what to say where it is unknown or has structure that it cannot have: what people try and is not possible."""
    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str = ""

    def found_from(self, folder: Path) -> Self:
        """With the YAML files that it names, which are relative to its own, relative to the working directory.

        folder: of the recipe's file. Recipes that name others override this.
        """
        return self

    @property
    def sha256(self) -> str:
        """Identity of the recipe's meaning: comments and order do not count."""
        return sha256_of(self.model_dump(mode="json"))


def beside(folder: Path, named: str) -> str:
    """The recipe that a file in `folder` calls `named`: a name stays, the path of a YAML file is relative to `folder`."""
    return str(folder / named) if named.endswith((".yaml", ".yml")) else named


def recipes_dir() -> Path:
    """The folder `recipes/`: beside the package in a clone, inside it in a wheel."""
    return data_file("recipes")


def recipe_names(kind: str) -> list[str]:
    """Names of the recipes of one kind that ship with assay, sorted."""
    return sorted(path.stem for path in (recipes_dir() / kind).glob("*.yaml"))


def refused_secrets(told: dict[str, Any], where: str) -> Iterator[str]:
    """One sentence for every key, token or password in a recipe's values. The secret itself is in none."""
    for place in secrets_in(told, where):
        yield (
            f"{place}: is a key, a token or a password, or an address with one, by its name or looks; command lines are for "
            "every user to read, and logs and records keep them. Remove it: a server that assay starts gets a key of its own "
            "and downloads nothing; the key of a server of yours is named by `api_key_env`"
        )
