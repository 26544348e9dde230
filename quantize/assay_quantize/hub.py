"""A checkpoint on the Hugging Face hub, as its headers describe it. Weights stay there.

One request lists the files, two fetch config and index, and one range request per shard fetches its header (two when it
is longer than `FIRST_BYTES`): about 30 MB for GLM-5 instead of 1.5 TB. `HF_ENDPOINT` names another hub; `HF_TOKEN`
is sent to it and to no other host, and never printed.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from assay.errors import CheckpointError
from assay.safe_files import parse_json_object
from assay_quantize.checkpoint import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    Checkpoint,
    TensorHeader,
    as_source,
    assemble,
    parse_header,
)
from assay_quantize.source_format import check_config_readable

FIRST_BYTES = 65_536
"""Length of the first range request: holds the header of most shards."""
MAX_JSON_BYTES = 200_000_000
TRIES = 3
NUM_CONNECTIONS = 8


class HubFile(NamedTuple):
    """What the hub says about a file: its size, its SHA-256 (None where the hub states none), and what names its content."""

    num_bytes: int | None
    sha256: str | None
    content: str


def open_hub_checkpoint(hub_id: str, revision: str = "main") -> Checkpoint:
    """The checkpoint `hub_id` at `revision`, from its headers.

    Raises CheckpointError in one line: no such model, gated, offline, no safetensors, quantized already.
    """
    with hub_client(hub_id) as client:
        hub = Repository(client, hub_id, revision)
        listed = hub.list_files()
        files = sorted(listed)
        config = parse_json_object(f"{hub_id}: config.json", hub.get("config.json", files))
        check_config_readable(hub_id, config)
        if not any(name.endswith(".safetensors") for name in files):
            raise CheckpointError(f"{hub_id}: has no *.safetensors; take a release in safetensors")
        index = None
        if INDEX_NAME in files:
            index = parse_json_object(f"{hub_id}: {INDEX_NAME}", hub.get(INDEX_NAME, files))
        made = assemble(hub_id, None, config, index, files, hub.shard_headers)
    data = {shard: listed[shard].content for shard in made.shards}
    return replace(as_source(made), revision=hub.commit, data=data)


def hub_client(hub_id: str) -> httpx.Client:
    """A client that shows `HF_TOKEN` to the hub only. Raises CheckpointError when `HF_HUB_OFFLINE` is set."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise CheckpointError(f"{hub_id}: HF_HUB_OFFLINE is set; give a local folder, or unset it")
    token = os.environ.get("HF_TOKEN", "").strip()
    # httpx drops Authorization when the hub redirects to the host of its storage
    headers = {"user-agent": "assay", **({"authorization": f"Bearer {token}"} if token else {})}
    return httpx.Client(headers=headers, follow_redirects=True, timeout=30.0)


class Repository:
    """One revision of one model; after `list_files` pinned to its commit, so that a push in between changes nothing."""

    def __init__(self, client: httpx.Client, hub_id: str, revision: str) -> None:
        self.client = client
        self.hub_id = hub_id
        self.revision = revision
        self.commit: str | None = None
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"

    def list_files(self) -> dict[str, HubFile]:
        """All files at the top of the repository, and what the hub states of each."""
        url = f"{self.endpoint}/api/models/{quote(self.hub_id)}/revision/{quote(self.revision, safe='')}?blobs=true"
        listing = parse_json_object(f"{self.hub_id}: file list", self.fetch(url, None)[0])
        commit = listing.get("sha")
        if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit):
            self.revision = self.commit = commit
        siblings = listing.get("siblings") or []
        found = (_hub_file(one, self.revision) for one in siblings if isinstance(one, dict))
        return {name: file for name, file in found if name and "/" not in name}

    def get(self, name: str, files: list[str]) -> bytes:
        """A small file."""
        if name not in files:
            raise CheckpointError(f"{self.hub_id}: has no {name}; is it a model in transformers format?")
        return self.fetch(self.url(name), None)[0]

    def shard_headers(self, shards: list[str]) -> list[dict[str, TensorHeader]]:
        """Headers of `shards`, a few requests at a time."""
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            return list(pool.map(self._shard_header, shards))

    def _shard_header(self, shard: str) -> dict[str, TensorHeader]:
        first, file_bytes = self.fetch(self.url(shard), (0, FIRST_BYTES))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 + length <= min(file_bytes, 8 + MAX_HEADER_BYTES):
            first += self.fetch(self.url(shard), (len(first), 8 + length))[0]
        return parse_header(f"{self.hub_id}/{shard}", shard, file_bytes, lambda begin, end: first[begin:end])

    def url(self, name: str) -> str:
        return f"{self.endpoint}/{quote(self.hub_id)}/resolve/{quote(self.revision, safe='')}/{quote(name)}"

    def fetch(self, url: str, span: tuple[int, int] | None) -> tuple[bytes, int]:
        """(bytes of `url`, or of its range [begin, end); size of the whole file). Tries again what may pass."""
        for attempt in range(1, TRIES + 1):
            try:
                return self._fetch_once(url, span)
            except MayPass as problem:
                if attempt == TRIES:
                    raise CheckpointError(
                        f"{self.hub_id}: {self.endpoint} does not answer: {problem}; give a local folder, or try again"
                    ) from None
                time.sleep(0.5 * attempt)
        raise AssertionError("unreachable")

    def _fetch_once(self, url: str, span: tuple[int, int] | None) -> tuple[bytes, int]:
        headers = {"accept-encoding": "identity"}
        if span is not None:
            headers["range"] = f"bytes={span[0]}-{span[1] - 1}"
        limit = MAX_JSON_BYTES if span is None else span[1] - span[0]
        try:
            with self.client.stream("GET", url, headers=headers) as response:
                file_bytes = self.check(response, ranged=span is not None)
                data = bytearray()
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > limit:  # stop before a server that does not count sends a whole shard
                        raise CheckpointError(f"{self.hub_id}: {url} is longer than the {limit} bytes asked for")
        except httpx.InvalidURL:
            raise CheckpointError(f"{self.hub_id}: {self.endpoint!r} (HF_ENDPOINT) is not a URL") from None
        except httpx.HTTPError as error:
            raise MayPass(str(error) or type(error).__name__) from None
        return bytes(data), len(data) if file_bytes is None else file_bytes

    def check(self, response: httpx.Response, *, ranged: bool) -> int | None:
        """Refuse every answer but the one asked for; the size of the whole file, for a range."""
        status = response.status_code
        if status in (401, 403, 404):
            raise CheckpointError(
                f"{self.hub_id}: no such model, revision or file on {self.endpoint} (HTTP {status}); if it is private or "
                "gated, set HF_TOKEN; a local folder works too"
            )
        if status >= 500 or status == 429:
            raise MayPass(f"HTTP {status}")
        if not ranged and status == 200:
            return None
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("content-range", ""))
        if ranged and status == 206 and total:
            return int(total[1])
        if ranged and status == 200:
            raise CheckpointError(f"{self.hub_id}: {self.endpoint} ignores range requests; download it and give the folder")
        raise CheckpointError(f"{self.hub_id}: {self.endpoint} answered HTTP {status} where {200 + 6 * ranged} was expected")


class MayPass(Exception):
    """A failure that another try may not meet."""


def _hub_file(sibling: dict[str, Any], commit: str) -> tuple[str, HubFile]:
    lfs = sibling.get("lfs")
    stated = lfs.get("sha256") if isinstance(lfs, dict) else None
    sha256 = stated if isinstance(stated, str) and re.fullmatch(r"[0-9a-f]{64}", stated) else None
    size, blob = sibling.get("size"), sibling.get("blobId")
    content = f"blob:{blob}" if isinstance(blob, str) else f"commit:{commit}"
    if sha256 is not None:
        content = f"sha256:{sha256}"
    return str(sibling.get("rfilename", "")), HubFile(size if isinstance(size, int) else None, sha256, content)
