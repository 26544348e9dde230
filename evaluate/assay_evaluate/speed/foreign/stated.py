"""What the user states beside an imported file, and what every reader of a format needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import one_line, shown
from assay.records.speed import MOST_COUNT, SpeedRow

_HARDWARE = re.compile(r"(\d+)\s*[xX×]\s*(.+)")
MOST_DIGITS = 20
SPECULATION_UNKNOWN = "whether it drafted, and how many tokens, is not stated"


@dataclass(frozen=True)
class Stated:
    """None: not stated. hardware: `8xH200`, or the name of a CPU. speculation: tokens drafted a step, 0 for off."""

    label: str | None = None
    hardware: str | None = None
    speculation: int | None = None
    prompts: str | None = None


def renamed(rows: Sequence[SpeedRow], names: Mapping[str, str], where: str) -> list[SpeedRow]:
    """names: what the file calls a checkpoint -> its label here; others keep theirs. Each row says what it was called.

    AssayError: the file has no such checkpoint.
    """
    there = list(dict.fromkeys(row.checkpoint for row in rows))
    for name in names:
        if name not in there:
            hint = did_you_mean(name, there)
            raise AssayError(f"--label {shown(name)}=...: {hint}{where} has {', '.join(map(shown, there))}")
    return [
        row.model_copy(
            update={
                "checkpoint": names[row.checkpoint],
                "assumptions": (*row.assumptions, f"the file calls this checkpoint {row.checkpoint}"),
            }
        )
        if row.checkpoint in names
        else row
        for row in rows
    ]


def num_gpus_of(hardware: str) -> int:
    """8 of `8xH200`; 0 of anything else, which is taken for a CPU."""
    found = _HARDWARE.fullmatch(hardware.strip())
    return int(found[1]) if found else 0


def required(value: str | None, what: str, option: str, where: str) -> str:
    """AssayError: neither the file nor the user states it."""
    if value is None or not value.strip():
        raise AssayError(f"{where}: does not state {what}; say {option}")
    return one_line(value)


def text(found: Mapping[str, Any], name: str) -> str | None:
    """Text, or a number as text, under `name`; None: there is none, or something else."""
    value = found.get(name)
    if isinstance(value, str):
        return one_line(value.strip()) or None
    return str(value) if isinstance(value, int | float) and type(value) is not bool else None


def whole(found: Mapping[str, Any], name: str) -> int | None:
    """A count under `name`, which may be written as text; None: there is none, or one that counts nothing real."""
    value = found.get(name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < MOST_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 <= value <= MOST_COUNT else None


def wrong(where: str, what: object) -> AssayError:
    """The file does not have the form that it was read as."""
    return AssayError(
        f"{where}: {shown(what, 200)}; say --as FORMAT if it is of another tool, or write a table (docs/speed.md, `A table`)"
    )
