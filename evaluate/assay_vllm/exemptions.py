"""Parameters that a whole checkpoint may lack: vLLM 0.32 registers them on a GPU and computes nothing with what is loaded.

vLLM itself does not notice, as it checks no quantized model. Each exemption is as narrow as the code it rests on.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_moe,
)

_DRAFT_HEAD = ".shared_head.head."
_GRANITE_EXPERT = ".block_sparse_moe.experts."
_INPUT_SCALES = ("w13_input_global_scale", "w2_input_global_scale")


def exempt_parameters(model: torch.nn.Module, stored: Collection[str]) -> set[str]:
    """Names of the parameters that need not be loaded. stored: names of all tensors that were read for `model`."""
    shared = shared_draft_heads(model, stored) | shared_draft_embedding(model)
    unused = unused_input_scales(model) | unused_speech_embedding(model)
    return shared | unused | uncounted_experts(model, stored) | unread_shapes(model)


def unused_speech_embedding(model: torch.nn.Module) -> set[str]:
    """The embedding of words of the transformer that encodes speech in MiMo-V2.5, which no release has.

    `MimoAudioEncoder` (vllm/model_executor/models/mimo_audio.py) builds a whole `Qwen2Model` of transformers, and gives it
    `inputs_embeds` only (`apply_input_local_transformer`).
    """
    if type(model).__name__ != "MiMoV2OmniForCausalLM":
        return set()
    return {"audio_encoder.input_local_transformer.embed_tokens.weight"} & {name for name, _ in model.named_parameters()}


def uncounted_experts(model: torch.nn.Module, stored: Collection[str]) -> set[str]:
    """Experts of Granite 4 that were stored one by one, as quantized ones are.

    `GraniteMoeHybridModel.load_weights` (vllm/model_executor/models/granitemoehybrid.py) gives them to their parameters in
    `_load_quant_expert` and does not add these to the names that it returns.
    """
    if type(model).__name__ != "GraniteMoeHybridForCausalLM" or not any(_GRANITE_EXPERT in name for name in stored):
        return set()
    return {name for name, _ in model.named_parameters() if f"{_GRANITE_EXPERT}routed_experts." in name}


def unread_shapes(model: torch.nn.Module) -> set[str]:
    """Shapes of packed experts of gpt-oss, which its loader does not know (`_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD` in
    vllm/model_executor/models/gpt_oss.py).

    `CompressedTensorsWNA16MoEMethod` registers them and reads them nowhere.
    """
    if type(model).__name__ != "GptOssForCausalLM":
        return set()
    return {name for name, _ in model.named_parameters() if name.endswith(("w13_weight_shape", "w2_weight_shape"))}


def shared_draft_heads(model: torch.nn.Module, stored: Collection[str]) -> set[str]:
    """Heads of an MTP draft that vLLM replaces by the target's after loading. None if the checkpoint stores such a head.

    GLM-5 and GLM-5.2 store none, but `DeepseekV32MultiTokenPredictorLayer` (vllm/models/deepseek_v32/nvidia/mtp.py) builds a
    `SharedHead` with a `ParallelLMHead` of its own. `load_eagle_model` (vllm/v1/worker/gpu/spec_decode/eagle/utils.py) and
    `_maybe_share_lm_head` (vllm/v1/spec_decode/llm_base_proposer.py) put the target's into its place, except in drafts that set
    `has_own_lm_head`.
    """
    if getattr(model, "has_own_lm_head", False) or any(_DRAFT_HEAD in name for name in stored):
        return set()
    return {name for name, _ in model.named_parameters() if name.endswith(f"{_DRAFT_HEAD}weight")}


def shared_draft_embedding(model: torch.nn.Module) -> set[str]:
    """The embedding of an MTP draft whose loader passes over every name outside the block, the model's own among them:
    DeepSeek-V4's and GLM-5.3-Flash's.

    Then `maybe_share_target_embed` and `_maybe_share_embeddings`, in the files named above, put the target's into its place:
    the draft does not set `has_own_embed_tokens`.
    """
    return {"model.embed_tokens.weight"} if type(model).__name__ in ("DeepSeekV4MTP", "Glm5NextMTP") else set()


def unused_input_scales(model: torch.nn.Module) -> set[str]:
    """Activation scales of experts with NVFP4 weights and 16-bit activations.

    `CompressedTensorsW4A4Nvfp4MoEMethod.create_weights` registers them whatever its `use_a16` says. With `use_a16` no kernel
    reads them: `convert_to_nvfp4_moe_kernel_format` (vllm/model_executor/layers/fused_moe/oracle/nvfp4.py) sets them to None
    for Marlin and Humming; b12x and flashinfer_b12x, which run only when asked for by name, take 1 in their place.
    """
    return {
        f"{name}.{scale}"
        for name, module in model.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), nvfp4_moe.CompressedTensorsW4A4Nvfp4MoEMethod)
        and method.use_a16
        for scale in _INPUT_SCALES
    }
