"""`RUN/choice.json`, which `assay choose` writes: as much of it as the first screen says. A file that is absent says nothing.

Read by names of fields, without its type: fields may be added to it, and one that is missing is left out of the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.quantities import percent_of_events
from assay.records.base import Part

CHOICE_RECORD = "choice.json"


class Choice(Part):
    """What was recommended, in sentences."""

    sentence: str
    """The recommendation: `w4a16 with MTP up to about 20 streams, then nvfp4`."""
    picks: tuple[str, ...] = ()
    """One for each operating point."""
    reasons: tuple[str, ...] = ()
    not_known: tuple[str, ...] = ()
    """What was missing or predicted."""
    next_steps: tuple[str, ...] = ()


MOST_LINES = 4
"""Of what is not known, on the first screen; the rest is counted."""


def read_choice(path: Path) -> Choice | None:
    """None: there is no such file, or it recommends nothing. AssayError: it is no JSON object."""
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AssayError(f"{path}: cannot be read as JSON ({one_line(str(error))}); `assay choose` writes it again") from None
    if not isinstance(told, dict):
        raise AssayError(f"{path}: holds no JSON object; `assay choose` writes it again")
    return choice_of(told)


def choice_of(told: dict[str, Any]) -> Choice | None:
    """The adapter: fields of the record, to what the page says. A field that is not there is left out."""
    sentence = told.get("recommendation")
    if not isinstance(sentence, str) or not sentence:
        return None
    quality = _objects(told, "quality")
    return Choice(
        sentence=sentence,
        picks=tuple(_pick(one) for one in _objects(told, "picks")),
        reasons=tuple(_flip(one) for one in _objects(told, "flips")),
        not_known=(*_unknown(told), *_few([*_missing(told), *_texts(told, "refused"), *_texts(told, "set_aside")])),
        next_steps=tuple(
            f"To decide whether {one.get('checkpoint')} may be chosen, run {line}"
            for one in quality
            for line in _texts(one, "to_run")
        ),
    )


def _pick(one: dict[str, Any]) -> str:
    """`At 8 streams: w4a16 with MTP (stays the choice in 93 % of draws)`"""
    at = f"At {one.get('concurrency')} {'stream' if one.get('concurrency') == 1 else 'streams'}"
    if not one.get("setup"):
        return f"{at}: none, {one.get('why_none') or 'nothing is known'}"
    chance = one.get("chance_best")
    return f"{at}: {one['setup']}" + (
        f" (stays the choice in {percent_of_events(chance)} of draws)" if _is_number(chance) else ""
    )


def _flip(one: dict[str, Any]) -> str:
    """`w4a16 with MTP up to about 20 streams, then nvfp4 with MTP (95 %: 15 to 27)`"""
    at, low, high = one.get("at"), one.get("low"), one.get("high")
    said = (
        f"{one.get('before') or 'none'} up to about {at:.0f} streams, then {one.get('after') or 'none'}"
        if _is_number(at)
        else ""
    )
    return f"{said} (95 %: {low:.0f} to {high:.0f})" if said and _is_number(low) and _is_number(high) else said


def _unknown(told: dict[str, Any]) -> list[str]:
    assumed = ["Quality was assumed: nobody measured that these checkpoints answer like the reference"]
    origin = told.get("origin")
    said = assumed if told.get("quality_assumed") is True else []
    return said + ([f"The speeds are {origin}, not measured here"] if origin in ("imported", "predicted") else [])


def _missing(told: dict[str, Any]) -> list[str]:
    """Setups without a number, each with the numbers of streams and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in _objects(told, "cells"):
        if one.get("state") in ("missing", "predicted"):
            why = str(one.get("why") or "no row") if one["state"] == "missing" else "predicted only"
            found.setdefault((str(one.get("setup")), why), []).append(str(one.get("concurrency")))
    same: dict[tuple[str, str], list[str]] = {}
    for (setup, why), streams in found.items():
        same.setdefault((", ".join(streams), why), []).append(setup)
    return [f"Speed of {', '.join(setups)} at {streams}: {why}" for (streams, why), setups in same.items()]


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"{more} more things that `assay choose` lists"] if more > 0 else lines


def _objects(told: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = told.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _texts(told: dict[str, Any], name: str) -> list[str]:
    value = told.get(name)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
