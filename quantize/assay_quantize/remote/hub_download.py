"""Files of a model on the hub, onto the disk: all of them into the Hugging Face cache, or one by one beside their place.

A single file comes whole by `hf_hub_download` (with Xet where the hub has it), or parts of it by ranges. A whole one arrives
in a folder of its own beside its place, and gets its place when it has the size and the hash that the hub states. Nothing is
kept in the Hugging Face cache; a copy that lies there is taken. What a killed process had of a file is lost:
`hf_hub_download` begins a file anew.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download

import assay
from assay.errors import AssayError, CheckpointError
from assay.hub_errors import HUB_ERRORS, hub_error, may_pass
from assay.hub_session import guard_hub
from assay_quantize.checkpoint.hub import (
    NUM_CONNECTIONS,
    Repository,
    Stopped,
    altered_error,
    check_hashes_stated,
    content_difference,
    difference,
    silent_bar,
)
from assay_quantize.storage.hash_files import MOST_AT_ONCE

DOWNLOADS = ".download"
"""Folder beside the file that arrives: the file, and what `hf_hub_download` notes of it."""
ROUNDS = 4
"""How often a download is begun; each time `hf_hub_download` itself waits half a minute for a hub that does not answer."""
ROUND_WAIT_S = 2.0
XET_BUFFER_BYTES = 512 << 20
"""What `hf_xet` may hold in memory. Its own default, about 2 GB, is as much as the whole bound of this process."""


class HubFiles(Repository):
    """The files of one commit of a model, onto the disk. One whole file at a time."""

    tries = 8
    """A run of hours outlives a network that is away for a minute."""

    def __init__(self, hub_id: str, commit: str) -> None:
        super().__init__(hub_id, commit)
        if self.revision != commit:
            raise CheckpointError(
                f"{hub_id}: commit {commit[:12]} was asked for, {self.revision[:12]} is listed; try again later"
            )
        self._stop = threading.Event()

    def stop(self) -> None:
        """Have all transfers end; they raise `Stopped` with the next bytes that come."""
        self._stop.set()

    def download(self, name: str, path: Path) -> None:
        """The file `name` to `path`, checked.

        Raises CheckpointError: twice another size or hash than the hub states, a hub that does not answer; OSError: the disk is
        full.
        """
        folder = path.parent / DOWNLOADS
        try:
            for attempt in range(2):
                shutil.rmtree(folder, ignore_errors=True)
                arrived = self._fetch(name, folder, from_cache=attempt == 0)
                how = self.difference(name, arrived)
                if not how:
                    os.replace(arrived, path)
                    return
            raise altered_error(self.hub_id, name, how)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def difference(self, name: str, path: Path) -> str:
        """How the file at `path` differs from what the hub states of `name`; empty: it does not."""
        with path.open("rb") as file:
            return difference(self.files[name], path.stat().st_size, file)

    def download_ranges(self, name: str, ranges: Sequence[tuple[int, int]], path: Path) -> None:
        """Only `ranges` [begin, end) of a file, written to their places in `path`, which must exist."""

        def write(data: bytes, position: int) -> None:
            if self._stop.is_set():
                raise Stopped
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), memoryview(data)[done:], position + done)

        # the pool ends inside: no thread writes to a file that is closed
        with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="ranges") as pool:
            list(pool.map(lambda span: self.receive(name, span[0], span[1], write), ranges))

    def _fetch(self, name: str, folder: Path, *, from_cache: bool) -> Path:
        """The whole file, somewhere in `folder`. from_cache: a copy in the Hugging Face cache will do."""
        os.environ.setdefault("HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE", str(XET_BUFFER_BYTES))
        os.environ.setdefault("HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE", "0")
        bar = silent_bar(self._stop.is_set, self.files[name].num_bytes, f"{self.hub_id}/{name}")
        for round_ in range(1, ROUNDS + 1):
            try:
                return Path(
                    hf_hub_download(
                        self.hub_id,
                        name,
                        revision=self.revision,
                        local_dir=folder,
                        cache_dir=None if from_cache else folder / "cache",
                        tqdm_class=bar,
                        library_name="assay",
                        library_version=assay.__version__,
                    )
                )
            except AssayError:
                raise
            except HUB_ERRORS as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # this machine's disk
                if self._stop.is_set():
                    raise Stopped from None
                if round_ == ROUNDS or not may_pass(error):
                    raise hub_error(self.hub_id, error, name) from None
            self._stop.wait(ROUND_WAIT_S * 2 ** (round_ - 1))
        raise AssertionError("unreachable")


# ------------------------------------------------------------------------------------------------ the whole model
NOT_DOWNLOADED = ("*.py", "*.bin", "*.pt", "*.pth", "*.gguf")


def download_model(hub_id: str, revision: str, stated: Mapping[str, str]) -> Path:
    """The folder of a model in the Hugging Face cache, downloaded as far as it is not there; every file of `stated` checked.

    stated: `Plan.source_files` of a plan made from the hub. `snapshot_download` compares sizes only, and takes what lies in the
    cache for right, so a file with another hash is fetched once more. Empty: nothing is known, and sizes have to do.
    Raises CheckpointError: no such model, gated, offline and not in the cache, the hub does not answer, no hash stated, twice
    another content than stated, the disk is full.
    """
    check_hashes_stated(hub_id, stated)
    guard_hub()
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, ignore_patterns=list(NOT_DOWNLOADED)))
    except HUB_ERRORS as error:
        raise hub_error(hub_id, error) from None

    def check(name: str) -> None:
        if not content_difference(folder, name, stated[name]):
            return
        try:
            hf_hub_download(hub_id, name, revision=revision, force_download=True)
        except HUB_ERRORS as error:
            raise hub_error(hub_id, error, name) from None
        if how := content_difference(folder, name, stated[name]):
            raise altered_error(hub_id, name, f"its {how} is not the one the hub states")

    with ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="check") as pool:
        list(pool.map(check, stated))
    return folder
