"""JSON that a server sent: read without trusting it."""

from __future__ import annotations

import json
from typing import Any

from assay.foreign_text import one_line, shown

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
        text = str(data.get("error", data).get("message", data))
    except (NotJson, AttributeError, RecursionError):
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


def fingerprint_in(data: dict[str, Any]) -> str | None:
    """vLLM's `system_fingerprint` in a reply, for people and records. None: it tells none."""
    told = data.get("system_fingerprint")
    return shown(told) if isinstance(told, str) else None
