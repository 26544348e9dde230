"""`verify` in slabs: the same findings however a tensor is cut and on however many threads; FP8 and fused sources, damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import fuse_experts, make_tiny_glm4_moe, store_as_fp8

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of_file
from assay.records.verification import Verification
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify import contents as verify_contents
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import ScaleCounts
from assay_quantize.verify.slabs import count_bad_scales
from assay_quantize.verify.verify import num_bytes_of, verify

pytestmark = pytest.mark.slow


EXPERT = "model.layers.1.mlp.experts.1"
MTP_HEAD = "model.layers.2.self_attn.o_proj.weight"
Tensors = dict[str, torch.Tensor]


class Made(NamedTuple):
    source: Path
    folder: Path


def quantized(source: Path, folder: Path, precision: str) -> Made:
    recipe = load_recipe(PrecisionRecipe, precision)
    quantize(make_plan(open_checkpoint(source), recipe, model="tiny", family=None), source, folder)
    return Made(source, folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 256 and 384 rows: with slabs of 19 rows the last slab of a tensor is ragged."""
    return make_tiny_glm4_moe(
        tmp_path_factory.mktemp("slabs") / "bf16",
        num_layers=2, num_experts=2, hidden=128, dense_intermediate=384, moe_intermediate=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fp8(tiny: Path) -> Path:
    return store_as_fp8(tiny, tiny.parent / "fp8", scales_apart=True)


def damage(made: Made, tmp_path: Path, change: Callable[[Tensors], object]) -> Made:
    """A copy with `change` applied to all its tensors, index and manifest mended, so that only the contents are wrong."""
    folder = Path(shutil.copytree(made.folder, tmp_path / "damaged"))
    shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    tensors = {name: tensor.clone() for found in shards.values() for name, tensor in found.items()}
    change(tensors)
    for shard, found in shards.items():
        save_file({name: tensors[name] for name in found}, folder / shard, {"format": "pt"})
    manifest = json.loads((folder / "assay_manifest.json").read_text())
    for record in manifest["shards"]:
        path = folder / record["name"]
        record.update(num_bytes=path.stat().st_size, sha256=sha256_of_file(path))
    (folder / "assay_manifest.json").write_text(json.dumps(manifest))
    return Made(made.source, folder)


def found(result: Verification) -> list[tuple[str, str, str]]:
    return [(one.check, one.where, one.what) for one in result.damages]


def flip_bytes(name: str, *places: int) -> Callable[[Tensors], None]:
    """Change the lowest bit of these bytes of a tensor; negative places count from its end."""

    def change(tensors: Tensors) -> None:
        raw = tensors[name].view(-1).view(torch.uint8)
        for place in places:
            raw[place] ^= 1

    return change


# ------------------------------------------------------------------------------------------------ slabs
def several(tensors: Tensors) -> None:
    """Damage at both ends of a kept tensor, one scale too many of each kind, and two weights exchanged."""
    flip_bytes("lm_head.weight", 0, 7, -1)(tensors)
    scale = tensors[f"{EXPERT}.down_proj.weight_scale"]
    scale[0, 0], scale[-1, -1] = 0, float("nan")
    for part in [name for name in tensors if name.startswith(f"{EXPERT}.gate_proj.weight")]:
        other = part.replace("gate_proj", "up_proj")
        tensors[part], tensors[other] = tensors[other], tensors[part]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4a16", "w4a16-asym", "fp8", "nvfp4a16"])
def test_findings_do_not_depend_on_slabs_and_workers(
    tiny: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = damage(quantized(tiny, tmp_path / "made", precision), tmp_path, several)
    whole = verify(made.folder, source=made.source, workers=1)
    checks = [(check, where) for check, where, _ in found(whole) if check != "fused_scales"]
    down, gate, up = (f"{EXPERT}.{p}_proj.weight" for p in ("down", "gate", "up"))
    assert sorted(checks) == [("error", gate), ("error", up), ("kept", "lm_head.weight"), ("scales", f"{down}_scale")]
    assert next(what for check, _, what in found(whole) if check == "kept").startswith("3 of 131072 bytes differ")
    assert next(what for check, _, what in found(whole) if check == "scales").startswith("1 of ")
    for slab_bytes, workers in ((1_000, 1), (5_000, 3), (1 << 15, 2)):
        monkeypatch.setattr(verify_contents, "SLAB_BYTES", slab_bytes)
        cut = verify(made.folder, source=made.source, workers=workers)
        assert found(cut) == found(whole) and cut.checks == whole.checks
        assert cut.worst_relative_error == pytest.approx(whole.worst_relative_error, rel=1e-9)
        assert cut.mean_relative_error == pytest.approx(whole.mean_relative_error, rel=1e-9)


# scales of fp8_static come from a calibration file: tests/quantize/plan/test_static_scales.py verifies them
@pytest.mark.parametrize("scheme", sorted(SCHEMES.keys() - {"fp8_static"}))
def test_every_scheme_in_ragged_slabs(tiny: Path, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(PrecisionRecipe, "w4a16").model_copy(update={"scheme": scheme})
    plan = make_plan(open_checkpoint(tiny), recipe, model="tiny", family=None)
    quantize(plan, tiny, tmp_path / "made")
    results = [verify(tmp_path / "made", source=tiny)]
    monkeypatch.setattr(verify_contents, "SLAB_BYTES", 5_000)
    results += [verify(tmp_path / "made", source=tiny), verify(tmp_path / "made")]
    assert [found(result) for result in results] == [[], [], []]
    count = sum(tensor.action == "quantize" for tensor in plan.tensors)
    assert [result.checks.get("error", 0) for result in results] == [count, count, 0]
    assert results[0].mean_relative_error == pytest.approx(results[1].mean_relative_error, rel=1e-9)


def test_the_error_is_the_frobenius_norm_that_pytorch_computes(tiny: Path, tmp_path: Path) -> None:
    from assay_quantize.kernels.reference import dequantize_weight

    made = quantized(tiny, tmp_path / "made", "w4a16")
    result = verify(made.folder, source=made.source)
    source = {n: t for path in tiny.glob("*.safetensors") for n, t in load_file(path).items()}
    stored = {n: t for path in made.folder.glob("*.safetensors") for n, t in load_file(path).items()}
    errors = []
    for layer, expert, projection in [(1, e, p) for e in range(2) for p in ("gate", "up", "down")]:
        module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        parts = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")}
        w = source[f"{module}.weight"].double()
        errors.append(float((dequantize_weight(parts, "w4a16", torch.float64) - w).norm() / w.norm()))
    # Six significant digits of each tensor's error are kept.
    assert result.mean_relative_error["routed_expert"] == pytest.approx(sum(errors) / 6, rel=5e-6)
    assert result.worst_relative_error["routed_expert"] == float(f"{max(errors):.6g}")


def test_hashes_only(tiny: Path, tmp_path: Path) -> None:
    made = quantized(tiny, tmp_path / "made", "w4a16")
    result = verify(made.folder, source=made.source, contents=False)
    assert result.passed and result.not_checked == ("contents and scales of the tensors: only hashes were asked for",)
    assert result.checks["hashes"] == 2 + len(json.loads((made.folder / "assay_manifest.json").read_text())["files"])
    assert not {"weights", "scales", "kept", "error"} & result.checks.keys()
    damaged = damage(made, tmp_path, flip_bytes("lm_head.weight", 3))
    assert verify(damaged.folder, contents=False).passed, "its hashes were mended"
    shard = damaged.folder / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ((check, where, what),) = found(verify(damaged.folder, contents=False))
    assert (check, where) == ("hashes", shard.name) and what.startswith(f"has SHA-256 {sha256_of_file(shard)[:12]}...")


@pytest.mark.parametrize("contents", [True, False])
def test_progress_adds_up(tiny: Path, tmp_path: Path, contents: bool) -> None:
    made = quantized(tiny, tmp_path / "made", "nvfp4a16")
    told: list[tuple[str, int]] = []
    verify(made.folder, source=made.source, workers=3, contents=contents, on_progress=lambda *one: told.append(one))
    total, headers = sum(count for _, count in told), 0
    for path in made.folder.glob("*.safetensors"):
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert total == num_bytes_of(made.folder) - (headers if contents else 0)


def test_a_source_that_cannot_be_read_is_an_error_not_a_finding(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    made = quantized(source, tmp_path / "made", "fp8")
    with (source / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: truncated"):
        verify(made.folder, source=source)


def test_a_shard_that_is_a_link_out_of_the_folder(tiny: Path, tmp_path: Path) -> None:
    made = quantized(tiny, tmp_path / "made", "fp8")
    shutil.move(made.folder / "model-00001-of-00002.safetensors", tmp_path / "elsewhere")
    (made.folder / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "elsewhere")
    result = verify(made.folder, source=tiny)
    assert ("headers", "model-00001-of-00002.safetensors") in [(check, where) for check, where, _ in found(result)]
    assert not result.passed


@pytest.mark.parametrize("name", ["assay_manifest.json", "config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tiny: Path, tmp_path: Path, name: str) -> None:
    made = quantized(tiny, tmp_path / "made", "fp8")
    (made.folder / name).unlink()
    os.mkfifo(made.folder / name)
    result = verify(made.folder, source=tiny)
    assert not result.passed and name in [where for _, where, _ in found(result)]


# ------------------------------------------------------------------------------------------------ FP8 and fused sources
def test_what_was_dequantized_is_compared_byte_for_byte(fp8: Path, tmp_path: Path) -> None:
    made = quantized(fp8, tmp_path / "made", "w4a16")
    assert found(verify(made.folder, source=fp8)) == []
    damaged = damage(made, tmp_path, flip_bytes(MTP_HEAD, 0, -2))
    assert found(verify(damaged.folder, source=fp8)) == [
        ("kept", MTP_HEAD, "2 of 65536 bytes differ; it must be the source's, dequantized to BF16")
    ]
    assert found(verify(damaged.folder)) == [], "nothing to compare with"


def test_what_was_carried_over_from_an_fp8_release(fp8: Path, tmp_path: Path) -> None:
    """Weight and scales have the source's bytes; a scale that is none is named as such, without the source, too."""
    made = quantized(fp8, tmp_path / "made", "fp8")
    assert found(verify(made.folder, source=fp8)) == found(verify(made.folder)) == []
    weight, scale = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale"
    damaged = damage(made, tmp_path, lambda t: (flip_bytes(weight, 5)(t), flip_bytes(scale, 0)(t)))
    kept = "bytes differ; it must be copied unchanged"
    expected = {("kept", weight, f"1 of 32768 {kept}"), ("kept", scale, f"1 of 8 {kept}")}
    assert set(found(verify(damaged.folder, source=fp8))) == expected
    shutil.rmtree(damaged.folder)
    damaged = damage(made, tmp_path, lambda t: t[scale].view(-1)[1:2].zero_())
    for source in (fp8, None):
        assert ("scales", scale, "1 of 2 scales are zero") in found(verify(damaged.folder, source=source))


def test_an_expert_of_a_fused_source(fp8: Path, tmp_path: Path) -> None:
    fused = fuse_experts(fp8, tmp_path / "fused")
    made = quantized(fused, tmp_path / "made", "w4a16")
    result = verify(made.folder, source=fused)
    assert found(result) == [] and result.checks["error"] == 2 * 4 + 3 + 3 + 2 * 3

    def exchange(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"{EXPERT}.down_proj.")]:
            other = name.replace("experts.1", "experts.0")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    result = verify(damage(made, tmp_path, exchange).folder, source=fused)
    assert {(check, where) for check, where, _ in found(result)} == {
        ("error", f"model.layers.1.mlp.experts.{number}.down_proj.weight") for number in (0, 1)
    }


# ------------------------------------------------------------------------------------------------ pieces
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_bad_scales_are_those_pytorch_finds(dtype: torch.dtype) -> None:
    """Every bit pattern of 8 and 16 bits; of 32 bits random ones and the edges."""
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    if dtype == torch.float32:
        edges = np.array([0, 1 << 31, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7F7F_FFFF, 1], np.uint32)
        bits = np.concatenate([edges, np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)])
    else:
        bits = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint16).astype(np.uint8 if dtype.itemsize == 1 else np.uint16)
    values = torch.from_numpy(bits).view(dtype).float()
    got = count_bad_scales(bits if name != "F32" else bits.view(np.float32), name)
    # NaN with a sign counts as negative, too: only the first kind that is found is reported
    assert got[:2] == (int((~values.isfinite()).sum()), int((values == 0).sum()))
    assert got.negative == int((values.signbit()).sum())
    assert count_bad_scales(np.array([0, 127, 255, 255], np.uint8), "U8") == ScaleCounts(2, 0, 0)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, tiny: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "source"))
    reader = StoredReader(folder, open_checkpoint(folder).tensors)
    header = open_checkpoint(folder).tensors["lm_head.weight"]
    buffer = np.zeros(header.num_bytes, np.uint8)
    data = (folder / header.shard).read_bytes()[header.begin : header.end]
    assert reader.read("lm_head.weight", 10, 20, buffer).tobytes() == data[10:20]
    with (folder / header.shard).open("r+b") as file:
        file.truncate(header.end - 100)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        reader.read("lm_head.weight", 0, header.num_bytes, buffer)
    reader.close()


def test_a_sample_looks_at_the_beginning_of_every_tensor(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Beyond it, at the share that was asked for: none of it, and all of it."""
    monkeypatch.setattr(verify_contents, "SLAB_BYTES", 5_000)
    made = quantized(tiny, tmp_path / "made", "w4a16")
    first = damage(made, tmp_path / "first", flip_bytes("lm_head.weight", 0))
    last = damage(made, tmp_path / "last", flip_bytes("lm_head.weight", -1))
    kept = ("kept", "lm_head.weight", "1 of 131072 bytes differ; it must be copied unchanged")
    assert found(verify(first.folder, source=tiny, sample=0)) == found(verify(last.folder, source=tiny, sample=1)) == [kept]
    result = verify(last.folder, source=tiny, sample=0)
    assert result.passed and result.not_checked == ("contents: 100 % of the slabs were left out (--sample)",)
    told: list[int] = []
    verify(made.folder, source=tiny, sample=0.5, on_progress=lambda _, count: told.append(count))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in made.folder.glob("*.safetensors"))
    assert sum(told) == num_bytes_of(made.folder) - headers


def test_scales_that_were_searched_with_channel_weights_are_searched_again(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"{EXPERT}.{p}_proj.weight": torch.rand(256 if p == "down" else 128) for p in ("gate", "up", "down")}
    save_file(weights, tmp_path / "importance.safetensors")
    plan = make_plan(open_checkpoint(tiny), load_recipe(PrecisionRecipe, "w4a16-mse"), model="tiny", family=None)
    plan = plan.model_copy(update={"importance_sha256": sha256_of_file(tmp_path / "importance.safetensors")})
    quantize(plan, tiny, tmp_path / "made", importance=tmp_path / "importance.safetensors")
    made = Made(tiny, tmp_path / "made")
    result = verify(made.folder, source=tiny, importance=tmp_path / "importance.safetensors")
    assert found(result) == [] and result.checks["recomputed"] == result.checks["error"] > result.checks["definition"] > 0
    without = verify(made.folder, source=tiny)
    assert found(without) == [] and "recomputed" not in without.checks
    assert "give the same file with --importance" in without.not_checked[0]
    damaged = damage(made, tmp_path, flip_bytes(f"{EXPERT}.up_proj.weight_packed", 3))
    ((check, where, _),) = found(verify(damaged.folder, source=tiny, importance=tmp_path / "importance.safetensors"))
    assert (check, where) == ("recomputed", f"{EXPERT}.up_proj.weight")
