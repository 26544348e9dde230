"""ModelOpt's MIXED_PRECISION: format by layer, entries without a tensor, and what is stored otherwise than an entry says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published import Published, defects_of, is_expert, is_linear, modelopt_mixed, of_model, publish

from assay_quantize.formats.vllm_rules import MixedSchemes, RuntimeModule
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
from assay_quantize.inspection.mixed_precision import expects_mixed

EXCLUDE = ["lm_head", "*.mlp.gate"]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def algorithm_of(name: str) -> str | None:
    """Experts in NVFP4, attention in FP8, as NVIDIA mixes them."""
    return "NVFP4" if is_expert(name) else "FP8" if is_linear(name) else None


def qwen3(**more: Any) -> Published:
    return modelopt_mixed(*of_model("qwen3-30b-a3b"), algorithm_of, EXCLUDE, **more)


def layers_of(published: Published) -> dict[str, Any]:
    return published.files["hf_quant_config.json"]["quantization"]["quantized_layers"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_in_config", [True, False])
def test_a_healthy_one_shows_its_format_by_layer(tmp_path: Path, is_in_config: bool) -> None:
    published = qwen3()
    if not is_in_config:
        published.config.pop("quantization_config")
    folder = publish(tmp_path / "mixed", published)
    assert defects_of(folder) == {}
    result = inspect(FolderFiles(folder))
    assert (
        result.facts.method == "modelopt, MIXED_PRECISION: FP8 of 16 modules in layers 0-3; NVFP4 of 48 modules in layers 0-3"
    )
    assert not any("plain modules" in line for line in result.not_checked)
    assert [(form.role, form.form) for form in result.facts.forms] == [
        ("attention", "fp8_tensor"), ("embedding", "bf16"), ("lm_head", "bf16"), ("routed_expert", "nvfp4"), ("router", "bf16"),
    ]  # fmt: skip


def test_a_multimodal_one_by_the_names_of_its_shards(tmp_path: Path) -> None:
    """https://github.com/FlashML-org/FreeToken/pull/390: nvidia/Qwen3.6-35B-A3B-NVFP4 has FP8 attention and NVFP4 experts;
    entries begin with `model.language_model.`, vLLM's modules with `language_model.model.`."""

    def algorithm(name: str) -> str | None:
        return None if name.startswith("mtp.") or ".visual." in name else algorithm_of(name)

    kept = [
        *EXCLUDE,
        "mtp.*",
        "model.visual*",
        "*.shared_expert_gate",
        "*.in_proj_a",
        "*.in_proj_b",
        "*.in_proj_qkv",
        "*.in_proj_z",
    ]
    published = modelopt_mixed(*of_model("qwen3.5-35b-a3b"), algorithm, kept)
    folder = publish(tmp_path / "mixed", published)
    assert defects_of(folder) == {}
    layers = layers_of(published)
    assert all(name.startswith("model.language_model.layers.") for name in layers)
    name = "model.language_model.layers.3.self_attn.o_proj"
    layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
    published.config["quantization_config"]["quantized_layers"] = layers
    found = defects_of(publish(tmp_path / "broken", published))
    assert found == {"other_form": ["language_model.model.layers.3.self_attn.o_proj"]}


def test_entries_that_cover_the_experts_of_a_layer_as_one_module(tmp_path: Path) -> None:
    published = qwen3()
    layers = layers_of(published)
    for name in [name for name in layers if ".experts." in name]:
        layers[name.partition(".experts.")[0] + ".experts"] = layers.pop(name)
    published.config.pop("quantization_config")
    assert defects_of(publish(tmp_path / "mixed", published)) == {}


def test_an_entry_that_no_tensor_matches(tmp_path: Path) -> None:
    published = qwen3()
    layers = layers_of(published)
    layers["model.layers.0.self_attn.o"] = layers.pop("model.layers.0.self_attn.o_proj")
    published.config.pop("quantization_config")
    assert defects_of(publish(tmp_path / "mixed", published)) == {
        "listed_but_packed": ["model.layers.0.self_attn.o_proj"],
        "layer_without_tensor": ["model.layers.0.self_attn.o"],
    }


def test_what_is_stored_otherwise_than_its_entry_says(tmp_path: Path) -> None:
    """Layer 2's experts are said to be FP8 and stored as NVFP4; o_proj of layer 1 is said to be FP8 and stored plain."""
    published = qwen3()
    layers = layers_of(published)
    for name in layers:
        if name.startswith("model.layers.2.mlp.experts."):
            layers[name] = {"quant_algo": "FP8"}
    published.config["quantization_config"]["quantized_layers"] = layers
    _, tensors = of_model("qwen3-30b-a3b")
    plain = {name: told for name, told in published.tensors.items() if not name.startswith("model.layers.1.self_attn.o_proj.")}
    plain["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"]
    folder = publish(tmp_path / "mixed", published._replace(tensors=plain))
    assert defects_of(folder) == {
        "plain_not_listed": ["model.layers.1.self_attn.o_proj"], "other_form": ["model.layers.2.mlp.experts"],
    }  # fmt: skip
    told = {finding.defect: finding.places[0].what for finding in inspect(FolderFiles(folder)).findings}
    where = "config.json: quantization_config"
    assert told["plain_not_listed"] == f"is stored as bf16; {where}.quantized_layers says FP8"
    assert told["other_form"] == f"12 weights are stored as nvfp4; {where} says FP8"


def test_without_a_family_entries_are_compared_by_their_names(tmp_path: Path) -> None:
    published = qwen3()
    published.config["architectures"], published.config["model_type"] = ["OtherMoeForCausalLM"], "other_moe"
    folder = publish(tmp_path / "healthy", published)
    assert defects_of(folder) == {}
    layers = layers_of(published)
    layers["model.layers.3.self_attn.q_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    published.config["quantization_config"]["quantized_layers"] = layers
    assert defects_of(publish(tmp_path / "mixed", published)) == {"other_form": ["model.layers.3.self_attn.q_proj"]}


def test_without_quantized_layers_vllm_refuses(tmp_path: Path) -> None:
    published = qwen3()
    del published.config["quantization_config"]["quantized_layers"]
    assert defects_of(publish(tmp_path / "mixed", published)) == {
        "quantized_layers_absent": ["config.json: quantization_config"]
    }


@pytest.mark.parametrize(
    ("layers", "module", "expected"),
    [
        ({"a.q_proj": "FP8", "a.k_proj": "FP8", "a.v_proj": "FP8"}, ("a.qkv_proj", "linear"), "FP8"),
        ({"m.experts.0.up_proj": "NVFP4"}, ("m.experts", "experts"), "NVFP4"),
        ({"m.gate_proj": "NVFP4"}, ("m.experts", "experts"), "NVFP4"),
        ({"model.language_model.a.o_proj": "MXFP8"}, ("language_model.model.a.o_proj", "linear"), "MXFP8"),
        ({"lm_head": "FP8"}, ("language_model.lm_head", "lm_head"), "FP8"),
        ({"a.o_proj": "INT4_AWQ"}, ("a.o_proj", "linear"), None),
        ({"m.experts": "FP8_PER_CHANNEL_PER_TOKEN"}, ("m.experts", "experts"), None),
        ({"m.experts": "FP8_BLOCK_SCALES"}, ("m.experts", "experts"), "FP8_BLOCK_SCALES"),
        ({"a.o_proj": "FP8"}, ("b.o_proj", "linear"), None),
        ({"kept.o_proj": "FP8"}, ("kept.o_proj", "linear"), None),
    ],
)  # fmt: skip
def test_the_algorithm_of_a_module(layers: dict[str, str], module: tuple[str, Any], expected: str | None) -> None:
    """As `ModelOptMixedPrecisionConfig` of vLLM 0.32 looks it up."""
    expects = expects_mixed(layers, lambda name: name.startswith("kept."), FUSED)
    assert expects(RuntimeModule(*module, (module[0],), (module[0],))) == expected


def test_members_with_several_algorithms_are_refused() -> None:
    expects = expects_mixed({"a.q_proj": "FP8", "a.k_proj": "NVFP4"}, lambda name: False, FUSED)
    with pytest.raises(MixedSchemes, match=r"^quantized_layers has several algorithms for members of a.qkv_proj: FP8, NVFP4; "):
        expects(RuntimeModule("a.qkv_proj", "linear", ("a.qkv_proj",), ("a.q_proj", "a.k_proj")))
