"""Sources whose experts are MXFP4 of compressed-tensors (Kimi-K3): what is read is what compressed-tensors decompresses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import hollow_moe
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from deepseek_v4_checkpoints import to_fp4
from hollow import write_hollow_shard
from safetensors.torch import save_file
from tiny_checkpoints import random_tensors, read_shards, write_json, write_shards

from assay.errors import CheckpointError, PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.text_config import changing_text
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.native import foreign_quantization
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

LAYERS = "language_model.model.layers"
X = f"{LAYERS}.1.block_sparse_moe.experts.0.w1"
MXFP4: dict[str, Any] = hollow_moe.KIMI_K3_QUANTIZATION
SCHEME = QuantizationScheme(
    targets=["Linear"], format="mxfp4-pack-quantized", weights=QuantizationArgs(**MXFP4["config_groups"]["group_0"]["weights"])
)
NEEDED = "a BF16, FP16, FP32 or FP8 source is needed"


def declared(**changes: Any) -> dict[str, Any]:
    group = MXFP4["config_groups"]["group_0"]
    inputs = changes.pop("input_activations", None)
    changed = {**group, "weights": {**group["weights"], **changes}, "input_activations": inputs}
    return {"quantization_config": {**MXFP4, "config_groups": {"group_0": changed}}}


def decompressed(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """BF16, by compressed-tensors."""
    parts = {"weight_packed": packed, "weight_scale": scale}
    return BaseCompressor.get_value_from_registry("mxfp4-pack-quantized").decompress(parts, SCHEME)["weight"].to(torch.bfloat16)


def plan_of(source: Path, precision: str | PrecisionRecipe) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision) if isinstance(precision, str) else precision
    return make_plan(open_checkpoint(source), recipe, model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def kimi_k3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a small Kimi-K3 as it is published, with 36 expert weights in MXFP4; the BF16 checkpoint that it stands for)."""
    folder = tmp_path_factory.mktemp("kimi_k3")
    config = hollow_moe.small("kimi_k3")
    published, plain = {}, {}
    for name, tensor in random_tensors(dict(hollow_moe.MODELS["kimi_k3"].shapes(config)), 0, torch.bfloat16).items():
        if ".experts." in name:
            codes, scale = (part.view(torch.uint8) for part in to_fp4(tensor))
            published |= {f"{name}_packed": codes, f"{name}_scale": scale}
            plain[name] = decompressed(codes, scale)
        else:
            kept = tensor.float() * (1 + 2**-12) if hollow_moe.is_in_fp32("kimi_k3", name) else tensor
            published[name] = plain[name] = kept
    of_release = changing_text(config, lambda text: {**text, "quantization_config": MXFP4})
    for place, whole, tensors in (("published", of_release, published), ("plain", config, plain)):
        (folder / place).mkdir()
        write_json(folder / place / "config.json", whole)
        write_shards(folder / place, {"model.safetensors": tensors})
    return folder / "published", folder / "plain"


def test_rows_are_what_compressed_tensors_decompresses(tmp_path: Path) -> None:
    """Every byte of two codes with every exponent but the last two, beyond which a product of FP32 is no BF16."""
    packed = torch.randint(0, 256, (253, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed[:, :16] = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(16, 1)[:253]
    scale = torch.arange(253, dtype=torch.uint8)[:, None].repeat(1, 4)
    save_file({f"{X}.weight_packed": packed, f"{X}.weight_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(declared()))
    checkpoint = open_checkpoint(tmp_path)
    header = checkpoint.tensors[f"{X}.weight"]
    assert (header.dtype, header.shape, header.num_bytes) == ("FP4", (253, 128), 253 * 64)
    tensor = TensorPlan(
        header.name, "routed_expert", "routed_expert", X, "quantize", "w4a16", None, header.dtype, header.shape,
        header.num_bytes, header.shard, header.shard, (), f"{X}.weight_scale",
    )  # fmt: skip
    with SourceReader(checkpoint) as reader:
        made = np.concatenate([reader.read_rows(tensor, begin, min(begin + 9, 253)) for begin in range(0, 253, 9)])
    np.testing.assert_array_equal(made, decompressed(packed, scale).view(torch.uint16).numpy(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4a16-g32", "fp8-channel", "nvfp4a16"])
def test_the_release_gives_the_checkpoint_of_the_weights_it_stands_for(
    kimi_k3: tuple[Path, Path], tmp_path: Path, precision: str
) -> None:
    made: list[dict[str, torch.Tensor]] = []
    for number, source in enumerate(kimi_k3):
        folder = tmp_path / str(number)
        quantize(plan_of(source, precision), source, folder)
        assert verify(folder, source=source).damages == ()
        made.append(stored(folder))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(tensor.view(torch.uint8), made[1][name].view(torch.uint8)) for name, tensor in made[0].items())


def test_what_becomes_of_every_tensor(kimi_k3: tuple[Path, Path]) -> None:
    published, _ = kimi_k3
    checkpoint = open_checkpoint(published)
    assert checkpoint.notes == ("36 weights are packed MXFP4; they are read as BF16",)
    plan = plan_of(published, "w4a16-g32")
    assert Counter(tensor.action for tensor in plan.tensors if tensor.dtype == "FP4") == {"quantize": 36}
    assert Counter(tensor.action for tensor in plan.tensors if tensor.dtype == "F8_E8M0") == {"consume": 36}
    assert plan.bytes_in == sum(header.num_bytes for header in checkpoint.tensors.values())


def experts_in_mxfp4() -> PrecisionRecipe:
    recipe = load_recipe(PrecisionRecipe, "mxfp4").model_dump(by_alias=True)
    keep = {**recipe["keep"], "source": [*recipe["keep"]["source"], "attention", "dense_mlp", "shared_expert"]}
    return PrecisionRecipe.model_validate({**recipe, "name": "mine", "quantize": ["routed_expert"], "keep": keep})


@pytest.mark.slow
def test_experts_in_mxfp4_keep_their_bytes(kimi_k3: tuple[Path, Path], tmp_path: Path) -> None:
    published, _ = kimi_k3
    plan = plan_of(published, experts_in_mxfp4())
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name[f"{X}.weight"].outputs == (OutputTensor(f"{X}.weight_packed", "U8", (128, 64), 128 * 64),)
    assert by_name[f"{X}.weight_scale"].outputs == (OutputTensor(f"{X}.weight_scale", "U8", (128, 4), 128 * 4),)
    quantize(plan, published, tmp_path / "made")
    assert verify(tmp_path / "made", source=published).damages == verify(tmp_path / "made").damages == ()
    before, after = stored(published), stored(tmp_path / "made")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"  # as vLLM's class for this model asks


def test_the_release_is_a_source_and_healthy(kimi_k3: tuple[Path, Path], tmp_path: Path) -> None:
    published, _ = kimi_k3
    assert foreign_quantization(open_checkpoint(published, allow_quantized=True)) is None
    found = inspect(FolderFiles(published), weights=True)
    assert (found.facts.family, [finding.defect for finding in found.findings]) == ("kimi_k3", ["tokenizer_absent"])
    quantize(plan_of(published, "w4a16-g32"), published, tmp_path / "made")
    found = inspect(FolderFiles(tmp_path / "made"), source=FolderFiles(published), weights=True)
    assert [finding.defect for finding in found.findings] == ["tokenizer_absent"]


PACKED, SCALE = (f"{X}.weight_packed", "U8", (8, 64)), (f"{X}.weight_scale", "U8", (8, 4))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ([PACKED], declared(), f"{X}.weight is FP4, but there is no scale or weight_scale beside it; complete the download"),
        ([PACKED, (f"{X}.weight_scale", "U8", (8, 8))], declared(),
         f"{X}.weight_scale [8, 8] does not fit {X}.weight [8, 128]: one exponent for 32 columns of a row is read; the "
         "checkpoint is damaged, download it again"),
        ([PACKED, (f"{X}.weight_scale", "F8_E4M3", (8, 4))], declared(),
         f"{X}.weight_scale has dtype F8_E4M3; scales are read as F8_E8M0"),
        ([PACKED, SCALE, (f"{X}.weight_global_scale", "F32", (1,))], declared(),
         f"is quantized already ({X}.weight_global_scale is F32); {NEEDED}"),
        ([PACKED, SCALE], declared(group_size=16),
         f"is quantized already (config.json says quant_method 'compressed-tensors', format 'mxfp4-pack-quantized'); {NEEDED}"),
        ([PACKED, SCALE], declared(input_activations={"num_bits": 4, "type": "float"}),
         f"is quantized already (config.json says quant_method 'compressed-tensors', format 'mxfp4-pack-quantized'); {NEEDED}"),
    ],
)  # fmt: skip
def test_what_is_stored_otherwise_is_refused(tmp_path: Path, tensors: Any, config: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_hollow_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"


def test_mxfp4_beside_the_experts_is_refused(kimi_k3: tuple[Path, Path]) -> None:
    """vLLM's class for it reads MXFP4 by a method that knows experts alone."""
    with pytest.raises(PlanError) as caught:
        plan_of(kimi_k3[0], "mxfp4")
    assert str(caught.value) == (
        f"precision mxfp4: {LAYERS}.0.mlp.down_proj.weight would be stored as mxfp4, and of family kimi_k3 vLLM 0.32 reads "
        "that of routed_expert alone; keep the others in 16 bits, or take another scheme"
    )
