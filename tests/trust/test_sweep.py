"""Calls that fail one at a time, a seeded sample (`make sweep` has them all); and the shim that makes them fail."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "trust"))

from faulty_calls import Call, Fault, why_not
from forking import Forking

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLE = {
    "quantize in a run": 12, "quantize --out": 4, "quantize, reading the source": 5, "quantize, reading what it wrote": 4,
    "journal of replies": 6, "journal, reading it": 2, "journal of an earlier version": 4, "gate, report and cards": 4,
    "quantize --stream-from hub": 4, "calibrate": 4, "probe": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    from sweep import forked

    with forked(tmp_path_factory.mktemp("forking")) as process:
        yield process


def test_every_subject_is_sampled() -> None:
    from sweep import SUBJECTS

    assert SAMPLE.keys() == SUBJECTS.keys()


@pytest.mark.parametrize("name", SAMPLE)
def test_whatever_fails_the_next_run_makes_up_for_it(name: str, tmp_path: Path, forking: Forking) -> None:
    from sweep import Sweep, sampled

    sweep = Sweep(name, tmp_path.resolve() / "swept", forking)
    found = [sweep.outcome(fault, at) for fault, at in sampled(name, sweep.cases(), SAMPLE[name])]
    assert [one for one in found if one.problems] == []
    assert any(one.hit is not None for one in found)


# ------------------------------------------------------------------------------------------------ the shim
CALLS = [
    ("mkdir", "new"), ("open", "new/a"), ("write", "new/a"), ("pwrite", "new/a"), ("writev", "new/a"), ("pwritev", "new/a"),
    ("fsync", "new/a"), ("fdatasync", "new/a"), ("ftruncate", "new/a"), ("fallocate", "new/a"), ("truncate", "new/a"),
    ("sendfile", "new/a"), ("copy_file_range", "new/a"), ("rename", "new/b"), ("link", "new/c"), ("symlink", "new/d"),
    ("unlink", "new/c"), ("unlink", "new/d"), ("open", "x"), ("write", "x"), ("unlink", "new/b"), ("rmdir", "new"),
]  # fmt: skip
"""What `swept_jobs.every_call` does, in order: names of calls, and paths in its folder."""


def test_every_kind_of_call_is_counted_once(tmp_path: Path, forking: Forking) -> None:
    (under := tmp_path.resolve() / "under").mkdir()
    (tmp_path / "other").write_bytes(b"read" * 9)
    ended = forking.run("swept_jobs:every_call", [str(tmp_path / "other")], under=under, cwd=under)
    assert (ended.status, ended.err, ended.hit) == (0, "", None)
    assert ended.calls == tuple(Call(name, str(under / path)) for name, path in CALLS)
    assert (under / "x").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("fault", "status", "left", "said"),
    [
        (Fault.KILL, -signal.SIGKILL, b"", ""),
        (Fault.TORN, -signal.SIGKILL, b"01234", ""),
        (Fault.NO_SPACE, 0, b"", "ENOSPC ENOSPC ENOSPC"),
        (Fault.SHORT, 0, b"01234", "5 ENOSPC ENOSPC"),
        (Fault.IO_ERROR, 0, b"0123456789next", "EIO 10 4"),
    ],
)
def test_what_a_fault_does(
    tmp_path: Path, forking: Forking, fault: Fault, status: int, left: bytes, said: str
) -> None:  # fmt: skip
    """Of three writes to a file (ten bytes, the same again, four more), the first one fails."""
    (under := tmp_path.resolve() / "under").mkdir()
    ended = forking.run("swept_jobs:three_writes", [], under=under, cwd=under, fault=fault, at=2)
    assert (ended.status, ended.hit, ended.out.strip()) == (status, Call("write", str(under / "file")), said)
    assert (under / "file").read_bytes() == left


def test_reads_fail_apart_from_writes(tmp_path: Path, forking: Forking) -> None:
    (under := tmp_path.resolve() / "under").mkdir()
    (under / "file").write_bytes(b"0123456789")
    job = ("swept_jobs:two_reads", [])
    counted = forking.run(*job, under=under, cwd=under, fault=Fault.READ_SHORT)
    assert [call.name for call in counted.calls] == ["open", "read", "pread"]
    halved = forking.run(*job, under=under, cwd=under, fault=Fault.READ_SHORT, at=2)
    assert halved.out.split() == ["01234", "0123456789"]
    failed = forking.run(*job, under=under, cwd=under, fault=Fault.READ_ERROR, at=3)
    assert failed.out.split() == ["0123456789", "EIO"]
    assert os.listdir(under) == ["file"]
