"""Names of the text that a calibration is made with, as recipes have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

MAX_LENGTH = 1 << 20
"""Of a sequence, in tokens: no model reads a longer one."""
_ELSEWHERE = re.compile(r"own(@.*)?|hub:.*")
"""Sources that are no files."""


def _listed(value: Any) -> Any:
    """One source needs no list."""
    return [value] if isinstance(value, str) else value


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(text.strip() for text in value):
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
        names = [source if _ELSEWHERE.fullmatch(source) else Path(source).name for source in calibration["text"]]
        made["calibration"] = {**calibration, "text": names}
    return made
