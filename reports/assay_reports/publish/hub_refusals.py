"""What the hub answers to an upload that fails, as one line that says what to do. Tokens are in no message."""

from __future__ import annotations

import httpx
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

from assay.errors import AssayError
from assay.hub_errors import first_line, hub_address

KEPT = "run the same command again: what was uploaded is kept"
REFUSALS: dict[int, str] = {
    401: "does not know who you are (HTTP 401); log in (hf auth login), or set HF_TOKEN to a token that may write",
    402: "wants to be paid first (HTTP 402): the storage of this account is full; make room on the hub",
    403: "does not let you write there (HTTP 403); use a token with the right to write, and an owner that is yours",
    404: "has no such repository or branch, or hides it from you (HTTP 404); check the name, log in (hf auth login)",
    409: f"says that somebody else changes it at the same time (HTTP 409); {KEPT}",
    412: f"says that somebody else has changed it meanwhile (HTTP 412); {KEPT}",
    429: f"is asked too often (HTTP 429); wait some minutes, then {KEPT}",
}


def publish_error(repository: str, error: Exception) -> AssayError:
    """`error`, one of HUB_ERRORS, as the user is told it."""
    cause, endpoint = _cause(error), hub_address()
    if isinstance(cause, LocalTokenNotFoundError):
        return AssayError(f"{repository}: {endpoint} {REFUSALS[401]}")
    if isinstance(cause, OfflineModeIsEnabled):
        return AssayError(f"{repository}: HF_HUB_OFFLINE is set; unset it to publish")
    if isinstance(cause, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return AssayError(f"{repository}: {endpoint!r} (HF_ENDPOINT) is not a URL; write it like https://huggingface.co")
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return AssayError(f"{repository}: {endpoint} {REFUSALS.get(status, f'answered HTTP {status}; {KEPT}')}")
    if isinstance(cause, httpx.HTTPError):
        return AssayError(f"{repository}: the connection to {endpoint} broke off ({first_line(cause)}); {KEPT}")
    return AssayError(f"{repository}: cannot be published: {first_line(cause)}; {KEPT}")


def _cause(error: Exception) -> Exception:
    """The library says which file it was about, and keeps the reason as the cause."""
    while isinstance(error, RuntimeError) and not isinstance(error, httpx.HTTPError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
