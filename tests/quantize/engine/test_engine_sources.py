"""Sources that change while they are read, and disks that fill up."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_sources import SHARDS, bytes_of, plan_for

import assay_quantize.engine.quantize as engine
from assay.errors import AssayError, QuantizeError
from assay.records.manifest import MANIFEST, Manifest, ShardRecord
from assay.records.plan import Plan
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.engine.journal import append, locked_journal
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.quantize import quantize
from assay_quantize.verify.verify import verify


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)  # copy2: times of change are kept
    return out


# ------------------------------------------------------------------------------------------------ sources that change
def stopped_after_one(plan: Plan, source: Path, out: Path) -> None:
    def one(plan: Plan, names: Sequence[str], *rest: Any) -> Generator[ShardRecord, None, None]:
        yield from run_local(plan, names[:1], *rest)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(plan, source, out, runner=one)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_source_that_changed_between_two_runs_is_refused_by_name(source: Path, tmp_path: Path, shard: int) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    plan = plan_for(ours, "w4a16")
    stopped_after_one(plan, ours, out)
    path = ours / SHARDS[shard]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(QuantizeError, match=rf"its data is not what the plan was made of: {SHARDS[shard]} was \d+ bytes of "):
        quantize(plan, ours, out)
    with pytest.raises(QuantizeError, match=rf"{out}: begun with other data .*{SHARDS[shard]} was \d+ bytes of "):
        quantize(plan_for(ours, "w4a16"), ours, out)


def test_a_source_whose_time_was_set_back_is_still_another(source: Path, tmp_path: Path) -> None:
    """Size and time of modification can be equal by accident (unpacked archives) or by `cp -p`; the inode's own time is not."""
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    stopped_after_one(plan_for(ours, "w4a16"), ours, out)
    path = ours / SHARDS[1]
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]} was .*, is another file of the same size and time"):
        quantize(plan_for(ours, "w4a16"), ours, out)


@pytest.mark.parametrize("precision", ["w4a16", "fp8"])
def test_who_finishes_between_the_check_and_the_lock_is_not_overwritten(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    out, lock = tmp_path / "out", engine.locked_journal
    others: list[Manifest] = []

    def late(folder: Path) -> Any:
        monkeypatch.setattr(engine, "locked_journal", lock)
        others.append(quantize(plan_for(source, precision), source, folder))
        return lock(folder)

    monkeypatch.setattr(engine, "locked_journal", late)
    if precision == "w4a16":
        assert quantize(plan_for(source, "w4a16"), source, out) == others[0]
    else:
        with pytest.raises(QuantizeError, match="holds a finished checkpoint of another plan"):
            quantize(plan_for(source, "w4a16"), source, out)
    assert Manifest.load(out / "assay_manifest.json") == others[0] and not (out / JOURNAL).exists()


def test_a_source_with_a_journal_of_ours_is_quantized_like_any_other(source: Path, tmp_path: Path) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    (ours / JOURNAL).write_text("left by a run that was killed")
    manifest = quantize(plan_for(ours, "w4a16"), ours, out)
    assert JOURNAL not in manifest.files and verify(out, source=ours).passed


def other_time(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def other_bytes_of_that_time(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_file_of_that_time(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [other_time, other_bytes_of_that_time, another_file_of_that_time])
def test_a_source_that_changes_during_the_run_is_refused_by_name(
    source: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    touched: list[str] = []

    def touch(name: str, num_bytes: int) -> None:
        if not touched:
            touched.append(name)
            change(ours / SHARDS[1])

    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]}: changed since this run began"):
        quantize(plan_for(ours, "w4a16"), ours, out, on_progress=touch)
    assert {path.name for path in out.glob("*")} <= {JOURNAL, SHARDS[0]}
    assert list(out.glob(".*.partial")) == []


def test_a_small_file_that_changes_during_the_run_is_refused(source: Path, tmp_path: Path) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    plan = plan_for(ours, "w4a16")
    with pytest.raises(QuantizeError, match=r"source/tokenizer.json: its SHA-256 is not the planned one: it changed meanwhile"):
        quantize(plan, ours, out, on_progress=lambda name, _: (ours / "tokenizer.json").write_text("{}"))
    assert not (out / "tokenizer.json").exists() and not (out / MANIFEST).exists()
    with pytest.raises(QuantizeError, match=r"its data is not what the plan was made of: tokenizer.json was sha256 "):
        quantize(plan, ours, out)
    made = quantize(plan_for(ours, "w4a16"), ours, out)  # the finished shards are of the same weights
    assert (out / "tokenizer.json").read_text() == "{}" and made.source_files["tokenizer.json"].startswith("sha256:44136fa3")


def test_a_path_may_hold_what_ends_a_line_elsewhere(source: Path, tmp_path: Path) -> None:
    """U+2028, which `str.splitlines` takes for the end of a line of the journal."""
    ours, out = copied(source, tmp_path / "sou\u2028rce"), tmp_path / "o\u2028ut"
    plan, seen = plan_for(ours, "w4a16"), list[str]()
    stopped_after_one(plan, ours, out)
    quantize(plan, ours, out, on_progress=lambda name, _: seen.append(name))
    assert [name for name in seen if name.endswith("(done before)")] == [f"{SHARDS[0]} (done before)"]


def test_a_truncated_source_shard_is_named(source: Path, tmp_path: Path) -> None:
    ours = copied(source, tmp_path / "source")
    plan = plan_for(ours, "w4a16")
    os.truncate(ours / SHARDS[1], (ours / SHARDS[1]).stat().st_size - 100)
    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]} was \d+ bytes of .*, is \d+ bytes of"):
        quantize(plan, ours, tmp_path / "out")
    (tmp_path / "cut").mkdir()
    other = copied(source, tmp_path / "other")

    def cut_off(name: str, num_bytes: int) -> None:
        if (other / SHARDS[1]).stat().st_size > 5000:
            os.truncate(other / SHARDS[1], 5000)

    with pytest.raises(AssayError, match=rf"{SHARDS[1]}: (changed since|truncated|\d+ bytes expected)"):
        quantize(plan_for(other, "w4a16"), other, tmp_path / "cut" / "out", on_progress=cut_off)


# ------------------------------------------------------------------------------------------------ the disk fills up
LIMITED = """
import resource, sys
from pathlib import Path
from assay.errors import QuantizeError
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
try:
    quantize(Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), workers=2)
except QuantizeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_write_that_the_system_refuses_is_one_line_and_the_rerun_goes_on(source: Path, tmp_path: Path) -> None:
    plan, out = plan_for(source, "fp8"), tmp_path / "out"
    quantize(plan, source, tmp_path / "whole")
    sizes = {name: (tmp_path / "whole" / name).stat().st_size for name in SHARDS}
    small, large = sorted(SHARDS, key=lambda name: sizes[name])
    plan.save(tmp_path / "plan.json")
    arguments = [str(tmp_path / "plan.json"), str(source), str(out), str(sizes[large] - 1)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{out / large}: cannot be written: File too large; finished shards stay, run again\n", done.stderr
    assert list(out.glob(".*.partial")) == [] and not (out / large).exists()
    quantize(plan, source, out)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert small != large and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_full_file_system(source: Path, tmp_path: Path) -> None:
    """A real one of a few MB, where this user may mount it; filled by somebody else while the second shard is written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    plan = plan_for(source, "fp8")
    size = plan.bytes_out + (66 << 20)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        out = disk / "out"

        def fill(name: str, num_bytes: int) -> None:
            if (out / SHARDS[0]).exists() and not (disk / "other").exists():
                with (disk / "other").open("wb", buffering=0) as file:
                    for piece in (1 << 20, 4096):
                        try:
                            while file.write(b"x" * piece) == piece:
                                pass
                        except OSError:
                            continue

        with pytest.raises(
            QuantizeError, match=rf"{SHARDS[1]}: cannot be written: No space left on device; finished shards stay"
        ):
            quantize(plan, source, out, runner=one_by_one, on_progress=fill)
        assert sorted(path.name for path in out.iterdir()) == [JOURNAL, SHARDS[0]]
        (disk / "other").unlink()
        inode = (out / SHARDS[0]).stat().st_ino
        quantize(plan, source, out)
        assert (out / SHARDS[0]).stat().st_ino == inode
        quantize(plan, source, tmp_path / "whole")
        assert bytes_of(out) == bytes_of(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def one_by_one(plan: Plan, names: Sequence[str], *rest: Any) -> Generator[ShardRecord, None, None]:
    for name in names:
        yield from run_local(plan, [name], *rest)


def test_what_a_full_disk_refuses_names_the_journal(tmp_path: Path) -> None:
    """Closing the file does not try again, and does not put an error without a path in its place."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(QuantizeError) as refused, locked_journal(tmp_path) as journal:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
            append(journal, {"name": "a shard with a long name"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(refused.value) == f"{tmp_path / JOURNAL}: cannot be written: File too large; finished shards stay, run again"
    assert (tmp_path / JOURNAL).read_bytes() == b'{"name": "a shard wi'
