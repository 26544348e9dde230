"""A mix of sources as its user says it: `--text SOURCE@WEIGHT`, or a YAML file.

    texts:
      - {source: hub:org/code, files: ["data/*.parquet"], weight: 0.4, kind: code}
      - {source: chats.jsonl, weight: 0.3, kind: tools}
      - {source: own, weight: 0.3}

Weights are shares of tokens and need not add up to 1. Paths are relative to the file. What stands for a source: `own`, the
model's own text; `hub:OWNER/NAME`, a data set; else a file. Others, such as a run's folder, are opened by who knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.errors import QuantizeError
from assay.safe_yaml import NotPlainYaml, read_yaml
from assay_quantize.calibration.sources import HUB, FileText, HubText, Source
from assay_quantize.calibration.text import OWN, Weighted

OpenFolder = Callable[[Path], Source]
"""What a folder stands for: the conversations of a run. QuantizeError: nothing."""


LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""What a share of tokens can be made of: of numbers near the ends of a double neither sums nor quotients are numbers."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MixedText(_Strict):
    """One entry of a mix file. files, revision: of a data set. column: of its rows."""

    source: str
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    kind: str | None = None
    files: tuple[str, ...] = ()
    revision: str = "main"
    column: str | None = None


class MixFile(_Strict):
    """The whole file."""

    texts: Annotated[tuple[MixedText, ...], Field(min_length=1)]


def mix_of(named: Sequence[str], open_folder: OpenFolder) -> tuple[Weighted, ...]:
    """The sources that `--text` names. QuantizeError: a weight that is none, a file that is not there."""
    return tuple(one for text in named for one in _of_option(text, open_folder))


def _of_option(text: str, open_folder: OpenFolder) -> Iterable[Weighted]:
    name, weight = text, 1.0
    if "@" in text and not Path(text).exists():
        before, _, after = text.rpartition("@")
        with suppress(ValueError):  # an @ of the name's own
            name, weight = before, float(after)
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise QuantizeError(
                f"--text {text}: a weight is a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, as in {before}@0.3"
            )
    if Path(name).suffix in (".yaml", ".yml"):
        mixed = _of_file(Path(name), open_folder)
        total = sum(one.weight for one in mixed)
        return [replace(one, weight=weight * one.weight / total) for one in mixed]
    return [Weighted(_source(name, Path(), open_folder), weight)]


def _source(name: str, folder: Path, open_folder: OpenFolder, more: MixedText | None = None) -> Source | None:
    if name == OWN:
        return None
    column = None if more is None else more.column
    if name.startswith(HUB):
        dataset, _, patterns = name.removeprefix(HUB).partition(":")
        files = (*(part for part in patterns.split(",") if part), *(() if more is None else more.files))
        return HubText(dataset, files, "main" if more is None else more.revision, column)
    path = folder / name
    return open_folder(path) if path.is_dir() else FileText(path, column)


def _of_file(path: Path, open_folder: OpenFolder) -> list[Weighted]:
    try:
        mix = MixFile.model_validate(read_yaml(path))
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be read: {problem.strerror}") from None
    except NotPlainYaml as problem:
        raise QuantizeError(f"{path}: {problem}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the file"
        raise QuantizeError(
            f"{path}: {where}: {first['msg']}; a mix is `texts:`, a list of {{source, weight, kind, files, revision, column}}"
        ) from None
    return [Weighted(_source(one.source, path.parent, open_folder, one), one.weight, one.kind) for one in mix.texts]
