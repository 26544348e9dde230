"""Seeded damage to a file: of its bytes, and of the values that its JSON or YAML holds."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import yaml

NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3.5, 2**31, 2**62, 2**63, -(2**64), 10**30, 10**400, "256", 1e308, float("nan"), float("inf"),
    "", " ", "\x00", "\x1b[31m", "\u2028", "\ud800", "../../x", "/etc/passwd", "[/red]", "<img src=x>", "a" * 10_000,
    [], {}, [[]], [None], {"": {}}, "2026-13-45", "nan", "1e400",
    json.loads("[" * 150 + "]" * 150), json.loads('{"a":' * 150 + "1" + "}" * 150),
)  # fmt: skip
WORDS = (
    b"null", b"-1", b"1e999", b"NaN", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\x00", b'"', b"\\ud800", b"{}",
    b"[]", b"18446744073709551616", b"-9223372036854775809", b"\n", b"&a *a", b"!!python/name:os.system", b"- ", b": ",
    b"\xe2\x80\xa8",
)  # fmt: skip


def damaged_bytes(data: bytes, random: Random) -> bytes:
    """One to four edits: bits, spans cut, doubled or moved, words that parsers stumble over, the end missing."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        begin = random.randrange(len(data) + 1)
        end = min(len(data), begin + random.choice((1, 2, 8, 64, 1024)))
        match random.randrange(6):
            case 0 if begin < len(data):
                data = data[:begin] + bytes([data[begin] ^ 1 << random.randrange(8)]) + data[begin + 1 :]
            case 1:
                data = data[:begin] + data[end:]
            case 2:
                data = data[:end] + data[begin:]
            case 3:
                data = data[:begin] + random.randbytes(end - begin) + data[end:]
            case 4:
                data = data[:begin]
            case _:
                data = data[:begin] + random.choice(WORDS) + data[random.choice((begin, end)) :]
    return data


def damaged_value(value: Any, random: Random) -> Any:
    """`value` with one or two of its parts replaced, left out, doubled, renamed, or put where another was."""
    for _ in range(random.choice((1, 1, 2))):
        places = list(_places(value))
        if not places:
            return random.choice(NASTY)
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[f"{key}{random.choice(('x', ' ', '[/]', '.'))}"] = holder.pop(key)
            case 2 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 3:
                other, at = random.choice(places)
                holder[key] = json.loads(json.dumps(other[at])) if _is_in(other, at) else None
            case _:
                holder[key] = random.choice(NASTY)
    return value


def damaged_text(data: bytes, suffix: str, random: Random) -> bytes:
    """A file of JSON or YAML, or a shard, damaged in its bytes or, as often, in a value; any other in its bytes."""
    if suffix not in (".json", ".jsonl", ".yaml", ".safetensors") or random.random() < 0.5:
        return damaged_bytes(data, random)
    if suffix == ".safetensors":
        return _with_damaged_header(data, random)
    if suffix == ".jsonl":
        lines = data.splitlines()
        at = random.randrange(len(lines))
        lines[at] = json.dumps(damaged_value(json.loads(lines[at]), random)).encode()
        return b"\n".join(lines) + b"\n"
    value = json.loads(data) if suffix == ".json" else yaml.safe_load(data)
    return json.dumps(damaged_value(value, random)).encode()


def _with_damaged_header(data: bytes, random: Random) -> bytes:
    """A shard whose data is whole, and whose header is JSON of the length that it states."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(damaged_value(json.loads(data[8:begin]), random)).encode()
    return len(header).to_bytes(8, "little") + header + data[begin:]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(list or dict, index or key) of every part at any depth; of a list of many at most eight."""
    found: list[tuple[Any, Any]] = []
    open_ = [value]
    while open_:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))[:8] if isinstance(holder, list) else []
        found += [(holder, key) for key in keys]
        open_ += [holder[key] for key in keys]
    return found


def _is_in(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)
