"""The engine's order on disk, its writer and its slabs."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_sources import TINY, plan_for
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.plan import OutputTensor, TensorPlan
from assay_quantize.checkpoint.shard_files import header_bytes, held_bytes, layout
from assay_quantize.engine.ordered_writer import OrderedWriter, Result, WritingStopped
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.schemes import output_tensors
from assay_quantize.plan.slabs import slab_ranges


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
    quantize(plan, folder, tmp_path / "out", workers=2)
    source = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    made = {
        name: tensor for path in sorted((tmp_path / "out").glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    keeps = [tensor.name for tensor in plan.tensors if tensor.action == "keep"]
    assert keeps and all(torch.equal(made[name], source[name]) for name in keeps)


def test_slabs_cover_a_tensor_once() -> None:
    tensor = quantized("w", "w4a16_asym", 21, 128)._replace(shape=(21, 128), num_bytes=21 * 256)
    assert list(slab_ranges(tensor, 256 * 8)) == [(0, 8), (8, 16), (16, 21)]
    assert list(slab_ranges(tensor, 1)) == [(0, 8), (8, 16), (16, 21)]
    assert list(slab_ranges(tensor, 256 * 17)) == [(0, 16), (16, 21)]
    by_row = quantized("w", "fp8_channel", 21, 128)._replace(shape=(21, 128), num_bytes=21 * 256)
    assert list(slab_ranges(by_row, 256)) == [(row, row + 1) for row in range(21)]
    assert list(slab_ranges(kept("k", "BF16", 5, 3)._replace(num_bytes=30), 17)) == [(0, 16), (16, 30)]
    assert list(slab_ranges(kept("k", "BF16", 0, 3)._replace(num_bytes=0), 17)) == [(0, 0)]
