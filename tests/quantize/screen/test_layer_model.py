"""One layer at a time is bit for bit what transformers computes that holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_logits import logits_of
from safetensors.torch import save_file
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe, qwen3_next
from torch.overrides import TorchFunctionMode

from assay_quantize.calibration.one_layer import State
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.formats.schemes import compressed_tensors_scheme
from assay_quantize.screen.draft import DraftModel, NoDraft
from assay_quantize.screen.estimate import estimate_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.placing import text_config
from assay_quantize.sensitivity.texts import ScoredText
from assay_vllm.fake_quant import fake_quantize

LENGTH = 40
CONFIGS = [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()]


def whole_model(folder: Path, dtype: torch.dtype, tokens: torch.Tensor) -> tuple[list[State], torch.Tensor]:
    """(states behind every layer, logits) of transformers' from_pretrained."""
    from transformers import AutoModelForCausalLM

    config = text_config(json.loads((folder / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, experts_implementation="eager").eval()
    states: list[State] = []
    for layer in model.base_model.layers:
        layer.register_forward_hook(
            lambda _module, _args, output: states.append(output if isinstance(output, tuple) else (output,))
        )
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return states, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config",
    [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()],
    ids=lambda config: str(config["model_type"]),
)
def test_states_and_logits_are_those_of_the_whole_model(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    folder = make_tiny(tmp_path / "model", config)
    tokens = torch.randint(7, 800, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    expected_states, expected_logits = whole_model(folder, dtype, tokens)
    with open_stored(open_checkpoint(folder, allow_quantized=True)) as stored:
        model, state = LayerModel(stored, dtype), None
        model.use_embedding(tokens)
        for layer in range(model.num_layers):
            with model.filled(layer):
                state = model.run(layer, tokens, state)
            assert len(state) == len(expected_states[layer]) == (2 if "index_topk" in config else 1)
            assert all(torch.equal(part, expected) for part, expected in zip(state, expected_states[layer], strict=True))
            assert not any(parameter.device.type != "meta" for parameter in model.model.model.layers.parameters())
        assert state is not None
        with model.head() as logits:
            positions = torch.arange(LENGTH)
            assert torch.equal(logits(tokens, positions, state), expected_logits)
            assert torch.equal(logits(tokens, positions[7:19], state), expected_logits[:, 7:19])


TEXT = {
    "vocab_size": 896, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "patch_size": 16}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", TEXT),
    "granitemoe": ("GraniteMoeForCausalLM", TEXT | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": TEXT, "vision_config": TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": TEXT
            | {
                "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
                "final_logit_softcapping": 5.0,
            },
            "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                              "num_key_value_heads": 2, "head_dim": 32},
            "audio_config": None,
        },
    ),
}  # fmt: skip
"""model_type -> class, what its config.json says; weights are those that transformers draws, as it writes them."""


@pytest.mark.parametrize("model_type", WRITTEN)
def test_other_layouts_and_wrappers(tmp_path: Path, model_type: str) -> None:
    """Experts in one tensor, layers in a multimodal model, factors of embeddings and logits."""
    import transformers

    name, settings = WRITTEN[model_type]
    config = transformers.CONFIG_MAPPING[model_type].from_dict(settings)
    torch.manual_seed(0)
    whole = getattr(transformers, name)._from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    whole.save_pretrained(tmp_path / "model")
    tokens = torch.randint(7, 800, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(input_ids=tokens, use_cache=False).logits
    with open_stored(open_checkpoint(tmp_path / "model", allow_quantized=True)) as stored:
        assert torch.equal(logits_of(LayerModel(stored), tokens), expected)
        texts = [ScoredText(tuple(range(7, 40)))]
        assert estimate_pass(LayerModel(stored), texts, tmp_path, has_draft=False).seconds > 0
        with pytest.raises(NoDraft):
            DraftModel(stored)


class RoundedByTheEmulation(TorchFunctionMode):
    """Inputs of the weights in `addresses` are rounded by the code that emulates schemes in vLLM."""

    def __init__(self, addresses: dict[int, Any]) -> None:
        super().__init__()
        self.addresses, self.num_rounded = addresses, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and (scheme := self.addresses.get(args[1].data_ptr())) is not None:
            x_TI = args[0].reshape(-1, args[0].shape[-1])
            self.num_rounded += 1
            args = (fake_quantize(x_TI, scheme, None, torch.ones(1)).reshape(args[0].shape), *args[1:])
        return func(*args, **(kwargs or {}))


def decompressed_logits(folder: Path, work: Path, tokens: torch.Tensor, scheme: str) -> torch.Tensor:
    """transformers' whole model with the weights that the codes stand for, inputs of quantized ones rounded."""
    from transformers import AutoModelForCausalLM

    plain = work / "plain"
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "quantization_config"})
    )
    with open_stored(open_checkpoint(folder, allow_quantized=True)) as stored:
        quantized = {weight.name for weight in stored.weights if not weight.is_plain}
        tensors = {weight.name: stored.read_weight(weight.name) for weight in stored.weights}
        tensors |= {name: stored.read_other(name) for name in stored.others}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval()
    args, addresses = compressed_tensors_scheme(scheme).input_activations, {}
    for name, parameter in model.named_parameters():
        if name in quantized:
            addresses[parameter.data_ptr()] = args
        elif ".experts." in name:
            addresses |= {expert.data_ptr(): args for expert in parameter}
    mode = RoundedByTheEmulation(addresses if args is not None else {})
    with torch.no_grad(), mode:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    assert (mode.num_rounded > 0) == (args is not None)
    return logits


@pytest.mark.parametrize(
    ("precision", "scheme"),
    [("w4a16-g32", "w4a16_g32"), ("fp8-channel", "fp8_channel"), ("fp8", "fp8_block"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"),
     ("mxfp8", "mxfp8"), ("w8a8", "w8a8")],
)  # fmt: skip
def test_quantized_weights_and_their_inputs(tmp_path: Path, precision: str, scheme: str) -> None:
    """Experts and attention alike."""
    from assay_pipeline.quantizing import quantize

    source, made = make_tiny(tmp_path / "source", glm4_moe()), tmp_path / "made"
    quantize(str(source), precision=precision, out=made)
    tokens = torch.randint(7, 800, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = decompressed_logits(made, tmp_path, tokens, scheme)
    with open_stored(open_checkpoint(made, allow_quantized=True)) as stored:
        assert torch.equal(logits_of(LayerModel(stored), tokens), expected)
    assert not torch.equal(whole_model(source, torch.float32, tokens)[1], expected)
