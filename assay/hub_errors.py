"""What the Hugging Face hub and `huggingface_hub` refuse, as one line that says what to do.

Of what a server says only the status is shown: its text may hold anything. Addresses lose their queries, which are signatures.
"""

from __future__ import annotations

import re

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    OIDCError,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)

from assay.errors import CheckpointError
from assay.secret_text import hide_password

HUB_ERRORS = (httpx.HTTPError, httpx.InvalidURL, OIDCError, OSError, RuntimeError, ValueError)
"""What login, requests, downloads and `hf_xet` raise. An OSError of this machine's disk has an `errno`, others have none."""


def hub_address() -> str:
    """Where the hub is asked (HF_ENDPOINT), for messages: without a user and password."""
    return hide_password(constants.ENDPOINT)


def hub_error(hub_id: str, error: Exception, name: str | None = None) -> CheckpointError:
    """`error`, one of HUB_ERRORS, as the user is told it. name: of the file it is about."""
    cause, endpoint = _cause(error), hub_address()
    where = hub_id if name is None else f"{hub_id}/{name}"
    if isinstance(cause, OfflineModeIsEnabled):
        return CheckpointError(f"{where}: HF_HUB_OFFLINE is set; give a local folder, or unset it")
    if isinstance(cause, httpx.InvalidURL | httpx.UnsupportedProtocol) and endpoint.startswith(("http://", "https://")):
        return CheckpointError(
            f"{where}: {endpoint} sends the download on to an address that is not HTTP; try another network, or give a local "
            "folder"
        )
    if isinstance(cause, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return CheckpointError(f"{where}: {endpoint!r} (HF_ENDPOINT) is not a URL; write it like https://huggingface.co")
    if isinstance(cause, GatedRepoError):
        return CheckpointError(
            f"{where}: is gated; accept its terms at {endpoint}/{hub_id}, then log in (hf auth login) or set HF_TOKEN; "
            "a local folder works too"
        )
    if isinstance(cause, RevisionNotFoundError | RemoteEntryNotFoundError):
        what = "revision" if isinstance(cause, RevisionNotFoundError) else "file"
        return CheckpointError(
            f"{where}: no such {what} on {endpoint}; its branches, tags and files are at {endpoint}/{hub_id}"
        )
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if status in (401, 403, 404):
        what = "data set" if hub_id.startswith("datasets/") else "model"
        return CheckpointError(
            f"{where}: no such {what} on {endpoint} (HTTP {status}); if it is private, log in (hf auth login) or set HF_TOKEN; "
            "a local folder works too"
        )
    if status is not None:
        how = f"{endpoint} answered HTTP {status}"
    elif isinstance(cause, httpx.HTTPError):
        how = f"{endpoint} does not answer: {first_line(cause)}"
    else:
        how = f"cannot be downloaded: {first_line(cause)}"
    return CheckpointError(f"{where}: {how}; give a local folder, or try again")


def may_pass(error: Exception) -> bool:
    """Whether another try may meet a better moment."""
    cause = _cause(error)
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code >= 500 or cause.response.status_code in (408, 429)
    return not isinstance(cause, OfflineModeIsEnabled | httpx.InvalidURL | httpx.UnsupportedProtocol | ValueError)


def _cause(error: Exception) -> Exception:
    """Why a file is not to be had: the library says it is not in the cache either, and keeps the reason as the cause."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def first_line(error: Exception) -> str:
    """What a library says of an error, on one line: without passwords, and without the queries of addresses."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text.splitlines()[0]) if text else type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in hide_password(line))[:300].rstrip(".")
