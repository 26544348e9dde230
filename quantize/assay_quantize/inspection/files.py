"""The files of a checkpoint in a folder, on the hub or below a URL, all read the same way; nothing of them is believed.

Headers come one request a shard, many at a time. Weights stay where they are until a range of them is asked for.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import httpx

from assay.errors import CheckpointError
from assay.safe_files import MAX_JSON_BYTES, open_inside
from assay.safetensors_index import INDEX_NAME
from assay.secret_text import hide_password
from assay_quantize.checkpoint.declaration import READ_BESIDE
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.headers import TensorHeader, parse_header
from assay_quantize.checkpoint.hub import FIRST_BYTES, NUM_CONNECTIONS, TIMEOUT_S, Repository
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.inspection.gguf_names import with_one_model

Headers = dict[str, TensorHeader]
SMALL_NAMES = (
    CONFIG, INDEX_NAME, *READ_BESIDE, "generation_config.json",
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "preprocessor_config.json", "README.md",
    "assay_manifest.json", "recipe.yaml", "model.safetensors", "consolidated.safetensors",
)  # fmt: skip
"""Asked for below a URL, which lists nothing."""
_BLOCK = 4096
"""Smallest unit in which a file system leaves holes."""


class Files(Protocol):
    """names: of the files at the top. folders: beside them. lists_all: whether `names` is all there is."""

    @property
    def location(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def names(self) -> frozenset[str]: ...
    @property
    def folders(self) -> frozenset[str]: ...
    @property
    def lists_all(self) -> bool: ...
    @property
    def is_local(self) -> bool: ...

    def small(self, name: str) -> bytes | None:
        """A small file; None: there is none. CheckpointError: it cannot be read, or is not small."""

    def headers(self, shards: Sequence[str]) -> dict[str, Headers | CheckpointError]:
        """Of each shard its headers, or what is wrong with them."""

    def read(self, shard: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a shard; CheckpointError where they cannot be had. Safe to use from many threads."""

    def is_hollow(self, shard: str, data_begin: int) -> bool:
        """Whether the shard has a header and no data: all behind `data_begin` is zero and was never written."""


class FolderFiles:
    """A folder on this machine, or in it one GGUF model and what lies beside it."""

    def __init__(self, place: Path) -> None:
        """place: the folder, or a GGUF file."""
        is_gguf = place.suffix == ".gguf" and place.is_file()
        folder = place.parent if is_gguf else place
        if not folder.is_dir():
            what = "is a file; give the checkpoint's folder" if folder.exists() else "no such folder"
            raise CheckpointError(f"{folder}: {what}; `assay inspect` takes a folder, a GGUF file, a hub id or a URL of files")
        entries = list(folder.iterdir())
        self.location, self.revision = str(place), None
        names = frozenset(path.name for path in entries if not path.is_dir())
        self.names = with_one_model(names, place.name) if is_gguf else names
        self.folders = frozenset(path.name for path in entries if path.is_dir())
        self.lists_all = self.is_local = True
        self._folder, self._shards = folder, OpenShards(folder, advice=os.POSIX_FADV_RANDOM)

    def small(self, name: str) -> bytes | None:
        if name not in self.names:
            return None
        path = self._folder / name
        try:
            with open_inside(self._folder, name) as file:
                if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                    raise CheckpointError(f"{path}: {size} bytes, allowed are {MAX_JSON_BYTES}; is it the right file?")
                return file.read(MAX_JSON_BYTES)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None

    def headers(self, shards: Sequence[str]) -> dict[str, Headers | CheckpointError]:
        return {shard: _caught(functools.partial(self._header, shard)) for shard in shards}

    def _header(self, shard: str) -> Headers:
        size = os.fstat(self._shards.open(shard).descriptor).st_size
        return parse_header(str(self._folder / shard), shard, size, lambda begin, end: self.read(shard, begin, end))

    def read(self, shard: str, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        self._shards.read_into(memoryview(buffer), shard, begin, "is shorter than its header says; download it again")
        return bytes(buffer)

    def is_hollow(self, shard: str, data_begin: int) -> bool:
        descriptor = self._shards.open(shard).descriptor
        size = os.fstat(descriptor).st_size
        first_block = min(size, -(-data_begin // _BLOCK) * _BLOCK)
        if any(self.read(shard, data_begin, first_block)):
            return False
        try:
            return first_block < size and os.lseek(descriptor, first_block, os.SEEK_DATA) >= size
        except OSError as error:  # ENXIO: no data behind it; others: the file system does not say
            return error.errno == errno.ENXIO


class HubFiles:
    """A repository of the Hugging Face hub at one commit."""

    def __init__(self, hub_id: str, revision: str = "main") -> None:
        self._hub = Repository(hub_id, revision)
        self.location, self.revision = hub_id, self._hub.commit
        self.names, self.folders = frozenset(self._hub.files), frozenset[str]()
        self.lists_all, self.is_local = True, False

    def small(self, name: str) -> bytes | None:
        return self._hub.read_small(name) if name in self.names else None

    def headers(self, shards: Sequence[str]) -> dict[str, Headers | CheckpointError]:
        read = zip(shards, self._hub.read_headers(shards), strict=True)
        return {shard: _caught(functools.partial(self._header, shard, *header)) for shard, header in read}

    def _header(self, shard: str, stored: bytes, num_bytes: int) -> Headers:
        return parse_header(f"{self.location}/{shard}", shard, num_bytes, lambda begin, end: stored[begin:end])

    def read(self, shard: str, begin: int, end: int) -> bytes:
        data = bytearray()
        self._hub.receive(shard, begin, end, lambda piece, position: data.extend(piece))
        return bytes(data)

    def is_hollow(self, shard: str, data_begin: int) -> bool:
        return False


class UrlFiles:
    """Files below a URL of a plain web server, which takes range requests and lists nothing."""

    def __init__(self, url: str) -> None:
        if url.endswith(".gguf"):
            raise only_in_a_folder(hide_password(url))
        self._url = url.rstrip("/") + "/"
        self.location, self.revision = hide_password(url), None
        self._client = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True, headers={"accept-encoding": "identity"})
        with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="files") as pool:
            sizes = dict(zip(SMALL_NAMES, pool.map(self._size, SMALL_NAMES), strict=True))
        self._sizes = {name: size for name, size in sizes.items() if size is not None}
        self.names, self.folders = frozenset(self._sizes), frozenset[str]()
        self.lists_all = self.is_local = False
        if CONFIG not in self.names:
            raise CheckpointError(f"{self.location}: has no {CONFIG}; give the URL below which a checkpoint's files lie")

    def small(self, name: str) -> bytes | None:
        if name not in self.names:
            return None
        if self._sizes[name] > MAX_JSON_BYTES:
            raise CheckpointError(f"{self.location}: {name} has {self._sizes[name]} bytes, allowed are {MAX_JSON_BYTES}")
        return self.read(name, 0, self._sizes[name])

    def headers(self, shards: Sequence[str]) -> dict[str, Headers | CheckpointError]:
        with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="headers") as pool:
            return dict(
                zip(shards, pool.map(lambda shard: _caught(functools.partial(self._header, shard)), shards), strict=True)
            )

    def _header(self, shard: str) -> Headers:
        size = self._sizes.get(shard) or self._size(shard)
        if size is None:
            raise CheckpointError(f"{self.location}: has no {shard}; complete the upload")
        first = self.read(shard, 0, min(FIRST_BYTES, size))
        return parse_header(
            f"{self.location}/{shard}", shard, size,
            lambda begin, end: first[begin:end] if end <= len(first) else self.read(shard, begin, end),
        )  # fmt: skip

    def read(self, shard: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        data = bytearray()
        try:
            with self._client.stream("GET", self._url + shard, headers={"range": f"bytes={begin}-{end - 1}"}) as answer:
                if answer.status_code != 206:
                    raise CheckpointError(
                        f"{self.location}/{shard}: HTTP {answer.status_code} to a request for a range; range requests are "
                        "needed; download the files and give the folder"
                    )
                for piece in answer.iter_raw():
                    data += piece
                    if len(data) > end - begin:
                        raise CheckpointError(f"{self.location}/{shard}: more bytes were sent than asked for; try again")
        except httpx.HTTPError as error:
            raise _not_answering(self.location, error) from None
        if len(data) < end - begin:
            raise CheckpointError(f"{self.location}/{shard}: ended at byte {begin + len(data)} of {end}; try again")
        return bytes(data)

    def is_hollow(self, shard: str, data_begin: int) -> bool:
        return False

    def _size(self, name: str) -> int | None:
        """Bytes of a file; None: there is none."""
        try:
            with self._client.stream("GET", self._url + name, headers={"range": "bytes=0-0"}) as answer:
                match = re.fullmatch(r"bytes 0-0/(\d{1,18})", answer.headers.get("content-range", ""))
                return int(match[1]) if answer.status_code == 206 and match else None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _not_answering(self.location, error) from None


def only_in_a_folder(location: str) -> CheckpointError:
    """Of GGUF elsewhere."""
    return CheckpointError(f"{location}: GGUF is inspected in a folder only; download the files and give the folder")


def _not_answering(location: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{location}: does not answer ({type(error).__name__}); check the URL, or give a folder")


def _caught(read: Callable[[], Headers]) -> Headers | CheckpointError:
    try:
        return read()
    except CheckpointError as problem:
        return problem
