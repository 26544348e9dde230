"""Text that somebody else chose (a server's model id, version, words of an error): where it lands, it must stay text.

one_line(text)        on a terminal, in a comment: what does not print is written out
shown(told)           the same, and not longer than a line of a message
safe_name(told)       as the name of a file or folder
in_markdown(text)     in a heading, list or table of Markdown
in_page(html)         of a whole page of HTML, already escaped: control codes and bidirectional marks are written out
in_rich(text)         for rich to print: neither markup nor control codes
check_label(label)    a name that the user chose: refused, not changed
"""

from __future__ import annotations

import hashlib
import json
import re

from assay.errors import AssayError

MOST_NAME_BYTES = 100
"""Of a file's name; file systems allow 255, and suffixes are added to it."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
MOST_SHOWN = 200
"""Characters of a message."""


def one_line(text: str) -> str:
    """`text` with line breaks, ESC, NUL, bidirectional marks, lone surrogates written as in JSON: `\\n`, `\\u001b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


def shown(told: object, most: int = MOST_SHOWN) -> str:
    """What a server told, of whatever type, for people: one line of at most `most` characters, and `…` for what is cut."""
    text = str(told)
    return one_line(text[:most]) + ("…" if len(text) > most else "")


def safe_name(told: str) -> str:
    """The last part of `told` as the name of a file or folder. The file system is not asked.

    A name that had to be changed ends with eight digits of the SHA-256 of `told`: two that look alike afterwards stay two.
    """
    last = re.split(r"[/\\]", told.rstrip("/\\"))[-1]
    name = re.sub(r"[^\w.-]", "-", last).encode()[:MOST_NAME_BYTES].decode(errors="ignore").strip(".-") or "model"
    if name == told:
        return name
    return f"{name}-{hashlib.sha256(told.encode(errors='surrogatepass')).hexdigest()[:8]}"


def check_label(label: str | None) -> None:
    """AssayError if a label that the user gave cannot be the name of a file."""
    if label is None:
        return
    is_name = label not in {"", ".", ".."} and label.isprintable() and not re.search(r"[/\\]", label)
    if not is_name or len(label.encode()) > MOST_NAME_BYTES:
        raise AssayError(
            f"--label {shown(repr(label))}: names a file, so it may hold no slash, backslash or control character, be at most "
            f"{MOST_NAME_BYTES} bytes long, and not be empty, . or ..; give a name such as w4a16"
        )


def in_markdown(text: object) -> str:
    """`text` inside a line or a table's cell: no line break, no new cell, no link, no HTML. Emphasis and code stay."""
    flat = one_line(" ".join(str(text).split()))
    flat = flat.replace("\\", "\\\\").replace("|", "\\|").replace("](", "]\\(")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", flat)


def in_page(html: str) -> str:
    """A page without what is not seen in it: ESC and other control codes, marks that turn or join text, lone surrogates.

    They are written as in JSON, so that a name cannot show itself as another. Line ends and tabs stay.
    """
    return _UNSEEN.sub(lambda match: json.dumps(match[0])[1:-1], html)


def in_rich(text: str) -> str:
    """One line for rich to print as it is: neither markup nor control codes."""
    from rich import markup  # the serving environment has no rich

    return markup.escape(one_line(text))
