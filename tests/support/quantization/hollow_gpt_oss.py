"""Hollow checkpoints of gpt-oss in forms that vLLM's loader might take beside the published MXFP4.

Every expert has biases, and gate and up rows are interleaved, so vLLM loads them as one weight, under its own names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hollow

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_evaluate.serving.replay import PlannedCheckpoint
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

LAYERS, EXPERTS = 2, 4
GPT_OSS_20B_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": LAYERS, "num_key_value_heads": 8, "num_local_experts": EXPERTS,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip
"""openai/gpt-oss-20b, with fewer layers and experts."""
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
WIDE, HIDDEN = 5760, 2880
"""Rows of gate and up, and of down; both have 2,880 columns."""


def tensors_of(experts: Tensors) -> Tensors:
    """The model with these tensors behind the prefix of the experts of each layer; attention is in BF16."""
    made: Tensors = {"model.embed_tokens.weight": ("BF16", (201088, HIDDEN))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (("q", 4096, HIDDEN), ("k", 512, HIDDEN), ("v", 512, HIDDEN), ("o", HIDDEN, 4096)):
            made[f"{prefix}.self_attn.{name}_proj.weight"] = ("BF16", (rows, columns))
            made[f"{prefix}.self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        made[f"{prefix}.self_attn.sinks"] = ("BF16", (64,))
        made[f"{prefix}.mlp.router.weight"] = ("BF16", (EXPERTS, HIDDEN))
        made[f"{prefix}.mlp.router.bias"] = ("BF16", (EXPERTS,))
        made |= {f"{prefix}.{norm}.weight": ("BF16", (HIDDEN,)) for norm in ("input_layernorm", "post_attention_layernorm")}
        made |= {f"{prefix}.mlp.experts.{name}": header for name, header in experts.items()}
    return made | {"model.norm.weight": ("BF16", (HIDDEN,)), "lm_head.weight": ("BF16", (201088, HIDDEN))}


def published() -> Tensors:
    made: Tensors = {}
    for name, rows in (("gate_up_proj", WIDE), ("down_proj", HIDDEN)):
        made[f"{name}_blocks"] = ("U8", (EXPERTS, rows, HIDDEN // 32, 16))
        made[f"{name}_scales"] = ("U8", (EXPERTS, rows, HIDDEN // 32))
        made[f"{name}_bias"] = ("BF16", (EXPERTS, rows))
    return made


def one_by_one(parts: dict[str, tuple[str, int]], *, vllms_names: bool) -> Tensors:
    """parts: leaf -> (dtype, columns of a tensor). vllms_names: `w13_weight_packed` and not `gate_up_proj.weight_packed`."""
    made: Tensors = {}
    for expert in range(EXPERTS):
        for name, own, rows in (("gate_up_proj.", "w13_", WIDE), ("down_proj.", "w2_", HIDDEN)):
            prefix = f"{expert}.{own if vllms_names else name}"
            made |= {f"{prefix}{leaf}": (dtype, (rows, columns)) for leaf, (dtype, columns) in parts.items()}
            made[f"{prefix}bias"] = ("BF16", (rows,))
    return made


INT4 = {"weight_packed": ("I32", HIDDEN // 8), "weight_scale": ("BF16", HIDDEN // 32)}
FP8 = {"weight": ("F8_E4M3", HIDDEN), "weight_scale": ("BF16", 1)}
CASES: dict[str, tuple[str | None, Tensors]] = {
    "as published": (None, published()),
    "int4": ("w4a16-g32", one_by_one(INT4, vllms_names=False)),
    "int4, vLLM's names": ("w4a16-g32", one_by_one(INT4, vllms_names=True)),
    "fp8, vLLM's names": ("fp8-channel", one_by_one(FP8, vllms_names=True)),
}
"""Case -> (precision whose scheme the experts have, their tensors)."""


def declared(precision: str | None, folder: Path) -> dict[str, Any]:
    """`quantization_config`, made as for another model; only experts are quantized."""
    if precision is None:
        return MXFP4
    source = open_checkpoint(hollow.hollow_model(folder / precision, "qwen3-30b-a3b"))
    config = config_json(make_plan(source, load_recipe(PrecisionRecipe, precision), model="m", family=None))
    quantization: dict[str, Any] = config["quantization_config"]
    return {**quantization, "ignore": ["lm_head", r"re:.*\.self_attn\..*$", r"re:.*\.attn\..*$", r"re:.*\.router$"]}


def checkpoints(folder: Path) -> dict[str, PlannedCheckpoint]:
    """Case -> checkpoint."""
    return {
        name: PlannedCheckpoint(
            {**GPT_OSS_20B_CONFIG, "quantization_config": declared(precision, folder / str(number))},
            {"model.safetensors": tensors_of(experts)},
        )
        for number, (name, (precision, experts)) in enumerate(CASES.items())
    }
