"""Published quantized repositories as data: what each stores and claims, and what is wrong with it.

Each is rebuilt hollow, cut to four layers and four experts, from the published config of a model, its own or a smaller one of
its family (`config_of`), and from what a public source says of the repository: its claim, what it stores, its defect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hollow
import numpy as np
import published_gguf
from published import (
    Published,
    awq,
    fp8_blocks,
    gptq,
    is_expert,
    is_linear,
    modelopt_nvfp4,
    of_model,
    outside_mtp,
    publish,
    put,
    two_shards,
)

HUB = "https://huggingface.co"
LAYERS = 4


class Repository(NamedTuple):
    """config_of: the model in `hollow.py` whose config and shapes it has. source: where the facts of the repository come from.
    made: writes the hollow copy into a folder. defects: what is found -> where; empty: nothing."""

    name: str
    format: str
    config_of: str
    source: str
    made: Callable[[Path], Path]
    defects: dict[str, list[str]]

    @property
    def address(self) -> str:
        return f"{HUB}/{self.name}"


def release(name: str, format_: str, model: str) -> Repository:
    """A release by the model's makers, as `hollow.py` has it; its facts are those of the repository's own files."""
    return Repository(
        name, format_, model, f"{HUB}/{name}", lambda folder: hollow.hollow_model(folder, model, release=True), {}
    )


# ------------------------------------------------------------------------------------------------ NVIDIA's layout
QWEN35_KEPT = ["model.visual*", "*.mlp.gate", "*.shared_expert_gate", "*linear_attn.*", "*self_attn.*", "*.shared_expert.*"]


def _qwen35_nvfp4(folder: Path, exclude: list[str], *, head: bool = False, scale: float | None = None) -> Path:
    config, tensors = of_model("qwen3.5-35b-a3b")
    experts = outside_mtp(is_expert, LAYERS)

    def is_chosen(name: str) -> bool:
        return experts(name) or (head and name == "lm_head.weight")

    publish(folder, modelopt_nvfp4(config, tensors, is_chosen, [*exclude, *QWEN35_KEPT]))
    if scale is not None:
        put(folder, f"{UNREACHED}.input_scale", np.array([scale], np.float32))
    return folder


UNREACHED = "model.language_model.layers.1.mlp.experts.3.down_proj"
"""An expert that no calibration text reached."""


def glm5_without_mtp(folder: Path) -> Path:
    config, tensors = of_model("glm-5")
    lost = {name: told for name, told in tensors.items() if f".layers.{LAYERS}." not in name}
    exclude = [
        "lm_head",
        "*self_attn*",
        "*.mlp.gate",
        "*shared_experts*",
        *(f"model.layers.{layer}.mlp*" for layer in range(3)),
    ]
    return publish(folder, modelopt_nvfp4(config, lost, lambda name: is_expert(name) and ".layers.3." in name, exclude))


# ------------------------------------------------------------------------------------------------ AWQ, GPTQ, AutoRound
def deepseek_v32_awq(folder: Path) -> Path:
    """`modules_to_not_convert` names the router, the indexer and the first three layers, the last one and the MTP layer."""
    config, tensors = of_model("deepseek-v3.2")
    config["num_hidden_layers"] = LAYERS
    listed = ["mlp.gate.", "indexer", *(f"model.layers.{layer}." for layer in (0, 1, 2, LAYERS))]

    def is_chosen(name: str) -> bool:
        return is_linear(name) and not any(entry in name for entry in listed) and ".indexer." not in name

    return publish(folder, awq(config, tensors, is_chosen, listed))


def qwen35_awq(folder: Path) -> Path:
    """Experts of layer 0 stay in BF16."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    listed = ["model.layers.0.", "model.language_model.layers.0.", "self_attn", "shared_expert", "linear_attn", "mlp.gate",
              "visual", "mtp"]  # fmt: skip
    experts = outside_mtp(is_expert, LAYERS)
    return publish(folder, awq(config, tensors, lambda name: experts(name) and ".layers.0." not in name, listed))


def qwen3_gptq(folder: Path) -> Path:
    config, tensors = of_model("qwen3-30b-a3b")
    return publish(folder, gptq(config, tensors, is_linear))


LEAKED = "model.layers.1.mlp.experts.0.up_proj.qweight"


def leaked_into_two_shards(folder: Path) -> Path:
    """The shard of layers 2 and 3 has a tensor of layer 1 as well; the index means the first shard."""
    config, tensors = of_model("qwen3-30b-a3b")
    routers = {f"model.layers.{layer}.mlp.gate": {"bits": 16, "data_type": "float"} for layer in range(LAYERS)}
    claim = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "extra_config": routers}
    published = gptq(config, tensors, is_linear, **claim)
    publish(folder, published)
    second = two_shards("model.layers.3.")
    more = {name: told for name, told in published.tensors.items() if two_shards(name) == second}
    beside = folder.with_name(f"{folder.name}-more")
    publish(beside, published._replace(tensors={**more, LEAKED: published.tensors[LEAKED]}), shard_of=lambda name: second)
    (beside / second).replace(folder / second)
    return folder


# ------------------------------------------------------------------------------------------------ FP8
def qwen3_fp8_block(folder: Path) -> Path:
    """llm-compressor's FP8 in blocks of 128 x 128: `weight_scale`."""
    config, tensors = of_model("qwen3-30b-a3b")
    published = fp8_blocks(config, tensors, is_linear)
    renamed = {name.replace("weight_scale_inv", "weight_scale"): told for name, told in published.tensors.items()}
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True,
               "dynamic": False}  # fmt: skip
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True}
    claim: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }  # fmt: skip
    return publish(folder, Published({**config, "quantization_config": claim}, renamed))


MTP_SHARD = "model-mtp-of-00002.safetensors"


def mtp_shard_outside_the_index(folder: Path) -> Path:
    """Drafts of GLM-5.2's MTP block were accepted at 0.1 %: no entry of the index named its shard."""
    config, tensors = of_model("glm-4.7", dense=1)
    block = f"model.layers.{LAYERS}."
    kept = [name.removesuffix(".weight") for name in tensors if name.startswith(block) and is_linear(name)]
    published = fp8_blocks(config, tensors, outside_mtp(is_linear, LAYERS), kept)
    publish(
        folder, published, shard_of=lambda name: MTP_SHARD if name.startswith(block) else "model-00001-of-00002.safetensors"
    )
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] = {name: shard for name, shard in data["weight_map"].items() if shard != MTP_SHARD}
    index.write_text(json.dumps(data))
    return folder


VLLM, SGLANG = "https://github.com/vllm-project/vllm", "https://github.com/sgl-project/sglang"
LLAMA_CPP, IK_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp", "https://github.com/ikawrakow/ik_llama.cpp"
NVFP4, FP8, INT4 = "ModelOpt NVFP4", "FP8", "compressed-tensors INT4"
REPOSITORIES: tuple[Repository, ...] = (
    release("deepseek-ai/DeepSeek-V3", FP8, "deepseek-v3"),
    release("deepseek-ai/DeepSeek-V3.2", FP8, "deepseek-v3.2"),
    release("deepseek-ai/DeepSeek-V4-Flash", "FP8, experts FP4", "deepseek-v4-flash"),
    release("deepseek-ai/DeepSeek-V4-Pro", "FP8, experts FP4", "deepseek-v4-pro"),
    release("zai-org/GLM-5-FP8", FP8, "glm-5"),
    release("zai-org/GLM-4.5-Air-FP8", "compressed-tensors FP8", "glm-4.5-air"),
    release("MiniMaxAI/MiniMax-M2", FP8, "minimax-m2"),
    release("XiaomiMiMo/MiMo-V2-Flash", FP8, "mimo-v2-flash"),
    release("moonshotai/Kimi-K2-Thinking", INT4, "kimi-k2-thinking"),
    release("moonshotai/Kimi-K2.5", INT4, "kimi-k2.5"),
    Repository(
        "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "GPTQ", "qwen3-30b-a3b", f"{VLLM}/issues/25029", qwen3_gptq, {}),
    Repository(
        "RedHatAI/Qwen3-30B-A3B-FP8-block", "compressed-tensors FP8", "qwen3-30b-a3b", f"{VLLM}/issues/31768",
        qwen3_fp8_block, {}),
    Repository(
        "QuantTrio/DeepSeek-V3.2-Exp-AWQ", "AWQ", "deepseek-v3.2", f"{VLLM}/issues/30052", deepseek_v32_awq, {}),
    Repository(
        "QuantTrio/Qwen3.5-397B-A17B-AWQ", "AWQ", "qwen3.5-35b-a3b", f"{SGLANG}/pull/20439", qwen35_awq, {}),
    Repository(
        "nvidia/Qwen3.5-397B-A17B-NVFP4", NVFP4, "qwen3.5-35b-a3b", f"{VLLM}/pull/38832",
        lambda folder: _qwen35_nvfp4(folder, ["lm_head", "mtp.layers.0*"]), {"mtp_plain_not_listed": ["mtp.fc"]}),
    Repository(
        "nvidia/Qwen3.6-35B-A3B-NVFP4", NVFP4, "qwen3.5-35b-a3b", f"{VLLM}/issues/44081",
        lambda folder: _qwen35_nvfp4(folder, ["lm_head*", "mtp.*"], head=True), {"listed_but_packed": ["lm_head"]}),
    Repository(
        "txn545/Qwen3.5-122B-A10B-NVFP4", NVFP4, "qwen3.5-35b-a3b", f"{VLLM}/pull/42601",
        lambda folder: _qwen35_nvfp4(folder, ["lm_head", "mtp.*"], scale=1e-40),
        {"scale_not_invertible": [f"{UNREACHED}.input_scale"]}),
    Repository(
        "lukealonso/GLM-5-NVFP4", NVFP4, "glm-5", f"{VLLM}/pull/35548", glm5_without_mtp, {"mtp_absent": ["config.json"]}),
    Repository(
        "Intel/Qwen3.5-397B-A17B-int4-AutoRound", "AutoRound", "qwen3-30b-a3b", "https://github.com/eugr/spark-vllm-docker/pull/134",
        leaked_into_two_shards, {"tensor_twice": [LEAKED]}),
    Repository(
        "PhalaCloud/GLM-5.2-W4AFP8", FP8, "glm-4.7", "https://github.com/local-inference-lab/vllm/pull/436",
        mtp_shard_outside_the_index,
        {"shard_not_in_index": [MTP_SHARD], "mtp_absent": ["config.json"], "total_size": ["model.safetensors.index.json"]}),
    Repository(
        "unsloth/DeepSeek-R1-0528-GGUF", "GGUF Q8_0", "deepseek-v3", f"{LLAMA_CPP}/issues/13916", published_gguf.deepseek_r1_q8,
        {}),
    Repository(
        "localweights/Qwen3.6-35B-A3B-MTP-IQ4_XS-Q8nextn-GGUF", "GGUF IQ4_XS", "qwen3.5-35b-a3b", f"{IK_LLAMA_CPP}/pull/1745",
        published_gguf.qwen36_with_mtp, {}),
    Repository(
        "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF", "GGUF Q5_K", "mixtral-8x7b", f"{LLAMA_CPP}/issues/10244",
        published_gguf.mixtral_of_single_experts,
        {"experts_not_stacked": [f"block {number}" for number in range(LAYERS)]}),
    Repository(
        "antirez/deepseek-v4-gguf", "GGUF Q4_K", "deepseek-v4-flash", f"{IK_LLAMA_CPP}/pull/2256",
        published_gguf.deepseek_v4_without_mtp, {"mtp_absent": ["deepseek4.nextn_predict_layers"]}),
)  # fmt: skip
