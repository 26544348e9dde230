"""A checkpoint on the hub that is read layer by layer: a shard is on the disk from when it is first read until it is released.

The folder looks like the checkpoint, as the staging folder of `hub_stream` does: small files, and every shard with its true
header and size but without data. A shard comes whole and is compared with the hash that the hub states.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from assay.atomic_files import naming
from assay.errors import CheckpointError
from assay.quantities import size
from assay.records.base import sha256_of_file, write_text_atomically
from assay.safe_files import read_fully
from assay_quantize.checkpoint.copied_files import MAX_COPIED_BYTES
from assay_quantize.checkpoint.hub import Repository, check_hashes_stated
from assay_quantize.remote.hub_download import DOWNLOADS, HubFiles
from assay_quantize.remote.hub_stream import SPARE_BYTES, header_of, write_hollow

SMALL = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken", ".py"})
"""Of what lies beside weights: config, tokenizer, templates, manifest; code is data here, a part of a checkpoint's identity."""
_COMMIT, _UNFINISHED = ".commit", "unfinished"


class HubMirror:
    """The reader of a stored checkpoint (`decoding.open_stored.ShardReader`); safe to use from many threads at once."""

    def __init__(self, hub_id: str, folder: Path, report: Callable[[str], None]) -> None:
        """folder: of this repository alone; what lies there of another commit goes. report: told in a line what comes.

        CheckpointError: no such repository, no safetensors, no hash stated of a shard, a hub that does not answer, no room for
        its two largest shards, something in `folder` that no mirror put there.
        """
        commit = Repository(hub_id).commit
        if commit is None:
            raise CheckpointError(f"{hub_id}: the hub names no commit of it; try again later, or give a folder")
        self.hub_id, self.commit, self.folder, self._report = hub_id, commit, folder, report
        self._hub = HubFiles(hub_id, commit)
        shards = {name: file for name, file in self._hub.files.items() if name.endswith(".safetensors")}
        if not shards:
            raise CheckpointError(f"{hub_id}: has no *.safetensors; take a release in safetensors")
        check_hashes_stated(hub_id, {name: file.content for name, file in shards.items()})
        self._whole: set[str] = set()
        self._download = threading.Lock()
        self._sizes = self._make_hollow(list(shards))

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(self._sizes.values())

    def file_sha256(self, path: Path) -> str:
        """Of a file of the folder; of a shard what the hub states, or the hash of what comes."""
        content = self._hub.files[path.name].content if path.name in self._sizes else ""
        if content.startswith("sha256:"):
            return content.removeprefix("sha256:")
        if path.name in self._sizes:
            self._fetch(path.name)
        return sha256_of_file(path)

    def read_into(self, view: memoryview, name: str, begin: int, if_shorter: str, /) -> None:
        """As of `OpenShards`. CheckpointError: the shard cannot be downloaded, or is not what the hub states."""
        self._fetch(name)
        with naming(self.folder / name), (self.folder / name).open("rb") as file:
            done = read_fully(file.fileno(), view, begin)
        if done < len(view):
            raise CheckpointError(f"{self.hub_id}/{name}: {if_shorter}")

    def prefetch(self, name: str, begin: int, num_bytes: int, /) -> None:
        """Download the shard, if it is not there. CheckpointError as of `read_into`."""
        self._fetch(name)

    def release(self, shards: Collection[str]) -> None:
        """Nothing of these is read again soon; their data go."""
        for name in self._whole & set(shards):
            self._whole.discard(name)
            path = self.folder / name
            hollow = self.folder / f".{name}.smaller"
            write_hollow(hollow, header_of(path), self._sizes[name])
            hollow.replace(path)

    def close(self) -> None:
        """End a download that is under way, and give the disk back."""
        self._hub.stop()
        self.release(self._sizes)
        shutil.rmtree(self.folder / DOWNLOADS, ignore_errors=True)

    def _fetch(self, name: str) -> None:
        if name in self._whole:
            return
        with self._download:
            if name in self._whole:
                return
            self._check_room(self._sizes[name])
            self._report(f"{self.hub_id}: downloading {name} ({size(self._sizes[name])})")
            arriving = self.folder / f".{name}.whole"
            self._hub.download(name, arriving)
            arriving.replace(self.folder / name)
            self._whole.add(name)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if num_bytes + SPARE_BYTES > free:
            raise CheckpointError(
                f"{self.folder}: {size(num_bytes + SPARE_BYTES)} are needed for shards of {self.hub_id}, {size(free)} are free "
                "on its disk; free some space, or give --out a folder elsewhere"
            )

    def _make_hollow(self, shards: list[str]) -> dict[str, int]:
        """Everything but data into the folder. Returns shard -> its bytes."""
        note = self.folder / _COMMIT
        if self.folder.exists() and not note.is_file() and any(self.folder.iterdir()):
            raise CheckpointError(f"{self.folder}: holds something else than a copy of {self.hub_id}; give another --out")
        if not note.is_file() or note.read_text(encoding="utf-8") != self.commit:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            write_text_atomically(note, _UNFINISHED)  # so that a killed one knows it for its own
        for name, file in self._hub.files.items():
            path = self.folder / name
            if (
                path.suffix in SMALL
                and (file.num_bytes or 0) <= MAX_COPIED_BYTES
                and (not path.is_file() or self._hub.difference(name, path))
            ):
                with naming(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._hub.download(name, path)
        sizes = {}
        for name, (header, num_bytes) in zip(shards, self._hub.read_headers(shards), strict=True):
            write_hollow(self.folder / f".{name}.smaller", header, num_bytes)
            (self.folder / f".{name}.smaller").replace(self.folder / name)
            sizes[name] = num_bytes
        self._check_room(sum(sorted(sizes.values())[-2:]))
        write_text_atomically(note, self.commit)
        return sizes
