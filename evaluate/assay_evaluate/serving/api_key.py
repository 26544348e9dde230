"""A server's API key: named by an environment variable, sent as a bearer token, written nowhere."""

from __future__ import annotations

import os
import re

from assay.errors import AssayError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def bearer(variable: str | None, asked_by: str) -> dict[str, str]:
    """The header that carries the key in the environment variable `variable`; none without one.

    asked_by: where the variable was named, for the error (`--api-key-env`). AssayError: it holds no key. The key itself is in
    no message, on no command line and in no record.
    """
    if variable is None:
        return {}
    if not _NAME.fullmatch(variable):  # perhaps the key itself, which is not repeated
        raise AssayError(
            f"{asked_by}: takes the name of an environment variable (letters, digits, underscores), not the key itself; "
            "export the key, and give the variable's name"
        )
    key = os.environ.get(variable)
    if not key:
        raise AssayError(f"{asked_by} {variable}: no such environment variable, or it is empty; export it first")
    if not key.isascii() or not key.isprintable() or " " in key:  # the HTTP client would quote it in its error
        raise AssayError(
            f"{asked_by} {variable}: its value has a space, a line break or a character outside ASCII; export the bare key"
        )
    return {"Authorization": f"Bearer {key}"}
