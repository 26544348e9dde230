"""What is published names no folder of the machine that it was made on: files by their names, a run's by their place in it.

without_places(run, here)    the records of a run, for a card, a report and a manifest
places_in(text, here)        folders of this machine that a text names all the same
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from assay.records.plan import Plan
from assay_reports.run import Run

_STEP = r"[^\s/'\"`<>|,;:()\[\]{}]"
_PATH = re.compile(rf"(?<![\w/.:~<)\]}}-])(?:file://)?/(?!v\d+/|api/)(?:{_STEP}+/)+{_STEP}*")
"""An absolute path of two steps or more. A server's routes (/v1/completions) and addresses are none."""
_IS_PATH = re.compile(r"/(?!v\d+/|api/)[^/\n]+/(?:(?! /|://).)*")
"""A text that begins with one, which may have spaces in it, and names no other."""


class Places(NamedTuple):
    """Folders that no other machine has, each with a slash behind it. around: those around the run. others: the working
    directory and the user's home."""

    around: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def places_of(run_dir: Path) -> Places:
    """Of this machine and user."""
    around, others = {run_dir.absolute().parent, run_dir.resolve().parent}, {Path.cwd(), Path.home()}
    return Places(*(tuple(f"{folder}/" for folder in sorted(folders) if len(folder.parts) > 1) for folders in (around, others)))


def without_places(run: Run, here: Places) -> Run:
    """The records of a run with names in place of absolute paths. What says where the files of a checkpoint lie stays: they are
    read there."""
    plans = {label: _of_plan(plan, here) for label, plan in run.plans.items()}
    kept = {"plans", "checkpoints"}
    changed = {field.name: _named(getattr(run, field.name), here) for field in fields(run) if field.name not in kept}
    return replace(run, plans=plans, **changed)


def _of_plan(plan: Plan, here: Places) -> Plan:
    """Its 60,000 tensors name no folder."""
    told = ("model", "precision", "source", "precision_recipe", "config", "calibrated")
    return plan.model_copy(update={name: _named(getattr(plan, name), here) for name in told})


def _named(value: Any, here: Places) -> Any:
    """The same value with names in place of paths, in whatever it is made of."""
    made: Any = value
    if isinstance(value, str):
        made = named(value, here)
    elif isinstance(value, BaseModel):
        changed = {name: _named(old, here) for name in type(value).model_fields if (old := getattr(value, name)) is not None}
        made = value.model_copy(update={name: new for name, new in changed.items() if new is not getattr(value, name)})
    elif isinstance(value, dict):
        made = {key: _named(old, here) for key, old in value.items()}
    elif isinstance(value, tuple):
        parts = [_named(old, here) for old in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif isinstance(value, list):
        made = [_named(old, here) for old in value]
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{field.name: _named(getattr(value, field.name), here) for field in fields(value) if field.init})
    return made


def named(text: str, here: Places) -> str:
    """`text` with what lies around the run by its place there, and of other absolute paths the last step alone, of a folder
    `checkpoint` the last two."""
    if "/" not in text:
        return text
    for place in here.around:
        text = text.replace(place, "")
    for place in here.others:  # they may have spaces in them
        text = text.replace(place, "/~/")
    if _IS_PATH.fullmatch(text):
        return _last_step(text)
    return _PATH.sub(lambda match: _last_step(match[0]), text)


def _last_step(path: str) -> str:
    steps = [step for step in path.split("/") if step]
    return "/".join(steps[-2:]) if steps[-1] == "checkpoint" else steps[-1]


def places_in(text: str, here: Places) -> Iterator[str]:
    """Places of `here` that a text names, as it names them."""
    for place in (*here.around, *here.others):
        if (at := text.find(place)) >= 0:
            yield re.split(r"[\n\"']", text[at : at + len(place) + 60])[0]
