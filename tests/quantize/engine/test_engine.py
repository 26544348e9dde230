"""The engine's parts: order on disk, memory budget, slabs, lanes; the same bytes however it is run; sources that change."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe

import assay_quantize.engine.quantize as engine
from assay.cli.progress import ShardProgress
from assay.errors import AssayError, QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import Manifest, ShardRecord
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.checkpoint.shard_files import header_bytes, held_bytes, layout
from assay_quantize.engine.budget import RUNTIME_BYTES, Budget, parse_memory, plan_budget, slab_budget_bytes, window_of
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.ordered_writer import OrderedWriter, Result, WritingStopped
from assay_quantize.engine.quantize import quantize
from assay_quantize.engine.shards import ShardOptions, quantize_shard
from assay_quantize.formats.casting import cast_rows
from assay_quantize.formats.schemes import output_tensors
from assay_quantize.kernels.devices import default_workers
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.slabs import SLAB_BYTES, cut, least_slab_bytes
from assay_quantize.verify.verify import verify

TINY: dict[str, Any] = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("engine") / "source", **TINY)


def plan_for(source: Path, precision: str, **changes: Any) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision).model_copy(update=changes)
    return make_plan(open_checkpoint(source), recipe, model="tiny", family=None)


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)  # copy2: times of change are kept
    return out


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


# ------------------------------------------------------------------------------------------------ the same bytes
@pytest.mark.parametrize(
    ("scheme", "precision"),
    [("w4a16", "w4a16"), ("w4a16_asym", "w4a16"), ("fp8_block", "fp8"), ("nvfp4a16", "nvfp4a16"), ("mxfp4", "w4a16"),
     ("w8a8", "w4a16")],
)  # fmt: skip
def test_workers_slabs_lanes_and_engines_do_not_show(source: Path, tmp_path: Path, scheme: str, precision: str) -> None:
    recipe = load_recipe(PrecisionRecipe, precision)
    plan = make_plan(open_checkpoint(source), recipe.model_copy(update={"scheme": scheme}), model="tiny", family=None)
    ways = {
        "one slab per tensor": ShardOptions(),
        "many slabs": ShardOptions(workers=3, slab_bytes=3000),
        "reference": ShardOptions(workers=2, slab_bytes=20_000, kernels="reference"),
    }
    made: dict[str, tuple[list[ShardRecord], dict[str, str]]] = {}
    for way, options in ways.items():
        (folder := tmp_path / way).mkdir()
        records = [quantize_shard(plan, name, source, folder, options) for name in SHARDS]
        made[way] = ([record.model_copy(update={"seconds": 0.0}) for record in records], bytes_of(folder))
    (folder := tmp_path / "lanes").mkdir()
    records = sorted(run_local(plan, SHARDS, source, folder, ShardOptions(workers=9, slab_bytes=5000)), key=lambda r: r.name)
    made["lanes"] = ([record.model_copy(update={"seconds": 0.0}) for record in records], bytes_of(folder))
    first = made["one slab per tensor"]
    assert {record.name: record.sha256 for record in first[0]} == first[1]
    assert all(way == first for way in made.values()), [name for name, way in made.items() if way != first]


def test_no_files_are_left_open_and_none_half_written(source: Path, tmp_path: Path) -> None:
    plan = plan_for(source, "nvfp4a16")
    before = len(os.listdir("/proc/self/fd"))
    quantize(plan, source, tmp_path / "out", device="cpu", workers=2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((tmp_path / "out").glob(".*")) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("assay-")] == []


# ------------------------------------------------------------------------------------------------ order on disk
def planned(
    name: str, action: Any, outputs: Sequence[OutputTensor], dtype: str = "BF16", scheme: str | None = None
) -> TensorPlan:
    shape = outputs[0].shape
    return TensorPlan(name, "norm", "norm", name, action, scheme, None, dtype, shape, 2, "in", "out", tuple(outputs))


def kept(name: str, dtype: str, *shape: int) -> TensorPlan:
    size = int(np.prod(shape)) * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
    return planned(name, "keep", [OutputTensor(name, dtype, shape, size)], dtype)


def quantized(name: str, scheme: str, rows: int, columns: int) -> TensorPlan:
    return planned(name, "quantize", output_tensors(scheme, f"{name}.weight", (rows, columns)), scheme=scheme)


AWKWARD = [
    kept("odd", "BF16", 3, 5),
    quantized("w4", "w4a16", 7, 128),
    kept("bias", "F32", 3),
    quantized("channel", "fp8_channel", 3, 5),
    quantized("nvfp4", "nvfp4a16", 4, 32),
    kept("bytes", "U8", 3),
    kept("plain", "BF16", 4, 8),
    kept("empty", "BF16", 0, 8),
]
"""Sizes that are no multiple of 8, large and small, and a tensor without elements."""


def test_layout_keeps_every_tensor_aligned_and_streams_the_large_ones() -> None:
    order, outputs = layout(AWKWARD)
    assert [output.name for output in outputs] == [
        "w4.weight_packed", "w4.weight_shape",
        "nvfp4.weight_packed", "nvfp4.weight_scale",
        "plain", "empty",
        "bias", "nvfp4.weight_global_scale", "channel.weight_scale", "odd", "w4.weight_scale", "bytes", "channel.weight",
    ]  # fmt: skip
    assert [tensor.name for tensor in order] == ["w4", "nvfp4", "plain", "empty", "bias", "odd", "bytes", "channel"]
    prefix, begins = header_bytes(AWKWARD)
    widths = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    assert {o.name: begins[o.name] % widths[o.dtype] for o in outputs} == dict.fromkeys(begins, 0)
    assert len(prefix) % 8 == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_writer_gives_the_same_file_whatever_the_order_and_the_threads(tmp_path: Path, seed: int) -> None:
    """Against a plain concatenation; also what waits in memory is no more than `held_bytes` says, beside the window."""
    rng = random.Random(seed)
    order, outputs = layout(AWKWARD)
    data = {output.name: rng.randbytes(output.num_bytes) for output in outputs}
    results: list[Result] = []
    for tensor in order:  # every tensor in three pieces, each output cut anywhere
        cuts = {
            o.name: sorted((0, rng.randint(0, o.num_bytes), rng.randint(0, o.num_bytes), o.num_bytes)) for o in tensor.outputs
        }
        for piece in range(3):
            parts = {name: data[name][at[piece] : at[piece + 1]] for name, at in cuts.items()}
            results.append(Result(parts, rng.random() < 0.5, lambda: None))
    prefix = header_bytes(AWKWARD)[0]
    writer = OrderedWriter(tmp_path / "file", prefix, outputs, window=5)
    numbered = list(enumerate(results))
    lock, most = threading.Lock(), 0

    def work() -> None:
        nonlocal most
        while True:
            with lock:
                if not numbered:
                    return
                index, result = numbered.pop(0)
            writer.wait_for_room(index)
            writer.deliver(index, result)
            with lock:
                most = max(most, sum(len(piece) for pieces in writer._held.values() for piece in pieces))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digest, num_bytes = writer.finish()
    written = (tmp_path / "file").read_bytes()
    assert written == prefix + b"".join(data[output.name] for output in outputs)
    assert (digest, num_bytes) == (hashlib.sha256(written).hexdigest(), len(written))
    assert 0 < most <= held_bytes(AWKWARD)
    with safe_open(tmp_path / "file", framework="np") as file:
        assert sorted(file.keys()) == sorted(data)


def test_a_failure_stops_everyone(tmp_path: Path) -> None:
    writer = OrderedWriter(tmp_path / "file", b"", [OutputTensor("a", "U8", (4,), 4)], window=1)
    seen: list[str] = []

    def wait() -> None:
        try:
            writer.wait_for_room(1)
        except WritingStopped:
            seen.append("stopped")

    thread = threading.Thread(target=wait)
    thread.start()
    writer.fail(OSError("disk"))
    thread.join(10)
    with pytest.raises(WritingStopped):
        writer.deliver(0, Result({"a": b"1234"}, False, lambda: None))
    writer.close()
    assert seen == ["stopped"] and (tmp_path / "file").read_bytes() == b""


def test_odd_tensors_go_through(tmp_path: Path) -> None:
    """Three experts: a bias of 12 bytes, and everything behind it in the file stays where the library finds it."""
    folder = make_tiny_glm4_moe(tmp_path / "source", **{**TINY, "num_experts": 3}, experts_per_token=1)
    plan = plan_for(folder, "w4a16")
    assert {output.num_bytes % 8 for tensor in plan.tensors for output in tensor.outputs} == {0, 4}
    quantize(plan, folder, tmp_path / "out", device="cpu", workers=2)
    source = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    made = {
        name: tensor for path in sorted((tmp_path / "out").glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    keeps = [tensor.name for tensor in plan.tensors if tensor.action == "keep"]
    assert keeps and all(torch.equal(made[name], source[name]) for name in keeps)


def test_slabs_cover_a_tensor_once() -> None:
    tensor = quantized("w", "w4a16_asym", 21, 128)._replace(shape=(21, 128), num_bytes=21 * 256)
    assert list(cut(tensor, 256 * 8)) == [(0, 8), (8, 16), (16, 21)]
    assert list(cut(tensor, 1)) == [(0, 8), (8, 16), (16, 21)]
    assert list(cut(tensor, 256 * 17)) == [(0, 16), (16, 21)]
    by_row = quantized("w", "fp8_channel", 21, 128)._replace(shape=(21, 128), num_bytes=21 * 256)
    assert list(cut(by_row, 256)) == [(row, row + 1) for row in range(21)]
    assert list(cut(kept("k", "BF16", 5, 3)._replace(num_bytes=30), 17)) == [(0, 16), (16, 30)]
    assert list(cut(kept("k", "BF16", 0, 3)._replace(num_bytes=0), 17)) == [(0, 0)]


# ------------------------------------------------------------------------------------------------ memory, workers
@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("1.5GiB", 3 << 29), ("800MB", 800_000_000), ("2g", 2 << 30), (" 64 KiB ", 65536), ("1TB", 10**12)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e9", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(QuantizeError, match=re.escape(f"--memory {text}: not a size; write it like 2GiB, 1.5GiB or 800MB")):
        parse_memory(text)


@pytest.mark.parametrize("text", ["10", "2147483648", "10B"])
def test_a_size_needs_its_unit(text: str) -> None:
    number = text.removesuffix("B")
    with pytest.raises(QuantizeError, match=f"^--memory {text}: say the unit as well: {number}GiB, {number}MB, ...$"):
        parse_memory(text)


def test_budget_gives_up_workers_then_slabs_then_names_the_least() -> None:
    base = {"least_slab_bytes": 1 << 20, "held_bytes": 10 << 20, "kernels": "fused", "base_bytes": 100 << 20}
    four = slab_budget_bytes(4, SLAB_BYTES, "fused")
    fixed = 110 << 20
    assert plan_budget(fixed + four, 4, **base) == Budget(4, SLAB_BYTES, fixed + four)
    assert plan_budget(fixed + four - 1, 4, **base) == Budget(3, SLAB_BYTES, fixed + four - 1)
    one = slab_budget_bytes(1, SLAB_BYTES, "fused")
    assert plan_budget(fixed + one, 4, **base) == Budget(1, SLAB_BYTES, fixed + one)
    assert plan_budget(fixed + one - 1, 4, **base) == Budget(1, SLAB_BYTES // 2, fixed + one - 1)
    least = fixed + slab_budget_bytes(1, 1 << 20, "fused")
    assert plan_budget(least, 4, **base).slab_bytes == 1 << 20
    with pytest.raises(QuantizeError, match=r"--memory 138MiB: too little .* at least 139MiB are needed here"):
        plan_budget(least - 1, 4, **base)
    with pytest.raises(QuantizeError, match="--workers 0"):
        plan_budget(1 << 30, 0, **base)
    large = plan_budget(1 << 33, 2, **{**base, "least_slab_bytes": 3 * SLAB_BYTES})
    assert large.slab_bytes == 3 * SLAB_BYTES
    assert window_of(2) == 4 and RUNTIME_BYTES < 1 << 30


def test_too_little_memory_is_refused_before_anything_is_made(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"--memory 50MiB: too little for one worker .*; at least \d+MiB are needed here"):
        quantize(plan_for(source, "w4a16"), source, tmp_path / "out", device="cpu", memory_bytes=50 << 20)
    assert not (tmp_path / "out").exists()


def test_workers_by_affinity_and_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert default_workers(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert default_workers(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert default_workers(tmp_path) == cores
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert default_workers(tmp_path) == 1


def hollow_source(folder: Path, experts: int, intermediate: int) -> Path:
    """One shard of zeros, sparse on the disk, with large experts."""
    make_tiny_glm4_moe(folder, shards=1, mtp=False, num_layers=1, first_dense=1, num_experts=2, hidden=1024)
    path = folder / "model.safetensors"
    with safe_open(path, framework="np") as file:
        names = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wide = {
        "gate_proj": [intermediate * experts, 1024],
        "up_proj": [intermediate * experts, 1024],
        "down_proj": [1024, intermediate * experts],
    }
    header, end = {}, 0
    for name, (dtype, shape) in names.items():
        part = name.split(".")[-2]
        shape = wide.get(part, shape)
        size = int(np.prod(shape)) * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file_out:
        file_out.write(len(text).to_bytes(8, "little") + text)
        file_out.truncate(8 + len(text) + end)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": intermediate * experts}))
    return folder


PEAK = """
import sys
from pathlib import Path
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
quantize(Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), device="cpu", workers=2)
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """Peak RSS of a process that makes one shard, of 75 MB and of 600 MB."""
    peaks = []
    for size in (1, 8):
        folder = hollow_source(tmp_path / f"source-{size}", size, 12288)
        plan_for(folder, "w4a16").save(tmp_path / "plan.json")
        arguments = [str(tmp_path / "plan.json"), str(folder), str(tmp_path / f"out-{size}")]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        peaks.append(int(done.stdout) << 10)
        assert (folder / "model.safetensors").stat().st_size > size * 70e6
    assert peaks[1] < peaks[0] + (24 << 20) and peaks[1] < 512 << 20, peaks


# ------------------------------------------------------------------------------------------------ sources that change
def stopped_after_one(plan: Plan, source: Path, out: Path) -> None:
    def one(plan: Plan, names: Sequence[str], *rest: Any) -> Generator[ShardRecord, None, None]:
        yield from run_local(plan, names[:1], *rest)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(plan, source, out, device="cpu", runner=one)


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
        quantize(plan, ours, out, device="cpu")
    with pytest.raises(QuantizeError, match=rf"{out}: begun with other data .*{SHARDS[shard]} was \d+ bytes of "):
        quantize(plan_for(ours, "w4a16"), ours, out, device="cpu")


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
        quantize(plan_for(ours, "w4a16"), ours, out, device="cpu")


@pytest.mark.parametrize("precision", ["w4a16", "fp8"])
def test_who_finishes_between_the_check_and_the_lock_is_not_overwritten(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    out, lock = tmp_path / "out", engine.locked_journal
    others: list[Manifest] = []

    def late(folder: Path) -> Any:
        monkeypatch.setattr(engine, "locked_journal", lock)
        others.append(quantize(plan_for(source, precision), source, folder, device="cpu"))
        return lock(folder)

    monkeypatch.setattr(engine, "locked_journal", late)
    if precision == "w4a16":
        assert quantize(plan_for(source, "w4a16"), source, out, device="cpu") == others[0]
    else:
        with pytest.raises(QuantizeError, match="holds a finished checkpoint of another plan"):
            quantize(plan_for(source, "w4a16"), source, out, device="cpu")
    assert Manifest.load(out / "assay_manifest.json") == others[0] and not (out / JOURNAL).exists()


def test_a_source_with_a_journal_of_ours_is_quantized_like_any_other(source: Path, tmp_path: Path) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    (ours / JOURNAL).write_text("left by a run that was killed")
    manifest = quantize(plan_for(ours, "w4a16"), ours, out, device="cpu")
    assert JOURNAL not in manifest.files and verify(out, source=ours).passed


def test_a_source_that_changes_during_the_run_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    ours, out = copied(source, tmp_path / "source"), tmp_path / "out"
    touched: list[str] = []

    def touch(name: str, num_bytes: int) -> None:
        if not touched:
            touched.append(name)
            os.utime(ours / SHARDS[1], ns=(1, 1))

    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]}: changed since this run began"):
        quantize(plan_for(ours, "w4a16"), ours, out, device="cpu", on_progress=touch)
    assert {path.name for path in out.glob("*")} <= {JOURNAL, SHARDS[0]}
    assert list(out.glob(".*.partial")) == []


def test_a_truncated_source_shard_is_named(source: Path, tmp_path: Path) -> None:
    ours = copied(source, tmp_path / "source")
    plan = plan_for(ours, "w4a16")
    os.truncate(ours / SHARDS[1], (ours / SHARDS[1]).stat().st_size - 100)
    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]} was \d+ bytes of .*, is \d+ bytes of"):
        quantize(plan, ours, tmp_path / "out", device="cpu")
    (tmp_path / "cut").mkdir()
    other = copied(source, tmp_path / "other")

    def cut_off(name: str, num_bytes: int) -> None:
        if (other / SHARDS[1]).stat().st_size > 5000:
            os.truncate(other / SHARDS[1], 5000)

    with pytest.raises(AssayError, match=rf"{SHARDS[1]}: (changed since|truncated|\d+ bytes expected)"):
        quantize(plan_for(other, "w4a16"), other, tmp_path / "cut" / "out", device="cpu", on_progress=cut_off)


# ------------------------------------------------------------------------------------------------ the disk fills up
LIMITED = """
import resource, sys
from pathlib import Path
from assay.errors import QuantizeError
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
try:
    quantize(Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), device="cpu", workers=2)
except QuantizeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_write_that_the_system_refuses_is_one_line_and_the_rerun_goes_on(source: Path, tmp_path: Path) -> None:
    plan, out = plan_for(source, "fp8"), tmp_path / "out"
    quantize(plan, source, tmp_path / "whole", device="cpu")
    sizes = {name: (tmp_path / "whole" / name).stat().st_size for name in SHARDS}
    small, large = sorted(SHARDS, key=lambda name: sizes[name])
    plan.save(tmp_path / "plan.json")
    arguments = [str(tmp_path / "plan.json"), str(source), str(out), str(sizes[large] - 1)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{out / large}: cannot be written: File too large; finished shards stay, run again\n", done.stderr
    assert list(out.glob(".*.partial")) == [] and not (out / large).exists()
    quantize(plan, source, out, device="cpu")
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
            quantize(plan, source, out, device="cpu", runner=one_by_one, on_progress=fill)
        assert sorted(path.name for path in out.iterdir()) == [JOURNAL, SHARDS[0]]
        (disk / "other").unlink()
        inode = (out / SHARDS[0]).stat().st_ino
        quantize(plan, source, out, device="cpu")
        assert (out / SHARDS[0]).stat().st_ino == inode
        quantize(plan, source, tmp_path / "whole", device="cpu")
        assert bytes_of(out) == bytes_of(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def one_by_one(plan: Plan, names: Sequence[str], *rest: Any) -> Generator[ShardRecord, None, None]:
    for name in names:
        yield from run_local(plan, [name], *rest)


# ------------------------------------------------------------------------------------------------ casts, progress
def test_casts_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    wide = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        fits = ~(np.isfinite(wide) & (np.abs(wide) > 3.38e38))
    wide = np.ascontiguousarray(wide[fits])
    theirs = torch.from_numpy(wide.copy()).to(torch.bfloat16)
    ours = torch.from_numpy(cast_rows(wide, "F32", "BF16", "w")).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])
    half = rng.integers(0, 2**16, 40_000, dtype=np.uint16).view(np.float16)
    finite = half[np.isfinite(half)]
    assert torch.equal(
        torch.from_numpy(cast_rows(finite, "F16", "BF16", "w")).view(torch.bfloat16),
        torch.from_numpy(finite).to(torch.bfloat16),
    )
    assert np.array_equal(cast_rows(finite, "F16", "F32", "w"), finite.astype(np.float32))
    short = rng.integers(0, 2**16, 1000, dtype=np.uint16)
    same = cast_rows(cast_rows(short, "BF16", "F32", "w"), "F32", "BF16", "w")
    is_nan = (short & 0x7FFF) > 0x7F80
    assert np.array_equal(same[~is_nan], short[~is_nan])
    with pytest.raises(QuantizeError, match="w: some values do not fit BF16"):
        cast_rows(np.array([3.4e38], np.float32), "F32", "BF16", "w")


def test_progress_in_a_log(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(source, "w4a16")
    console = Console(record=True, width=200, force_terminal=False)
    clock = iter([100.0, 100.0, 130.0, 130.0, 131.0])
    monkeypatch.setattr("assay.cli.progress.time.monotonic", lambda: next(clock))
    total = sum(tensor.num_bytes for tensor in plan.tensors)
    with ShardProgress(console, plan) as progress:
        progress("first", 0)
        progress("one (done before)", total // 2)
        progress("two", total // 4)
    (line,) = console.export_text().splitlines()
    assert line == "w4a16      938 kB of 1.88 MB, checking, one (done before)"


def test_the_file_of_importance_is_the_plans(source: Path, tmp_path: Path) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "importance.safetensors")
    with pytest.raises(QuantizeError, match=r"importance\.safetensors: the plan was made for none; make the plan anew"):
        quantize(plan_for(source, "w4a16"), source, tmp_path / "out", importance=tmp_path / "importance.safetensors")
    other = plan_for(source, "w4a16").model_copy(update={"importance_sha256": "abc"})
    with pytest.raises(QuantizeError, match="no file of channel weights: the plan was made for abc"):
        quantize(other, source, tmp_path / "out")
    assert least_slab_bytes(other) > 0
