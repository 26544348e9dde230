"""Bits of the weights by config.json, as the projects that write them say it; and of what assay itself makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay_evaluate.run.weight_bits import weight_bits, weight_shares


def group(bits: int) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({}, 16),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, 8),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": group(4), "b": group(8)}}}, 4),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": group(8)}}}}, 8),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 4),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, 3),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, 4),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, 8),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
                }
            },
            4,
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 4),
        ({"quantization_config": {"quant_method": "new"}}, None),
    ],
)
def test_bits_by_config(tmp_path: Path, config: dict[str, Any], bits: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_bits(tmp_path) == bits


def write_headers(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """One safetensors file with a true header and no data."""
    entries = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_shares_by_header(tmp_path: Path) -> None:
    """One layer of four in 4 bits (packed integers, NVFP4), the others in FP8; what stands beside weights does not count."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    layer = "model.layers.{}.mlp.{}_proj.{}"
    fp8 = {layer.format(i, name, "weight"): ("F8_E4M3", [64, 128]) for i in range(3) for name in ("up", "down")}
    write_headers(
        tmp_path,
        fp8
        | {
            layer.format(3, "up", "weight_packed"): ("I32", [64, 16]),
            layer.format(3, "up", "weight_scale"): ("BF16", [64, 1]),
            layer.format(3, "down", "weight_packed"): ("U8", [64, 64]),
            layer.format(3, "down", "weight_scale"): ("F8_E4M3", [64, 8]),
            "model.layers.0.input_layernorm.weight": ("BF16", [128]),
            "model.layers.4.mlp.up_proj.weight": ("BF16", [64, 128]),  # the MTP block
            "model.embed_tokens.weight": ("BF16", [4096, 128]),
            "lm_head.weight": ("BF16", [4096, 128]),
        },
    )
    assert weight_shares(tmp_path, 4) == {4: 0.25, 8: 0.75}


def test_shares_that_are_not_known(tmp_path: Path) -> None:
    assert weight_shares(tmp_path, None) == {}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    assert weight_shares(tmp_path, 16) == {}
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert weight_shares(tmp_path, 16) == {}
