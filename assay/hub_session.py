"""Answers of a Hugging Face hub, compared with what one says: `huggingface_hub` believes each of them.

guard_hub()  from here on, for all that `huggingface_hub` asks in this process, also on behalf of `datasets` and lm-eval

`hf_hub_download` names a file of its cache by the ETag that it is told, and a folder of links by the commit (1.33,
`_hf_hub_download_to_cache_dir`): `../../x` is written there. Listings are read whole, page after page, as long as another is
announced. Whoever answers in place of the hub, a mirror (HF_ENDPOINT) or a proxy, could use either.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator

import httpx
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from assay.errors import CheckpointError
from assay.secret_text import hide_password

MAX_ANSWER_BYTES = 64_000_000
"""Of one answer of the hub's API. A list of 100,000 files has 25 MB."""
MAX_PACKED_BYTES = 1_000_000
"""Of one that is compressed although nobody asked for it: a thousand times as much may come out of it."""
MAX_PAGES = 1000
"""Of one list, with 1,000 entries each."""
SLOWEST_BYTES_S, PATIENCE_S = 5_000, 60.0
"""An answer of the API that is slower on average, once it has taken that long, is given up."""
MOST_NAME_CHARACTERS = 200


@functools.cache
def guard_hub() -> None:
    """Have `huggingface_hub` ask through a client that refuses such answers, with a CheckpointError of one line."""
    set_client_factory(_client)


def _client() -> httpx.Client:
    client, pages = default_client_factory(), Counter[str]()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _ask_unpacked],
        "response": [*hooks["response"], _refuse_names, functools.partial(_bound, pages)],
    }
    return client


def _is_api(request: httpx.Request) -> bool:
    return request.method == "GET" and "/api/" in request.url.path


def _ask_unpacked(request: httpx.Request) -> None:
    if _is_api(request):
        request.headers["accept-encoding"] = "identity"


def _refuse_names(response: httpx.Response) -> None:
    """What `get_hf_file_metadata` takes from the headers, for names of files and folders."""
    headers = response.headers
    stated = {"commit": headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)}
    if response.request.method == "HEAD":
        etag = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG) or headers.get("etag")
        stated["ETag"] = None if etag is None else etag.removeprefix("W/").strip('"')
    for what, name in stated.items():
        if name is not None and not is_plain_name(name):
            raise CheckpointError(
                f"{hide_password(constants.ENDPOINT)} states {ascii(name)[:80]} as the {what} of a file, which no hub does; "
                "something between it and here changes what it says: try another network, or give a local file"
            )


def is_plain_name(name: str) -> bool:
    """Whether a file can be called so, and lies where it is put."""
    is_short = 0 < len(name) <= MOST_NAME_CHARACTERS
    return is_short and name.isprintable() and name not in (".", "..") and "/" not in name and "\\" not in name


def _bound(pages: Counter[str], response: httpx.Response) -> None:
    if not _is_api(response.request):
        return
    url = response.request.url
    where = f"{hide_password(constants.ENDPOINT)}: the answer for {url.path[:100]}"
    if "next" in response.links:
        pages[url.path] += 1
        if pages[url.path] > MAX_PAGES:
            raise CheckpointError(f"{where} has more than {MAX_PAGES} pages")
    else:
        pages.pop(url.path, None)
    is_packed = response.headers.get("content-encoding", "identity") != "identity"
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Bounded(response.stream, where, MAX_PACKED_BYTES if is_packed else MAX_ANSWER_BYTES)


class _Bounded(httpx.SyncByteStream):
    """The body of an answer, as long as it is neither too long nor too slow."""

    def __init__(self, stream: httpx.SyncByteStream, where: str, limit: int) -> None:
        self._stream, self._where, self._limit = stream, where, limit

    def __iter__(self) -> Iterator[bytes]:
        begun, received = time.monotonic(), 0
        for piece in self._stream:
            received += len(piece)
            if received > self._limit:
                raise CheckpointError(f"{self._where} is longer than {self._limit:,} bytes")
            seconds = time.monotonic() - begun
            if seconds > PATIENCE_S and received < seconds * SLOWEST_BYTES_S:
                raise CheckpointError(f"{self._where} came too slowly: {received:,} bytes in {seconds:.0f} s")
            yield piece

    def close(self) -> None:
        self._stream.close()
