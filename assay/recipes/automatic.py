"""`auto-4.5bpw` among a model's precisions: a mix of schemes that the run chooses, under this budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from assay.errors import AssayError, RecipeError
from assay.foreign_text import shown
from assay.recipes.base import Section, beside
from assay.recipes.precision import SchemeName

PREFIX = "auto-"
_BUDGET = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(bpw|[KMGT]i?B|B)", re.IGNORECASE)
_POWERS = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Budget:
    """As it was asked for: bytes of the whole checkpoint, or bits for each weight that the choice is about."""

    text: str
    num_bytes: int | None = None
    bits: float | None = None


def budget_of(text: str, *, where: str | None = None) -> Budget:
    """`405GB` (10^9), `377GiB` (2^30), `6270000B`, `4.5bpw`. AssayError: it is neither. where: who says so."""
    said = where or f"--budget {shown(text)}"
    found = _BUDGET.fullmatch(text.strip())
    amount = 0.0 if found is None else float(found[1])
    if found is None or amount <= 0:
        raise AssayError(f"{said}: is no size; write 405GB or 377GiB for the whole checkpoint, or 4.5bpw")
    if found[2].lower() == "bpw":
        if not 1 <= amount <= 32:
            raise AssayError(f"{said}: bits per weight lie between 4 and 16; write 4.5bpw, or a size such as 405GB")
        return Budget(text.strip(), bits=amount)
    unit = found[2].upper()
    return Budget(text.strip(), num_bytes=int(amount * (1024 if "I" in unit else 1000) ** _POWERS[unit[0]]))


@dataclass(frozen=True)
class Automatic:
    """A precision that is not there yet. name: also of the recipe that is chosen, and of its checkpoint."""

    name: str
    budget: Budget


def is_automatic(name: str) -> bool:
    """Whether it is no recipe's name or file, but that of a mix to be chosen."""
    return name.startswith(PREFIX) and not name.endswith((".yaml", ".yml"))


def automatic_of(name: str) -> Automatic:
    """RecipeError: what stands behind `auto-` is no budget."""
    try:
        return Automatic(name, budget_of(name.removeprefix(PREFIX), where=f"precision {shown(name)}"))
    except AssayError as problem:
        raise RecipeError(f"{problem}: {PREFIX}405GB, {PREFIX}4.5bpw") from None


class AutomaticMix(Section):
    """`automatic:` of a model's recipe: how `auto-BUDGET` is chosen (`assay sensitivity`, then `assay recipe`).

    proxy: kl: the divergence itself, part by part; fisher: an estimate from one backward pass. schemes: that are measured and
    chosen from. base: the precision that says which roles are chosen for and what is kept; None: w4a16. hardware: profile of
    the GPUs it must run on; None: a choice by bytes alone. tokens, length: of the model's own replies to
    generated questions, on which damages are measured: not those of a suite. slack: as of `assay recipe`.
    """

    proxy: Literal["kl", "fisher"] = "kl"
    schemes: tuple[SchemeName, ...] = Field(default=("w4a16", "w4a16_g32", "nvfp4a16", "fp8_block"), min_length=1)
    base: str | None = None
    hardware: str | None = None
    tokens: int = Field(default=16_384, ge=64)
    length: int = Field(default=256, ge=8)
    seed: int = Field(default=0, ge=0)
    slack: float = Field(default=0.02, ge=0, le=0.5)

    def _contradictions(self) -> Iterator[str]:
        if "fp8_static" in self.schemes:
            yield "schemes: fp8_static needs a calibration file and has the weights of fp8_channel; name that"

    def found_from(self, folder: Path) -> Self:
        """With the files that it names relative to the working directory. folder: of the recipe."""
        return self.model_copy(
            update={
                "base": None if self.base is None else beside(folder, self.base),
                "hardware": None if self.hardware is None else beside(folder, self.hardware),
            }
        )
