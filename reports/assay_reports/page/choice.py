"""`RUN/choice.json`, which `assay choose` writes: as much of it as the first screen says. A file that is absent says nothing.

Read by names of fields, without its type: fields may be added to it, and one that is missing is left out of the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.errors import AssayError
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


SENTENCE = ("sentence", "recommendation", "summary", "headline")
PICKS, REASONS = ("picks", "points"), ("reasons", "why", "flips", "flip_points", "regret")
NOT_KNOWN, NEXT = ("not_measured", "missing", "predicted", "refused", "not_known"), ("next", "next_steps", "to_run")


def read_choice(path: Path) -> Choice | None:
    """None: there is no such file, or it recommends nothing. AssayError: it is no JSON object."""
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AssayError(f"{path}: cannot be read as JSON ({error}); `assay choose` writes it again") from None
    if not isinstance(told, dict):
        raise AssayError(f"{path}: holds no JSON object; `assay choose` writes it again")
    return choice_of(told)


def choice_of(told: dict[str, Any]) -> Choice | None:
    """The adapter: names that the record has had, to what the page says."""
    sentence = next((told[name] for name in SENTENCE if isinstance(told.get(name), str) and told[name]), None)
    if sentence is None:
        return None
    return Choice(
        sentence=sentence, picks=_lines(told, PICKS), reasons=_lines(told, REASONS),
        not_known=_lines(told, NOT_KNOWN), next_steps=_lines(told, NEXT),
    )  # fmt: skip


def _lines(told: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Sentences under these names: texts, or objects that have one."""
    found: list[str] = []
    for name in names:
        value = told.get(name)
        for one in value if isinstance(value, list | tuple) else [value]:
            said = one if isinstance(one, str) else _sentence(one)
            if said:
                found.append(said)
    return tuple(found)


def _sentence(one: Any) -> str | None:
    if not isinstance(one, dict):
        return None
    said = next((one[name] for name in ("sentence", "reason", "detail") if isinstance(one.get(name), str)), None)
    if said is None:
        return None
    where = next((str(one[name]) for name in ("concurrency", "point", "checkpoint") if one.get(name) is not None), None)
    return said if where is None or where in said else f"{where}: {said}"
