"""Run by test_emulation.py with the serving environment's Python: the same functions under its compressed-tensors, and vLLM's.

python emulation_in_serving_env.py IN.safetensors CASES.json OUT.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as reference_fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file


def main(inputs_path: str, cases_path: str, outputs_path: str) -> None:
    from assay_vllm.dequantize import Dequantizer
    from assay_vllm.fake_quant import fake_quantize

    inputs = load_file(inputs_path)
    cases = json.loads(Path(cases_path).read_text(encoding="utf-8"))
    outputs: dict[str, torch.Tensor] = {}
    for preset, scheme_json in cases["schemes"].items():
        stream = [(name, t) for name, t in inputs.items() if name.startswith(f"{preset}.")]
        dequantizer = Dequantizer({"config_groups": {"group_0": scheme_json}}, torch.float32)
        outputs |= {f"dense {name}": tensor for name, tensor in dequantizer(stream)}
        args = QuantizationScheme.model_validate(scheme_json).input_activations
        if args is None:
            continue
        x, global_scale = inputs["x"], inputs.get(f"{preset}.input_global_scale")
        scale, zero_point = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module(), global_scale)
        theirs = reference_fake_quantize(x[None], scale, zero_point, args, global_scale=global_scale)[0]
        outputs |= {f"ours {preset}": fake_quantize(x, args, global_scale=global_scale), f"compressed-tensors {preset}": theirs}
    outputs |= vllm_references(inputs["x"], inputs["NVFP4.input_global_scale"])
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, outputs_path)


def vllm_references(x: torch.Tensor, global_scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize-dequantize by vLLM's own code."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    int8, int8_scale, _ = ops.scaled_int8_quant(x)
    mxfp8, exponents = _mxfp8_e4m3_quantize_torch(x)
    fp4, fp4_scale = ref_nvfp4_quant(x, global_scale, 16)
    return {
        "vllm W8A8": int8.float() * int8_scale,
        "vllm MXFP8": mxfp8.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, -1),
        "vllm NVFP4": (fp4.unflatten(-1, (-1, 16)) * fp4_scale.unsqueeze(-1) / global_scale).flatten(-2),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
