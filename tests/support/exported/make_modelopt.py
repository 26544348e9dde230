"""Makes the folders `modelopt-*` beside it with NVIDIA's own quantized tensors, in an environment that has nvidia-modelopt.

Its exporter needs a GPU for NVFP4; its classes of tensors pack and unpack on a CPU, which `expected.safetensors` holds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import modelopt
import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "num_hidden_layers": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
LINEARS = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.experts.{expert}.{part}_proj" for expert in range(2) for part in ("gate", "up", "down")),
]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = {
        "model.embed_tokens.weight": torch.randn(64, 64, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(64).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(2, 64, generator=generator).bfloat16(),
    }
    for norm, width in (
        ("input_layernorm", 64),
        ("post_attention_layernorm", 64),
        ("self_attn.q_norm", 32),
        ("self_attn.k_norm", 32),
    ):
        plain[f"model.layers.0.{norm}.weight"] = torch.ones(width).bfloat16()
    weights = {name: torch.randn(64, 64, generator=generator).bfloat16() for name in LINEARS}
    largest = max(float(weight.abs().max()) for weight in weights.values())
    for form in ("NVFP4", "FP8"):
        tensors, expected = dict(plain), {}
        for name, weight in weights.items():
            prefix = f"model.layers.0.{name}"
            if form == "NVFP4":
                shared = torch.tensor(largest / (6.0 * 448.0))
                packed, scale, second = NVFP4QTensor.quantize(weight, 16, weights_scaling_factor_2=shared)
                values = packed.dequantize(dtype=torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
                tensors |= {f"{prefix}.weight_scale": scale, f"{prefix}.weight_scale_2": second.float().reshape(())}
            else:
                packed, scale = FP8QTensor.quantize(weight)
                values = packed.dequantize(dtype=torch.float32, scale=scale)
                tensors |= {f"{prefix}.weight_scale": scale.float().reshape(())}
            tensors |= {f"{prefix}.weight": packed._quantized_data, f"{prefix}.input_scale": torch.tensor(0.5)}
            if name in ("self_attn.k_proj", "mlp.experts.1.down_proj"):
                expected[f"{prefix}.weight"] = values.float().reshape(64, 64).contiguous()
        folder = FOLDER / f"modelopt-{form.lower()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        claim = {"quant_algo": form, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "model.layers.0.mlp.gate"]}
        claim |= {"group_size": 16} if form == "NVFP4" else {}
        producer = {"name": "modelopt", "version": modelopt.__version__}
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": claim}))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
        save_file(expected, folder / "expected.safetensors")
        print(folder.name, modelopt.__version__, flush=True)


if __name__ == "__main__":
    main()
