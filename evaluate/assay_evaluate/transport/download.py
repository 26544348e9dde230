"""A file whose size and hash are known beforehand, from the first of several addresses that has it.

Not for servers of models: a download follows redirects, goes through the proxies of the environment, and may be large.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from assay.atomic_files import replacing
from assay.foreign_text import shown
from assay_evaluate.transport.errors import TransportError

SILENCE_S = 30
"""Between two parts of a file, and to connect."""
SLOWEST_BYTES_S = 50_000
"""A download that is slower than this on average, after the first `SILENCE_S`, is given up."""


class NotDownloaded(TransportError):
    """No address had the file: one clause for each."""


def download(urls: Sequence[str], path: Path, num_bytes: int, sha256: str) -> None:
    """The file to `path`, whole and checked or not at all. NotDownloaded; OSError: it cannot be written."""
    reasons = []
    for url in urls:
        reason = _from_one(url, path, num_bytes, sha256)
        if reason is None:
            return
        reasons.append(f"{url}: {reason}")
    raise NotDownloaded("; ".join(reasons))


def find_problem(url: str, timeout_s: float) -> str | None:
    """Why an address does not have a file; None: it answers. Nothing is downloaded."""
    try:
        with _client(timeout_s) as client:
            status = client.head(url).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _shown(error)
    return None if status == 200 else f"HTTP {status}"


def _from_one(url: str, path: Path, num_bytes: int, sha256: str) -> str | None:
    """Why the file does not come from one address; None: it is at `path`."""
    digest, received = hashlib.sha256(), 0
    limit_s = SILENCE_S + num_bytes / SLOWEST_BYTES_S
    deadline = time.monotonic() + limit_s
    try:
        with _client(SILENCE_S) as client, client.stream("GET", url) as reply:
            if reply.status_code != 200:
                return f"HTTP {reply.status_code}"
            with replacing(path) as partial:
                with partial.open("wb") as file:
                    for part in reply.iter_bytes():
                        received += len(part)
                        if received > num_bytes:
                            raise _WrongFile(f"more than {num_bytes:,} bytes")
                        if time.monotonic() > deadline:
                            raise _WrongFile(f"{received:,} of {num_bytes:,} bytes came in {limit_s:.0f} s")
                        digest.update(part)
                        file.write(part)
                if received != num_bytes:
                    raise _WrongFile(f"{received:,} bytes instead of {num_bytes:,}")
                if digest.hexdigest() != sha256:
                    raise _WrongFile(f"SHA-256 {digest.hexdigest()[:12]} instead of {sha256[:12]}: another file")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _shown(error)
    except _WrongFile as problem:
        return str(problem)
    return None


class _WrongFile(Exception):
    """What comes is not the file."""


def _client(timeout_s: float) -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=timeout_s, headers={"accept-encoding": "identity"})


def _shown(error: Exception) -> str:
    return shown(error, 100) or type(error).__name__
