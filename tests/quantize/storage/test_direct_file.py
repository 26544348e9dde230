"""Files written past the page cache: the same bytes whatever the pieces and the file system, errors where they belong."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pytest

from assay_quantize.storage.direct_file import BLOCK_BYTES, STAGE_BYTES, STAGES, DirectFile

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 17, 5 * STAGE_BYTES, 6 * STAGE_BYTES + 4097]


def write(path: Path, data: bytes, expected_bytes: int, seed: int = 0) -> None:
    rng, done = random.Random(seed), 0
    file = DirectFile(path, expected_bytes)
    while done < len(data):
        size = rng.choice((1, 7, BLOCK_BYTES, 100_000, STAGE_BYTES + 5))
        file.append(memoryview(data)[done : done + size])
        done += size
    file.sync()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("expected_bytes", [0, 1 << 40])
def test_every_byte_arrives(tmp_path: Path, size: int, expected_bytes: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(b"what was there before")
    write(tmp_path / "file", data, expected_bytes)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("refused_by", ["open", "pwrite"])
def test_a_file_system_that_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_by: str) -> None:
    real_open, real_pwrite, refused = os.open, os.pwrite, []

    def refuse() -> None:
        refused.append(1)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opened(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT and refused_by == "open":
            refuse()
        return real_open(path, flags, mode, **more)

    def written(descriptor: int, data: Any, place: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and refused_by == "pwrite":
            refuse()
        return real_pwrite(descriptor, data[: len(data) // 2 + 1], place)  # and a system that writes less than it was given

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    data = random.Random(0).randbytes(20 * STAGE_BYTES + 1)
    write(tmp_path / "file", data, len(data))
    assert refused and (tmp_path / "file").read_bytes() == data


def test_an_error_reaches_whoever_writes_or_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any, place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    file = DirectFile(tmp_path / "file", 0)
    file.append(b"x")
    with pytest.raises(OSError, match="No space left"):
        file.sync()
    file.close()
    file = DirectFile(tmp_path / "file", 0)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(STAGES + 1):
            file.append(bytes(BLOCK_BYTES))
    file.close()
    file.close()


def test_closed_before_its_end_it_holds_no_file(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "file", 1 << 30)
    file.append(bytes(STAGE_BYTES + 1))
    file.close()
    open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert str(tmp_path / "file") not in open_files
    assert (tmp_path / "file").stat().st_size <= STAGE_BYTES
