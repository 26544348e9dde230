"""Whatever form a source is stored in, the reader hands out the weights that PyTorch and compressed-tensors compute from it,
and the checkpoint made from it is the one made from those weights."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hollow import write_hollow_shard
from safetensors.torch import save_file
from tiny_checkpoints import dequantized, fuse_experts, make_tiny_glm4_moe, read_shards, store_as_fp8, to_fp8

from assay.errors import AssayError, CheckpointError, QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader, rows_bytes
from assay_quantize.checkpoint.torch_tensors import read_tensor
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.storage.past_cache import ReadAhead, Residency
from assay_quantize.verify.verify import verify

X = "model.layers.0.mlp.up_proj"


def plan_of(source: Path, precision: str = "w4a16") -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as safetensors reads it."""
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return {n: (t.dtype, t.shape) for n, t in left.items()} == {n: (t.dtype, t.shape) for n, t in right.items()} and all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name, tensor in left.items()
    )


def one_weight(folder: Path, tensors: dict[str, torch.Tensor], config: str = "{}") -> tuple[Checkpoint, TensorPlan]:
    """A checkpoint of a single weight, and its plan."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    checkpoint = open_checkpoint(folder)
    header = checkpoint.tensors[f"{X}.weight"]
    scale = next((name for name in tensors if "weight_scale" in name), None)
    return checkpoint, TensorPlan(
        header.name, "dense_mlp", "dense_mlp", X, "quantize", "w4a16", None, header.dtype, header.shape, header.num_bytes,
        header.shard, header.shard, (), scale,
    )  # fmt: skip


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


# ------------------------------------------------------------------------------------------------ the reader
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rows_and_bytes_of_every_tensor(tmp_path: Path, dtype: str) -> None:
    """By many threads at once, in slabs of any size, into one buffer for each."""
    folder = make_tiny_glm4_moe(tmp_path / "source", dtype=dtype)
    wanted, plan = stored(folder), plan_of(folder)

    def check(tensor: TensorPlan) -> None:
        buffer = np.empty(rows_bytes(tensor, 7), np.uint8)
        for begin in range(0, tensor.shape[0], 7):
            end = min(begin + 7, tensor.shape[0])
            rows = reader.read_rows(tensor, begin, end, buffer)
            assert np.shares_memory(rows, buffer)
            np.testing.assert_array_equal(rows, bits(wanted[tensor.name][begin:end]), strict=True)
        data = wanted[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        reader.will_need(tensor, 0, tensor.num_bytes)
        assert bytes(reader.read_bytes(tensor, 3, tensor.num_bytes - 1)) == data[3:-1]
        reader.done_with(tensor, 0, tensor.num_bytes)

    with SourceReader(open_checkpoint(folder)) as reader, ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(check, plan.tensors))) == 107


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(576, 384), (128, 128), (200, 200), (1, 128), (40, 72)])
def test_fp8_blocks_are_what_compressed_tensors_makes_of_them(
    tmp_path: Path, rows: int, columns: int, scale_dtype: torch.dtype
) -> None:
    """576 rows (kv_a_proj_with_mqa) end inside a block; every E4M3 code but NaN occurs; scales reach into BF16's subnormals."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.randn(-(-rows // 128), -(-columns // 128), generator=generator).mul(20 if scale_dtype != torch.float16 else 3)
    weight, scale = codes.view(torch.float8_e4m3fn), scale.exp().to(scale_dtype)
    wanted = FP8BlockDequantizer().process({f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})[f"{X}.weight"]
    checkpoint, tensor = one_weight(tmp_path / "c", {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
    assert tensor.logical_dtype == "BF16"
    with SourceReader(checkpoint) as reader:
        np.testing.assert_array_equal(reader.read_rows(tensor, 0, rows), bits(wanted), strict=True)
        buffer = np.empty(rows_bytes(tensor, 130) + 64, np.uint8)
        for begin in range(0, rows, 130):
            end = min(begin + 130, rows)
            np.testing.assert_array_equal(reader.read_rows(tensor, begin, end, buffer), bits(wanted[begin:end]), strict=True)


@pytest.mark.parametrize(("per", "scale_shape"), [("channel", (192, 1)), ("channel", (192,)), ("tensor", (1,)), ("tensor", ())])
def test_fp8_channels_and_tensors_are_what_compressed_tensors_makes_of_them(
    tmp_path: Path, per: str, scale_shape: tuple[int, ...]
) -> None:
    weight, scale = to_fp8(torch.randn(192, 256, generator=torch.Generator().manual_seed(1)), per, torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"], format="float-quantized", weights=QuantizationArgs(num_bits=8, type="float", strategy=per)
    )
    parts = {"weight": weight, "weight_scale": scale}
    wanted = BaseCompressor.get_value_from_registry("float-quantized").decompress(parts, scheme)["weight"]
    checkpoint, tensor = one_weight(
        tmp_path / "c", {f"{X}.weight": weight, f"{X}.weight_scale": scale.reshape(scale_shape)}
    )  # fmt: skip
    with SourceReader(checkpoint) as reader:
        made = [reader.read_rows(tensor, begin, begin + 64) for begin in (0, 64, 128)]
    np.testing.assert_array_equal(np.concatenate(made), bits(wanted), strict=True)


def test_other_blocks_are_read_as_config_json_says(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator)
    declared = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 64]}}'
    tensors = {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale}
    checkpoint, tensor = one_weight(tmp_path / "c", tensors, declared)
    wanted = (weight.float() * scale.repeat_interleave(32, 0).repeat_interleave(64, 1)).bfloat16()
    with SourceReader(checkpoint) as reader:
        np.testing.assert_array_equal(reader.read_rows(tensor, 31, 96), bits(wanted[31:]), strict=True)
    with pytest.raises(CheckpointError) as caught:
        one_weight(tmp_path / "undeclared", tensors)
    assert str(caught.value) == (
        f"{tmp_path / 'undeclared'}: {X}.weight_scale_inv [3, 2] does not fit {X}.weight [96, 128]: one scale per 128 x 128 "
        "block, per row or per tensor is read; check weight_block_size in config.json"
    )


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    scale = torch.ones(2, 1)
    scale[1] = float("nan")
    tensors = {f"{X}.weight": torch.zeros(200, 128).to(torch.float8_e4m3fn), f"{X}.weight_scale_inv": scale}
    checkpoint, tensor = one_weight(tmp_path / "c", tensors)
    with SourceReader(checkpoint) as reader:
        assert not reader.read_rows(tensor, 0, 128).any()
        with pytest.raises(QuantizeError) as caught:
            reader.read_rows(tensor, 100, 200)
    assert str(caught.value) == f"{X}.weight_scale_inv: 1 scales are NaN or infinite; the source is damaged"


def test_a_nan_code_is_a_nan(tmp_path: Path) -> None:
    weight = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    checkpoint, tensor = one_weight(tmp_path / "c", {f"{X}.weight": weight, f"{X}.weight_scale": torch.tensor([1.0])})
    with SourceReader(checkpoint) as reader:
        assert np.isnan((reader.read_rows(tensor, 0, 1).astype(np.uint32) << 16).view(np.float32)).tolist() == [
            [True, True, False]
        ]


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    checkpoint, tensor = one_weight(tmp_path / "c", {f"{X}.weight": torch.zeros(4, 128)})
    path = tmp_path / "c" / "model.safetensors"
    size = path.stat().st_size
    with SourceReader(checkpoint) as reader:
        reader.read_rows(tensor, 0, 1)
        path.write_bytes(path.read_bytes()[:-600])
        with pytest.raises(CheckpointError, match=f"^{path}: truncated: ends inside {X}.weight; download it again$"):
            reader.read_rows(tensor, 0, 4)
    with SourceReader(checkpoint) as reader, pytest.raises(CheckpointError) as caught:
        reader.read_rows(tensor, 0, 1)
    assert str(caught.value) == (
        f"{path}: {size} bytes expected, {size - 600} there: it changed since its header was read; download it again"
    )
    with SourceReader(checkpoint) as reader, pytest.raises(QuantizeError, match="no longer what the plan was made from"):
        reader.read_rows(tensor._replace(shape=(4, 64)), 0, 1)
    with pytest.raises(CheckpointError, match="its weights are on the hub"):
        SourceReader(replace(checkpoint, folder=None))


def cold_weight(folder: Path, seed: int = 0) -> tuple[Checkpoint, TensorPlan, np.ndarray, Path]:
    """A weight of 6 MB whose file is not in the page cache, its plan, its values, and the file."""
    values = torch.randn((1500, 2000), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    checkpoint, tensor = one_weight(folder, {f"{X}.bias": torch.zeros(5, dtype=torch.bfloat16), f"{X}.weight": values})
    path = (folder / "model.safetensors").resolve()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return checkpoint, tensor, bits(values), path


def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(begin, bytes) of every range that is read ahead past the page cache, as they come."""
    seen: list[tuple[int, int]] = []
    real = ReadAhead.begin

    def begin(self: ReadAhead, descriptor: int, begin: int, size: int) -> None:
        seen.append((begin, size))
        real(self, descriptor, begin, size)

    monkeypatch.setattr(ReadAhead, "begin", begin)
    return seen


def test_what_is_not_in_the_page_cache_is_read_ahead_past_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, tensor, wanted, path = cold_weight(tmp_path / "c")
    begin_of_data = checkpoint.tensors[tensor.name].begin
    slabs = [(0, 1), (1, 700), (700, 1499), (1499, 1500)]  # the last one ends with the file
    with path.open("rb") as file:
        residency = Residency(file.fileno(), path.stat().st_size)
        if residency.is_cached(0, 1):
            pytest.skip(f"{tmp_path} lies in memory (tmpfs)")
        seen = direct_reads(monkeypatch)
        with SourceReader(checkpoint) as reader:
            for begin, end in slabs:
                reader.will_need(tensor, begin * 4000, end * 4000)
                reader.will_need(tensor, begin * 4000, end * 4000)  # asked for twice, read once
            for begin, end in slabs:
                np.testing.assert_array_equal(reader.read_rows(tensor, begin, end), wanted[begin:end], strict=True)
            assert not residency.is_cached(begin_of_data, path.stat().st_size - begin_of_data)
            # through the cache from the beginning on; then it is there, and nothing is left to be read past it
            reader.will_need(tensor, 0, 4000 * 1500, through_cache=True)
            np.testing.assert_array_equal(reader.read_rows(tensor, 0, 1500), wanted, strict=True)
            reader.will_need(tensor, 0, 4000 * 1500)
            np.testing.assert_array_equal(reader.read_rows(tensor, 0, 1500), wanted, strict=True)
        residency.close()
    assert set(seen) == {(begin_of_data + begin * 4000, (end - begin) * 4000) for begin, end in slabs}


@pytest.mark.parametrize("fails", ["when opened", "when read", "not ours"])
def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    checkpoint, tensor, wanted, _ = cold_weight(tmp_path / "c")
    direct: set[int] = set()
    real_open, real_preadv = os.open, os.preadv

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and fails == "when opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        made = real_open(path, flags, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(made)
        return made

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in direct:
            assert fails == "when read", "nobody can tell what lies in the page cache"
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    if fails == "not ours":
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with SourceReader(checkpoint) as reader:
        reader.will_need(tensor, 0, 4000 * 1500)
        np.testing.assert_array_equal(reader.read_rows(tensor, 0, 1500), wanted, strict=True)


def test_a_file_that_is_truncated_while_it_is_read_ahead_is_named(tmp_path: Path) -> None:
    checkpoint, tensor, _, path = cold_weight(tmp_path / "c")
    with SourceReader(checkpoint) as reader:
        reader.read_rows(tensor, 0, 1)
        os.truncate(path, path.stat().st_size - 600)
        reader.will_need(tensor, 4000, 4000 * 1500)
        with pytest.raises(CheckpointError, match=f"^{path}: truncated: ends inside {X}.weight; download it again$"):
            reader.read_rows(tensor, 1, 1500)


def test_a_reader_takes_one_descriptor_of_a_file_and_gives_it_back(tmp_path: Path) -> None:
    """With a range that was read ahead and never asked for. 500 shards must stay below the usual limit of 1,024."""
    checkpoint, tensor, wanted, path = cold_weight(tmp_path / "c")
    with SourceReader(checkpoint) as reader:
        reader.will_need(tensor, 0, 4000)
        reader.will_need(tensor, 4000, 4000 * 1500)
        np.testing.assert_array_equal(reader.read_rows(tensor, 0, 1), wanted[:1], strict=True)
        np.testing.assert_array_equal(reader.read_rows(tensor, 1, 1500), wanted[1:], strict=True)
        assert _open_files().count(path) == 1
        reader.will_need(tensor, 0, 4000)
    assert path not in _open_files()


def _open_files() -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(link.readlink())
        except OSError:  # the descriptor of the listing itself
            continue
    return found


# ------------------------------------------------------------------------------------------------ from plan to verify
def test_an_fp8_release_gives_the_checkpoint_of_the_weights_it_stands_for(tiny_glm: Path, tmp_path: Path) -> None:
    """INT4 experts, everything else in BF16, the MTP block as well; scales lie in other shards than their weights."""
    fp8 = store_as_fp8(tiny_glm, tmp_path / "fp8", scales_apart=True, activation_scales=True)
    plain = dequantized(fp8, tmp_path / "plain")
    plan = plan_of(fp8, "w4a16-experts")
    assert Counter(tensor.action for tensor in plan.tensors) == {"keep": 43, "quantize": 30, "dequantize": 34, "consume": 128}
    assert {t.outputs[0].dtype for t in plan.tensors if t.role == "mtp" and t.outputs and t.part != "router_bias"} == {"BF16"}
    for source in (fp8, plain):
        made = tmp_path / f"from-{source.name}"
        quantize(plan_of(source, "w4a16-experts"), source, made)
        assert verify(made, source=source).damages == ()
    left, right = stored(tmp_path / "from-fp8"), stored(tmp_path / "from-plain")
    assert same(left, right)
    name = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(left[name], stored(plain)[name]) and left[name].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("per", "leaf", "precision"), [("block", "weight_scale_inv", "fp8"), ("channel", "weight_scale", "fp8-channel")]
)
def test_an_fp8_release_in_the_scheme_that_is_wanted_keeps_its_bytes(
    tiny_glm: Path, tmp_path: Path, per: str, leaf: str, precision: str
) -> None:
    fp8 = store_as_fp8(tiny_glm, tmp_path / "fp8", per=per, leaf=leaf)
    plan = plan_of(fp8, precision)
    quantize(plan, fp8, tmp_path / "made")
    assert verify(tmp_path / "made", source=fp8).damages == verify(tmp_path / "made").damages == ()
    before, after = stored(fp8), stored(tmp_path / "made")
    kept = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    assert len(kept) == 45 and {tensor.action for tensor in kept} == {"keep"}
    for tensor in kept:
        module = tensor.module
        assert torch.equal(after[f"{module}.weight"].view(torch.uint8), before[f"{module}.weight"].view(torch.uint8))
        assert torch.equal(after[f"{module}.weight_scale"], before[f"{module}.{leaf}"])
    assert after["model.layers.3.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert not [name for name in after if name.endswith("weight_scale_inv")]


def test_fused_groups_are_carried_over_whole_or_not_at_all(tiny_glm: Path, tmp_path: Path) -> None:
    fp8 = store_as_fp8(tiny_glm, tmp_path / "fp8", plain=r".*eh_proj.*|model\.layers\.0\.self_attn\.k_proj.*")
    actions = {tensor.name: tensor.action for tensor in plan_of(fp8, "fp8").tensors}
    assert {p: actions[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkvo"} == {
        "q": "quantize", "k": "quantize", "v": "quantize", "o": "keep",
    }  # fmt: skip
    assert actions["model.layers.0.self_attn.q_proj.weight_scale_inv"] == "consume"


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("form", ["bf16", "block", "channel", "tensor"])
def test_fused_experts_are_read_one_by_one(tiny_glm: Path, tmp_path: Path, form: str, suffix: str) -> None:
    leaf = "weight_scale_inv" if form == "block" else "weight_scale"
    single = tiny_glm if form == "bf16" else store_as_fp8(tiny_glm, tmp_path / "single", per=form, leaf=leaf)
    if form == "tensor":
        with pytest.raises(CheckpointError, match="cannot be split among the experts"):
            open_checkpoint(fuse_experts(single, tmp_path / "fused", suffix=suffix))
        return
    fused = open_checkpoint(fuse_experts(single, tmp_path / "fused", suffix=suffix))
    alone = open_checkpoint(single)
    assert {n: (h.dtype, h.shape) for n, h in fused.tensors.items()} == {
        n: (h.dtype, h.shape) for n, h in alone.tensors.items()
    }
    for name in alone.tensors:
        assert torch.equal(*(read_tensor(each, name).reshape(-1).view(torch.uint8) for each in (fused, alone))), name
    count, experts = (6, 36) if form == "bf16" else (12, 72)
    assert fused.notes == (
        f"{count} tensors hold all experts of a layer; they are read as {experts} tensors of single experts",
    )


def test_fused_experts_give_the_checkpoint_of_single_ones(tiny_glm: Path, tmp_path: Path) -> None:
    fused = fuse_experts(store_as_fp8(tiny_glm, tmp_path / "fp8"), tmp_path / "fused")
    for source in (tmp_path / "fp8", fused):
        quantize(plan_of(source, "nvfp4a16"), source, tmp_path / f"from-{source.name}")
    assert verify(tmp_path / "from-fused", source=fused).damages == ()
    assert same(stored(tmp_path / "from-fused"), stored(tmp_path / "from-fp8"))


# ------------------------------------------------------------------------------------------------ refused, and noted
Shapes = list[tuple[str, str, tuple[int, ...]]]
EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([(f"{X}.weight_packed", "I32", (8, 16)), (f"{X}.weight_scale", "BF16", (8, 1))],
         f"is quantized already ({X}.weight_packed is I32); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.qweight", "I32", (8, 16))],
         f"is quantized already ({X}.qweight is I32); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.weight", "I8", (8, 16)), (f"{X}.weight_scale", "BF16", (8, 1))],
         f"is quantized already ({X}.weight is I8); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.weight", "F8_E5M2", (8, 16)), (f"{X}.weight_scale", "BF16", (8, 1))],
         f"is quantized already ({X}.weight is F8_E5M2); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.weight_scale", "BF16", (8, 1))],
         f"is quantized already ({X}.weight_scale scales no weight); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.weight", "BF16", (8, 16)), (f"{X}.weight_scale", "BF16", (8, 1))],
         f"{X}.weight is BF16, but has scales ({X}.weight_scale); the checkpoint is damaged, download it again"),
        ([(f"{X}.weight", "F8_E4M3", (8, 16)), (f"{X}.weight_scale", "BF16", (8, 1)), (f"{X}.weight_scale_inv", "F32", (1, 1))],
         f"{X}.weight has two tensors of scales, {X}.weight_scale and {X}.weight_scale_inv; the checkpoint is damaged, "
         "download it again"),
        ([(f"{X}.weight", "F8_E4M3", (8, 16)), (f"{X}.weight_scale", "U8", (8, 1))],
         f"{X}.weight_scale has dtype U8; scales are read as F32, BF16, F16, F8_E8M0"),
        ([(f"{X}.input_scale", "F32", (1,))], f"{X}.input_scale belongs to {X}.weight, not there; complete the download"),
        ([(f"{EXPERTS}.gate_up_proj", "BF16", (4, 64, 64))],
         f"{EXPERTS}.gate_up_proj has shape [4, 64, 64]; by config.json it should be [experts, 64, 256] or the other way "
         "round; save the model again with one tensor per expert"),
        ([(f"{EXPERTS}.down_proj", "BF16", (4, 256, 99))],
         f"{EXPERTS}.down_proj has shape [4, 256, 99]; by config.json it should be [experts, 256, 32] or the other way "
         "round; save the model again with one tensor per expert"),
        ([(f"{EXPERTS}.gate_up_proj", "F8_E4M3", (4, 64, 256)), (f"{EXPERTS}.gate_up_proj_scale_inv", "F32", (4, 2, 2))],
         f"{EXPERTS}.gate_up_proj_scale_inv [4, 2, 2] cannot be split among the experts of {EXPERTS}.gate_up_proj [4, 64, 256]"
         "; save the model again with one tensor per expert"),
        ([(f"{EXPERTS}.gate_up_proj_scale_inv", "F32", (4, 2, 2))],
         f"{EXPERTS}.gate_up_proj_scale_inv has no {EXPERTS}.gate_up_proj; complete the download"),
        ([(f"{EXPERTS}.down_proj", "BF16", (4, 256, 32)), (f"{EXPERTS}.3.down_proj.weight", "BF16", (256, 32))],
         f"{EXPERTS}.3.down_proj.weight is there on its own and inside {EXPERTS}.down_proj; download it again"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path: Path, tensors: Shapes, message: str) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 256, "moe_intermediate_size": 32}')
    write_hollow_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"


def test_lists_that_lie_are_noted(tiny_glm: Path, tmp_path: Path) -> None:
    """Layer 3 is the MTP block: here in BF16, and not in the list, which names four modules that are FP8."""
    listed = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.shared_experts", "layers.3.eh_proj"]
    folder = store_as_fp8(tiny_glm, tmp_path / "fp8", plain=r"model\.layers\.3\..*", listed=listed)
    assert open_checkpoint(folder).notes == (
        "config.json: modules_to_not_convert lists model.layers.0.self_attn.q_proj and 3 more modules, stored as FP8 all the "
        "same: the tensors are right",
        "config.json: modules_to_not_convert does not list model.layers.3.mlp.experts.0.down_proj and 18 more modules, stored "
        "unquantized: the tensors are right",
    )
    plan = plan_of(folder)
    assert {t.action for t in plan.tensors if t.role == "mtp"} == {"keep"}
    patterns = store_as_fp8(tiny_glm, tmp_path / "patterns", listed=[*listed, r"re:(.*)*(.*)*\.never"])
    assert open_checkpoint(patterns).notes == ()
    shutil.copytree(tiny_glm, tmp_path / "plain")
    shutil.copy(folder / "config.json", tmp_path / "plain")
    assert open_checkpoint(tmp_path / "plain").notes == (
        "config.json: quant_method 'fp8', but no weight is FP8: the tensors are right",
    )


@pytest.mark.parametrize("edit", [lambda h: h._replace(dtype="F16"), lambda h: h._replace(shape=(1, *h.shape))])
def test_another_source_than_the_plan_was_made_from(tiny_glm: Path, edit: Callable[..., object]) -> None:
    plan, checkpoint = plan_of(tiny_glm), open_checkpoint(tiny_glm)
    tensor = plan.tensors[0]
    checkpoint.tensors[tensor.name] = edit(checkpoint.tensors[tensor.name])  # type: ignore[assignment]
    with SourceReader(checkpoint) as reader, pytest.raises(AssayError, match="no longer what the plan was made from"):
        reader.read_bytes(tensor, 0, 8)
