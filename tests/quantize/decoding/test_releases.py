"""FP8 releases, DeepSeek-V4's FP4, gpt-oss: against compressed-tensors' and transformers' own decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from stored_checkpoints import assert_slabs_agree, normal, opened, write_stored
from tiny_checkpoints import to_fp8
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from assay.errors import CheckpointError
from assay_quantize.decoding.stored_weight import ActivationRule, Problem

UP = "model.layers.0.mlp.experts.0.up_proj"
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    codes, scale = to_fp8(normal(200, 320), "block", dtype)
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": scale}
    library = FP8BlockDequantizer(targets=["re:.*"], dtype=torch.float32).process(dict(tensors))
    with opened(write_stored(tmp_path, tensors, FP8_CONFIG)) as stored:
        assert torch.equal(stored.read_weight(UP), library[f"{UP}.weight"])
        assert_slabs_agree(stored, UP)
        weight = stored.weight(UP)
    assert (weight.format, weight.shares, weight.row_step) == ("FP8", (128, 128), 128)
    assert weight.activations == ActivationRule("dynamic", "fp8_e4m3", "group", 128)


@pytest.mark.parametrize(
    ("dtype", "block"), [(torch.uint8, [128, 128]), (torch.float8_e8m0fnu, [128, 128]), (torch.uint8, [1, 32])]
)
def test_exponents_as_scales(tmp_path: Path, dtype: torch.dtype, block: list[int]) -> None:
    """UE8M0: DeepSeek-V3.1 and V4, MiniMax-M2."""
    codes = normal(200, 320).to(torch.float8_e4m3fn)
    blocks = -(-200 // block[0]), -(-320 // block[1])
    exponents = torch.randint(110, 130, blocks, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": exponents.view(dtype)}
    whole = (2.0 ** (exponents.float() - 127)).repeat_interleave(block[0], 0)[:200].repeat_interleave(block[1], 1)[:, :320]
    with opened(write_stored(tmp_path, tensors, FP8_CONFIG | {"weight_block_size": block})) as stored:
        assert torch.equal(stored.read_weight(UP), codes.float() * whole)
        assert_slabs_agree(stored, UP)


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_fp8_per_channel_and_per_tensor(tmp_path: Path, per: str, scheme: str) -> None:
    codes, scale = to_fp8(normal(16, 64), per)
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale": scale, f"{UP}.input_scale": torch.tensor(0.5)}
    declared = {"quant_method": "fp8", "activation_scheme": scheme}
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        assert torch.equal(stored.read_weight(UP), codes.float() * scale.float())
        rule = stored.weight(UP).activations
    static = ActivationRule("static", "fp8_e4m3", "tensor", scale="input_scale")
    assert rule == (static if scheme == "static" else ActivationRule("dynamic", "fp8_e4m3", "token"))


def gpt_oss(experts: int, rows: int, groups: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 130, (experts, rows, groups), generator=generator, dtype=torch.uint8)


def test_gpt_oss_experts(tmp_path: Path) -> None:
    """One weight for each expert; transformers makes the same values, transposed."""
    moe = "model.layers.0.mlp.experts"
    blocks, scales = gpt_oss(3, 96, 2, 0)
    down_blocks, down_scales = gpt_oss(3, 64, 1, 1)
    tensors = {
        f"{moe}.gate_up_proj_blocks": blocks, f"{moe}.gate_up_proj_scales": scales, f"{moe}.gate_up_proj_bias": normal(3, 96),
        f"{moe}.down_proj_blocks": down_blocks, f"{moe}.down_proj_scales": down_scales,
        "model.layers.0.mlp.router.weight": normal(3, 64),
    }  # fmt: skip
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    library = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        assert [weight.name for weight in stored.weights] == [
            *(f"{moe}.{expert}.{leaf}.weight" for expert in range(3) for leaf in ("down_proj", "gate_up_proj")),
            "model.layers.0.mlp.router.weight",
        ]
        assert stored.problems == () and list(stored.others) == [f"{moe}.gate_up_proj_bias"]
        for expert in range(3):
            assert torch.equal(stored.read_weight(f"{moe}.{expert}.gate_up_proj"), library[expert].t())
        assert_slabs_agree(stored, f"{moe}.2.down_proj")
        weight = stored.weight(f"{moe}.1.down_proj")
    assert (weight.format, weight.shape, weight.bits_per_weight) == ("MXFP4 experts", (64, 32), 4.25)


def test_deepseek_v4s_fp4_beside_fp8(tmp_path: Path) -> None:
    blocks, scales = gpt_oss(1, 64, 2, 5)
    codes, scale = to_fp8(normal(128, 128), "block")
    q = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"{UP}.weight": blocks[0].flatten(1).view(torch.int8), f"{UP}.scale": scales[0].view(torch.float8_e8m0fnu),
        f"{q}.weight": codes, f"{q}.scale": scale,
    }  # fmt: skip
    with opened(write_stored(tmp_path, tensors, FP8_CONFIG)) as stored:
        assert torch.equal(stored.read_weight(UP), convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t())
        assert torch.equal(stored.read_weight(q), codes.float() * scale)
        assert {weight.module: weight.format for weight in stored.weights} == {UP: "DeepSeek FP4", q: "FP8"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weight_scale_inv": None}, "has none of the scales weight_scale_inv, weight_scale, scale"),
        ({"weight_scale": torch.ones(1, 1)}, "has scales twice: weight_scale_inv and weight_scale"),
        ({"weight_scale_inv": torch.ones(2, 2)},
         "has weight_scale_inv of shape [2, 2], which fits neither 128 x 128 blocks of a weight [128, 128], "
         "nor its rows, nor all of it"),
        ({"weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)},
         "has weight_scale_inv of dtype I32; BF16 or F16 or F32 or U8 or F8_E8M0 is read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_problem(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    codes, scale = to_fp8(normal(128, 128), "block")
    tensors: dict[str, Any] = {"weight": codes, "weight_scale_inv": scale} | changes
    named = {f"{UP}.{leaf}": tensor for leaf, tensor in tensors.items() if tensor is not None}
    with opened(write_stored(tmp_path, named, FP8_CONFIG)) as stored:
        assert stored.problems == (Problem(UP, problem),)
        assert set(stored.others) == set(named)


def test_a_block_size_or_an_activation_scheme_that_is_none(tmp_path: Path) -> None:
    codes, scale = to_fp8(normal(128, 128), "block")
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": scale}
    with pytest.raises(CheckpointError, match=r"weight_block_size must be \[rows, columns\]"):
        opened(write_stored(tmp_path / "a", tensors, FP8_CONFIG | {"weight_block_size": [128]}))
    with pytest.raises(CheckpointError, match="activation_scheme must be one of dynamic, static"):
        opened(write_stored(tmp_path / "b", tensors, FP8_CONFIG | {"activation_scheme": "sometimes"}))
