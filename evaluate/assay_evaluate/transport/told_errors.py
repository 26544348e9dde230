"""The error in a server's JSON: its words, and the HTTP status that it names, whatever the status of the reply was.

Gateways answer 200 and put the provider's error into the body (inspect_ai #1534, mini-swe-agent PR #902; OpenRouter's "Errors
and Debugging" says so of every error after the model began). Read here: `{"error": {"message", "code" | "type"}}` (OpenAI,
OpenRouter, Anthropic), `{"object": "error", "message", "code"}` (vLLM and SGLang before they took OpenAI's),
`choices[0].error` (OpenRouter), `{"detail": ...}` (FastAPI), `{"errors": [...]}` (Cloudflare), `{"message"}` and
`{"code", "msg"}` (Kong, Zhipu).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
class ToldError:
    """An error in a body. `status`: as HTTP has it; None: it names none that is known."""

    status: int | None
    message: str


def error_in(data: dict[str, Any]) -> ToldError | None:
    """The error that stands where a result should; None: there is none."""
    choices = data.get("choices")
    first = choices[0] if type(choices) is list and choices else None
    told = data.get("error") or (first.get("error") if type(first) is dict else None)
    if not told and data.get("object") != "error" and (choices or not _is_error(data)):
        return None
    inner = told if type(told) is dict else {}
    return ToldError(_status(inner) or _status(data), words_in(told or data))


def words_in(told: Any, levels: int = 8) -> str:
    """The words of an error, whatever is around them: text, `{"message": ...}`, a list of such."""
    if isinstance(told, list) and levels and told:
        return "; ".join(words_in(one, levels - 1) for one in told[:3])
    if not isinstance(told, dict) or not levels:
        return str(told)
    for name in _WORDS:
        if told.get(name):
            where = told.get("loc")  # FastAPI: which field
            place = f"{'.'.join(map(str, where))}: " if isinstance(where, list) else ""
            return place + words_in(told[name], levels - 1)
    return str(told)


def _is_error(data: dict[str, Any]) -> bool:
    """Whether an object that holds no result says why. A result of another kind, with a `message` of its own, has an `id`."""
    return bool(data.get("detail") or data.get("errors") or ((data.get("message") or data.get("msg")) and not data.get("id")))


def _status(told: dict[str, Any]) -> int | None:
    for name in ("code", "status", "status_code", "http_code", "type"):
        value = told.get(name)
        if type(value) is str and value.isascii() and value.isdecimal() and len(value) == 3:
            value = int(value)
        if type(value) is int and 400 <= value < 600:
            return value
        if type(value) is str and (known := NAMED.get(re.sub("[^a-z]", "", value.lower()))) is not None:
            return known
    return None
