"""An imported file: its format, told or recognized, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.records.speed import SpeedRow
from assay.safe_files import read_record
from assay.safe_yaml import NotPlainYaml, read_yaml
from assay_evaluate.speed.foreign.guidellm import is_guidellm, read_guidellm
from assay_evaluate.speed.foreign.inferencex import is_inferencex, read_inferencex
from assay_evaluate.speed.foreign.stated import Stated, wrong
from assay_evaluate.speed.foreign.table import is_table, read_table
from assay_evaluate.speed.foreign.vllm_bench import is_vllm_bench, read_vllm_bench
from assay_evaluate.transport.foreign_json import NotJson, read_json

Format = Literal["vllm-bench", "inferencex", "guidellm", "table"]
FORMATS: tuple[Format, ...] = get_args(Format)
READERS: Mapping[Format, tuple[Callable[[Any], bool], Callable[[Any, Stated, str], list[SpeedRow]]]] = {
    "vllm-bench": (is_vllm_bench, read_vllm_bench),
    "inferencex": (is_inferencex, read_inferencex),
    "guidellm": (is_guidellm, read_guidellm),
    "table": (is_table, read_table),
}
"""Format -> (whether a file looks like it, reader)."""
_YAML = {".yaml", ".yml"}
_NAMES = ("checkpoint", "scheme", "source", "hardware", "prompts", "engine")
MOST_NAME = 200
MOST_BYTES = 500_000_000
"""Longest file that is read; guidellm keeps every request."""


def read_imported(path: Path, form: str | None, stated: Stated) -> list[SpeedRow]:
    """The rows of a file. form: of FORMATS; None: as it looks. AssayError: it cannot be read, or lacks what a row needs."""
    where, found = path.name, _parsed(path)
    for name, (fits, read) in READERS.items():
        if form == name or (form is None and fits(found)):
            try:
                return _together(_checked(read(found, stated, where), where))
            except ValidationError as error:  # a number beyond what a row can be
                first = error.errors()[0]
                raise wrong(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    raise wrong(where, f"is of none of the formats {', '.join(FORMATS)}, as far as can be seen")


def _parsed(path: Path) -> Any:
    try:
        if path.suffix in _YAML:
            return read_yaml(path)
        data = read_record(path)
        if len(data) > MOST_BYTES:
            raise AssayError(f"{path}: {len(data):,} bytes, {MOST_BYTES:,} are read; leave the single requests out")
        return read_json(data)
    except OSError as error:
        raise AssayError(f"{path}: cannot be read: {error.strerror}") from None
    except NotPlainYaml as error:
        raise AssayError(f"{path}: {error}") from None
    except NotJson as error:
        raise AssayError(f"{path}: {one_line(str(error))}; give JSON, or YAML in a file that ends in .yaml") from None


def _checked(rows: list[SpeedRow], where: str) -> list[SpeedRow]:
    """The rows. AssayError: a name that would be no name of a line, a column or a mark."""
    for row in rows:
        for field in _NAMES:
            name = getattr(row, field)
            if name is not None and len(name) > MOST_NAME:
                raise wrong(where, f"{field}: {len(name):,} characters; at most {MOST_NAME} are read")
            if name is not None and not name.isprintable():
                raise wrong(where, f"{field}: '{shown(name)}' holds what cannot be printed; write it in plain letters")
    return rows


def _together(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Rows of one point as one, with their repeats."""
    found: dict[tuple[object, ...], SpeedRow] = {}
    for row in rows:
        point = (row.checkpoint, row.source, *row.like)
        before = found.get(point)
        found[point] = row if before is None else before.model_copy(update={"repeats": (*before.repeats, *row.repeats)})
    return list(found.values())
