"""Ten more reports of checkpoints that do not load or answer with noise, each with a healthy twin."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import (
    Published,
    Tensors,
    awq,
    compressed,
    defects_of,
    fp8_blocks,
    gptq,
    is_expert,
    is_linear,
    modelopt_mixed,
    modelopt_nvfp4,
    of_model,
    publish,
    put,
)

from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect

EXCLUDE = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
IGNORE = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]
KEYS, VALUES = "model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"


def qwen3() -> tuple[dict[str, Any], Tensors]:
    return of_model("qwen3-30b-a3b")


# ------------------------------------------------------------------------------------------------ scales of the KV cache
def algorithm_of(name: str) -> str | None:
    return "NVFP4" if is_expert(name) else "FP8" if is_linear(name) else None


def with_cache(shape: tuple[int, ...] = ()) -> Published:
    """FP8 attention and NVFP4 experts by ModelOpt, with scales of the KV cache in all four layers."""
    published = modelopt_mixed(
        *qwen3(), lambda name: "NVFP4" if is_expert(name) else "FP8" if is_linear(name) else None, EXCLUDE[:2]
    )
    scales = {name.format(layer): ("F32", shape) for layer in range(4) for name in (KEYS, VALUES)}
    published.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    return published._replace(tensors={**published.tensors, **scales})


def without(published: Published, *names: str) -> Published:
    return published._replace(tensors={name: told for name, told in published.tensors.items() if name not in names})


def test_a_layer_with_a_scale_of_values_alone(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/46264: vLLM's `BaseKVCacheMethod` asserts that a lone scale is of keys."""
    assert defects_of(publish(tmp_path / "healthy", with_cache())) == {}
    folder = publish(tmp_path / "values", without(with_cache(), KEYS.format(2)))
    assert defects_of(folder) == {"cache_scale_alone": [VALUES.format(2)]}
    folder = publish(tmp_path / "keys", without(with_cache(), VALUES.format(2)))
    assert defects_of(folder) == {"cache_scales_missing": ["model.layers.2.self_attn"]}


def test_layers_without_scales_of_the_cache(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/46265: what has no scale is served with 1."""
    folder = publish(tmp_path / "some", without(with_cache(), *(name.format(3) for name in (KEYS, VALUES))))
    assert defects_of(folder) == {"cache_scales_missing": ["model.layers.3.self_attn"]}
    (place,) = inspect(FolderFiles(folder)).findings[0].places
    assert place.what == "has no k_scale and no v_scale; 3 layers have scales"
    every = [name.format(layer) for layer in range(4) for name in (KEYS, VALUES)]
    assert defects_of(publish(tmp_path / "none", without(with_cache(), *every))) == {}


def test_scales_of_the_cache_that_are_no_numbers_or_not_one(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/40243: NaN, infinity, and one for each head."""
    folder = publish(tmp_path / "nan", with_cache())
    put(folder, KEYS.format(1), np.array([np.nan], np.float32))
    assert defects_of(folder) == {"scale_not_finite": [KEYS.format(1)]}
    heads = publish(tmp_path / "heads", with_cache((4,)))
    assert sorted(defects_of(heads)["cache_scale_shape"]) == sorted(
        name.format(layer) for layer in range(4) for name in (KEYS, VALUES)
    )
    published = with_cache((4,))
    published.config["quantization_config"]["kv_cache_scheme"]["strategy"] = "attn_head"
    assert defects_of(publish(tmp_path / "claimed", published)) == {}


# ------------------------------------------------------------------------------------------------ global scales
@pytest.mark.parametrize("producer", ["compressed-tensors", "modelopt"])
def test_global_scales_in_the_convention_of_the_other_tool(tmp_path: Path, producer: str) -> None:
    """https://github.com/modular/modular/issues/6600, https://github.com/FlashML-org/FreeToken/pull/430: one divides, the other
    multiplies; inverted, the model says one token over and over."""
    if producer == "modelopt":
        published, leaf, right = modelopt_nvfp4(*qwen3(), is_expert, EXCLUDE), "weight_scale_2", 0.00028
    else:
        published, leaf, right = compressed(*qwen3(), is_expert, IGNORE, "nvfp4"), "weight_global_scale", 3584.0
    folder = publish(tmp_path / "model", published)
    pair = [f"model.layers.1.mlp.experts.2.{part}_proj.{leaf}" for part in ("gate", "up")]
    for value, expected in ((right, {}), (1 / right, {"global_scale_inverted": pair})):
        for name in pair:
            put(folder, name, np.array([value], np.float32))
        assert defects_of(folder) == expected


# ------------------------------------------------------------------------------------------------ experts that no text reached
@pytest.mark.parametrize("producer", ["gptq", "awq"])
def test_experts_that_were_never_reached_stay_plain(tmp_path: Path, producer: str) -> None:
    """https://github.com/ModelCloud/GPTQModel/issues/2221, https://github.com/ModelCloud/GPTQModel/issues/2271: of a layer one
    expert is quantized, and another is not: KeyError 'layers.0.mlp.experts.w2_weight'."""

    def chosen(name: str) -> bool:
        return is_expert(name) and ".layers.1.mlp.experts.2." not in name

    made = [gptq(*qwen3(), choice) if producer == "gptq" else awq(*qwen3(), choice, ["lm_head", "mlp.gate", "self_attn"])
            for choice in (is_expert, chosen)]  # fmt: skip
    assert defects_of(publish(tmp_path / "healthy", made[0])) == {}
    broken = defects_of(publish(tmp_path / "broken", made[1]))
    assert broken["fused_members_differ"] == ["model.layers.1.mlp.experts"]


# ------------------------------------------------------------------------------------------------ what must be plain
def test_autoround_quantizes_router_and_embedding(tmp_path: Path) -> None:
    """https://github.com/intel/auto-round/issues/1776: Intel/DeepSeek-V4-Flash-W4A16-AutoRound leaves out the head alone."""
    claim = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
    config, tensors = qwen3()
    healthy = gptq(config, tensors, is_linear, **claim, extra_config={"lm_head": {"bits": 16}, r".*mlp\.gate": {"bits": 16}})
    assert defects_of(publish(tmp_path / "healthy", healthy)) == {}

    def chosen(name: str) -> bool:
        return is_linear(name) or name == "model.embed_tokens.weight" or name.endswith("mlp.gate.weight")

    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    wide = {name: ("BF16", (32, tensors[name][1][1])) for name in routers}  # whole words of eight codes
    broken = gptq({**config, "num_experts": 32}, {**tensors, **wide}, chosen, **claim, extra_config={"lm_head": {"bits": 16}})
    found = defects_of(publish(tmp_path / "broken", broken))
    assert found["embedding_quantized"] == ["model.embed_tokens"]
    assert found["router_quantized"] == [f"model.layers.{layer}.mlp.gate" for layer in range(4)]


def test_a_layer_of_16_bits_that_autoround_does_not_claim(tmp_path: Path) -> None:
    """https://github.com/intel/auto-round/issues/422: OPEA/QwQ-32B-Preview-int4-sym-mixed-awq-inc keeps down_proj of layer 5:
    KeyError 'layers.5.mlp.down_proj.weight'."""
    claim = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    kept = "model.layers.2.self_attn.o_proj"
    extra = {"lm_head": {"bits": 16}, r".*mlp\.gate": {"bits": 16}}

    def chosen(name: str) -> bool:
        return is_linear(name) and name != f"{kept}.weight"

    broken = publish(tmp_path / "broken", gptq(*qwen3(), chosen, **claim, extra_config=extra))
    assert defects_of(broken) == {"plain_not_listed": [kept]}
    mended = gptq(*qwen3(), chosen, **claim, extra_config={**extra, kept: {"bits": 16}})
    assert defects_of(publish(tmp_path / "mended", mended)) == {}


# ------------------------------------------------------------------------------------------------ groups
def test_awq_experts_without_groups(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/18885: group_size -1; vLLM 0.32 serves such linears, and divides by -1 for
    experts (auto_awq.py: num_groups_w13)."""
    kept = ["lm_head", "mlp.gate", "self_attn"]
    published = awq(*qwen3(), is_expert, kept)
    whole: Tensors = {}
    for name, (dtype, shape) in published.tensors.items():
        is_of_groups = name.endswith((".scales", ".qzeros"))
        whole[name] = (dtype, (1, shape[1])) if is_of_groups else (dtype, shape)
    assert defects_of(publish(tmp_path / "healthy", published)) == {}
    published.config["quantization_config"]["group_size"] = -1
    folder = publish(tmp_path / "broken", published._replace(tensors=whole))
    assert defects_of(folder) == {"awq_without_groups": ["model.layers.0.mlp.experts.0.down_proj"]}


def in_8_bits(published: Published, is_wide: Any) -> Published:
    """Some of its packed weights in twice the words."""
    tensors = {
        name: ("I32", (told[1][0], told[1][1] * 2)) if name.endswith("weight_packed") and is_wide(name) else told
        for name, told in published.tensors.items()
    }
    return published._replace(tensors=tensors)


def test_experts_of_4_and_8_bits_by_layer(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/52002: poolside/Laguna-XS-2.1-INT4 has INT4 in layers 1-30 and INT8 behind
    them; a healthy checkpoint, whose shapes follow only from its groups."""
    published = compressed(*qwen3(), is_expert, IGNORE, "int4")
    group = published.config["quantization_config"]["config_groups"]["group_0"]
    wide = {**group, "weights": {**group["weights"], "num_bits": 8}, "targets": [r"re:.*layers\.[23]\..*"]}
    published.config["quantization_config"]["config_groups"] = {"group_1": wide, "group_0": group}
    published = in_8_bits(published, lambda name: re.search(r"layers\.[23]\.", name))
    folder = publish(tmp_path / "model", published)
    for name, (_, shape) in published.tensors.items():
        if name.endswith("weight_packed"):
            rows, words = shape
            columns = words * (4 if re.search(r"layers\.[23]\.", name) else 8)
            put(folder, name.replace("weight_packed", "weight_shape"), np.array([rows, columns], np.int64))
    assert defects_of(folder) == {}
    forms = inspect(FolderFiles(folder)).facts.forms
    (experts,) = [form for form in forms if form.role == "routed_expert"]
    assert experts.num_elements == 4 * 4 * 3 * 768 * 2048


def test_of_config_groups_that_overlap_the_first_counts(tmp_path: Path) -> None:
    """https://github.com/charlie12345/ROCmFPX/pull/79: unsloth/Qwen3.8-27B-NVFP4 has FP8 for some layers' MLPs and NVFP4 for
    every MLP; in the other order vLLM looks for NVFP4 everywhere."""
    published = compressed(*qwen3(), is_expert, IGNORE, "nvfp4")
    tensors: Tensors = {}
    for name, told in published.tensors.items():
        module, _, leaf = name.rpartition(".")
        if ".layers.3.mlp.experts." not in name:
            tensors[name] = told
        elif leaf == "weight_packed":
            rows, half = told[1]
            tensors |= {f"{module}.weight": ("F8_E4M3", (rows, 2 * half)), f"{module}.weight_scale": ("BF16", (rows, 1))}
    quantization = published.config["quantization_config"]
    (nvfp4,) = quantization["config_groups"].values()
    nvfp4 = {**nvfp4, "targets": [r"re:.*mlp\.experts\..*"]}
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    fp8 = {"targets": [r"re:.*layers\.3\.mlp\.experts\..*"], "input_activations": {**numbers, "dynamic": True},
           "weights": {**numbers, "strategy": "channel"}}  # fmt: skip
    for name, groups, expected in (
        ("healthy", {"group_0": fp8, "group_1": nvfp4}, {}),
        ("broken", {"group_0": nvfp4, "group_1": fp8}, {"other_form": ["model.layers.3.mlp.experts"]}),
    ):
        quantization["config_groups"] = groups
        assert defects_of(publish(tmp_path / name, published._replace(tensors=tensors))) == expected


# ------------------------------------------------------------------------------------------------ names
def test_a_prefix_that_was_written_three_times(tmp_path: Path) -> None:
    """https://github.com/vllm-project/llm-compressor/issues/2568: model.language_model.language_model.language_model.layers of
    Qwen3.5-122B-A10B: KeyError 'language_model.language_model.layers.0.mlp.experts.w2_weight_packed'."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    ignore = [
        "lm_head",
        "re:.*visual.*",
        r"re:.*mlp\.gate$",
        "re:.*shared_expert.*",
        "re:.*linear_attn.*",
        "re:.*self_attn.*",
        "re:.*mtp.*",
    ]

    def chosen(name: str) -> bool:
        return is_expert(name) and not name.startswith("mtp.")

    healthy = compressed(config, tensors, chosen, ignore, "int4")
    assert defects_of(publish(tmp_path / "healthy", healthy)) == {}
    triple = {
        name.replace("model.language_model.", "model.language_model.language_model.language_model."): told
        for name, told in healthy.tensors.items()
    }
    found = defects_of(publish(tmp_path / "broken", healthy._replace(tensors=triple)))
    assert found.keys() >= {"unknown_tensor", "layers_missing"}
    assert found["layers_missing"] == ["layers 0-3"]


def test_fp8_experts_whose_scales_were_left_in_the_base(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/9316: FP8 codes, and no scale of the experts' w2."""
    kept = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(4))]
    published = fp8_blocks(*qwen3(), is_linear, kept)
    assert defects_of(publish(tmp_path / "healthy", published)) == {}
    lost = [
        name for name in published.tensors if ".layers.1.mlp.experts." in name and name.endswith("down_proj.weight_scale_inv")
    ]
    broken = publish(tmp_path / "broken", without(published, *lost))
    assert json.loads((broken / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert defects_of(broken) == {"scale_missing": [name.removesuffix(".weight_scale_inv") for name in lost]}
