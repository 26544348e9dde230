"""The same tensors, as vLLM packs, unpacks and multiplies them: its own functions, run in the serving environment.

There is also compressed-tensors 0.17, which still decompresses columns in the order of activations.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_checkpoints import opened, write_stored

ROOT = Path(__file__).resolve().parents[3]
SERVE_PYTHON = ROOT / ".venv-serve" / "bin" / "python"
SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from vllm.model_executor.layers.quantization.utils import quant_utils as utils
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.scalar_type import scalar_types
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

torch.manual_seed(0)
I, O, G = 128, 64, 32
made = {}

def case(name, expected, **parts):
    made.update({f"{name}.m.{leaf}": part.clone(memory_format=torch.contiguous_format) for leaf, part in parts.items()})
    made[f"{name}.expected"] = expected.contiguous()

w_IO = torch.randn(I, O).half()
for bits, kind in ((4, scalar_types.uint4b8), (8, scalar_types.uint8b128)):
    reference, codes, scales = utils.gptq_quantize_weights(w_IO, kind, G)
    zeros = torch.full((I // G, O), (1 << (bits - 1)) - 1, dtype=torch.int32)
    case(f"gptq{bits}", reference.t(), qweight=utils.gptq_pack(codes, bits, I, O), scales=scales,
         qzeros=utils.pack_cols(zeros, bits, I // G, O))
reference, codes, scales, zeros = utils.quantize_weights(w_IO, scalar_types.uint4, G, zero_points=True)
case("awq", reference.t(), qweight=utils.awq_pack(codes, 4, I, O), scales=scales, qzeros=utils.awq_pack(zeros, 4, I // G, O))

packed = torch.randint(0, 256, (O, I // 2), dtype=torch.uint8)
scale = (torch.rand(O, I // 16) * 100 + 1).to(torch.float8_e4m3fn)
case("nvfp4", dequantize_to_dtype(packed, scale, torch.tensor(0.0037), torch.float32, 16, swizzle=False),
     weight=packed, weight_scale=scale, weight_scale_2=torch.tensor(0.0037), input_scale=torch.tensor(0.1))
codes = torch.randn(O, I).to(torch.float8_e4m3fn)
exponents = torch.randint(110, 130, (O, I // 32), dtype=torch.uint8)
case("mxfp8", dequant_mxfp8_to_bf16(codes, exponents), weight=codes, weight_scale=exponents)
blocks = torch.rand(2, 4)
case("fp8", utils.scaled_dequantize(codes, blocks, utils.GroupShape(32, 32)), weight=codes, weight_scale_inv=blocks)

for symmetric in (True, False):
    name = "actorder" if symmetric else "actorder_asymmetric"
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=G, actorder="group")
    codes = torch.randint(-8, 8, (O, I), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (O, I // G), dtype=torch.int8)
    parts = dict(weight_packed=pack_to_int32(codes, 4), weight_scale=torch.rand(O, I // G).bfloat16() + 0.1,
                 weight_shape=torch.tensor([O, I]), weight_g_idx=torch.arange(I, dtype=torch.int32)[torch.randperm(I)] // G)
    if not symmetric:
        parts["weight_zero_point"] = pack_to_int32(zeros, 4, packed_dim=0).contiguous()
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(dict(parts), scheme)["weight"]
    case(name, expected, **parts)
save_file(made, sys.argv[1])
"""
WORDS = {"bits": 4, "group_size": 32}


def _actorder(symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric, "actorder": "group"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


DECLARED: dict[str, dict[str, Any]] = {
    "gptq4": {"quant_method": "gptq", **WORDS, "sym": True},
    "gptq8": {"quant_method": "gptq", **WORDS, "sym": True, "bits": 8},
    "awq": {"quant_method": "awq", **WORDS, "zero_point": True, "version": "gemm"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "actorder": _actorder(True),
    "actorder_asymmetric": _actorder(False),
}


@pytest.fixture(scope="module")
def by_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    assert SERVE_PYTHON.exists(), f"{SERVE_PYTHON} is missing: run `make setup`"
    path = tmp_path_factory.mktemp("vllm") / "cases.safetensors"
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run([str(SERVE_PYTHON), "-c", SCRIPT, str(path)], check=True, env=environment, cwd=path.parent)
    return load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("case", DECLARED)
def test_values_are_vllms(by_vllm: dict[str, torch.Tensor], tmp_path: Path, case: str) -> None:
    tensors = {name.removeprefix(f"{case}."): tensor for name, tensor in by_vllm.items() if name.startswith(f"{case}.m.")}
    expected = by_vllm[f"{case}.expected"]
    with opened(write_stored(tmp_path, tensors, DECLARED[case])) as stored:
        made = stored.read_weight("m")
    assert torch.equal(made.to(expected.dtype), expected)
