"""Bits of the weights by config.json, as the projects that write them say it; and of what assay itself makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay_evaluate.run.weight_bits import weight_bits


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
