"""Where recipes say that calibration text comes from: `text:`, in the words of `--text`, files relative to the recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field

from assay.recipes.base import Section, beside

_ELSEWHERE = re.compile(r"own(@.*)?|hub:.*")
"""Sources that are no files."""


def _listed(value: Any) -> Any:
    """One source needs no list."""
    return [value] if isinstance(value, str) else value


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(one.strip() for one in value):
        raise ValueError("names nothing; say files, hub:OWNER/NAME, own or MIX.yaml, each with @WEIGHT if it has one")
    return value


TextNames = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_not_empty)]
"""`SOURCE[@WEIGHT]`, as `--text` takes them."""


def text_beside(folder: Path, named: str) -> str:
    """The source that a recipe in `folder` calls `named`: a file is relative to `folder`."""
    return named if _ELSEWHERE.fullmatch(named) else str(folder / named)


def without_folders(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A precision's content with files of text by their names: the same recipe, from whichever folder it is named."""
    made, calibration = dict(recipe), recipe.get("calibration")
    if isinstance(calibration, Mapping) and calibration.get("text"):
        names = [one if _ELSEWHERE.fullmatch(one) else Path(one).name for one in calibration["text"]]
        made["calibration"] = {**calibration, "text": names}
    return made


class CalibrationData(Section):
    """`calibration:` of a model's recipe: what precisions that need to know what enters weights are made with.

    file: what `assay calibrate` made; None: a run makes it in its folder, for the precisions that cannot do without. text: of
    GPTQ and AWQ as well, where the precision names none. withhold: suites and runs whose items no text may hold; None: as
    `assay calibrate` does by default. tokens: the most, where `tokens_per_expert` says when every expert saw enough.
    """

    file: str | None = None
    text: TextNames = ()
    withhold: tuple[str, ...] | None = None
    tokens: int = Field(default=65_536, ge=1)
    tokens_per_expert: int | None = Field(default=None, ge=1)
    length: int = Field(default=512, ge=8)
    min_tokens: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)

    def _contradictions(self) -> Iterator[str]:
        made = {"tokens", "tokens_per_expert", "length", "min_tokens", "seed"} & self.model_fields_set
        if self.file is not None and made:
            yield f"{', '.join(sorted(made))}: of a file that is made, and `file` names one that is there; say one of them"

    def found_from(self, folder: Path) -> Self:
        """With its files relative to the working directory. folder: of the recipe."""
        more: dict[str, Any] = {"text": tuple(text_beside(folder, one) for one in self.text)}
        if self.file is not None:
            more["file"] = str(folder / self.file)
        if self.withhold is not None:
            more["withhold"] = tuple(beside(folder, one) for one in self.withhold)
        return self.model_copy(update=more)
