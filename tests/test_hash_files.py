"""Hashes of files read ahead and past the page cache are those of hashlib, wherever the bytes come from."""

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
from assay_quantize import hash_files
from assay_quantize.hash_files import PIECE_BYTES, PIECES_AHEAD, FileHasher

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


@pytest.mark.parametrize("lanes", [1, 3])
def test_hashes_are_those_of_hashlib(tmp_path: Path, files: dict[str, str], lanes: int) -> None:
    told: dict[str, list[int]] = {name: [] for name in files}
    with FileHasher(lanes) as hasher, ThreadPoolExecutor(lanes) as pool:
        got = dict(zip(files, pool.map(lambda name: hasher.sha256(tmp_path, name, told[name].append), files), strict=True))
    assert got == files
    assert {name: sum(pieces) for name, pieces in told.items()} == {str(size): size for size in SIZES}


@pytest.mark.parametrize("refuses", ["O_DIRECT when opened", "O_DIRECT when read", "RWF_NOWAIT"])
def test_file_systems_that_know_less(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """tmpfs, NFS, FUSE: each refuses something else, and what it refuses is read in the usual way."""
    for name in files:
        evict(tmp_path / name)
    refused, real_open, real_preadv = [], os.open, os.preadv
    direct: set[int] = set()

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refuses == "O_DIRECT when opened":
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        made = real_open(path, flags, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(made)
        return made

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if (refuses == "RWF_NOWAIT" and flags) or (refuses == "O_DIRECT when read" and descriptor in direct):
            refused.append(descriptor)
            raise OSError(errno.EINVAL if not flags else errno.EOPNOTSUPP, "refused")
        return real_preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    with FileHasher(2) as hasher:
        assert {name: hasher.sha256(tmp_path, name) for name in files} == files
    assert refused


def test_a_disk_that_cannot_be_read_is_an_error(tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", preadv)
    with FileHasher(1) as hasher, pytest.raises(OSError, match="Input/output error"):
        hasher.sha256(tmp_path, str(SIZES[-1]))
    assert len(os.listdir("/proc/self/fd")) == before, "files are left open"


def test_a_file_that_shrinks_while_it_is_hashed(tmp_path: Path, files: dict[str, str]) -> None:
    path = tmp_path / str(SIZES[-1])
    with FileHasher(1) as hasher, pytest.raises(CheckpointError, match="became shorter while it was read"):
        hasher.sha256(tmp_path, path.name, lambda num_bytes: os.truncate(path, 100))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, files: dict[str, str]) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path / "1")
    with FileHasher(1) as hasher, pytest.raises(CheckpointError, match="leads out of its folder"):
        hasher.sha256(inner, "link")


def test_memory_is_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    real = hash_files.mmap.mmap

    def counted(*arguments: int) -> Any:
        nonlocal made
        made += 1
        return real(*arguments)

    monkeypatch.setattr(hash_files.mmap, "mmap", counted)
    path = tmp_path / "large"
    path.write_bytes(bytes(20 * PIECE_BYTES))
    with FileHasher(1) as hasher:
        for _ in range(3):
            hasher.sha256(tmp_path, path.name)
    assert made == PIECES_AHEAD + 1
