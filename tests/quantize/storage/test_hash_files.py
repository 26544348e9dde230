"""Hashes of files read ahead are those of hashlib, wherever the bytes come from."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.errors import CheckpointError
from assay_quantize.storage import past_cache
from assay_quantize.storage.hash_files import PIECE_BYTES, PIECES_AHEAD, hash_file
from assay_quantize.storage.past_cache import Residency

SIZES = (0, 1, 4095, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, (PIECES_AHEAD + 3) * PIECE_BYTES + 12_345)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Name -> SHA-256 by hashlib; half of them not in the page cache."""
    made = {}
    for number, size in enumerate(SIZES):
        data = np.random.default_rng(size).bytes(size)
        path = tmp_path / f"{size}"
        path.write_bytes(data)
        made[path.name] = hashlib.sha256(data).hexdigest()
        if number % 2:
            evict(path)
    return made


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("at_once", [1, 3])
def test_hashes_are_those_of_hashlib(tmp_path: Path, files: dict[str, str], at_once: int) -> None:
    told: dict[str, list[int]] = {name: [] for name in files}
    with ThreadPoolExecutor(at_once) as pool:
        got = dict(zip(files, pool.map(lambda name: hash_file(tmp_path, name, told[name].append), files), strict=True))
    assert got == files
    assert {name: sum(pieces) for name, pieces in told.items()} == {str(size): size for size in SIZES}


@pytest.mark.parametrize("refuses", ["when opened", "when read", "no mincore", "not ours"])
def test_file_systems_that_know_less(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """tmpfs, NFS, FUSE: what they refuse is read in the usual way."""
    for name in files:
        evict(tmp_path / name)
    refused, real_open, real_preadv = [], os.open, os.preadv
    direct: set[int] = set()

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refuses == "when opened":
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        made = real_open(path, flags, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(made)
        return made

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if refuses == "when read" and descriptor in direct:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        assert refuses not in ("no mincore", "not ours") or descriptor not in direct, "who cannot tell reads through the cache"
        return real_preadv(descriptor, buffers, offset)

    class Library:
        real = past_cache._libc()
        mmap, munmap = real.mmap, real.munmap

        def mincore(self, *arguments: Any) -> int:
            refused.append(arguments)
            return -1

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    if refuses == "no mincore":
        monkeypatch.setattr(past_cache, "_libc", Library)
    elif refuses == "not ours":  # mincore then says that all of it is there
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        monkeypatch.setattr(os, "access", lambda path, mode: bool(refused.append(path)))
    assert {name: hash_file(tmp_path, name) for name in files} == files
    assert refused


def test_what_the_page_cache_has_is_known(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 3 * PIECE_BYTES + 5
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        residency = Residency(file.fileno(), size)
        assert residency.is_cached(0, size)
        evict(path)
        if residency.is_cached(0, size):
            pytest.skip(f"{tmp_path} lies in memory (tmpfs)")
        assert not residency.is_cached(0, PIECE_BYTES) and not residency.is_cached(3 * PIECE_BYTES, 5)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(file.fileno(), 5, 3 * PIECE_BYTES)
        assert residency.is_cached(3 * PIECE_BYTES, 5) and not residency.is_cached(0, size)


@pytest.mark.parametrize("is_needed_again", [False, True])
def test_only_what_is_needed_again_stays_in_the_page_cache(tmp_path: Path, is_needed_again: bool) -> None:
    path, size = tmp_path / "file", 3 * PIECE_BYTES
    path.write_bytes(bytes(size))
    evict(path)
    with path.open("rb") as file:
        residency = Residency(file.fileno(), size)
        if residency.is_cached(0, size):
            pytest.skip(f"{tmp_path} lies in memory (tmpfs)")
        hash_file(tmp_path, path.name, is_needed_again=is_needed_again)
        is_cached = [residency.is_cached(begin, PIECE_BYTES) for begin in range(0, size, PIECE_BYTES)]
    assert is_cached == [is_needed_again] * 3


def test_a_disk_that_cannot_be_read_is_an_error(tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match="Input/output error"):
        hash_file(tmp_path, str(SIZES[-1]))
    assert len(os.listdir("/proc/self/fd")) == before, "files are left open"


def test_a_file_that_shrinks_while_it_is_hashed(tmp_path: Path, files: dict[str, str]) -> None:
    path = tmp_path / str(SIZES[-1])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        hash_file(tmp_path, path.name, lambda num_bytes: os.truncate(path, 100))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, files: dict[str, str]) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path / "1")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        hash_file(inner, "link")


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(CheckpointError, match=r"link: is a link that leads back to itself; put the file itself there$"):
        hash_file(tmp_path, "link")


def test_memory_is_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into: set[int] = set()  # addresses
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        read_into.add(np.frombuffer(buffers[0], np.uint8).ctypes.data)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    path = tmp_path / "large"
    path.write_bytes(bytes(20 * PIECE_BYTES))
    hash_file(tmp_path, path.name)
    assert 1 < len(read_into) <= PIECES_AHEAD + 1


def test_a_disk_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard").write_bytes(b"abc")

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(OSError, match="Input/output error") as refused:
        hash_file(tmp_path, "shard")
    assert refused.value.filename == str(tmp_path / "shard")
