"""Every name has one form; names and shapes agree with what transformers writes; ignore patterns mean what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import hollow
import hollow_hybrids
import hollow_moe
import pytest
import yaml
from safetensors import safe_open

from assay.errors import PlanError, RecipeError
from assay.recipes.base import recipes_dir
from assay.recipes.families import family_of
from assay.recipes.family import FamilyBlock, FamilyRecipe
from assay.recipes.family_names import Classified, classify, family_names, forms, ignore_patterns, names_of
from assay.recipes.load import load_recipe

SMALL = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128, "num_hidden_layers": 3}
GLM_SMALL = {**SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
MLA_SMALL = {
    **GLM_SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_SMALL = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

QWEN35_SMALL = {
    **QWEN_SMALL, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def anchored(form: str) -> re.Pattern[str]:
    """The form as a fully anchored regular expression."""
    escaped = re.escape(form).replace(r"\{layer\}", r"(0|[1-9]\d*)").replace(r"\{expert\}", r"(0|[1-9]\d*)")
    return re.compile(rf"\A{escaped}\Z")


IN_LAYER = re.compile(r"(?<=layers\.)\d+|(?<=mtp_block\.)\d+|(?<=_norm\.)\d+|(?<=_linear_proj\.)\d+|(?<=^mtp\.)\d+")


@pytest.mark.parametrize("model", hollow.MODELS)
def test_every_name_of_every_model_matches_exactly_one_form(model: str) -> None:
    base, shapes = hollow.MODELS[model]
    config = hollow.changed(hollow_hybrids.cut_to(base, 4), num_hidden_layers=4)
    family = family_of(config)
    known = {form: anchored(form) for form in forms(family)}
    names = [name for name, _ in hollow.one_by_one(shapes(config))]
    kept = {name for name in names if name.startswith(tuple(f"{module}." for module in names_of(family).kept))}
    for name in names:
        found = classify(family, name, config)
        if name in kept:
            assert (found.part, found.linear) == ("other", False)
            continue
        form = forms(family)[IN_LAYER.sub("{layer}", re.sub(r"(?<=experts\.)\d+", "{expert}", name))]
        assert (found.part, found.linear) == (form.part, form.kind == "linear")
    for name in names:
        if name not in kept and not re.search(r"\.experts\.[1-9]", name):
            assert len([form for form, pattern in known.items() if pattern.match(name)]) == 1, name


def _written_by_transformers(folder: Path, config_class: str, model_class: str, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).to(torch.bfloat16)
    model.save_pretrained(folder)
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


@pytest.mark.parametrize(
    ("family", "classes", "settings", "shapes"),
    [
        (
            "glm4_moe",
            ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
            {**GLM_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
             "use_qk_norm": True},
            hollow.glm4_shapes,
        ),
        (
            "glm_moe_dsa",
            ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
            {**MLA_SMALL, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
            lambda config: hollow.glm5_shapes(config, {0, 1, 2}),
        ),
        (
            "deepseek_v32",
            ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
            {**MLA_SMALL, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
            lambda config: hollow.glm5_shapes(config, {0, 1, 2}),
        ),
        ("glm4_moe_lite", ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"), MLA_SMALL, hollow.glm5_shapes),
        ("deepseek_v3", ("DeepseekV3Config", "DeepseekV3ForCausalLM"), MLA_SMALL, hollow.glm5_shapes),
        ("qwen3_moe", ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), {**QWEN_SMALL, "head_dim": 16}, hollow.qwen3_moe_shapes),
        (
            "qwen3_next",
            ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
            {**QWEN_SMALL, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32},
            lambda config: (
                (name, shape)
                for name, shape in hollow.qwen3_next_shapes(
                    {**config, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
                )
                if not name.startswith("mtp.")
            ),
        ),
        (
            "minimax_m2",
            ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
            {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16},
            hollow.minimax_shapes,
        ),
        (
            "qwen3_5_moe",
            ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
            {"text_config": {**QWEN35_SMALL, "model_type": "qwen3_5_moe_text"}, "vision_config": QWEN_VISION},
            lambda config: (
                (name, shape)
                for name, shape in hollow.one_by_one(hollow.qwen35_shapes(config))
                if not name.startswith("mtp.")
            ),
        ),
        (
            "ernie4_5_moe",
            ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
            {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            hollow.ernie_shapes,
        ),
        (
            "mimo_v2_flash",
            ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
            {**SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
             "head_dim": 24, "v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 24,
             "swa_v_head_dim": 16, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
             "add_swa_attention_sink_bias": True},
            lambda config: (
                (name, shape) for name, shape in hollow_hybrids.mimo_v2_flash_shapes(config) if ".mtp." not in name
            ),
        ),
        (
            "nemotron_h",
            ("NemotronHConfig", "NemotronHForCausalLM"),
            {**SMALL, "hybrid_override_pattern": "M*E", "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
             "ssm_state_size": 8, "conv_kernel": 4, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1},
            hollow_hybrids.nemotron3_shapes,
        ),
        (
            "nemotron_h",
            ("NemotronHConfig", "NemotronHForCausalLM"),
            {**SMALL, "hybrid_override_pattern": "M*E", "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
             "ssm_state_size": 8, "conv_kernel": 4, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1,
             "moe_latent_size": 24},
            hollow_hybrids.nemotron3_shapes,
        ),
    ],
)  # fmt: skip
def test_names_and_shapes_are_those_transformers_writes(
    tmp_path: Path, family: str, classes: tuple[str, str], settings: dict[str, Any], shapes: Any
) -> None:
    """The independent implementation: a random model saved by transformers has the names and shapes that we expect.

    MTP blocks are left out: transformers does not build them. Kimi-K2.5 is left out: transformers 5.17 writes other names
    than it reads (`language_model.model.blocks.0`, `model.mm_projector.pre_norm`).
    """
    written = _written_by_transformers(tmp_path, *classes, settings)
    assert written == dict(shapes({**settings, "num_nextn_predict_layers": 0}))
    for name in written:
        assert classify(family, name, settings).role != "mtp"


WRITTEN = [family for family, model in hollow_moe.MODELS.items() if model.made_by is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITTEN)
def test_names_and_shapes_of_more_families_are_those_transformers_writes(tmp_path: Path, family: str) -> None:
    config, classes = hollow_moe.small(family), hollow_moe.MODELS[family].made_by
    assert classes is not None
    written = _written_by_transformers(tmp_path, *classes, {key: config[key] for key in config if key != "architectures"})
    shapes = dict(hollow_moe.MODELS[family].shapes(config))
    block = ("mtp.", f"model.layers.{config.get('num_hidden_layers')}.")
    assert written == {name: shape for name, shape in shapes.items() if not name.startswith(block)}


@pytest.mark.parametrize(
    ("model", "tensors", "values"),
    [
        ("minimax-m2", 96_103, 228_703_644_928),
        ("qwen3.5-35b-a3b", 1_811, 35_951_822_704),
        ("kimi-k2.5", 208_550, 170_738_182_128),
        ("deepseek-v4-flash", 69_187, 158_069_433_298),
        ("deepseek-v4-pro", 145_116, 861_608_274_846),
    ],
)
def test_as_much_as_is_published(model: str, tensors: int, values: int) -> None:
    """Tensors of all shards, and values in them (an int32 with eight codes is one, so is a byte with two), as the published
    headers have them."""
    config, shapes_of = hollow.MODELS[model]
    shapes, _ = hollow.as_published(hollow.changed(config), shapes_of(config), model, release=False)
    shapes = list(shapes)
    assert (len(shapes), sum(math.prod(shape) for _, shape in shapes)) == (tensors, values)


def test_as_much_as_is_said_of_nemotron_3_super() -> None:
    """120 billion parameters, without the MTP block, and 1,040 tensors in that."""
    shapes = dict(hollow_hybrids.nemotron3_shapes(hollow_hybrids.NEMOTRON3_SUPER_CONFIG))
    block = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert len(block) == 1040
    assert round(sum(math.prod(shape) for name, shape in shapes.items() if name not in block) / 1e9, 1) == 120.7


GLM = {"num_hidden_layers": 78}


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("glm_moe_dsa", "model.layers.5.mlp.experts.17.gate_proj.weight",
         Classified("routed_expert", "routed_expert", "model.layers.5.mlp.experts.17.gate_proj", 5, 17,
                    "model.layers.5.mlp.experts.17.gate_up_proj", True)),
        ("glm_moe_dsa", "model.layers.78.mlp.experts.0.down_proj.weight",
         Classified("mtp", "routed_expert", "model.layers.78.mlp.experts.0.down_proj", 78, 0, None, True)),
        ("glm_moe_dsa", "model.layers.78.eh_proj.weight",
         Classified("mtp", "mtp_projection", "model.layers.78.eh_proj", 78, None, None, False)),
        ("glm_moe_dsa", "model.layers.78.mlp.gate.e_score_correction_bias",
         Classified("mtp", "router_bias", "model.layers.78.mlp.gate", 78, None, None, False)),
        ("glm_moe_dsa", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
         Classified("attention", "attention", "model.layers.0.self_attn.kv_a_proj_with_mqa", 0, None,
                    "model.layers.0.self_attn.fused_qkv_a_proj", True)),
        ("glm_moe_dsa", "model.layers.0.self_attn.indexer.weights_proj.weight",
         Classified("indexer", "indexer", "model.layers.0.self_attn.indexer.weights_proj", 0, None,
                    "model.layers.0.self_attn.indexer.wk_weights_proj", False)),
        ("glm4_moe", "model.layers.3.self_attn.k_proj.bias",
         Classified("attention", "attention", "model.layers.3.self_attn.k_proj", 3, None, None, False)),
        ("glm4_moe", "model.layers.3.mlp.shared_experts.up_proj.weight",
         Classified("shared_expert", "shared_expert", "model.layers.3.mlp.shared_experts.up_proj", 3, None,
                    "model.layers.3.mlp.shared_experts.gate_up_proj", True)),
        ("qwen3_next", "mtp.layers.0.self_attn.q_proj.weight",
         Classified("mtp", "attention", "mtp.layers.0.self_attn.q_proj", 0, None, "mtp.layers.0.self_attn.qkv_proj", True)),
        ("qwen3_next", "mtp.fc.weight", Classified("mtp", "mtp_projection", "mtp.fc", None, None, None, False)),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight",
         Classified("attention", "attention", "model.layers.0.linear_attn.in_proj_qkvz", 0, None, None, True)),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight",
         Classified("attention", "attention", "model.layers.0.linear_attn.in_proj_ba", 0, None, None, False)),
        ("qwen3_next", "model.layers.0.mlp.shared_expert_gate.weight",
         Classified("router", "router", "model.layers.0.mlp.shared_expert_gate", 0, None, None, False)),
        ("qwen3_moe", "lm_head.weight", Classified("lm_head", "lm_head", "lm_head", None, None, None, False)),
    ],
)  # fmt: skip
def test_what_a_tensor_is(family: str, name: str, expected: Classified) -> None:
    assert classify(family, name, GLM) == expected


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("glm4_moe", "model.layers.1.self_attn.q_prj.weight",
         "model.layers.1.self_attn.q_prj.weight: family glm4_moe has no such tensor; nearest known form: "
         "model.layers.{layer}.self_attn.q_proj.weight; unknown tensors are never guessed"),
        ("glm4_moe", "model.layers.1.mlp.experts.gate_up_proj",
         "model.layers.1.mlp.experts.gate_up_proj: family glm4_moe has no such tensor; nearest known form: "
         "model.layers.{layer}.mlp.shared_experts.gate_proj.weight; unknown tensors are never guessed"),
        ("qwen3_moe", "model.layers.78.input_layernorm.weight",
         "model.layers.78.input_layernorm.weight: layer 78 is beyond the 78 layers of config.json, and family qwen3_moe has no "
         "MTP block there; correct num_hidden_layers, or the checkpoint is of another family"),
        ("glm4_moe", "model.layers.1.eh_proj.weight",
         "model.layers.1.eh_proj.weight: belongs in an MTP layer, but layer 1 is one of the 78 layers of config.json; "
         "correct num_hidden_layers"),
        ("glm4_moe", "mtp.fc.weight", "mtp.fc.weight: family glm4_moe has no such tensor"),
        ("glm4_moe", "model.layers.01.input_layernorm.weight", "model.layers.01.input_layernorm.weight: family glm4"),
        ("glm4_moe", "xmodel.layers.1.input_layernorm.weight", "xmodel.layers.1.input_layernorm.weight: family glm"),
        ("glm4_moe", "model.layers.1.input_layernorm.weight\n", "model.layers.1.input_layernorm.weight"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_an_error_that_names_the_nearest_form(family: str, name: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        classify(family, name, GLM)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("model", hollow.MODELS)
def test_family_of_each_model(model: str) -> None:
    expected = {
        "glm-5": "glm_moe_dsa", "glm-5.2": "glm_moe_dsa", "glm-4.5-air": "glm4_moe", "glm-4.7": "glm4_moe",
        "deepseek-v3": "deepseek_v3", "deepseek-v3.2": "deepseek_v32", "kimi-k2": "deepseek_v3",
        "kimi-k2-thinking": "deepseek_v3", "glm-4.7-flash": "glm4_moe_lite", "qwen3-30b-a3b": "qwen3_moe",
        "qwen3-next-80b-a3b": "qwen3_next", "minimax-m2": "minimax_m2", "qwen3.5-35b-a3b": "qwen3_5_moe",
        "qwen3.5-35b-a3b-text": "qwen3_5_moe_text",
        "kimi-k2.5": "kimi_k25", "ernie-4.5-21b": "ernie4_5_moe", "step-3.5-flash": "step3p5",
        "mimo-v2-flash": "mimo_v2_flash", "mimo-v2.5": "mimo_v2",
        "nemotron-3-nano": "nemotron_h", "nemotron-3-super": "nemotron_h",
        "deepseek-v4-flash": "deepseek_v4", "deepseek-v4-pro": "deepseek_v4",
    }  # fmt: skip
    assert family_of(hollow.MODELS[model][0]) == expected[model]


DRAFTS = "`assay family` drafts a family of what vLLM serves (docs/families.md has the supported ones)"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
         "config.json: LlamaForCausalLM is a dense model (it declares no experts); assay is for mixture-of-experts "
         "(docs/families.md)"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": None},
         "config.json: Glm4MoeForCausalLM declares no experts (none of n_routed_experts, num_experts, num_local_experts, "
         "moe_num_experts, num_moe_experts): is it the config.json of the model's release?; assay is for mixture-of-experts "
         "(docs/families.md)"),
        ({"architectures": ["ArcticForCausalLM"], "moe": {"num_experts_of_layer": 8}},
         "config.json: ArcticForCausalLM has none of n_routed_experts, num_experts, num_local_experts, moe_num_experts, "
         "num_moe_experts, and moe is not read as a number of experts; assay is for mixture-of-experts (docs/families.md)"),
        ({"architectures": ["NewMoeForCausalLM"], "model_type": "new_moe", "num_local_experts": 8},
         "config.json: architecture NewMoeForCausalLM is not known; " + DRAFTS),
        ({"model_type": "new_moe", "num_local_experts": 8},
         "config.json: architecture model_type 'new_moe' is not known; " + DRAFTS),
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 32,
          "quantization_config": {"quant_method": "mxfp4"}},
         "config.json: GptOssForCausalLM cannot be quantized again: it is published with its experts in MXFP4, 4.25 bits a "
         "weight, and vLLM 0.32 takes no smaller form of them; serve it as it is (docs/decisions/families.md)"),
        ({"architectures": ["NewVLForConditionalGeneration"], "thinker_config": {"text_config": {"n_routed_experts": 8}}},
         "config.json: architecture NewVLForConditionalGeneration is not known; " + DRAFTS),
        ({"architectures": ["NewVLForConditionalGeneration"], "text_config": {"hidden_size": 8}},
         "config.json: NewVLForConditionalGeneration is a dense model (it declares no experts); assay is for "
         "mixture-of-experts (docs/families.md)"),
        ({}, "config.json: names neither `architectures` nor `model_type`; take the one of the model's release"),
    ],
)  # fmt: skip
def test_models_that_are_not_supported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        family_of(config)
    assert str(caught.value) == message


QUANTIZED = ("attention", "dense_mlp", "shared_expert", "routed_expert")


def test_ignore_patterns_of_the_usual_precision() -> None:
    assert ignore_patterns("glm_moe_dsa", QUANTIZED, mtp="keep", mtp_layers=(78,)) == (
        r"re:(.*\.)?lm_head$",
        r"re:(.*\.)?embed_tokens$",
        r"re:.*\.self_attn\.indexer\.(wq_b|wk|weights_proj)$",
        r"re:.*\.mlp\.gate$",
        r"re:.*layers\.78\..*$",
    )
    assert ignore_patterns("qwen3_next", QUANTIZED, mtp="keep", mtp_layers=()) == (
        r"re:(.*\.)?lm_head$",
        r"re:(.*\.)?embed_tokens$",
        r"re:.*\.linear_attn\.(in_proj_ba|conv1d)$",
        r"re:.*\.mlp\.(gate|shared_expert_gate)$",
        r"re:(.*\.)?mtp\..*$",
    )
    assert ignore_patterns("glm4_moe", QUANTIZED, mtp="quantize", mtp_layers=(46,))[-1] == (
        r"re:.*layers\.46\.(eh_proj|embed_tokens|shared_head\.head|head)$"
    )
    assert ignore_patterns("glm_moe_dsa", (*QUANTIZED, "indexer"), mtp="drop", mtp_layers=(78,))[-2:] == (
        r"re:.*\.self_attn\.indexer\.(wk|weights_proj)$",
        r"re:.*\.mlp\.gate$",
    )


@pytest.mark.parametrize("family", family_names())
@pytest.mark.parametrize("quantized", [QUANTIZED, ("routed_expert",), ("attention",), (*QUANTIZED, "indexer")])
@pytest.mark.parametrize("mtp", ["keep", "quantize", "drop"])
def test_ignore_patterns_are_closed_and_hit_only_their_layer(family: str, quantized: tuple[str, ...], mtp: Any) -> None:
    """The classic mistakes: `layers.1.` that hits layers 10 to 19, `mlp.gate` that hits `mlp.gate_proj`."""
    patterns = ignore_patterns(family, quantized, mtp=mtp, mtp_layers=(1,) if names_of(family).mtp_layer else ())
    for pattern in patterns:
        assert pattern.startswith("re:")
        assert pattern.endswith("$")
        assert not re.search(r"[^\\]\.(?![*?])", pattern), f"{pattern}: a dot that is not escaped"

    def ignored(module: str) -> bool:
        return any(re.match(pattern[3:], module) for pattern in patterns)

    for name, form in names_of(family).layer.items():
        module = f"model.layers.10.{name.replace('{expert}', '3')}".rpartition(".")[0]
        if form.kind == "linear":
            assert ignored(module) == (form.part not in quantized), module
        if form.kind in ("plain", "bare"):
            assert ignored(module), module


# ------------------------------------------------------------------------------------------------ files
def test_a_familys_own_names_follow_those_of_its_blocks_or_replace_them() -> None:
    """Qwen3-MoE's router is a linear of vLLM's, unlike the one of block `moe`, and keeps its place."""
    own = yaml.safe_load((recipes_dir() / "families" / "qwen3_moe.yaml").read_text())
    blocks = [yaml.safe_load((recipes_dir() / "families/blocks" / f"{name}.yaml").read_text()) for name in own["blocks"]]
    names = [name for block in blocks for name in block.get("layer", {})]
    assert list(names_of("qwen3_moe").layer) == names
    assert names_of("qwen3_moe").layer["mlp.gate.weight"].kind == "plain"
    assert names_of("glm4_moe").layer["mlp.gate.weight"].kind == "bare"


def test_a_family_without_architecture_goes_by_its_model_type() -> None:
    assert family_of({"model_type": "kimi_k2", "n_routed_experts": 8}) == "deepseek_v3"
    assert family_of({"model_type": "qwen3_moe", "num_experts": 8}) == "qwen3_moe"


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"), ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe")],
)
def test_transformers_5_saves_the_number_of_experts_under_another_key(architecture: str, family: str) -> None:
    """`attribute_map` of their configs: num_experts is saved as num_local_experts."""
    for key in ("num_experts", "num_local_experts"):
        text = {"text_config": {key: 8}}
        config = {"architectures": [architecture], **({"thinker_config": text} if "Omni" in architecture else text)}
        assert family_of(config) == family


def test_a_number_of_experts_under_a_key_that_the_family_has_not() -> None:
    with pytest.raises(
        PlanError,
        match=r"^config\.json: MixtralForCausalLM is of family mixtral, whose number of experts is num_local_experts; this one "
        r"has num_experts: write it as num_local_experts, or take the config\.json of the model's release$",
    ):
        family_of({"architectures": ["MixtralForCausalLM"], "num_experts": 8})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layer:\n  a.weight: {role: atention}\n", "layer.a.weight.role: Input should be 'embedding', 'lm_head', 'norm', "
         "'attention', 'indexer', 'dense_mlp', 'shared_expert', 'routed_expert', 'router', 'router_bias', 'mtp_projection' or "
         "'other' (got 'atention'); did you mean 'attention'?"),
        ("layer:\n  a.weight: {role: attention, knd: linear}\n",
         "unknown key 'layer.a.weight.knd'; did you mean 'kind'? Allowed: fused, kind, role, split"),
        ("layr: {}\n", "unknown key 'layr'; did you mean 'layer'? Allowed: apart, architectures, blocks, description, "
         "expert_schemes, from_config, joined, kept, kept_in_layers, kinds, layer, layers, model_types, mtp, "
         "mxfp4_experts_alone, name, native_quantization, num_experts, older_names, outside, packed_as_vllm, reasoning_parser, "
         "runtime, schema, stacked"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_family_file(tmp_path: Path, text: str, problem: str) -> None:
    (file := tmp_path / "mine.yaml").write_text(
        f"schema: 1\nname: mine\narchitectures: [A]\nreasoning_parser: x\nnum_experts: [n]\n{text}"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(FamilyRecipe, str(file))
    assert str(caught.value) == f"{file}: {problem}"


def test_an_unknown_family_or_block_names_the_nearest() -> None:
    with pytest.raises(
        RecipeError, match="no family called 'qwen3_nxt'; did you mean qwen3_next\\? `assay recipes families` lists all"
    ):
        names_of("qwen3_nxt")
    with pytest.raises(RecipeError, match="no block of names called 'gqaa'; did you mean gqa\\? known: "):
        load_recipe(FamilyBlock, "gqaa")
