"""JSON that a server sent: read without trusting it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from assay.foreign_text import one_line, shown
from assay_evaluate.transport.told_errors import words_in

WRONG_SHAPE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading a reply raises that has another shape than the API promises, NotJson and numbers without bound among it."""
MOST_COUNT = 2**53
"""Above which no number of tokens lies."""
MOST_NESTED = 16
"""Levels of what is kept as somebody else wrote it."""
MOST_MESSAGE = 300
"""Characters of a server's words about an error."""


class NotJson(ValueError):
    """A body that is no JSON, or none that can be read. The message begins with what is there instead."""


def read_json(body: bytes) -> Any:
    """The value in `body`. NotJson: it is HTML, cut off, nested without end, or has numbers of thousands of digits."""
    try:
        return json.loads(body)
    except RecursionError:
        raise NotJson("no readable JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and int() of more than 4,300 digits
        start = " ".join(body[:100].decode(errors="replace").split())
        raise NotJson(f"no JSON ({one_line(str(error))}): {shown(repr(start))}") from None


def message_in(body: bytes | str) -> str:
    """The server's own words in the body of an error, on one line of at most 300 characters."""
    text = body if isinstance(body, str) else body.decode(errors="replace")
    try:
        data = read_json(text.encode(errors="surrogatepass"))
        text = words_in(data)
    except (NotJson, RecursionError):
        pass
    return one_line(" ".join(text[: 8 * MOST_MESSAGE].split()))[:MOST_MESSAGE]


def text_of(told: Any) -> str | None:
    """A value that has to be text, as Unicode: a lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD.

    None stays None. TypeError: it is something else.
    """
    if told is None:
        return None
    if type(told) is not str:
        raise TypeError(f"{type(told).__name__} in place of text")
    return told if told.isascii() else told.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain(told: Any, levels: int = MOST_NESTED) -> Any:
    """A value of JSON that can be written as JSON again: with clean text, finite numbers, and not nested without end.

    ValueError: it has a number without bound, or is deeper than `levels`.
    """
    if levels == 0:
        raise ValueError(f"nested deeper than {MOST_NESTED} levels")
    if type(told) is dict:
        if set(map(type, told.values())) <= {int} and all(map(str.isascii, told)):
            return told
        return {str(text_of(name)): plain(value, levels - 1) for name, value in told.items()}
    if type(told) is list:
        return [plain(value, levels - 1) for value in told]
    if type(told) is float and not math.isfinite(told):
        raise ValueError("a number that is none, or without bound")
    return text_of(told) if type(told) is str else told


def object_in(told: Any, name: str) -> dict[str, Any]:
    """The object under `name` in an object; {} if there is none, or `told` is none."""
    found = told.get(name) if isinstance(told, dict) else None
    return found if isinstance(found, dict) else {}


def objects_in(told: Any, name: str) -> list[dict[str, Any]]:
    """The list under `name` in an object, with {} for each thing in it that is no object; [] if there is none."""
    found = told.get(name) if isinstance(told, dict) else None
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def text_in(told: Mapping[str, Any], name: str) -> str:
    """The text under `name`, as Unicode; "" if there is none."""
    found = told.get(name)
    return text_of(found) or "" if isinstance(found, str) else ""


def count_in(told: Mapping[str, Any], name: str) -> int | None:
    """The number of something under `name`; None if there is none."""
    found = told.get(name)
    return found if type(found) is int and 0 <= found < MOST_COUNT else None


def fingerprint_in(data: dict[str, Any]) -> str | None:
    """vLLM's `system_fingerprint` in a reply, for people and records. None: it tells none."""
    told = data.get("system_fingerprint")
    return shown(told) if isinstance(told, str) else None
