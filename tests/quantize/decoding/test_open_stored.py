"""Which format a checkpoint is in, what is refused, and what a damaged one says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hollow_moe
import pytest
import torch
from stored_checkpoints import normal, opened, write_stored
from tiny_checkpoints import fuse_experts, make_tiny_glm4_moe, to_fp8

from assay.errors import CheckpointError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.declaration import MODELOPT_CONFIG, read_declaration
from assay_quantize.decoding.methods import METHODS, REFUSED
from assay_quantize.decoding.open_stored import Examination, open_stored
from assay_quantize.decoding.stored_weight import KvRule
from assay_quantize.kernels.reference import quantize_weight

UP = "model.layers.0.mlp.experts.0.up_proj"
GROUPS_OF_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": GROUPS_OF_32}},
}


def int4(module: str = UP) -> dict[str, torch.Tensor]:
    return {f"{module}.{leaf}": tensor for leaf, tensor in quantize_weight(normal(64, 128), "w4a16_g32").items()}


@pytest.mark.parametrize(
    ("config", "modelopt", "expected"),
    [
        ({}, None, None),
        ({"quantization_config": INT4}, None, ("compressed-tensors", INT4)),
        ({"text_config": {"quantization_config": INT4}}, None, ("compressed-tensors", INT4)),
        ({"compression_config": {"config_groups": {}}}, None, ("compressed-tensors", {"config_groups": {}})),
        ({}, {"quantization": {"quant_algo": "FP8"}}, ("modelopt", {"quantization": {"quant_algo": "FP8"}})),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, {"quantization": {}}, ("modelopt", {"quant_algo": "NVFP4"})),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "x"}}, None,
         ("bitsandbytes", {"load_in_4bit": True, "quant_method": "x"})),
        ({"quantization_config": {"quant_method": "GPTQ"}}, None, ("gptq", {"quant_method": "GPTQ"})),
    ],
)  # fmt: skip
def test_the_format_is_what_is_declared(config: dict[str, Any], modelopt: dict[str, Any] | None, expected: Any) -> None:
    declaration = read_declaration(config, {} if modelopt is None else {MODELOPT_CONFIG: modelopt})
    assert (None if declaration is None else declaration[:2]) == expected


def test_no_format_is_both_read_and_refused() -> None:
    assert not METHODS.keys() & REFUSED.keys()


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path, method: str) -> None:
    with pytest.raises(CheckpointError) as error:
        opened(write_stored(tmp_path, int4(), {"quant_method": method}))
    assert str(error.value) == (
        f"{tmp_path}: is in a format that is not read: {REFUSED[method]}; convert it to compressed-tensors with its own tool, "
        "or take another release of the model. Formats that are read: docs/formats.md"
    )


def test_an_unknown_format_and_codes_without_a_declaration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says quant_method newest\?, which is not read; convert it"):
        opened(write_stored(tmp_path / "a", int4(), {"quant_method": "newest?"}))
    with pytest.raises(CheckpointError) as error:
        opened(write_stored(tmp_path / "b", int4(), None))
    assert str(error.value) == (
        f"{tmp_path / 'b'}: {UP} is stored as weight_packed I32, weight_scale BF16, weight_shape I64, but config.json has no "
        "quantization_config and there is no hf_quant_config.json; complete the download"
    )


def test_a_checkpoint_that_is_not_quantized(tmp_path: Path) -> None:
    """Every weight is plain; fused experts are read one by one."""
    source = make_tiny_glm4_moe(tmp_path / "plain")
    with opened(source) as stored, opened(fuse_experts(source, tmp_path / "fused")) as fused:
        assert (stored.method, stored.what, stored.kv, stored.problems) == (None, "not quantized", KvRule(), ())
        assert all(weight.is_plain and weight.bits_per_weight == 16 for weight in stored.weights)
        assert [weight.name for weight in stored.weights] == [weight.name for weight in fused.weights]
        for weight in stored.weights:
            assert torch.equal(stored.read_weight(weight.name), fused.read_weight(weight.name)), weight.name


def test_headers_alone_say_what_is_stored(tmp_path: Path) -> None:
    """As of a checkpoint on the hub: no folder, so no values."""
    checkpoint = open_checkpoint(write_stored(tmp_path, int4(), INT4), allow_quantized=True)
    stored = open_stored(replace(checkpoint, location="OWNER/NAME", folder=None))
    assert [(weight.name, weight.number) for weight in stored.weights] == [(f"{UP}.weight", "int4")]
    with pytest.raises(CheckpointError, match=r"OWNER/NAME: its weights are on the hub; download it first"):
        stored.read_weight(UP)


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    folder = write_stored(tmp_path, int4(), INT4)
    script = (
        "import sys; from pathlib import Path; from assay_quantize.checkpoint.checkpoint import open_checkpoint; "
        "from assay_quantize.decoding.open_stored import open_stored; "
        f"stored = open_stored(open_checkpoint(Path({str(folder)!r}), allow_quantized=True)); "
        "assert len(stored.weights) == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_and_rows_that_are_not_there(tmp_path: Path) -> None:
    with opened(write_stored(tmp_path, int4(), INT4)) as stored:
        with pytest.raises(CheckpointError, match=r"model\.nothing is no weight of this checkpoint"):
            stored.read_weight("model.nothing")
        with pytest.raises(CheckpointError, match="has rows 0 to 63, not 60 to 64"):
            stored.read_weight(UP, (60, 65))
        assert torch.equal(stored.read_part(UP, "weight_scale"), int4()[f"{UP}.weight_scale"])


# ------------------------------------------------------------------------------------------------ damage
@pytest.mark.parametrize(("value", "counted"), [(float("nan"), "not_finite"), (float("inf"), "not_finite"), (0.0, "zero")])
def test_damaged_scales_are_counted_and_values_that_are_no_numbers_refused(tmp_path: Path, value: float, counted: str) -> None:
    tensors = int4()
    tensors[f"{UP}.weight_scale"][5, 1] = value
    with opened(write_stored(tmp_path, tensors, INT4)) as stored:
        bad = 0 if counted == "zero" else 32
        examined = stored.examine(UP)
        assert examined._replace(bad_values=0) == Examination(scales=256, **{counted: 1})
        # infinity times a code of 0 is NaN, times any other infinite: all of the group is bad
        assert examined.bad_values == bad
        assert stored.examine(UP, (6, 64)) == Examination(scales=232)
        assert torch.isfinite(stored.read_weight(UP, (0, 5))).all()
        if bad:
            with pytest.raises(CheckpointError, match=f"{UP}.weight: 32 of its values are NaN or infinite; it is damaged"):
                stored.read_weight(UP)


def test_a_file_that_is_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    folder = write_stored(tmp_path, int4(), INT4)
    with opened(folder) as stored:
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="it changed since its header was read; download it again"):
            stored.read_weight(UP)


def test_a_weight_shape_that_says_otherwise(tmp_path: Path) -> None:
    tensors = int4() | {f"{UP}.weight_shape": torch.tensor([128, 64])}
    with (
        opened(write_stored(tmp_path, tensors, INT4)) as stored,
        pytest.raises(
            CheckpointError, match=r"weight_shape says \[128, 64\], its codes and scales are of a weight \[64, 128\]"
        ),
    ):
        stored.read_weight(UP)


def test_codes_of_fp8_that_are_no_numbers(tmp_path: Path) -> None:
    codes, scale = to_fp8(normal(128, 128), "block")
    codes.view(torch.uint8)[3, 7] = 0x7F
    declared = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": scale}
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        assert stored.examine(UP) == Examination(scales=1, bad_values=1)
        with pytest.raises(CheckpointError, match="1 of its values are NaN or infinite"):
            stored.read_weight(UP)


@pytest.mark.parametrize("missing", ["weight_packed", "weight_scale"])
def test_a_part_that_is_missing_is_a_problem(tmp_path: Path, missing: str) -> None:
    tensors = int4() | {"lm_head.weight": normal(8, 128)}
    del tensors[f"{UP}.{missing}"]
    with opened(write_stored(tmp_path, tensors, INT4)) as stored:
        expected = "has no weight_scale" if missing == "weight_scale" else "has scales, but neither weight nor weight_packed"
        assert [(problem.subject, problem.what) for problem in stored.problems] == [(UP, expected)]
        assert [weight.name for weight in stored.weights] == ["lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_that_are_stored_transposed(tmp_path: Path, dtype: torch.dtype) -> None:
    """[experts, inputs, 2 x width], as Llama 4 and Qwen3-VL-MoE are published: a row of a weight is a column there."""
    config = hollow_moe.cut("qwen3_vl_moe", experts=2)
    text = config["text_config"]
    text |= {"hidden_size": 96, "moe_intermediate_size": 40, "num_hidden_layers": 1}
    stacked = {"gate_up_proj": normal(2, 96, 80).to(dtype), "down_proj": normal(2, 40, 96, seed=1).to(dtype)}
    experts = "model.language_model.layers.0.mlp.experts"
    tensors = {f"{experts}.{name}": tensor for name, tensor in stacked.items()}
    expected = {
        "gate_proj": stacked["gate_up_proj"][:, :, :40].mT, "up_proj": stacked["gate_up_proj"][:, :, 40:].mT,
        "down_proj": stacked["down_proj"].mT,
    }  # fmt: skip
    write_stored(tmp_path, tensors, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with opened(tmp_path) as stored:
        for expert in range(2):
            for name, tensor in expected.items():
                weight = f"{experts}.{expert}.{name}"
                assert torch.equal(stored.read_weight(weight), tensor[expert].float())
                assert torch.equal(stored.read_weight(weight, (3, 17)), tensor[expert, 3:17].float())
                assert torch.equal(stored.read_part(weight, "weight"), tensor[expert])
