"""Sources whose experts are packed INT4 (Kimi-K2-Thinking): what is read is what compressed-tensors decompresses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hollow import write_hollow_shard
from safetensors.torch import save_file
from tiny_checkpoints import decompressed_int4, make_tiny_glm4_moe, read_shards, store_as_int4

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

X = "model.layers.0.mlp.up_proj"
ARGS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def declared(**changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**ARGS, **changes}}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}}


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose 36 expert weights are INT4 in groups of 32, and everything else BF16."""
    folder = tmp_path_factory.mktemp("int4")
    return store_as_int4(make_tiny_glm4_moe(folder / "plain"), folder / "int4")


@pytest.mark.parametrize("group_size", [32, 96, 192])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_rows_are_what_compressed_tensors_decompresses(tmp_path: Path, group_size: int, scale_dtype: torch.dtype) -> None:
    """Every code occurs, with scales of all sizes: into BF16's subnormals, and up to where a product overflows."""
    generator = torch.Generator().manual_seed(group_size)
    packed = torch.randint(-(2**31), 2**31, (40, 192 // 8), generator=generator, dtype=torch.int64).to(torch.int32)
    scale = torch.randn(40, 192 // group_size, generator=generator).mul(30).exp().to(scale_dtype)
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([40, 192])}
    strategy = {"strategy": "channel", "group_size": None} if group_size == 192 else {"group_size": group_size}
    scheme = QuantizationScheme(
        targets=["Linear"], format="pack-quantized", weights=QuantizationArgs(**{**ARGS, **strategy})
    )  # fmt: skip
    wanted = BaseCompressor.get_value_from_registry("pack-quantized").decompress(dict(parts), scheme)["weight"]
    save_file({f"{X}.{leaf}": part for leaf, part in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(declared(**strategy)))
    checkpoint = open_checkpoint(tmp_path)
    header = checkpoint.tensors[f"{X}.weight"]
    assert (header.dtype, header.shape, header.num_bytes) == ("INT4", (40, 192), 40 * 96)
    tensor = TensorPlan(
        header.name, "dense_mlp", "dense_mlp", X, "quantize", "fp8_block", None, header.dtype, header.shape, header.num_bytes,
        header.shard, header.shard, (), f"{X}.weight_scale",
    )  # fmt: skip
    with SourceReader(checkpoint) as reader:
        made = np.concatenate([reader.read_rows(tensor, begin, min(begin + 9, 40)) for begin in range(0, 40, 9)])
    np.testing.assert_array_equal(made, wanted.to(torch.bfloat16).view(torch.uint16).numpy(), strict=True)


@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16", "experts-bf16"])
def test_a_packed_source_gives_the_checkpoint_of_the_weights_it_stands_for(int4: Path, tmp_path: Path, precision: str) -> None:
    plain = decompressed_int4(int4, tmp_path / "plain")
    made: list[dict[str, torch.Tensor]] = []
    for number, source in enumerate((int4, plain)):
        recipe = load_recipe(PrecisionRecipe, "w4a16" if precision == "experts-bf16" else precision)
        if precision == "experts-bf16":
            keep = {
                "source": ["norm", "routed_expert"],
                "bf16": ["mtp", "embedding", "lm_head", "router", "indexer"],
                "fp32": ["router_bias"],
            }
            roles = ["attention", "dense_mlp", "shared_expert"]
            recipe = PrecisionRecipe.model_validate({**recipe.model_dump(by_alias=True), "quantize": roles, "keep": keep})
        plan = make_plan(open_checkpoint(source), recipe, model="tiny", family=None)
        folder = tmp_path / str(number)
        quantize(plan, source, folder)
        assert verify(folder, source=source).damages == ()
        made.append(stored(folder))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(tensor.view(torch.uint8), made[1][name].view(torch.uint8)) for name, tensor in made[0].items())


def test_what_becomes_of_every_tensor(int4: Path) -> None:
    plan = plan_of(int4, "nvfp4a16")
    packed = [tensor for tensor in plan.tensors if tensor.dtype == "INT4"]
    assert Counter(tensor.action for tensor in packed) == {"quantize": 24, "dequantize": 12}
    assert Counter(t.action for t in plan.tensors if t.name.endswith(("_scale", "_shape"))) == {"consume": 72}
    assert plan.bytes_in == sum(header.num_bytes for header in open_checkpoint(int4, allow_quantized=True).tensors.values())
    assert {t.logical_dtype for t in packed} == {"BF16"}
    assert open_checkpoint(int4).notes == ("36 weights are packed INT4; they are read as BF16",)


def test_a_packed_source_in_the_scheme_that_is_wanted_keeps_its_bytes(int4: Path, tmp_path: Path) -> None:
    """Its own groups of 32: codes, scales and shapes are carried over; the MTP block is kept in BF16, and so dequantized."""
    plan = plan_of(int4, "w4a16-g32")
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name[f"{EXPERT}.weight"].outputs == (OutputTensor(f"{EXPERT}.weight_packed", "I32", (256, 16), 256 * 64),)
    assert by_name["model.layers.3.mlp.experts.0.up_proj.weight"].action == "dequantize"
    quantize(plan, int4, tmp_path / "made")
    assert verify(tmp_path / "made", source=int4).damages == verify(tmp_path / "made").damages == ()
    before, after = stored(int4), stored(tmp_path / "made")
    carried = [tensor for tensor in plan.tensors if tensor.dtype == "INT4" and tensor.action == "keep"]
    assert len(carried) == 24
    for tensor in carried:
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            assert torch.equal(after[f"{tensor.module}.{leaf}"], before[f"{tensor.module}.{leaf}"])


def test_damage_to_carried_codes_is_found(int4: Path, tmp_path: Path) -> None:
    quantize(plan_of(int4, "w4a16-g32"), int4, tmp_path / "made")
    shutil.copytree(tmp_path / "made", tmp_path / "damaged")
    header = open_checkpoint(tmp_path / "damaged", allow_quantized=True).tensors[f"{EXPERT}.weight_packed"]
    with (tmp_path / "damaged" / header.shard).open("r+b") as file:
        file.seek(header.begin)
        byte = file.read(1)[0]
        file.seek(header.begin)
        file.write(bytes([byte ^ 1]))
    found = [damage.where for damage in verify(tmp_path / "damaged", source=int4).damages if damage.check == "kept"]
    assert found == [f"{EXPERT}.weight_packed"]


SCALE = (f"{X}.weight_scale", "BF16", (8, 4))
PACKED = (f"{X}.weight_packed", "I32", (8, 16))
NEEDED = "a BF16, FP16, FP32 or FP8 source is needed"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ([PACKED], declared(), f"{X}.weight is INT4, but there is no weight_scale beside it; complete the download"),
        ([PACKED, (f"{X}.weight_scale", "F16", (8, 4))], declared(),
         f"{X}.weight_scale has dtype F16; scales are read as F32, BF16"),
        ([PACKED, (f"{X}.weight_scale", "BF16", (8, 3))], declared(),
         f"{X}.weight_scale [8, 3] does not fit {X}.weight [8, 128]: one scale per row, or per group of a multiple of 8 "
         "columns, is read; the checkpoint is damaged, download it again"),
        ([PACKED, SCALE, (f"{X}.weight_zero_point", "I32", (1, 4))], declared(),
         f"is quantized already ({X}.weight_zero_point is I32); {NEEDED}"),
        ([PACKED, SCALE], declared(symmetric=False),
         f"is quantized already (config.json says quant_method 'compressed-tensors', format 'pack-quantized'); {NEEDED}"),
        ([PACKED, SCALE], declared(num_bits=8),
         f"is quantized already (config.json says quant_method 'compressed-tensors', format 'pack-quantized'); {NEEDED}"),
        ([PACKED, SCALE], declared(actorder="group"),
         f"is quantized already (config.json says quant_method 'compressed-tensors', format 'pack-quantized'); {NEEDED}"),
        ([(f"{X}.weight_packed", "U8", (8, 16)), SCALE], declared(),
         f"is quantized already ({X}.weight_packed is U8); {NEEDED}"),
    ],
)  # fmt: skip
def test_what_is_packed_otherwise_is_refused(tmp_path: Path, tensors: Any, config: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_hollow_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"
