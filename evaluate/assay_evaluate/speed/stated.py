"""What the user states beside an imported file, and what readers of formats share: fields, errors, requests in flight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.records.speed import MOST_COUNT, SpeedRepeat

_HARDWARE = re.compile(r"(\d+)\s*[xX×]\s*(.+)")
MOST_DIGITS = 20


@dataclass(frozen=True)
class Stated:
    """None: not stated. hardware: `8xH200`, or the name of a CPU. speculation: tokens drafted a step, 0 for off."""

    label: str | None = None
    hardware: str | None = None
    speculation: int | None = None
    prompts: str | None = None


def num_gpus_of(hardware: str) -> int:
    """8 of `8xH200`; 0 of anything else, which is taken for a CPU. AssayError: a number of GPUs that counts nothing real."""
    match = _HARDWARE.fullmatch(hardware.strip())
    if match is None:
        return 0
    if len(match[1]) > MOST_DIGITS or int(match[1]) > MOST_COUNT:
        raise AssayError(f"hardware {shown(hardware, 60)}: is no number of GPUs; write 8xH200, or the name of a CPU")
    return int(match[1])


def one_label(stated: Stated, names: Iterable[str], where: str) -> None:
    """AssayError: one label is stated for a file that has several checkpoints."""
    different = sorted(set(names))
    if stated.label is not None and len(different) > 1:
        several = ", ".join(shown(name, 60) for name in different)
        raise AssayError(
            f"{where}: --label {shown(stated.label)} is one name for {len(different)} checkpoints, {several}; say --label "
            "NAME=LABEL for each"
        )


def hardware_of(in_file: str | None, stated: Stated, where: str) -> str:
    """The hardware that a file or the user states. AssayError: neither does, or they name different ones."""
    if in_file is not None and stated.hardware is not None and in_file.strip().casefold() != stated.hardware.strip().casefold():
        raise AssayError(
            f"{where}: says hardware {shown(in_file, 60)}, and --hardware says {shown(stated.hardware, 60)}; leave the option "
            "out, or mend the file"
        )
    return required(stated.hardware or in_file, "the hardware", "--hardware 8xH200", where)


def speculation_of(in_file: int | str | None, stated: Stated, where: str) -> int | None:
    """Tokens drafted a step. in_file: their number; `on`: they were, nobody says how many; None: it says nothing.

    AssayError: --speculation says otherwise than the file, which knows what was measured.
    """
    if stated.speculation is None or in_file is None:
        return stated.speculation if in_file is None else in_file if isinstance(in_file, int) else None
    if in_file == "on" and stated.speculation:
        return stated.speculation
    if in_file != stated.speculation:
        says = {"on": "it drafted", 0: "it did not draft"}.get(
            in_file, f"it drafted {in_file} token{'s' * (in_file != 1)} a step"
        )
        option = stated.speculation or "off"
        raise AssayError(
            f"{where}: says that {says}, and --speculation says {option}; leave the option out"
            + (", or say how many tokens it drafted" if in_file == "on" else "")
        )
    return stated.speculation


def required(value: str | None, what: str, option: str, where: str) -> str:
    """AssayError: neither the file nor the user states it."""
    if value is None or not value.strip():
        raise AssayError(f"{where}: does not state {what}; say {option}")
    return one_line(value)


def text(fields: Mapping[str, Any], name: str) -> str | None:
    """Text, or a number as text, under `name`; None: there is none, or something else."""
    value = fields.get(name)
    if isinstance(value, str):
        return one_line(value.strip()) or None
    return str(value) if isinstance(value, int | float) and type(value) is not bool else None


def whole(fields: Mapping[str, Any], name: str) -> int | None:
    """A count under `name`, which may be written as text; None: there is none, or one that counts nothing real."""
    value = fields.get(name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < MOST_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 <= value <= MOST_COUNT else None


def wrong(where: str, what: object) -> AssayError:
    """The file does not have the form that it was read as."""
    return AssayError(
        f"{where}: {shown(what, 200)}; say --as FORMAT if it is of another tool, or write a table (docs/speed.md, `A table`)"
    )


# ------------------------------------------------------------------------------------------------ requests in flight
BOUND = 0.75
"""Share of the limit that is in flight on average from which a rate did not hold the requests back."""
BEYOND = 1.5
"""Times the limit that Little's law may find where end-to-end times follow from TTFT, TPOT and mean lengths."""
PEAK_FROM_S = 2.0
"""vLLM counts requests per whole second: of shorter ones its peak is too high."""
SENT_AT, AS_MANY = "requests were sent at", "at most"
"""How notes begin that say how many were in flight."""


@dataclass(frozen=True)
class InFlight:
    """concurrency: most at once. request_rate: None: it held nothing back. doubt: as `SpeedRow.doubt`."""

    concurrency: int
    request_rate: float | None
    notes: tuple[str, ...]
    doubt: str | None


def in_flight(limit: int | None, rate: float | None, num_prompts: int | None, repeat: SpeedRepeat) -> InFlight | None:
    """limit: `--max-concurrency`; rate: requests a second, None: without one. None: nobody knows how many were in flight."""
    mean, peak, notes = repeat.in_flight, repeat.peak_in_flight, []
    held = rate is not None and (limit is None or mean is None or mean < BOUND * limit)
    caps = {"the limit": limit, "the prompts": num_prompts}
    if held:
        caps["the peak"] = peak if repeat.end_to_end_s is None or repeat.end_to_end_s.mean >= PEAK_FROM_S else None
        caps["the mean"] = None if caps["the peak"] or mean is None else max(1, round(mean))
    known = {name: value for name, value in caps.items() if value}
    if not known or (not held and limit is None):
        return None
    which = min(known, key=lambda name: known[name])
    most = known[which]
    average = "" if mean is None else f", {mean:.1f} on average"
    if held:
        of = "" if limit is None else f" of the {limit:,} allowed"
        notes.append(f"{SENT_AT} {rate:g} a second, so at most {most:,}{of} were in flight{average}")
    elif rate is not None:
        notes.append(f"{SENT_AT} {rate:g} a second, which did not hold them back{average}")
    if not held and which == "the prompts" and limit is not None and limit > most:
        notes.append(f"{AS_MANY} {most:,} requests were in flight, as many as there were; the limit was {limit:,}")
    doubt = None
    slack = 1.05 if repeat.end_to_end_s is not None else BEYOND
    if mean is not None and limit is not None and mean > slack * limit:
        doubt = f"by its own times {mean:.1f} requests were in flight on average, and it says that at most {limit:,} were"
    return InFlight(most, rate if held else None, tuple(notes), doubt)
