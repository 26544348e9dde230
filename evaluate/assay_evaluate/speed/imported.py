"""Speeds that other tools measured, as imported rows of a `SpeedRecord`. What a file does not state stays None."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import one_line, shown
from assay.records.speed import SpeedRow
from assay.safe_files import read_record
from assay.safe_yaml import NotPlainYaml, read_yaml
from assay_evaluate.speed.formats import READERS
from assay_evaluate.speed.stated import AS_MANY, SENT_AT, Stated, wrong
from assay_evaluate.transport.foreign_json import NotJson, read_json

_YAML = {".yaml", ".yml"}
_NAMES = ("checkpoint", "scheme", "source", "hardware", "prompts", "engine")
COPIES = "copies of another result:"
MOST_NAME = 200
MOST_BYTES = 500_000_000
"""Longest file that is read; guidellm keeps every request."""


def read_imported(path: Path, form: str | None, stated: Stated) -> list[SpeedRow]:
    """The rows of a file. form: of READERS; None: as it looks. AssayError: it cannot be read, or lacks what a row needs."""
    where, content = path.name, _parsed(path)
    for name, (fits, read) in READERS.items():
        if form == name or (form is None and fits(content)):
            try:
                return _together(_checked(read(content, stated, where), where))
            except ValidationError as error:  # a number beyond what a row can be
                first = error.errors()[0]
                raise wrong(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    raise wrong(where, f"is of none of the formats {', '.join(READERS)}, as far as can be seen")


def notes_of(rows: Sequence[SpeedRow]) -> list[str]:
    """What rows say otherwise than their file: how many were in flight, which results are copies. One line each."""
    beginnings = (SENT_AT, AS_MANY, COPIES)
    return [
        f"{row.checkpoint} at {row.concurrency}: {note}"
        for row in rows
        for note in row.assumptions
        if note.startswith(beginnings)
    ]


def _parsed(path: Path) -> Any:
    try:
        if path.suffix in _YAML:
            return read_yaml(path)
        data = read_record(path)
        if len(data) > MOST_BYTES:
            raise AssayError(f"{path}: {len(data):,} bytes, {MOST_BYTES:,} are read; leave the single requests out")
        return _json_or_lines(data)
    except OSError as error:
        raise AssayError(f"{path}: cannot be read: {error.strerror}") from None
    except NotPlainYaml as error:
        raise AssayError(f"{path}: {error}") from None
    except NotJson as error:
        raise AssayError(f"{path}: {one_line(str(error))}; give JSON, or YAML in a file that ends in .yaml") from None


def _json_or_lines(data: bytes) -> Any:
    """One value, or a list of the objects that stand one after the other, as `--append-result` and JSON lines write them.

    NotJson: one of them is none; where that is the first, the whole is something else.
    """
    try:
        return read_json(data)
    except NotJson as error:
        if "Extra data" not in str(error):
            raise
        of_whole = error
    decoder, objects, at, text = json.JSONDecoder(), list[Any](), 0, data.decode("utf-8", errors="replace")
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if objects and isinstance(objects[0], dict):
                where = f"object {len(objects) + 1}, after line {text.count(chr(10), 0, at)}"
                raise NotJson(f"several objects, of which {where} is no JSON: {shown(repr(text[at : at + 60]))}") from None
            raise of_whole from None
        objects.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return objects


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
    """Rows of one point as one, with their repeats. Copies are one repeat: they say nothing of the noise."""
    points: dict[tuple[object, ...], list[SpeedRow]] = {}
    for row in rows:
        points.setdefault(row.point, []).append(row)
    made = []
    for same in points.values():
        repeats = [repeat for row in same for repeat in row.repeats]
        once = tuple(repeat for at, repeat in enumerate(repeats) if repeat not in repeats[:at])
        notes = dict.fromkeys(note for row in same for note in row.assumptions)
        if len(once) < len(repeats):
            notes[f"{COPIES} {len(repeats) - len(once)} of {len(repeats)} results of this point: they count once"] = None
        doubt = next((row.doubt for row in same if row.doubt is not None), None)
        made.append(same[0].model_copy(update={"repeats": once, "assumptions": tuple(notes), "doubt": doubt}))
    return made


def renamed(rows: Sequence[SpeedRow], names: Mapping[str, str], where: str) -> list[SpeedRow]:
    """names: what the file calls a checkpoint -> its label here; others keep theirs. Each row says what it was called.

    AssayError: the file has no such checkpoint, or two of them would have one label.
    """
    checkpoints = list(dict.fromkeys(row.checkpoint for row in rows))
    for name in names:
        if name not in checkpoints:
            hint = did_you_mean(name, checkpoints)
            raise AssayError(f"--label {shown(name)}=...: {hint}{where} has {', '.join(map(shown, checkpoints))}")
    became: dict[str, str] = {}
    for name in checkpoints:
        label = names.get(name, name)
        if (other := became.setdefault(label, name)) != name:
            raise AssayError(
                f"--label: {shown(other)} and {shown(name)} of {where} would both be {shown(label)}; give each its own"
            )
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
