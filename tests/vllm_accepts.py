"""Run by test_vllm_loads.py with the serving environment's Python: what vLLM says to folders before it starts anything, and
what it does to merged FP8 weights.

python vllm_accepts.py MERGED.safetensors FOLDER...: a JSON object on the last line. `folders`: folder -> null where vLLM
would go on and load the weights, else the error; `create_engine_config` is the first thing `vllm serve` does. `changed`: for
every group in MERGED.safetensors (`NAME.weight` [O, I], `NAME.scales`, `NAME.widths`) how many weights vLLM would change.
"""

from __future__ import annotations

import json
import sys

import torch


def refusal(folder: str) -> str | None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        AsyncEngineArgs(model=folder, dtype="float32", enforce_eager=True, max_model_len=128).create_engine_config()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def changed(merged: dict[str, torch.Tensor]) -> dict[str, int]:
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    # the operator exists for GPUs only; csrc/quantization/w8a8/fp8/common.cuh: multiply with the reciprocal, clamp, round
    def scaled_fp8_quant(weight_OI: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (weight_OI.float() * (1 / scale.float())).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    w8a8_utils.ops.scaled_fp8_quant = scaled_fp8_quant
    found = {}
    for name in sorted(key.removesuffix(".weight") for key in merged if key.endswith(".weight")):
        weight, scales = merged[f"{name}.weight"], merged[f"{name}.scales"]
        largest, made = w8a8_utils.requantize_with_max_scale(weight.clone(), scales, merged[f"{name}.widths"].tolist())
        assert largest == scales.max()
        found[name] = int((made.view(torch.uint8) != weight.view(torch.uint8)).sum())
    return found


if __name__ == "__main__":
    from safetensors.torch import load_file

    said = {"changed": changed(load_file(sys.argv[1])), "folders": {folder: refusal(folder) for folder in sys.argv[2:]}}
    print("\n" + json.dumps(said))
