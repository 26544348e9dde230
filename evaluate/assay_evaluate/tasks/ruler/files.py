"""Items as JSON lines, each with the hash of its content: what was asked can be shown, and a changed file is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from assay.atomic_files import replacing
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.items import RulerItem, from_saved_fields, saved_fields
from assay_evaluate.transport.foreign_json import read_json


def write_items(path: str | Path, items: Iterable[RulerItem]) -> int:
    """Write `items` one a line, by way of a temporary file; the number written. Items are not held in memory."""
    path = Path(path)
    num_items = 0
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for item in items:
            line = {"sha256": item.sha256, "id": item.id, **saved_fields(item)}
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
            num_items += 1
    return num_items


def read_items(path: str | Path) -> Iterator[RulerItem]:
    """The items of a file, each checked against its hash. RulerError naming the line that is unreadable or was changed."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise RulerError(f"{path}: cannot be read ({error}); write the items anew") from error


def _parse(line: str, where: str) -> RulerItem:
    try:
        fields = read_json(line.encode())
        sha256, name = fields.pop("sha256"), fields.pop("id")
        item = from_saved_fields(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RulerError(f"{where}: not an item ({type(error).__name__}: {error}); write the items anew") from error
    if item.sha256 != sha256 or item.id != name:
        raise RulerError(f"{where}: {name} was changed after it was written (its hash differs); write the items anew")
    return item
