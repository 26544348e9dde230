"""A checkpoint on the Hugging Face hub, as its headers describe it. Weights stay there.

One request lists the files, two fetch config and index, and one range request per shard fetches its header (two when it
is longer than `FIRST_BYTES`): about 30 MB for GLM-5 instead of 1.5 TB.

Requests are those of `huggingface_hub`: its session, its login (`hf auth login`, or HF_TOKEN), HF_ENDPOINT, HF_HUB_OFFLINE, its
waiting when the hub is busy. The token is sent to the hub, and not to the storage that the hub redirects to. What comes back is
bounded, checked against what the hub states of it, and parsed here. (The list is not `HfApi.model_info`: that tries once, reads
without a bound, and fails on what a model card may hold. And `hf_hub_download` compares neither size nor hash: what comes is
renamed into place if it is as long as the answer said, and what lies in the cache is taken for right.)
"""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import httpx
from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.utils import (
    HFValidationError,
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    validate_repo_id,
)
from tqdm import tqdm  # type: ignore[import-untyped]

import assay
from assay.errors import AssayError, CheckpointError
from assay.file_data import content_differs, data_of_files
from assay.hub_errors import HUB_ERRORS, hub_address, hub_error
from assay.hub_session import guard_hub, is_plain_name
from assay.safe_files import MAX_JSON_BYTES, parse_json_object
from assay.safetensors_index import INDEX_NAME, MAX_HEADER_BYTES
from assay_quantize.checkpoint.checkpoint import Checkpoint, as_source, assemble
from assay_quantize.checkpoint.copied_files import is_copied, is_template_beside
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.headers import TensorHeader, parse_header
from assay_quantize.checkpoint.source_format import check_config_readable

FIRST_BYTES = 65_536
"""Length of the first range request: holds the header of most shards."""
NUM_CONNECTIONS = 8
TIMEOUT_S = 30.0
"""Without one new byte."""
FIRST_WAIT_S = 0.5


MAX_LIST_BYTES = 32_000_000
MAX_FILES = 200_000
"""Of a repository; the hub itself advises at most 100,000."""
KIND_NAMES = {"model": "model", "dataset": "data set"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFile(NamedTuple):
    """What the hub says about a file: its size, if it states one, and what names its content (`Plan.source_files`)."""

    num_bytes: int | None
    content: str

    @property
    def has_hash(self) -> bool:
        """Whether `content` names its bytes, and not only the commit that it is in."""
        return not self.content.startswith("commit:")


def open_hub_checkpoint(hub_id: str, revision: str = "main", *, allow_quantized: bool = False) -> Checkpoint:
    """The checkpoint `hub_id` at `revision`, from its headers.

    allow_quantized: also open what cannot be a source, its tensors as they are stored (to judge how it would be served).
    Raises CheckpointError in one line: no such model, gated, offline, no safetensors, quantized already.
    """
    hub = Repository(hub_id, revision)
    files = sorted(hub.files)
    config = parse_json_object(f"{hub_id}: {CONFIG}", hub.read_small(CONFIG))
    if not allow_quantized:
        check_config_readable(hub_id, config)
    if not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(f"{hub_id}: has no *.safetensors; take a release in safetensors")
    index = None
    if INDEX_NAME in files:
        index = parse_json_object(f"{hub_id}: {INDEX_NAME}", hub.read_small(INDEX_NAME))
    made = assemble(hub_id, None, config, index, files, hub.shard_headers)
    small = [name for name, file in hub.files.items() if name == CONFIG or is_copied(name, file.num_bytes or 0)]
    data = {name: hub.files[name].content for name in (*made.shards, *small)}
    made = replace(made, revision=hub.commit, data=data)
    return made if allow_quantized else as_source(made)


class Repository:
    """One revision of a model or data set, listed when it is made and pinned to its commit: a push in between changes nothing.

    files: those at the top of a model's repository and its further chat templates, all of a data set's, and what the hub states
    of each. commit: None where the hub does not say it. Raises CheckpointError: no such repository, gated, offline, no answer,
    another commit listed than the one that was asked for, or files that lie in no folder of a data set.
    """

    tries = 3
    """Broken connections in a row, without one new byte, until it is given up."""

    def __init__(self, hub_id: str, revision: str = "main", kind: Literal["model", "dataset"] = "model") -> None:
        guard_hub()
        if not constants.HF_DEBUG and "HF_HUB_VERBOSITY" not in os.environ:
            # its warnings show signed addresses, in the midst of our lines
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            validate_repo_id(hub_id)
        except HFValidationError:
            raise CheckpointError(
                f"{hub_id}: is no id of a {KIND_NAMES[kind]} on the hub; write it like zai-org/GLM-5"
            ) from None  # fmt: skip
        self.hub_id, self.kind = hub_id, kind
        self.revision = revision
        self.commit: str | None = None
        self.files = self._list()

    def read_small(self, name: str) -> bytes:
        """A small file (config, index...), of the size and the hash that the hub states."""
        if name not in self.files:
            raise CheckpointError(f"{self.hub_id}: has no {name}; is it a model in transformers format?")
        stated = self.files[name]
        limit = MAX_JSON_BYTES if stated.num_bytes is None else stated.num_bytes
        if limit > MAX_JSON_BYTES:
            raise CheckpointError(f"{self.hub_id}/{name}: {limit} bytes, allowed are {MAX_JSON_BYTES}; is it the right file?")
        for _ in range(2):
            data = self._read(self.url(name), limit)
            how = difference(stated, len(data), io.BytesIO(data))
            if not how:
                return data
        raise altered_error(self.hub_id, name, how)

    def shard_headers(self, shards: Sequence[str]) -> list[dict[str, TensorHeader]]:
        """Headers of `shards`, parsed and checked."""

        def parse(shard: str, stored: bytes, num_bytes: int) -> dict[str, TensorHeader]:
            return parse_header(f"{self.hub_id}/{shard}", shard, num_bytes, lambda begin, end: stored[begin:end])

        return [parse(shard, *header) for shard, header in zip(shards, self.read_headers(shards), strict=True)]

    def read_headers(self, names: Sequence[str]) -> list[tuple[bytes, int]]:
        """(safetensors header as it is stored, its length in front; size of the whole file) of each file, some at a time."""
        with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="headers") as pool:
            return list(pool.map(self._read_header, names))

    def receive(self, name: str, begin: int, end: int, write: Callable[[bytes, int], None]) -> int:
        """Hand bytes [begin, end) of a file to `write(data, position)` as they come; returns the size of the whole file.

        A connection that breaks is taken up where it broke. The range may end behind the file.
        """
        position, failures, num_bytes = begin, 0, end
        while position < min(end, num_bytes):
            before = position
            try:
                with self._answer(self.url(name), (position, end)) as response:
                    num_bytes = self._total(name, response, position)
                    for data in response.iter_raw():
                        if len(data) > min(end, num_bytes) - position:
                            raise CheckpointError(f"{self.hub_id}/{name}: more bytes were sent than asked for; try again")
                        write(data, position)
                        position += len(data)
                problem: Exception = httpx.RemoteProtocolError("it ended early")
            except httpx.RequestError as error:
                problem = error
            if position < min(end, num_bytes):
                failures = 1 if position > before else failures + 1
                self._wait(failures, problem)
        return num_bytes

    @property
    def shown_id(self) -> str:
        """As addresses of the hub have it."""
        return self.hub_id if self.kind == "model" else f"datasets/{self.hub_id}"

    def url(self, name: str) -> str:
        return hf_hub_url(self.hub_id, name, repo_type=self.kind, revision=self.revision)

    def _list(self) -> dict[str, HubFile]:
        revision = quote(self.revision, safe="")
        url = f"{constants.ENDPOINT}/api/{self.kind}s/{quote(self.hub_id)}/revision/{revision}?blobs=true"
        listing = parse_json_object(f"{self.shown_id}: file list", self._read(url, MAX_LIST_BYTES))
        commit, before = listing.get("sha"), self.revision
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            self.revision = self.commit = commit
        if _COMMIT.fullmatch(before) and self.revision != before:
            raise CheckpointError(
                f"{self.shown_id}: commit {before[:12]} was asked for, {self.revision[:12]} is listed; try again later"
            )
        siblings = listing.get("siblings")
        listed = siblings if isinstance(siblings, list) else []
        if len(listed) > MAX_FILES:
            raise CheckpointError(f"{self.shown_id}: {len(listed):,} files are listed, at most {MAX_FILES:,} are read")
        files = dict(_hub_file(entry, self.revision) for entry in listed if isinstance(entry, dict))
        if self.kind == "model":
            return {name: file for name, file in files.items() if is_plain_name(name) or is_template_beside(name)}
        if (odd := next((name for name in files if not _is_plain_path(name)), None)) is not None:
            raise CheckpointError(f"{self.shown_id}: {ascii(odd)[:100]} is listed, which is no path in a data set")
        return files

    def _read_header(self, name: str) -> tuple[bytes, int]:
        stored = bytearray()
        num_bytes = self.receive(name, 0, FIRST_BYTES, lambda data, position: stored.extend(data))
        length = 8 + int.from_bytes(stored[:8], "little")
        if len(stored) < length <= min(num_bytes, 8 + MAX_HEADER_BYTES):
            self.receive(name, len(stored), length, lambda data, position: stored.extend(data))
        return bytes(stored[:length]), num_bytes

    def _read(self, url: str, limit: int) -> bytes:
        """All of an answer of at most `limit` bytes."""
        failures = 0
        while True:
            data = bytearray()
            try:
                with self._answer(url) as response:
                    for piece in response.iter_bytes():
                        data += piece
                        if len(data) > limit:  # stop before a server that does not count sends a whole shard
                            raise CheckpointError(f"{self.hub_id}: {url} is longer than the {limit} bytes expected")
                return bytes(data)
            except httpx.RequestError as error:
                failures += 1
                self._wait(failures, error)

    @contextmanager
    def _answer(self, url: str, span: tuple[int, int] | None = None) -> Iterator[httpx.Response]:
        """The answer for `url`, or for its bytes [begin, end). CheckpointError: it is refused; RequestError: try again."""
        with ExitStack() as stack:
            try:
                headers = build_hf_headers(library_name="assay", library_version=assay.__version__)
                headers["accept-encoding"] = "identity"
                if span is not None:
                    headers["range"] = f"bytes={span[0]}-{span[1] - 1}"
                # it waits where the hub is busy; what breaks while the answer is read, it could not begin again
                response = stack.enter_context(
                    http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S, retry_on_exceptions=())
                )
                if response.is_error:
                    response.close()  # unread: an error may be as long as it likes
                hf_raise_for_status(response)
            except httpx.RequestError:
                raise
            except HUB_ERRORS as error:
                raise hub_error(self.hub_id, error) from None
            yield response

    def _total(self, name: str, response: httpx.Response, begin: int) -> int:
        """Size of the whole file, from the answer for a range that begins at `begin`."""
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", ""))
        if response.status_code == 200:
            raise CheckpointError(f"{self.hub_id}: {hub_address()} ignores range requests; download it and give the folder")
        if response.status_code != 206 or match is None or int(match[1]) != begin:
            raise CheckpointError(f"{self.hub_id}/{name}: HTTP {response.status_code} and another range than the one asked for")
        num_bytes, stated = int(match[2]), self.files[name].num_bytes
        if stated not in (None, num_bytes):
            raise CheckpointError(f"{self.hub_id}/{name}: {num_bytes} bytes, listed with {stated}; try again later")
        return num_bytes

    def _wait(self, failures: int, problem: Exception) -> None:
        """Before another try; after the last one, raise `problem` as a CheckpointError."""
        if failures >= self.tries:
            raise hub_error(self.hub_id, problem) from None
        time.sleep(FIRST_WAIT_S * 2 ** (failures - 1))


def altered_error(hub_id: str, name: str, how: str) -> CheckpointError:
    """The error for a file that twice was not what the hub states."""
    return CheckpointError(
        f"{hub_id}/{name}: {how}, downloaded twice; something between {hub_address()} and here changes it; try another "
        "network, or give a local folder"
    )


def difference(stated: HubFile, num_bytes: int, file: io.BufferedIOBase) -> str:
    """How a file of `num_bytes` differs from what the hub states of it, in its size or its hash; empty: in neither."""
    if stated.num_bytes not in (None, num_bytes):
        return f"{num_bytes} bytes where the hub states {stated.num_bytes}"
    what = content_differs(stated.content, num_bytes, file) if stated.has_hash else ""
    return what and f"its {what} is not the one the hub states"


def check_hashes_stated(hub_id: str, files: Mapping[str, str]) -> None:
    """CheckpointError naming a file of a source (`Plan.source_files`) of which the hub states no hash."""
    unknown = next((name for name, content in sorted(files.items()) if content.startswith("commit:")), None)
    if unknown is not None:
        raise CheckpointError(
            f"{hub_id}: the hub states no hash of {unknown}, so a damaged download could not be told from a whole one; "
            "download it by other means and give the folder"
        )


def _is_plain_path(name: str) -> bool:
    """Whether a path stays in the folder that it is put into, and a file system takes it."""
    return len(name) <= 1000 and all(map(is_plain_name, name.split("/")))


def _hub_file(sibling: dict[str, Any], commit: str) -> tuple[str, HubFile]:
    """What the hub says of a file; a size or hash that is none is as one that is missing."""
    lfs = sibling.get("lfs")
    stated = lfs.get("sha256") if isinstance(lfs, dict) else None
    size, blob = sibling.get("size"), sibling.get("blobId")
    content = f"blob:{blob}" if isinstance(blob, str) and _COMMIT.fullmatch(blob) else f"commit:{commit}"
    if isinstance(stated, str) and re.fullmatch(r"[0-9a-f]{64}", stated):
        content = f"sha256:{stated}"
    return str(sibling.get("rfilename", "")), HubFile(size if type(size) is int and size >= 0 else None, content)


class Stopped(Exception):
    """The download was called off."""


def file_in_cache(repository: Repository, name: str) -> Path:
    """The file `name` of a repository, downloaded if it is not there, and checked; what differs is fetched once more.

    Raises CheckpointError: no size or hash is stated, twice another content than stated (which is removed from the cache), the
    hub does not answer, the disk is full.
    """
    hub_id, stated = repository.shown_id, repository.files[name]
    if stated.num_bytes is None or not stated.has_hash:
        raise CheckpointError(
            f"{hub_id}/{name}: the hub states no size or no hash of it, so a damaged download could not be told from a whole "
            "one; download it by other means and name the file"
        )
    for is_retry in (False, True):
        try:
            path = Path(
                hf_hub_download(
                    repository.hub_id,
                    name,
                    repo_type=repository.kind,
                    revision=repository.revision,
                    force_download=is_retry,
                    tqdm_class=silent_bar(lambda: False, stated.num_bytes, f"{hub_id}/{name}"),
                    library_name="assay",
                    library_version=assay.__version__,
                )
            )
        except AssayError:
            raise
        except HUB_ERRORS as error:
            raise hub_error(hub_id, error, name) from None
        if (num_bytes := path.stat().st_size) != stated.num_bytes:
            how = f"{num_bytes} bytes where the hub states {stated.num_bytes}"
        elif what := content_difference(path.parent, path.name, stated.content):
            how = f"its {what} is not the one the hub states"
        else:
            return path
    with suppress(OSError):  # others would take it for right
        blob = path.resolve()
        path.unlink()
        blob.unlink(missing_ok=True)
    raise altered_error(hub_id, name, how)


def content_difference(folder: Path, name: str, data: str) -> str:
    """`content_differs` of a file; remembered: a run makes many checkpoints of one source."""
    [stamp] = data_of_files(folder, [name]).values()
    return _hash_differs(folder / name, stamp, data)


@functools.cache
def _hash_differs(path: Path, stamp: str, data: str) -> str:
    """stamp: of the file, so that what was written to since is read again."""
    with path.open("rb") as file:
        return content_differs(data, os.fstat(file.fileno()).st_size, file)


def silent_bar(is_stopped: Callable[[], bool], num_bytes: int | None, where: str) -> type[Any]:
    """What `hf_hub_download` takes for a progress bar: it shows nothing, and ends a transfer that is called off or too long."""

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.received = options.get("initial", 0)
            self.thread = threading.get_ident()

        def update(self, n: float | None = 1) -> None:
            self.received += n or 0
            if threading.get_ident() != self.thread:
                return  # hf_xet reports from a thread of its own: an error there ends nothing
            if is_stopped():
                raise Stopped
            if num_bytes is not None and self.received > num_bytes:
                raise CheckpointError(f"{where}: more than the {num_bytes} bytes that the hub states were sent; try again")

    return SilentBar
