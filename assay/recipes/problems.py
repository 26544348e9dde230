"""All problems of a recipe file in one error: unknown keys, wrong values and contradictions, in the terms of the file.

pydantic runs the consistency checks of a section only if its keys and values are valid. A file that fails there is therefore
validated again, with the reported faults repaired: misspelt keys renamed, wrong values replaced or dropped; and once more
without the checks of its sections, for those that cross sections (two tasks of the same name).
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from assay.recipes.base import WHOLE_ONLY, Recipe

Fault = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""

MOST_REPAIRS = 4
FORMS = ("[number]", "[range]")
"""Steps of a fault's place that are not in the file: which form of a value it is taken for."""
_IN_YAML = {
    "model_type": "Input should be a mapping of keys to values",
    "dict_type": "Input should be a mapping of keys to values",
    "tuple_type": "Input should be a list",
}
"""Type of fault -> message, where pydantic's own would name Python types."""


def problems_in(kind: type[Recipe], data: Mapping[str, Any], stem: str) -> list[str]:
    """Problems of a recipe of this kind, one sentence each; an empty list means that it is valid.

    data: the content of the file. stem: the file's name without its suffix, which must be the recipe's name.
    """
    faults = _faults(kind, data)
    problems = _described(kind, faults)
    for mended, misspelt in _repaired(kind, data, faults):
        hidden = [f for f in _faults(kind, mended) if f["type"] == "value_error" or tuple(f["loc"][:2]) in misspelt]
        problems += _described(kind, hidden)
        problems += _described(kind, _contradictions(_faults(kind, mended, context=WHOLE_ONLY)))
    name = data.get("name")
    if isinstance(name, str) and name != stem:
        problems.append(f"name is {name!r}; it must be the file's name, {stem!r}")
    return list(dict.fromkeys(problems))


def _contradictions(faults: Sequence[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault["type"] == "value_error"]


def _faults(kind: type[Recipe], data: Mapping[str, Any], context: str | None = None) -> list[Fault]:
    try:
        kind.model_validate(data, context=context)
    except ValidationError as error:
        return [{**fault, "loc": tuple(step for step in fault["loc"] if step not in FORMS)} for fault in error.errors()]
    return []


# ------------------------------------------------------------------------------------------------ messages
def _described(kind: type[Recipe], faults: Sequence[Fault]) -> list[str]:
    """Unknown keys first. A misspelt required key is both unknown and missing; only the unknown one is reported. After a
    misspelt `extends`, every inherited key would be missing; none of these is reported."""
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    meant = {(*fault["loc"][:-1], _nearest_key(kind, fault)) for fault in unknown}
    explained = meant if not meant & {(key,) for key in kind.loader_keys} else {fault["loc"] for fault in faults}
    others = [f for f in faults if f not in unknown and not (f["type"] == "missing" and f["loc"] in explained)]
    return [text for fault in (*unknown, *others) for text in _texts(kind, fault)]


def _texts(kind: type[Recipe], fault: Fault) -> list[str]:
    where = ".".join(str(step) for step in fault["loc"] if step != "[key]")
    if where in kind.explained and (fault["type"] == "extra_forbidden" or isinstance(fault["input"], dict | list)):
        return [f"{where}: {kind.explained[where]}"]
    if fault["type"] == "extra_forbidden":
        near = _nearest_key(kind, fault)
        hint = f"; did you mean {near!r}?" if near else "."
        return [f"unknown key {where!r}{hint} Allowed: {', '.join(sorted(_keys_at(kind, fault['loc'][:-1])))}"]
    if fault["type"] == "missing":
        return [f"key {where!r} is missing"]
    if fault["type"] == "value_error":
        return [f"{where}: {line}" if where else line for line in str(fault["msg"]).removeprefix("Value error, ").split("\n")]
    got = "" if isinstance(fault["input"], dict) else f" (got {str(fault['input'])[:80]!r})"
    if fault["type"] == "union_tag_invalid":
        tag, tags = str(fault["ctx"]["tag"]), _allowed_values(fault)
        near = _nearest(tag, tags)
        hint = f"; did you mean {near!r}?" if near else ""
        return [f"{where}.kind: must be one of {', '.join(tags)} (got {tag[:80]!r}){hint}"]
    near = _nearest_value(fault)
    return [f"{where}: {_IN_YAML.get(fault['type'], fault['msg'])}{got}" + (f"; did you mean {near!r}?" if near else "")]


def _nearest_key(kind: type[Recipe], fault: Fault) -> str | None:
    return _nearest(fault["loc"][-1], _keys_at(kind, fault["loc"][:-1]))


def _nearest_value(fault: Fault) -> str | None:
    """The allowed value closest to the given one; None if nothing is close, or if the values are not enumerated."""
    return _nearest(fault["input"], _allowed_values(fault), 0.7)  # stricter than for keys: gpu is not a misspelt cpu


def _allowed_values(fault: Fault) -> list[str]:
    """Values, or kinds of section, that may stand here."""
    key = {"literal_error": "expected", "union_tag_invalid": "expected_tags"}.get(fault["type"])
    return [] if key is None else re.findall(r"'([^']*)'", str(fault["ctx"][key]))


def _nearest(wrong: Any, allowed: Sequence[str], least_likeness: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(str(wrong), allowed, 1, least_likeness)), None)


def _keys_at(kind: type[Recipe], steps: Sequence[int | str]) -> list[str]:
    """Allowed keys of the section at `steps`."""
    keys = [field.alias or name for section in _sections_at(kind, steps) for name, field in section.model_fields.items()]
    return keys if steps else [*keys, *kind.loader_keys]


def _sections_at(kind: type[BaseModel], steps: Sequence[int | str]) -> list[type[BaseModel]]:
    """The sections that can stand at `steps`; list indexes and union tags are skipped."""
    current: list[type[BaseModel]] = [kind]
    for step in map(str, steps):
        following = [
            model
            for section in current
            if (field := _field(section, step)) is not None
            for model in _sections_in(field.annotation)
        ]
        tagged = [model for model in current if (tag := _field(model, "kind")) and get_args(tag.annotation)[0] == step]
        current = following or tagged or current
    return current


def _field(section: type[BaseModel], key: str) -> Any:
    return next((f for name, f in section.model_fields.items() if key in (name, f.alias)), None)


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _sections_in(argument)]


# ------------------------------------------------------------------------------------------------ repair
def _repaired(
    kind: type[Recipe], data: Mapping[str, Any], faults: Sequence[Fault]
) -> Iterator[tuple[dict[str, Any], Collection[tuple[Any, ...]]]]:
    """`data` without its faults, then without those that this shows; and the places of sections whose kind was misspelt.

    Of the next faults, contradictions and those of such sections were hidden before; the repair may have made others.
    """
    misspelt: set[tuple[Any, ...]] = set()
    for _ in range(MOST_REPAIRS):
        if not faults or (mended := _mended(kind, data, faults)) is None:
            return
        data = mended
        misspelt |= {tuple(fault["loc"]) for fault in faults if fault["type"] == "union_tag_invalid"}
        yield mended, frozenset(misspelt)
        faults = [fault for fault in _faults(kind, mended) if fault["type"] != "value_error"]


def _mended(kind: type[Recipe], data: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any] | None:
    """`data` without its faults: a key or value close to an allowed one is replaced by it, any other enumerated value by the
    first allowed one; everything else is dropped.

    None if a whole section of a list would have to be dropped, which would shift the indexes of those after it.
    """
    mended = copy.deepcopy(dict(data))
    for fault in reversed(faults):  # later list elements first, so that earlier indexes stay valid
        if fault["type"] == "value_error":
            continue
        *before, last = [step for step in fault["loc"] if step != "[key]"]
        parent = _walk(mended, before)
        if fault["type"] == "union_tag_invalid":
            section = _walk(mended, [*before, last])
            section["kind"] = _nearest(section["kind"], _allowed_values(fault), 0.0)
        elif fault["type"] == "missing":
            if isinstance(parent, dict) and (choice := _first_choice(kind, before, str(last))) is not None:
                parent.setdefault(last, choice)
        elif isinstance(parent, dict) and last in parent:
            _mend_key(kind, parent, last, fault)
        elif isinstance(parent, list) and isinstance(last, int) and not isinstance(parent[last], dict):
            near = _nearest_value(fault)
            parent[last : last + 1] = [] if near is None else [near]
        else:
            return None
    return mended


def _mend_key(kind: type[Recipe], parent: dict[str, Any], key: str, fault: Fault) -> None:
    if fault["type"] == "extra_forbidden" or fault["loc"][-1] == "[key]":
        near, value = _nearest_value(fault) or _nearest_key(kind, fault), parent.pop(key)
        if near is not None:
            present = parent.get(near)
            parent[near] = [*present, *value] if isinstance(present, list) and isinstance(value, list) else present or value
    elif allowed := _allowed_values(fault):
        parent[key] = _nearest_value(fault) or allowed[0]
    elif (limit := _limit(fault)) is not None:
        parent[key] = limit
    else:
        del parent[key]


def _limit(fault: Fault) -> float | None:
    """A number that is just allowed, in place of one that is too small or too large. None: the fault is another one."""
    limits = fault.get("ctx", {})
    if (inside := limits.get("ge", limits.get("le"))) is not None:
        return float(inside) if isinstance(fault["input"], float) else inside
    if (outside := limits.get("gt", limits.get("lt"))) is not None:
        return float(outside) + (1e-3 if "gt" in limits else -1e-3)
    return None


def _first_choice(kind: type[Recipe], steps: Sequence[int | str], key: str) -> Any:
    """The first allowed value of `key`; None if its values are not enumerated."""
    fields = (_field(section, key) for section in _sections_at(kind, steps))
    return next((get_args(f.annotation)[0] for f in fields if f is not None and get_origin(f.annotation) is Literal), None)


def _walk(data: Any, steps: Sequence[int | str]) -> Any:
    """The value at `steps`; union tags, which are not in the file, are skipped."""
    for step in steps:
        here: Any = data
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int)):
            data = here[step]
    return data
