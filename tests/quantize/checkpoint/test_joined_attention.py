"""Queries, keys and values in one tensor, as MiMo-V2.5 is released, read as three; experts of MiMo-V2.6 in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mimo_checkpoints import decoded_mimo, join, spread, store_as_mimo, to_fp8_blocks
from safetensors.torch import save_file
from small_models import make_tiny_model
from tiny_checkpoints import read_shards, write_json

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.checkpoint.torch_tensors import read_tensor
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

HEADS, KEY, VALUE, RANKS, BLOCK, HIDDEN = 4, 6, 4, 2, 8, 24
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "num_hidden_layers": 2, "hidden_size": HIDDEN,
    "n_routed_experts": 2, "num_attention_heads": HEADS, "num_key_value_heads": RANKS, "head_dim": KEY, "v_head_dim": VALUE,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip
PREFIX = "model.layers.{}.self_attn"


def _plan(folder: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(folder), load_recipe(PrecisionRecipe, precision), model="m", family=None)


def _written(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG | changes)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layers() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(tensors as they are released, values of the three by their own names). Layer 1 has twice as many heads of keys. A share
    of layer 0 has 22 rows: its third block is cut short, and its second has rows of queries and of keys."""
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for layer, kv_heads in ((0, RANKS), (1, 2 * RANKS)):
        rows = (HEADS * KEY, kv_heads * KEY, kv_heads * VALUE)
        weight = torch.randn((sum(rows), HIDDEN), generator=generator)
        shares = [to_fp8_blocks(share, BLOCK) for share in join(weight, rows, RANKS)]
        name = f"{PREFIX.format(layer)}.qkv_proj.weight"
        stored[name] = torch.cat([codes for codes, _ in shares])
        stored[f"{name}_scale_inv"] = torch.cat([scale for _, scale in shares])
        decoded = [codes.float() * spread(scale, codes, BLOCK) for codes, scale in shares]
        for at, part in enumerate("qkv"):
            of_ranks = [share.split([count // RANKS for count in rows])[at] for share in decoded]
            values[f"{PREFIX.format(layer)}.{part}_proj.weight"] = torch.cat(of_ranks)
    return stored, values


def test_each_of_the_three_has_the_values_of_its_ranks(tmp_path: Path) -> None:
    stored, values = _layers()
    assert stored[f"{PREFIX.format(0)}.qkv_proj.weight"].shape[0] // RANKS % BLOCK
    opened = open_checkpoint(_written(tmp_path / "fp8", stored))
    assert opened.notes == ("2 tensors hold queries, keys and values of a layer; they are read as three each",)
    weights = [name for name in opened.tensors if name.endswith(".weight")]
    assert weights == list(values)
    plan = {name: _of(opened, name) for name in weights}
    with SourceReader(opened) as reader:
        for name, expected in values.items():
            rows = expected.shape[0]
            for begin, end in ((0, rows), (3, rows - 2), (rows - 1, rows), (0, 1)):
                made = reader.read_rows(plan[name], begin, end)
                assert np.array_equal(made, expected[begin:end].to(torch.bfloat16).view(torch.uint16).numpy()), (name, begin)
    sizes = sum(header.num_bytes for header in opened.tensors.values() if header.dtype == "F8_E4M3")
    assert sizes == sum(tensor.numel() for name, tensor in stored.items() if name.endswith(".weight"))


def _of(opened: Any, name: str) -> Any:
    from assay.records.plan import TensorPlan

    header = opened.tensors[name]
    return TensorPlan(
        name, "attention", "attention", name.removesuffix(".weight"), "dequantize", None, None, header.dtype, header.shape,
        header.num_bytes, header.shard, header.shard, (), scale=f"{name}_scale_inv",
    )  # fmt: skip


def test_decoded_for_inspection_they_have_the_same_values(tmp_path: Path) -> None:
    stored, values = _layers()
    with open_stored(open_checkpoint(_written(tmp_path / "fp8", stored), allow_quantized=True)) as decoded:
        assert decoded.problems == ()
        assert {weight.name for weight in decoded.weights} == values.keys()
        for name, expected in values.items():
            assert torch.equal(decoded.read_weight(name), expected)
            assert torch.equal(decoded.read_weight(name, (3, 7)), expected[3:7])


def test_in_16_bits_the_three_follow_each_other(tmp_path: Path) -> None:
    """As transformers writes it, whatever the release was stored for."""
    weight = torch.randn(HEADS * KEY + RANKS * (KEY + VALUE), HIDDEN).to(torch.bfloat16)
    folder = _written(tmp_path / "bf16", {f"{PREFIX.format(0)}.qkv_proj.weight": weight}, quantization_config=None)
    opened = open_checkpoint(folder)
    parts = weight.split([HEADS * KEY, RANKS * KEY, RANKS * VALUE])
    for part, expected in zip("qkv", parts, strict=True):
        assert torch.equal(read_tensor(opened, f"{PREFIX.format(0)}.{part}_proj.weight"), expected)


@pytest.mark.parametrize(
    ("rows", "scales", "message"),
    [
        (43, 6, "qkv_proj.weight has shape [43, 24]; by config.json it should have 4 x 6 rows of queries, and 6 of keys and 4 "
         "of values for each head of a multiple of 2; take the config.json of the model's release"),
        (54, 8, "qkv_proj.weight has shape [54, 24]; by config.json it should have 4 x 6 rows of queries, and 6 of keys and 4 "
         "of values for each head of a multiple of 2; take the config.json of the model's release"),
        (44, 7, "qkv_proj.weight_scale_inv has shape [7, 3]; of model.layers.0.self_attn.qkv_proj.weight [44, 24], stored for "
         "the ranks that num_key_value_heads of config.json says, it should be [6, 3]; take the config.json of the model's "
         "release"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_the_config_are_refused(tmp_path: Path, rows: int, scales: int, message: str) -> None:
    name = f"{PREFIX.format(0)}.qkv_proj.weight"
    tensors = {name: torch.zeros(rows, HIDDEN).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(scales, 3)}
    folder = _written(tmp_path / "fp8", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value) == f"{folder}: {PREFIX.format(0)}.{message}"


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    stored, values = _layers()
    own = f"{PREFIX.format(0)}.k_proj.weight"
    folder = _written(tmp_path / "twice", stored | {own: values[own].to(torch.bfloat16)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value) == (
        f"{folder}: {own} is there on its own and inside {PREFIX.format(0)}.qkv_proj.weight; download it again"
    )


@pytest.mark.parametrize("mxfp4", [False, True])
def test_a_small_release_gives_the_checkpoint_of_its_values(tmp_path: Path, mxfp4: bool) -> None:
    """Quantized and verified; what is made has the bytes of what is made of the decoded values, but for experts in MXFP4, which
    are as they were where the precision asks for them."""
    plain = make_tiny_model(tmp_path / "plain", "mimo-v2.5")
    source = store_as_mimo(plain, tmp_path / "source", mxfp4=mxfp4)
    dense = decoded_mimo(source, tmp_path / "dense")
    made = {}
    for folder in (source, dense):
        plan = _plan(folder, "w4a16")
        made[folder] = tmp_path / f"of-{folder.name}"
        quantize(plan, folder, made[folder])
        assert verify(made[folder], source=folder).damages == ()
    stored, expected = (_every(made[folder]) for folder in (source, dense))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert "model.layers.1.self_attn.k_proj.weight_packed" in stored
    assert "model.mtp.layers.0.self_attn.k_proj.weight" in stored
    config = json.loads((made[source] / "config.json").read_text())
    assert config["attention_projection_layout"] == "split"


def test_experts_in_mxfp4_are_carried_over(tmp_path: Path) -> None:
    source = store_as_mimo(make_tiny_model(tmp_path / "plain", "mimo-v2.5"), tmp_path / "source", mxfp4=True)
    quantize(_plan(source, "mxfp4"), source, tmp_path / "made")
    assert verify(tmp_path / "made", source=source).damages == ()
    stored, before = _every(tmp_path / "made"), _every(source)
    experts = [name for name in before if ".mlp.experts." in name and name.endswith(".weight")]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        assert torch.equal(stored[f"{name}_packed"], before[name])
        assert torch.equal(stored[f"{name}_scale"], before[f"{name}_scale"])


def _every(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}
