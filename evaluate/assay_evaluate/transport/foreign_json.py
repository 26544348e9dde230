"""JSON that a server sent, read without trusting it; and the error in it, whatever the status of the reply was.

Gateways answer 200 and put the provider's error into the body (inspect_ai #1534, mini-swe-agent PR #902; OpenRouter's "Errors
and Debugging" says so of every error after the model began). Read here: `{"error": {"message", "code" | "type"}}` (OpenAI,
OpenRouter, Anthropic), `{"object": "error", "message", "code"}` (vLLM and SGLang before they took OpenAI's),
`choices[0].error` (OpenRouter), `{"detail": ...}` (FastAPI), `{"errors": [...]}` (Cloudflare), `{"message"}` and
`{"code", "msg"}` (Kong, Zhipu).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.foreign_text import one_line, shown

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


def text_of(value: Any) -> str | None:
    """A value that has to be text, as Unicode: a lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD.

    None stays None. TypeError: it is something else.
    """
    if value is None:
        return None
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in place of text")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_json(data: Any, levels: int = MOST_NESTED) -> Any:
    """A value of JSON that can be written as JSON again: with clean text, finite numbers, and not nested without end.

    ValueError: it has a number without bound, or is deeper than `levels`.
    """
    if levels == 0:
        raise ValueError(f"nested deeper than {MOST_NESTED} levels")
    if type(data) is dict:
        if set(map(type, data.values())) <= {int} and all(map(str.isascii, data)):
            return data
        return {str(text_of(name)): clean_json(value, levels - 1) for name, value in data.items()}
    if type(data) is list:
        return [clean_json(value, levels - 1) for value in data]
    if type(data) is float and not math.isfinite(data):
        raise ValueError("a number that is none, or without bound")
    return text_of(data) if type(data) is str else data


def object_in(data: Any, name: str) -> dict[str, Any]:
    """The object under `name` in an object; {} if there is none, or `told` is none."""
    member = data.get(name) if isinstance(data, dict) else None
    return member if isinstance(member, dict) else {}


def objects_in(data: Any, name: str) -> list[dict[str, Any]]:
    """The list under `name` in an object, with {} for each thing in it that is no object; [] if there is none."""
    members = data.get(name) if isinstance(data, dict) else None
    return [member if isinstance(member, dict) else {} for member in members] if isinstance(members, list) else []


def text_in(data: Mapping[str, Any], name: str) -> str:
    """The text under `name`, as Unicode; "" if there is none."""
    text = data.get(name)
    return text_of(text) or "" if isinstance(text, str) else ""


def count_in(data: Mapping[str, Any], name: str) -> int | None:
    """The number of something under `name`; None if there is none."""
    count = data.get(name)
    return count if type(count) is int and 0 <= count < MOST_COUNT else None


def fingerprint_in(data: dict[str, Any]) -> str | None:
    """vLLM's `system_fingerprint` in a reply, for people and records. None: it tells none."""
    fingerprint = data.get("system_fingerprint")
    return shown(fingerprint) if isinstance(fingerprint, str) else None


NAMED = {
    "ratelimit": 429, "ratelimitexceeded": 429, "ratelimiterror": 429, "insufficientquota": 429, "toomanyrequests": 429,
    "overloaded": 503, "overloadederror": 503, "serviceunavailable": 503, "engineoverloaded": 503,
    "timeout": 408, "timeouterror": 408, "requesttimeout": 408,
    "servererror": 500, "internalservererror": 500, "apierror": 500, "badgateway": 502,
    "invalidrequesterror": 400, "badrequest": 400, "badrequesterror": 400, "contextlengthexceeded": 400,
    "authenticationerror": 401, "invalidapikey": 401, "unauthorized": 401, "permissionerror": 403, "permissiondenied": 403,
    "notfounderror": 404, "modelnotfound": 404,
}  # fmt: skip
"""What codes and types of errors are called, letters only -> the HTTP status that OpenAI and Anthropic send with them."""
_WORDS = ("message", "msg", "detail", "error", "error_message", "errors", "title", "reason")


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error in a body. `status`: as HTTP has it; None: it names none that is known."""

    status: int | None
    message: str


def error_in(data: dict[str, Any]) -> ServerError | None:
    """The error that stands where a result should; None: there is none."""
    choices = data.get("choices")
    first = choices[0] if type(choices) is list and choices else None
    error = data.get("error") or (first.get("error") if type(first) is dict else None)
    if not error and data.get("object") != "error" and (choices or not _is_error(data)):
        return None
    inner = error if type(error) is dict else {}
    return ServerError(_status(inner) or _status(data), words_in(error or data))


def words_in(error: Any, levels: int = 8) -> str:
    """The words of an error, whatever is around them: text, `{"message": ...}`, a list of such."""
    if isinstance(error, list) and levels and error:
        return "; ".join(words_in(member, levels - 1) for member in error[:3])
    if not isinstance(error, dict) or not levels:
        return str(error)
    for name in _WORDS:
        if error.get(name):
            where = error.get("loc")  # FastAPI: which field
            place = f"{'.'.join(map(str, where))}: " if isinstance(where, list) else ""
            return place + words_in(error[name], levels - 1)
    return str(error)


def _is_error(data: dict[str, Any]) -> bool:
    """Whether an object that holds no result says why. A result of another kind, with a `message` of its own, has an `id`."""
    return bool(data.get("detail") or data.get("errors") or ((data.get("message") or data.get("msg")) and not data.get("id")))


def _status(error: dict[str, Any]) -> int | None:
    for name in ("code", "status", "status_code", "http_code", "type"):
        value = error.get(name)
        if type(value) is str and value.isascii() and value.isdecimal() and len(value) == 3:
            value = int(value)
        if type(value) is int and 400 <= value < 600:
            return value
        if type(value) is str and (status := NAMED.get(re.sub("[^a-z]", "", value.lower()))) is not None:
            return status
    return None
