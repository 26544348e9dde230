"""ModelOpt's layouts (nvidia-modelopt 0.47, which is not in this environment), against compressed-tensors' converter of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
from compressed_tensors.quantization import preset_name_to_scheme
from stored_checkpoints import assert_slabs_agree, normal, opened, write_stored

from assay.errors import CheckpointError
from assay_quantize.decoding.stored_weight import ActivationRule, Problem
from assay_quantize.kernels.reference import quantize_weight

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Q, K, V = (f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv")


def nvfp4(module: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """`weight`, `weight_scale`, `weight_scale_2`, `input_scale`, as the export writes them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{module}.weight": torch.randint(0, 256, (48, 64), generator=generator, dtype=torch.uint8),
        f"{module}.weight_scale": (torch.rand(48, 8, generator=generator) * 100 + 1).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(0.0037),
        f"{module}.input_scale": torch.tensor(0.02),
    }


def nvfp4_values(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Element by element, in the order in which `NVFP4QTensor.dequantize` multiplies."""
    packed, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float() * tensors[f"{module}.weight_scale_2"]
    made = torch.empty(48, 128)
    for column in range(128):
        byte = packed[:, column // 2].int()
        made[:, column] = E2M1[(byte >> 4 if column % 2 else byte & 15)] * scale[:, column // 16]
    return made


def declared(algorithm: str, **changes: Any) -> dict[str, Any]:
    stated = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"], **changes}
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": stated}


@pytest.mark.parametrize("place", ["hf_quant_config", "config"])
def test_nvfp4(tmp_path: Path, place: str) -> None:
    """Declared in the file of its own, or in config.json; decoded as compressed-tensors decodes it after its own conversion."""
    tensors = nvfp4(Q) | {"lm_head.weight": normal(8, 128)}
    in_config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    files = {} if place == "config" else {"hf_quant_config": declared("NVFP4")}
    folder = write_stored(tmp_path, tensors, in_config if place == "config" else None, **files)
    with opened(folder) as stored:
        values = stored.read_weight(f"{Q}.weight")
        assert_slabs_agree(stored, Q)
        weight = stored.weight(Q)
        assert stored.read_activation_scale(Q) == torch.tensor(0.02)
        assert [weight.name for weight in stored.weights if weight.is_plain] == ["lm_head.weight"]
        assert stored.problems == () and stored.others == {}
    assert torch.equal(values, nvfp4_values(tensors, Q))
    assert (weight.format, weight.number, weight.shape) == ("ModelOpt NVFP4", "fp4_e2m1", (48, 128))
    assert weight.activations == ActivationRule("dynamic", "fp4_e2m1", "group", 16, "input_scale")
    assert weight.bits_per_weight == pytest.approx(4.5 + 32 / (48 * 128))
    converted = ModelOptNvfp4Converter(targets=["re:.*q_proj"]).process(dict(tensors))
    parts = {name.removeprefix(f"{Q}."): tensor for name, tensor in converted.items() if name.startswith(Q)}
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    torch.testing.assert_close(
        values.bfloat16(), BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(parts, scheme)["weight"]
    )


def test_nvfp4_of_weights_alone(tmp_path: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float"}, "input_activations": None, "targets": ["Linear"]}}
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}
    with opened(write_stored(tmp_path, nvfp4(Q), stated)) as stored:
        assert (stored.weights[0].format, stored.weights[0].activations) == ("ModelOpt W4A16_NVFP4", ActivationRule())


def test_fp8_with_scales_of_activations_and_of_the_kv_cache(tmp_path: Path) -> None:
    weight = normal(16, 64).to(torch.float8_e4m3fn)
    tensors = {name: tensor for module in (Q, K, V) for name, tensor in {
        f"{module}.weight": weight, f"{module}.weight_scale": torch.tensor(0.003), f"{module}.input_scale": torch.tensor(0.02),
    }.items()} | {f"{K}.k_scale": torch.tensor(0.5), f"{V}.v_scale": torch.tensor(0.25)}  # fmt: skip
    folder = write_stored(tmp_path, tensors, None, hf_quant_config=declared("FP8", kv_cache_quant_algo="FP8"))
    with opened(folder) as stored:
        assert torch.equal(stored.read_weight(K), weight.float() * torch.tensor(0.003))
        assert_slabs_agree(stored, K)
        assert stored.weight(K).activations == ActivationRule("static", "fp8_e4m3", "tensor", scale="input_scale")
        assert (stored.kv.number, stored.kv.scales) == ("fp8_e4m3", {f"{K}.k_scale": "key", f"{V}.v_scale": "value"})
        assert stored.problems == () and stored.others == {} and len(stored.weights) == 3


@pytest.mark.parametrize("dimensions", [2, 4])
def test_fp8_blocks_with_scales_in_four_dimensions(tmp_path: Path, dimensions: int) -> None:
    parts = quantize_weight(normal(200, 320), "fp8_block")
    scale = parts["weight_scale"].float()
    stored_scale = scale if dimensions == 2 else scale[:, None, :, None]
    tensors = {f"{Q}.weight": parts["weight"], f"{Q}.weight_scale": stored_scale}
    with opened(write_stored(tmp_path, tensors, None, hf_quant_config=declared("FP8_PB_WO"))) as stored:
        whole = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :320]
        assert torch.equal(stored.read_weight(Q), parts["weight"].float() * whole)
        assert_slabs_agree(stored, Q)
        assert stored.weight(Q).shares == (128, 128)
        assert stored.weight(Q).activations == ActivationRule("dynamic", "fp8_e4m3", "group", 128)


def test_mixed_precision_by_its_list_of_layers(tmp_path: Path) -> None:
    fp8 = normal(16, 64).to(torch.float8_e4m3fn)
    mxfp8 = quantize_weight(normal(16, 64), "mxfp8")
    tensors = nvfp4("model.layers.0.mlp.experts.1.up_proj") | {
        f"{Q}.weight": fp8, f"{Q}.weight_scale": torch.tensor([0.5]), f"{Q}.input_scale": torch.tensor(0.02),
        f"{K}.weight": mxfp8["weight"], f"{K}.weight_scale": mxfp8["weight_scale"],
        f"{V}.weight": fp8, f"{V}.weight_scale": torch.tensor(0.5),
    }  # fmt: skip
    experts = {"quant_algo": "NVFP4", "group_size": 16}
    layers = {"model.layers.0.mlp.experts": experts, Q: {"quant_algo": "FP8"}, K: {"quant_algo": "mxfp8"}}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with opened(write_stored(tmp_path, tensors, stated)) as stored:
        formats = {weight.module: weight.format for weight in stored.weights}
        assert formats == {
            Q: "ModelOpt FP8", K: "ModelOpt MXFP8", "model.layers.0.mlp.experts.1.up_proj": "ModelOpt NVFP4",
        }  # fmt: skip
        assert torch.equal(stored.read_weight(Q), fp8.float() * 0.5)
        exponents = mxfp8["weight_scale"].float()
        assert torch.equal(stored.read_weight(K), mxfp8["weight"].float() * (2.0 ** (exponents - 127)).repeat_interleave(32, 1))
        assert stored.problems == (Problem(V, "is quantized, and is not among quantized_layers"),)


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv"])
def test_mxfp8_under_the_name_that_minimax_gives_it(tmp_path: Path, leaf: str) -> None:
    parts = quantize_weight(normal(16, 64), "mxfp8")
    tensors = {f"{Q}.weight": parts["weight"], f"{Q}.{leaf}": parts["weight_scale"]}
    with opened(write_stored(tmp_path, tensors, {"quant_method": "mxfp8", "ignored_layers": []})) as stored:
        scale = (2.0 ** (parts["weight_scale"].float() - 127)).repeat_interleave(32, 1)
        assert torch.equal(stored.read_weight(Q), parts["weight"].float() * scale)
        assert stored.weights[0].activations == ActivationRule("dynamic", "fp8_e4m3", "group", 32)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ModelOpt's quant_algo W4A8_AWQ: NVFP4, W4A16_NVFP4, FP8,"):
        opened(write_stored(tmp_path / "a", nvfp4(Q), None, hf_quant_config=declared("W4A8_AWQ")))
    with pytest.raises(CheckpointError, match="MIXED_PRECISION needs quantized_layers; complete the download"):
        opened(write_stored(tmp_path / "b", nvfp4(Q), None, hf_quant_config=declared("MIXED_PRECISION")))
    tensors = nvfp4(Q)
    del tensors[f"{Q}.weight_scale_2"]
    with opened(write_stored(tmp_path / "c", tensors, None, hf_quant_config=declared("NVFP4"))) as stored:
        assert stored.problems == (Problem(Q, "has no weight_scale_2"),)
