"""A table of one's own, in YAML or JSON: `tables`, each with `every_row` (fields that all its rows share) and `rows`.

Fields are those of `SpeedRow`. Those of its only repeat (`output_tokens_s`, `ttft_s`, ...) may stand in the row itself, and a
latency may be one number, where nobody says whether it is a mean or a median.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.speed.foreign.stated import Stated, num_gpus_of, wrong

_OF_REPEAT = frozenset(SpeedRepeat.model_fields)
_LATENCIES = tuple(name for name, field in SpeedRepeat.model_fields.items() if field.annotation == (Quantiles | None))
EITHER = "{name}: mean or median is not stated; one number is taken for both"


def is_table(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("tables"), list)


def read_table(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """AssayError names the row, the field and what is wrong with it."""
    if not is_table(content) or content.keys() != {"tables"}:
        raise wrong(where, "no table: it holds `tables`, a list, and nothing else")
    rows = []
    for at, table in enumerate(content["tables"], 1):
        place = f"{where}, table {at}"
        if not isinstance(table, dict) or table.keys() - {"every_row", "rows"} or not isinstance(table.get("rows"), list):
            raise wrong(place, "holds `every_row` (optional) and `rows`, a list, and nothing else")
        shared = table.get("every_row", {})
        if not isinstance(shared, dict) or not all(isinstance(row, dict) for row in table["rows"]):
            raise wrong(place, "every row, and `every_row`, is a mapping of fields")
        for number, row in enumerate(table["rows"], 1):
            rows.append(_row(shared | row, stated, f"{place}, row {number}", where))
    if not rows:
        raise wrong(where, "has no row")
    return rows


def _row(fields: Mapping[str, Any], stated: Stated, place: str, where: str) -> SpeedRow:
    given = {name: value for name, value in fields.items() if name not in _OF_REPEAT}
    single = {name: value for name, value in fields.items() if name in _OF_REPEAT}
    if "origin" in given:
        raise wrong(place, "states an `origin`: rows of a table are imported, whatever they were")
    notes = given.pop("assumptions", None) or []
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise wrong(place, "`assumptions` is a list of sentences")
    notes = list(notes)
    repeats = given.pop("repeats", None)
    if repeats is not None and single:
        raise wrong(place, f"has `repeats`, so {min(single)} belongs into one of them")
    for repeat in [single] if repeats is None else repeats if isinstance(repeats, list) else []:
        for name in _LATENCIES if isinstance(repeat, dict) else ():
            value = repeat.get(name)
            if value == 0 and type(value) is not bool:
                repeat[name] = None
                notes.append(f"{name}: 0 is no time of a request; taken for not stated")
            elif isinstance(value, int | float) and type(value) is not bool:
                repeat[name] = {"mean": value, "p50": value}
                notes.append(EITHER.format(name=name))
    if stated.label is not None or stated.hardware is not None or stated.speculation is not None or stated.prompts is not None:
        raise wrong(place, "a table states everything itself; leave --label, --hardware, --speculation and --prompts out")
    given.setdefault("source", where)
    if isinstance(given.get("hardware"), str):
        given.setdefault("num_gpus", num_gpus_of(given["hardware"]))
    given |= {"origin": "imported", "repeats": [single] if repeats is None else repeats}
    given["assumptions"] = list(dict.fromkeys(notes))
    try:
        return SpeedRow.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise wrong(place, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
