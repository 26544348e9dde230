"""Reports of checkpoints that vLLM 0.32 does not take as they are: other engines' layouts, claims it refuses, names it has not.

Each beside a healthy twin. What vLLM refuses is what its classes of configuration refuse (model_executor/layers/quantization).
"""

from __future__ import annotations

import json
import math
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
    modelopt_nvfp4,
    of_model,
    outside_mtp,
    plain,
    publish,
    put,
)

from assay.errors import CheckpointError
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect

EXCLUDE = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
IGNORE = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]
CLAIM = "config.json: quantization_config"


def qwen3() -> tuple[dict[str, Any], Tensors]:
    return of_model("qwen3-30b-a3b")


def claiming(published: Published, **claim: Any) -> Published:
    """The same with other keys in its claim."""
    quantization = {**published.config["quantization_config"], **claim}
    return published._replace(config={**published.config, "quantization_config": quantization})


# ------------------------------------------------------------------------------------------------ other engines
def bitsandbytes(config: dict[str, Any], tensors: Tensors) -> Published:
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        made[name] = (dtype, shape)
        if is_linear(name):
            elements = math.prod(shape)
            made |= {name: ("U8", (elements // 2, 1)), f"{name}.absmax": ("U8", (elements // 64,)),
                     f"{name}.quant_map": ("F32", (16,)), f"{name}.quant_state.bitsandbytes__nf4": ("U8", (80,))}  # fmt: skip
    claim = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Published({**config, "quantization_config": claim}, made)


def exllama(config: dict[str, Any], tensors: Tensors) -> Published:
    made: Tensors = {}
    for name, told in tensors.items():
        module, shape = name.removesuffix(".weight"), told[1]
        if is_linear(name):
            made |= {f"{module}.trellis": ("I16", (shape[1] // 16, shape[0] // 16, 64)),
                     f"{module}.suh": ("F16", (shape[1],)), f"{module}.svh": ("F16", (shape[0],))}  # fmt: skip
        else:
            made[name] = told
    return Published({**config, "quantization_config": {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}}, made)


def fbgemm(config: dict[str, Any], tensors: Tensors) -> Published:
    published = fp8_blocks(config, tensors, is_linear)
    return published._replace(config={**config, "quantization_config": {"quant_method": "fbgemm_fp8"}})


DOES_NOT_HAVE = "which vLLM 0.32 does not have"


@pytest.mark.parametrize(
    ("made", "how"),
    [
        (bitsandbytes, DOES_NOT_HAVE),
        (exllama, DOES_NOT_HAVE),
        (fbgemm, "which vLLM 0.32 takes only with --allow-deprecated-quantization"),
    ],
)
def test_a_method_that_vllm_does_not_have(tmp_path: Path, made: Any, how: str) -> None:
    """https://github.com/vllm-project/vllm/issues/16713 (bnb-community/Llama-4-Scout-17B-16E-Instruct-bnb-4bit),
    https://github.com/unslothai/unsloth/issues/482: Unknown quantization method."""
    folder = publish(tmp_path / "model", made(*qwen3()))
    assert defects_of(folder) == {"method_not_served": [CLAIM]}
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    (finding,) = inspect(FolderFiles(folder)).findings
    assert finding.places[0].what == f"quant_method is {method}, {how}"


def mlx(bits: dict[str, int]) -> Published:
    """mlx-lm's layout: experts stacked as `switch_mlp`, groups of 64. bits: of modules by the end of their name, else 4."""
    config, tensors = qwen3()
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight").replace(".experts.0.", ".switch_mlp.")
        if ".experts." in module:
            continue
        if len(shape) != 2:
            made[name] = (dtype, shape)
            continue
        whole = (4, *shape) if "switch_mlp" in module else shape
        groups, words = (*whole[:-1], whole[-1] // 64), (*whole[:-1], whole[-1] * bits.get(module.rpartition(".")[2], 4) // 32)
        made |= {f"{module}.weight": ("U32", words), f"{module}.scales": ("BF16", groups), f"{module}.biases": ("BF16", groups)}
    of_routers = {f"model.layers.{layer}.mlp.gate": {"group_size": 64, "bits": 8} for layer in range(4)}
    claim = {"group_size": 64, "bits": 4, "mode": "affine", **of_routers}
    return Published({**config, "quantization": claim, "quantization_config": claim}, made)


def test_weights_of_mlx(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/13283 (mlx-community/DeepSeek-R1-4bit): the claim names no method, and codes
    would be taken for plain weights."""
    folder = publish(tmp_path / "mlx", mlx({"gate": 8}))
    assert defects_of(folder) == {"method_not_served": [CLAIM]}
    assert "tensor_lost" not in defects_of(folder, source=publish(tmp_path / "base", plain(*qwen3())))
    result = inspect(FolderFiles(folder))
    assert result.findings[0].places[0].what == "names no quant_method; 34 weights are stored as mlx"
    forms = {(form.role, form.form): form.num_elements for form in result.facts.forms}
    assert forms[("router", "mlx")] == 4 * 4 * 2048 and forms[("embedding", "mlx")] == 151936 * 2048


def test_bits_of_mlx_that_the_claim_does_not_say(tmp_path: Path) -> None:
    """https://github.com/jundot/omlx/issues/967: stored with 4 bits, claimed with 8: how many columns there are is not told."""
    claim = {"group_size": 64, "bits": 8, "mode": "affine"}
    published = mlx({})
    folder = publish(tmp_path / "mlx", published._replace(config={**published.config, "quantization_config": claim}))
    assert {form.num_elements for form in inspect(FolderFiles(folder)).facts.forms if form.form == "mlx"} == {0}
    assert defects_of(folder) == {"method_not_served": [CLAIM]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("params.json", ", but params.json: it is in Mistral's own layout; take the release for transformers"),
        ("adapter_config.json", ", but adapter_config.json: it is an adapter; merge it with its base"),
        ("model_index.json", ", but model_index.json: it is a pipeline of diffusers, no language model"),
        ("README.md", ""),
    ],
)
def test_what_is_no_checkpoint_of_transformers(tmp_path: Path, name: str, expected: str) -> None:
    """Folders without config.json are called by what they are."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError) as problem:
        inspect(FolderFiles(tmp_path))
    assert str(problem.value) == f"{tmp_path}: has no config.json{expected}; a checkpoint holds config.json and *.safetensors"


# ------------------------------------------------------------------------------------------------ claims that are refused
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("desc_act", True, "has desc_act true, with groups; vLLM no longer reads columns in the order of their activations"),
        ("sym", False, "has bits 4 and sym false; vLLM takes symmetric weights of 4 and 8 bits"),
        ("bits", 2, "has bits 2 and sym true; vLLM takes symmetric weights of 4 and 8 bits"),
        ("checkpoint_format", "marlin", "has checkpoint_format marlin; vLLM looks for qweight, qzeros and scales"),
    ],
)
def test_gptq_that_vllm_no_longer_takes(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    """https://github.com/vllm-project/vllm/pull/54809, https://github.com/vllm-project/vllm/issues/48148."""
    assert defects_of(publish(tmp_path / "healthy", gptq(*qwen3(), is_linear))) == {}
    folder = publish(tmp_path / "broken", gptq(*qwen3(), is_linear, **{key: value}))
    assert defects_of(folder) == {"claim_refused": [CLAIM]}
    assert [place.what for place in inspect(FolderFiles(folder)).findings[0].places] == [expected]


def test_gptq_in_the_layout_of_marlin(tmp_path: Path) -> None:
    """Its weights are not `stored plain`: they are in tensors of another name."""
    config, tensors = qwen3()
    made: Tensors = {}
    for name, told in tensors.items():
        module, shape = name.removesuffix(".weight"), told[1]
        if is_linear(name):
            made |= {
                f"{module}.B": ("I32", (shape[1] // 16, 2 * shape[0])),
                f"{module}.s": ("F16", (shape[1] // 128, shape[0])),
            }
        else:
            made[name] = told
    claim = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "is_marlin_format": True}
    folder = publish(tmp_path / "marlin", Published({**config, "quantization_config": claim}, made))
    assert defects_of(folder).keys() == {"claim_refused", "experts_missing", "unknown_tensor"}


def in_order(kind: Any) -> Published:
    """INT4 by llm-compressor with columns in the order of their activations; True is an old word for `group`."""
    published = compressed(*qwen3(), is_expert, IGNORE, "int4")
    published.config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = kind
    return published


def test_other_claims_that_vllm_refuses(tmp_path: Path) -> None:
    """AWQ for GEMV, AutoRound in a packing of GPTQModel's, ModelOpt's INT4 AWQ, columns in order of activations
    (https://github.com/vllm-project/compressed-tensors/pull/840), 2:4 sparsity, an INT8 cache, FP8 blocks with static ones."""
    config, tensors = qwen3()
    kept = ["lm_head", "mlp.gate", "self_attn"]
    packed = compressed(config, tensors, is_expert, IGNORE, "int4")
    extra = {"lm_head": {"bits": 16}, r".*mlp\.gate$": {"bits": 16}}
    round_ = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    healthy = {
        "awq": awq(config, tensors, is_expert, kept),
        "auto-round": gptq(config, tensors, is_linear, **round_),
        "modelopt": modelopt_nvfp4(config, tensors, is_expert, EXCLUDE),
        "packed": packed,
        "static order": in_order("static"),
        "fp8": fp8_blocks(config, tensors, is_linear, [f"model.layers.{layer}.mlp.gate" for layer in range(4)]),
    }
    cases = {
        "gemv": (claiming(healthy["awq"], version="gemv"), "has version gemv; vLLM reads the layout of gemm"),
        "awq8": (claiming(healthy["awq"], bits=8), "has 8 bits; vLLM takes 4"),
        "gptqmodel": (claiming(healthy["auto-round"], packing_format="auto_round:gptqmodel"),
                      "has packing_format auto_round:gptqmodel; vLLM takes auto_round:auto_gptq and auto_round:auto_awq"),
        "int4_awq": (claiming(healthy["modelopt"], quant_algo="W4A8_AWQ"),
                     "has quant_algo W4A8_AWQ, which vLLM's ModelOpt classes do not have"),
        "ordered": (in_order("group"), "has actorder group; vLLM no longer reads columns in the order of their activations"),
        "true": (in_order(True), "has actorder true; vLLM no longer reads columns in the order of their activations"),
        "sparse": (claiming(packed, sparsity_config={"format": "sparse-24-bitmask"}),
                   "has a sparsity_config (sparse-24-bitmask), which vLLM no longer takes"),
        "cache": (claiming(packed, kv_cache_scheme={"type": "int", "num_bits": 8, "symmetric": True}),
                  "has a kv_cache_scheme of 8-bit int; vLLM takes FP8"),
        "static": (claiming(healthy["fp8"], activation_scheme="static"),
                   "has static activations and weight_block_size; vLLM takes blocks with dynamic ones"),
    }  # fmt: skip
    for name, published in healthy.items():
        assert defects_of(publish(tmp_path / f"healthy-{name}", published)) == {}
    for name, (published, expected) in cases.items():
        found = inspect(FolderFiles(publish(tmp_path / name, published))).findings
        (refused,) = [finding for finding in found if finding.defect == "claim_refused"]
        assert [place.what for place in refused.places] == [expected]


def test_shared_experts_that_autoround_left_out(tmp_path: Path) -> None:
    """https://github.com/intel/auto-round/issues/769: of GLM-4.5-Air shared experts stay in 16 bits, and are to be listed."""
    config, tensors = of_model("glm-4.5-air")
    kept = {r".*mlp\.gate$": {"bits": 16}, r"model\.layers\.4\..*": {"bits": 16}}
    shared = {f"model.layers.{layer}.mlp.shared_experts.{part}_proj": {"bits": 16} for layer in (1, 2, 3)
              for part in ("gate", "up", "down")}  # fmt: skip
    claim = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"}

    def chosen(name: str) -> bool:
        return is_expert(name) and ".layers.4." not in name

    attention = {r".*self_attn.*": {"bits": 16}, r".*layers\.0\..*": {"bits": 16}}
    extra = {**kept, **attention, **shared}
    assert defects_of(publish(tmp_path / "healthy", gptq(config, tensors, chosen, **claim, extra_config=extra))) == {}
    broken = publish(tmp_path / "broken", gptq(config, tensors, chosen, **claim, extra_config={**kept, **attention}))
    assert sorted(defects_of(broken)["plain_not_listed"]) == sorted(
        f"model.layers.{layer}.mlp.shared_experts.{part}" for layer in (1, 2, 3) for part in ("gate_up_proj", "down_proj")
    )


# ------------------------------------------------------------------------------------------------ experts in one tensor
QWEN35_IGNORED = ["lm_head", "re:.*visual.*", r"re:.*mlp\.gate$", "re:.*shared_expert.*", "re:.*linear_attn.*",
                  "re:.*self_attn.*", "re:.*mtp.*"]  # fmt: skip
QWEN35_EXCLUDED = ["lm_head", "mtp.*", "model.visual*", "*.mlp.gate", "*.shared_expert_gate", "*linear_attn.*", "*self_attn.*",
                   "*.shared_expert.*"]  # fmt: skip
STACKS = [
    f"model.language_model.layers.{layer}.mlp.experts.{part}" for layer in range(4) for part in ("gate_up_proj", "down_proj")
]


def stacked(leaves: dict[str, tuple[str, Any]]) -> tuple[dict[str, Any], Tensors]:
    """Qwen3.5 with the experts of each layer in two tensors. leaves: what stands behind their names -> dtype, its shape for a
    weight [experts, rows, columns]."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    hidden, inner = config["text_config"]["hidden_size"], config["text_config"]["moe_intermediate_size"]
    made = {name: told for name, told in tensors.items() if ".experts." not in name or name.startswith("mtp.")}
    for stack in STACKS:
        rows, columns = (2 * inner, hidden) if stack.endswith("gate_up_proj") else (hidden, inner)
        made |= {f"{stack}{leaf}": (dtype, shape(4, rows, columns)) for leaf, (dtype, shape) in leaves.items()}
    return config, made


NVFP4_STACK: dict[str, tuple[str, Any]] = {
    "": ("U8", lambda e, r, c: (e, r, c // 2)), "_weight_scale": ("F8_E4M3", lambda e, r, c: (e, r, c // 16)),
    "_weight_scale_2": ("F32", lambda e, r, c: (e,)), "_input_scale": ("F32", lambda e, r, c: (e,)),
}  # fmt: skip
PACKED_STACK: dict[str, tuple[str, Any]] = {
    "_packed": ("U8", lambda e, r, c: (e, r, c // 2)), "_scale": ("F8_E4M3", lambda e, r, c: (e, r, c // 16)),
    "_global_scale": ("F32", lambda e, r, c: (e, 1)),
}  # fmt: skip
FP8_STACK: dict[str, tuple[str, Any]] = {
    "": ("F8_E4M3", lambda e, r, c: (e, r, c)), "_scale_inv": ("F32", lambda e, r, c: (e, r // 128, c // 128)),
}  # fmt: skip


def test_scales_of_stacked_experts(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/49638: ModelOpt's names; https://github.com/unslothai/unsloth/issues/6224:
    compressed-tensors', with global scales that lie outside [experts, rows, columns]."""
    config, tensors = stacked(NVFP4_STACK)
    published = modelopt_nvfp4(config, tensors, lambda name: False, QWEN35_EXCLUDED)
    folder = publish(tmp_path / "modelopt", published, scales=False)
    assert defects_of(folder)["stacked_scales_unread"] == STACKS
    (finding,) = inspect(FolderFiles(folder), scales=False).findings
    assert finding.places[0].what == (
        "its experts are one tensor; vLLM has no parameter for gate_up_proj_input_scale [4], gate_up_proj_weight_scale "
        "[4, 1024, 128], gate_up_proj_weight_scale_2 [4]"
    )
    config, tensors = stacked(PACKED_STACK)
    published = compressed(config, tensors, lambda name: False, QWEN35_IGNORED, "nvfp4")
    found = defects_of(publish(tmp_path / "packed", published, scales=False))
    assert found["stacked_scales_unread"] == STACKS


def test_stacked_experts_that_vllm_reads(tmp_path: Path) -> None:
    """The twins: FP8 blocks in one tensor, and experts one by one."""
    config, tensors = stacked(FP8_STACK)
    kept = [name.removesuffix(".weight") for name, told in tensors.items() if len(told[1]) == 2]
    published = fp8_blocks(config, tensors, lambda name: False, kept)
    assert "stacked_scales_unread" not in defects_of(publish(tmp_path / "fp8", published, scales=False))
    config, tensors = of_model("qwen3.5-35b-a3b")
    published = modelopt_nvfp4(config, tensors, outside_mtp(is_expert, 4), QWEN35_EXCLUDED)
    assert defects_of(publish(tmp_path / "single", published)) == {}


def test_experts_whose_number_is_behind(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/40885: `experts.down_proj.0.weight` by ModelOpt; no expert has its name."""
    published = modelopt_nvfp4(*qwen3(), is_expert, EXCLUDE)
    assert defects_of(publish(tmp_path / "healthy", published)) == {}
    behind = {
        re.sub(r"\.experts\.(\d+)\.(\w+_proj)\.", r".experts.\2.\1.", name): told for name, told in published.tensors.items()
    }
    found = defects_of(publish(tmp_path / "behind", published._replace(tensors=behind)))
    assert found["experts_missing"] == [f"model.layers.{layer}" for layer in range(4)]


# ------------------------------------------------------------------------------------------------ names
def test_scales_of_activation_functions(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/18718 (kishizaki-sci/Llama-4-Scout-17B-16E-Instruct-AWQ): KeyError
    'layers.10.feed_forward.experts.0.activation_fn.scales'. Nothing else is lacking."""
    config, tensors = of_model("glm-4.5-air")
    kept = ["mlp.gate", "self_attn", "shared_experts", "layers.0.", "layers.4."]
    published = awq(config, tensors, lambda name: is_expert(name) and ".layers.4." not in name, kept)
    assert defects_of(publish(tmp_path / "healthy", published)) == {}
    names = [f"model.layers.{layer}.mlp.experts.{e}.activation_fn.scales" for layer in (1, 2, 3) for e in range(4)]
    more: Tensors = dict.fromkeys(names, ("F16", (config["moe_intermediate_size"],)))
    broken = publish(tmp_path / "broken", published._replace(tensors={**published.tensors, **more}))
    assert defects_of(broken) == {"scaled_activation": names[::4]}


def renamed(published: Published, *pairs: tuple[str, str]) -> Published:
    def new(name: str) -> str:
        return next((older + name.removeprefix(own) for own, older in pairs if name.startswith(own)), name)

    return published._replace(tensors={new(name): told for name, told in published.tensors.items()})


def test_names_of_an_older_layout(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/33876, https://github.com/sgl-project/sglang/pull/18370: of
    nvidia/Kimi-K2.5-NVFP4 weights and list of plain modules say `language_model.layers`; vLLM renames both."""
    config, tensors = of_model("kimi-k2.5")
    config.pop("quantization_config", None)

    def published(dense: str) -> Published:
        plain = [
            "language_model.lm_head",
            "*self_attn*",
            "*shared_experts*",
            dense,
            "vision_tower*",
            "mm_projector*",
            "*mlp.gate",
        ]
        return modelopt_nvfp4(config, tensors, is_expert, plain)

    assert defects_of(publish(tmp_path / "new", published("language_model.model.layers.0.mlp*"))) == {}
    older = renamed(published("language_model.layers.0.mlp*"), ("language_model.model.layers.", "language_model.layers."))
    folder = publish(tmp_path / "older", older)
    first = "language_model.layers.0.input_layernorm.weight"
    assert defects_of(folder) == {"older_names": [first]}
    expert = "language_model.layers.2.mlp.experts.1.up_proj"
    put(folder, f"{expert}.weight_scale_2", np.array([np.nan], np.float32))
    new_name = f"{expert}.weight_scale_2".replace("language_model.layers", "language_model.model.layers")
    assert defects_of(folder)["scale_not_finite"] == [new_name]


def test_a_text_model_with_the_names_of_its_wrapper(tmp_path: Path) -> None:
    """vLLM 0.32 (models/qwen3_5.py: hf_to_vllm_mapper): `model.language_model.` of text-only Qwen3.5 is renamed."""
    config, tensors = of_model("qwen3.5-35b-a3b-text")
    published = compressed(config, tensors, outside_mtp(is_expert, 4), QWEN35_IGNORED, "int4")
    assert defects_of(publish(tmp_path / "healthy", published)) == {}
    older = renamed(published, ("model.", "model.language_model."))
    assert defects_of(publish(tmp_path / "older", older)) == {"older_names": ["model.language_model.embed_tokens.weight"]}
