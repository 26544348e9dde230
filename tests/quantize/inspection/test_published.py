"""Published checkpoints that were broken, rebuilt from their reports: each is found, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import (
    Published,
    awq,
    change_json,
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
    two_shards,
)

KEPT_QWEN35 = [
    "lm_head",
    "model.visual*",
    "*.mlp.gate",
    "*.shared_expert_gate",
    "*linear_attn.*",
    "*self_attn.*",
    "*.shared_expert.*",
]
QWEN35 = "model.language_model.layers"


def qwen35_experts(config: dict[str, Any], tensors: Any, exclude: list[str]) -> Any:
    return modelopt_nvfp4(config, tensors, outside_mtp(is_expert, 4), exclude)


# ------------------------------------------------------------------------------------------------ lists of plain modules
def test_modelopt_leaves_out_only_the_layers_of_the_mtp_block(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/38832: nvidia/Qwen3.5-397B-A17B-NVFP4 stores its MTP branch in BF16, and
    exclude_modules has `mtp.layers.0*` and not `mtp.fc`."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    folder = publish(tmp_path / "broken", qwen35_experts(config, tensors, [*KEPT_QWEN35, "mtp.layers.0*"]))
    assert defects_of(folder) == {"mtp_plain_not_listed": ["mtp.fc"]}
    assert defects_of(publish(tmp_path / "mended", qwen35_experts(config, tensors, [*KEPT_QWEN35, "mtp.*"]))) == {}


def test_compressed_tensors_ignores_all_of_the_mtp_block_but_its_experts(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/41994: `ignore` has mtp.fc, attention and shared expert of the MTP layer; its
    experts are BF16, all in one tensor."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    ignore = ["lm_head", "re:.*visual.*", r"re:.*mlp\.gate$", "re:.*shared_expert.*", "re:.*linear_attn.*", "re:.*self_attn.*"]
    lists = {
        "broken": [*ignore, "mtp.fc", r"re:^mtp\.layers\.0\.(self_attn|mlp\.shared_expert).*"],
        "mended": [*ignore, "re:mtp.*"],
    }
    mtp = "mtp.layers.0.mlp.experts"
    stacked = {name: told for name, told in tensors.items() if not name.startswith(f"{mtp}.")}
    width, hidden = tensors[f"{mtp}.0.gate_proj.weight"][1]
    stacked |= {f"{mtp}.gate_up_proj": ("BF16", (4, 2 * width, hidden)), f"{mtp}.down_proj": ("BF16", (4, hidden, width))}
    made = {
        name: defects_of(publish(tmp_path / name, compressed(config, stacked, outside_mtp(is_expert, 4), told, "nvfp4")))
        for name, told in lists.items()
    }
    assert made == {"broken": {"mtp_plain_not_listed": [mtp]}, "mended": {}}


def test_routers_that_no_list_names(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1858: with transformers 5 routers are no Linear, so ModelOpt left them
    plain without listing them; vLLM builds Qwen3-MoE's quantized."""
    config, tensors = of_model("qwen3-30b-a3b")
    folder = publish(tmp_path / "broken", modelopt_nvfp4(config, tensors, is_linear, ["lm_head"]))
    assert defects_of(folder) == {"plain_not_listed": [f"model.layers.{layer}.mlp.gate" for layer in range(4)]}
    listed = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(4))]
    assert defects_of(publish(tmp_path / "mended", modelopt_nvfp4(config, tensors, is_linear, listed))) == {}


def test_an_excluded_head_that_is_packed(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/44081: nvidia/Qwen3.6-35B-A3B-NVFP4 stores lm_head with its four NVFP4
    tensors, and excludes `lm_head*`."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    exclude = ["lm_head*", *KEPT_QWEN35[1:], "mtp.*"]

    def is_quantized(name: str) -> bool:
        return name == "lm_head.weight" or outside_mtp(is_expert, 4)(name)

    folder = publish(tmp_path / "broken", modelopt_nvfp4(config, tensors, is_quantized, exclude))
    assert defects_of(folder) == {"listed_but_packed": ["lm_head"]}


def test_fused_members_of_which_only_some_are_listed(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/38443: an ignore list in names that the fused module does not have."""
    config, tensors = of_model("qwen3-30b-a3b")
    ignore = ["lm_head", r"re:.*mlp\.gate$", r"re:.*self_attn\.[qk]_proj$"]

    def is_quantized(name: str) -> bool:
        return is_linear(name) and not name.endswith(("q_proj.weight", "k_proj.weight"))

    folder = publish(tmp_path / "broken", compressed(config, tensors, is_quantized, ignore, "int4"))
    layers = range(4)
    assert defects_of(folder) == {
        "fused_partly_listed": [f"model.layers.{layer}.self_attn.qkv_proj" for layer in layers],
        "fused_members_differ": [f"model.layers.{layer}.self_attn.qkv_proj" for layer in layers],
    }


# ------------------------------------------------------------------------------------------------ routers and their biases
def test_a_router_in_gptq(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/25029, https://github.com/intel/auto-round/issues/586: Qwen3-30B-A3B whose
    `mlp.gate` has qweight and g_idx."""
    config, tensors = of_model("qwen3-30b-a3b", experts=8)

    def is_quantized(name: str) -> bool:
        return is_linear(name) or name.endswith("mlp.gate.weight")

    folder = publish(tmp_path / "broken", gptq(config, tensors, is_quantized))
    assert defects_of(folder) == {"router_quantized": [f"model.layers.{layer}.mlp.gate" for layer in range(4)]}
    assert defects_of(publish(tmp_path / "mended", gptq(config, tensors, is_linear))) == {}


def test_router_biases_that_were_saved_in_bf16(tmp_path: Path) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/2553, https://github.com/sgl-project/sglang/pull/37133: GLM-5.2 keeps
    e_score_correction_bias in FP32; in BF16 238 different values become 8."""
    config, tensors = of_model("glm-5.2")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors |= {name: ("BF16", tensors[name][1]) for name in biases}
    folder = publish(tmp_path / "broken", compressed(config, tensors, outside_mtp(is_expert, 4), GLM_IGNORE, "nvfp4"))
    assert defects_of(folder) == {"router_bias_in_16_bits": sorted(biases)}


GLM_IGNORE = ["lm_head", r"re:.*self_attn.*", r"re:.*mlp\.gate$", r"re:.*shared_experts.*", r"re:.*layers\.[0-2]\.mlp.*_proj$",
              r"re:.*layers\.4\..*"]  # fmt: skip
"""Of the tests: experts of layer 3 alone are quantized, layer 4 is the MTP block."""


def test_pruned_experts_with_the_router_of_all(tmp_path: Path) -> None:
    """https://github.com/vllm-project/llm-compressor/pull/2864, https://github.com/vllm-project/vllm-ascend/pull/12525: REAP
    prunes experts; router and bias have to be pruned with them."""
    config, tensors = of_model("glm-4.5-air", experts=4, dense=1)
    config["num_nextn_predict_layers"] = 0
    tensors = {name: told for name, told in tensors.items() if ".layers.4." not in name}
    for name, (dtype, shape) in list(tensors.items()):
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            tensors[name] = (dtype, (8, *shape[1:]))
    folder = publish(tmp_path / "broken", fp8_blocks(config, tensors, is_linear))
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(1, 4)]
    assert defects_of(folder) == {"router_rows": [*routers, *(f"{name}.e_score_correction_bias" for name in routers)]}


# ------------------------------------------------------------------------------------------------ MTP blocks
def test_an_mtp_block_that_modelopt_did_not_carry_over(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/issues/750: GLM-4.7 in NVFP4 of its MLPs; mtp.safetensors was not carried
    over, and config.json still declares a layer."""
    config, tensors = of_model("glm-4.7", layers=4, dense=1)
    chosen = outside_mtp(lambda name: ".mlp." in name and is_linear(name), 4)
    lost = {name: told for name, told in tensors.items() if ".layers.4." not in name}
    exclude = ["lm_head", "model.layers.0.self_attn*"]  # vLLM takes entries for substrings: mlp.gate is in mlp.gate_up_proj
    exclude += [f"model.layers.{layer}.{part}" for layer in range(1, 4) for part in ("self_attn*", "mlp.gate")]
    folder = publish(tmp_path / "broken", modelopt_nvfp4(config, lost, chosen, exclude))
    assert defects_of(folder) == {"mtp_absent": ["config.json"]}
    mended = modelopt_nvfp4(config, tensors, chosen, [*exclude, "model.layers.4*"])
    assert defects_of(publish(tmp_path / "mended", mended)) == {}


def test_a_fine_tune_that_lost_its_mtp_block(tmp_path: Path) -> None:
    """https://github.com/modelscope/ms-swift/issues/9802: transformers drops `mtp.*` of Qwen3.5, config.json declares it."""
    config, tensors = of_model("qwen3.5-35b-a3b")
    tensors = {name: told for name, told in tensors.items() if not name.startswith("mtp.")}
    assert defects_of(publish(tmp_path / "broken", plain(config, tensors))) == {"mtp_absent": ["config.json"]}


def test_an_mtp_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    """https://github.com/osaurus-ai/vmlx-swift/pull/388: an index that was rewritten by a pattern that the MTP shard's name
    does not match; the same of PhalaCloud/GLM-5.2-W4AFP8 (0.1 % of drafts accepted)."""
    config, tensors = of_model("glm-4.7", dense=1)
    block = "model.layers.4"
    kept = [name.removesuffix(".weight") for name in tensors if name.startswith(block) and is_linear(name)]

    def shard_of(name: str) -> str:
        return "model-mtp-of-00002.safetensors" if name.startswith(f"{block}.") else "model-00001-of-00002.safetensors"

    published = fp8_blocks(config, tensors, outside_mtp(is_linear, 4), kept)
    folder = publish(tmp_path / "broken", published, shard_of=shard_of)
    assert defects_of(folder) == {}
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] = {name: shard for name, shard in data["weight_map"].items() if "mtp" not in shard}
    index.write_text(json.dumps(data))
    found = defects_of(folder)
    assert found == {
        "shard_not_in_index": ["model-mtp-of-00002.safetensors"], "mtp_absent": ["config.json"],
        "total_size": ["model.safetensors.index.json"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ scales
def test_gate_and_up_with_global_scales_of_their_own(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/54974, https://github.com/vllm-project/vllm/issues/54150: 69.1 % of the
    pairs of dealignai/GLM-5.3-Flash-ABLITERATED-NVFP4 differ, by up to 10 times; vLLM takes the gate's for both."""
    config, tensors = of_model("qwen3-30b-a3b")
    exclude = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
    folder = publish(tmp_path / "broken", modelopt_nvfp4(config, tensors, is_expert, exclude))
    assert defects_of(folder) == {}
    expert = "model.layers.2.mlp.experts.1"
    put(folder, f"{expert}.up_proj.weight_scale_2", np.array([0.1], np.float32))
    assert defects_of(folder) == {"global_scales_differ": [f"{expert}.gate_up_proj"]}


@pytest.mark.parametrize("form", ["missing", "zero", "subnormal", "infinite"])
def test_experts_that_no_text_reached(tmp_path: Path, form: str) -> None:
    """https://github.com/vllm-project/vllm/issues/45212 (missing: 1 / 0, empty replies to some prompts),
    https://github.com/vllm-project/vllm/pull/42601 (txn545/Qwen3.5-122B-A10B-NVFP4: subnormal),
    https://github.com/vllm-project/compressed-tensors/pull/595 (infinite)."""
    config, tensors = of_model("qwen3-30b-a3b")
    published = modelopt_nvfp4(config, tensors, is_expert, ["lm_head", "*.mlp.gate", "*.self_attn.*"])
    name = "model.layers.1.mlp.experts.3.down_proj"
    if form == "missing":
        del published.tensors[f"{name}.input_scale"]
        assert defects_of(publish(tmp_path / "broken", published)) == {"input_scale_missing": [name]}
        return
    folder = publish(tmp_path / "broken", published)
    put(folder, f"{name}.input_scale", np.array([{"zero": 0.0, "subnormal": 1e-40, "infinite": np.inf}[form]], np.float32))
    expected = {"zero": "scale_zero", "subnormal": "scale_not_invertible", "infinite": "scale_not_finite"}[form]
    assert defects_of(folder) == {expected: [f"{name}.input_scale"]}


def test_a_claim_of_static_activations_without_their_scales(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/54189: weights only, while the claim is W4A4: the activation scale was
    never set, and every expert gave zeros."""
    config, tensors = of_model("qwen3-30b-a3b")
    exclude = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
    published = modelopt_nvfp4(config, tensors, is_expert, exclude, inputs=False)
    assert defects_of(publish(tmp_path / "mended", published)) == {}
    groups = published.config["quantization_config"]["config_groups"]["group_0"]
    groups["input_activations"] = groups["weights"]
    experts = [f"model.layers.{layer}.mlp.experts.*.{part}_proj" for layer in range(4) for part in ("gate", "up", "down")]
    found = defects_of(publish(tmp_path / "broken", published))
    assert {defect: sorted(places) for defect, places in found.items()} == {"input_scale_missing": sorted(experts)}


def test_an_index_that_promises_a_scale_which_no_shard_has(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/57108: a DeepSeek-V4-Flash FP8 repack whose index names `attn.wo_a.scale` of
    all 43 layers; it is in no shard, and the server boots."""
    config, tensors = of_model("deepseek-v3", dense=1)
    published = fp8_blocks(config, tensors, is_linear)
    folder = publish(tmp_path / "broken", published)
    name = "model.layers.1.self_attn.o_proj"
    rest = {key: told for key, told in published.tensors.items() if key != f"{name}.weight_scale_inv"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    publish(tmp_path / "less", published._replace(tensors=rest))
    shards = {
        key: json.loads((tmp_path / "less" / "model.safetensors.index.json").read_text())["weight_map"][key] for key in rest
    }
    index["weight_map"] = shards | {f"{name}.weight_scale_inv": shards[f"{name}.weight"]}
    index["metadata"]["total_size"] = None
    (tmp_path / "less" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert defects_of(tmp_path / "less") == {"indexed_tensor_missing": [f"{name}.weight_scale_inv"], "scale_missing": [name]}


def test_block_scales_that_were_renamed_in_excluded_layers(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/54556: Quark's file2file keeps the FP8 bytes of excluded attention and
    renames weight_scale_inv to weight_scale; an FP8 weight is stored where the list says it is plain."""
    config, tensors = of_model("glm-5.2")
    published = fp8_blocks(config, tensors, outside_mtp(is_linear, 4))
    exclude = [f"model.layers.{layer}.self_attn.{part}" for layer in range(4) for part in
               ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")]  # fmt: skip
    kept = [f"model.layers.4.{part}" for part in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj",
            "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.experts", "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")]  # fmt: skip
    kept += [f"model.layers.{layer}.self_attn.indexer.wq_b" for layer in range(5)]
    published.config["quantization_config"] = {
        **published.config["quantization_config"],
        "modules_to_not_convert": [*exclude, *kept],
    }
    renamed = {name.replace("weight_scale_inv", "weight_scale") if ".self_attn." in name else name: told
               for name, told in published.tensors.items()}  # fmt: skip
    found = defects_of(publish(tmp_path / "broken", published._replace(tensors=renamed)))
    assert set(found) == {"listed_but_packed"} and len(found["listed_but_packed"]) == 4 * 4


# ------------------------------------------------------------------------------------------------ shards and index
def test_a_shard_that_holds_more_than_the_index_assigns(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/54230: shards reused from the official release, whose index means other
    shards for some of their tensors; vLLM loads the stale copies over the right ones."""
    config, tensors = of_model("qwen3-30b-a3b")
    published = awq(config, tensors, is_expert, ["self_attn", "mlp.gate", "lm_head"])
    folder = publish(tmp_path / "broken", published)
    assert defects_of(folder) == {}
    name = "model.layers.0.mlp.experts.1.up_proj.qweight"
    hold_more(tmp_path, folder, published, name)
    assert defects_of(folder) == {"tensor_twice": [name]}


def hold_more(tmp_path: Path, folder: Path, published: Published, name: str) -> None:
    """Put a copy of a tensor of the first shard into the second, behind the back of the index."""
    second = {key: told for key, told in published.tensors.items() if two_shards(key) != two_shards(name)}
    more = published._replace(tensors={**second, name: published.tensors[name]})
    publish(tmp_path / "more", more, shard_of=lambda key: two_shards(next(iter(second))))
    (tmp_path / "more" / two_shards(next(iter(second)))).replace(folder / two_shards(next(iter(second))))


def test_a_tensor_that_leaked_into_two_shards(tmp_path: Path) -> None:
    """https://github.com/eugr/spark-vllm-docker/pull/134: Intel/Qwen3.5-397B-A17B-int4-AutoRound has tensors in shard 39 and
    in shard 40."""
    config, tensors = of_model("qwen3-30b-a3b")
    published = gptq(config, tensors, is_linear)
    folder = publish(tmp_path / "broken", published)
    name = "model.layers.1.mlp.experts.0.up_proj.qweight"
    hold_more(tmp_path, folder, published, name)
    assert defects_of(folder) == {"tensor_twice": [name]}


def test_scaled_rotary_embeddings_that_were_lost_or_added(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/issues/1676: the quantized checkpoint has no rope_scaling."""
    config, tensors = of_model("qwen3-30b-a3b")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    unscaled = publish(tmp_path / "plain", plain({k: v for k, v in config.items() if k != "rope_scaling"}, tensors))
    scaled = publish(tmp_path / "scaled", plain({**config, "rope_scaling": yarn}, tensors))
    resaved = publish(tmp_path / "resaved", plain({**config, "rope_parameters": {**yarn, "rope_theta": 1e6}}, tensors))
    change_json(resaved / "config.json", rope_scaling=None, rope_theta=None)
    expected = {"config_unlike_base": ["config.json: rope_scaling"]}
    assert (defects_of(unscaled, source=scaled), defects_of(scaled, source=unscaled)) == (expected, expected)
    assert defects_of(resaved, source=scaled) == {}


@pytest.mark.parametrize("form", ["int4", "gptq", "awq"])
def test_another_group_size_than_the_claim_says(tmp_path: Path, form: str) -> None:
    """https://github.com/vllm-project/vllm/issues/50617: vLLM makes room for scales by the claim, and refuses their shape."""
    config, tensors = of_model("qwen3-30b-a3b")
    kept = ["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"]
    published = {
        "int4": lambda: compressed(config, tensors, is_expert, kept, "int4"),
        "gptq": lambda: gptq(config, tensors, is_linear),
        "awq": lambda: awq(config, tensors, is_expert, ["self_attn", "mlp.gate", "lm_head"]),
    }[form]()
    healthy, folder = publish(tmp_path / "healthy", published), publish(tmp_path / "broken", published)
    claim = json.loads((folder / "config.json").read_text())["quantization_config"]
    args = claim["config_groups"]["group_0"]["weights"] if form == "int4" else claim
    args["group_size"] = 64
    change_json(folder / "config.json", quantization_config=claim)
    assert defects_of(healthy) == {}
    ((defect, places),) = defects_of(folder).items()
    assert defect == "scale_shape" and "model.layers.0.mlp.experts.0.down_proj" in places


def test_an_interrupted_upload(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/34859: a shard is missing; quantized models were loaded all the same."""
    config, tensors = of_model("qwen3-30b-a3b")
    folder = publish(tmp_path / "broken", awq(config, tensors, is_expert, ["self_attn", "mlp.gate", "lm_head"]))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert defects_of(folder) == {
        "shard_missing": ["model-00002-of-00002.safetensors"], "layers_missing": ["layers 2-3"],
    }  # fmt: skip


def test_the_index_of_the_unquantized_release(tmp_path: Path) -> None:
    """https://github.com/ml-explore/mlx-swift-lm/issues/554: Qwen3-VL-4B-Instruct-4bit ships the BF16 index: two shards that
    are not there, and 8.9 GB beside a file of 3.1 GB."""
    config, tensors = of_model("qwen3-30b-a3b")
    publish(tmp_path / "bf16", plain(config, tensors))
    published = awq(config, tensors, is_expert, ["self_attn", "mlp.gate", "lm_head"])
    folder = publish(tmp_path / "broken", published, shard_of=lambda name: "model.safetensors")
    (tmp_path / "bf16" / "model.safetensors.index.json").rename(folder / "model.safetensors.index.json")
    found = defects_of(folder)
    assert found["shard_missing"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert found["shard_not_in_index"] == ["model.safetensors"]


def test_an_index_with_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728: nightmedia/Qwen3.8-27B-Brainwaves has mtp.fc.weight in the
    index, and not in the shard."""
    config, tensors = of_model("qwen3-next-80b-a3b")
    folder = publish(tmp_path / "whole", plain(config, tensors))
    assert defects_of(folder) == {}
    name = "mtp.fc.weight"
    rest = plain(config, {key: tensors[key] for key in tensors if two_shards(key) == two_shards(name) and key != name})
    publish(tmp_path / "rest", rest)
    (tmp_path / "rest" / two_shards(name)).replace(folder / two_shards(name))
    size = {"total_size": ["model.safetensors.index.json"]}
    assert {**size, **defects_of(folder)} == {"indexed_tensor_missing": [name], "mtp_incomplete": [name], **size}


def test_the_mistral_format_beside_the_shards(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/40765: consolidated.safetensors beside the shards; runai_streamer loads
    both."""
    config, tensors = of_model("qwen3-30b-a3b")
    folder = publish(tmp_path / "broken", plain(config, tensors))
    publish(tmp_path / "other", plain(config, {"layers.0.attention.wq.weight": ("BF16", (64, 64))}))
    (tmp_path / "other" / two_shards("layers.0.")).rename(folder / "consolidated.safetensors")
    assert defects_of(folder) == {"extra_weights": ["consolidated.safetensors"]}


# ------------------------------------------------------------------------------------------------ claims
def test_scales_of_which_config_json_says_nothing(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/53950: Granite 4.2 FP8: `no module or parameter named
    layers.0.mlp.down_proj.weight_scale`; here the claim is missing altogether."""
    config, tensors = of_model("glm-4.5-air", dense=1)
    published = fp8_blocks(config, tensors, outside_mtp(is_linear, 4))
    del published.config["quantization_config"]
    assert defects_of(publish(tmp_path / "broken", published)) == {"stored_not_declared": ["config.json"]}


def test_experts_that_were_skipped_without_a_word(tmp_path: Path) -> None:
    """https://github.com/vllm-project/llm-compressor/issues/2060, https://github.com/NVIDIA/Model-Optimizer/issues/1173: only
    attention was quantized; all experts are in the ignore list."""
    config, tensors = of_model("qwen3-30b-a3b")
    ignore = ["lm_head", r"re:.*mlp\..*"]
    folder = publish(
        tmp_path / "broken", compressed(config, tensors, lambda name: "self_attn" in name and is_linear(name), ignore, "int4")
    )
    assert defects_of(folder) == {"experts_left_out": ["model.layers.0.mlp.experts.0.down_proj"]}


def test_generation_config_that_was_not_carried_over(tmp_path: Path) -> None:
    """https://github.com/marin-community/marin/issues/4760: no generation_config.json, and config.json has another
    eos_token_id than the template ends turns with: replies do not end."""
    config, tensors = of_model("qwen3-30b-a3b")
    config["eos_token_id"] = 128009
    base = publish(tmp_path / "base", plain(config, tensors))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    folder = publish(tmp_path / "broken", awq(config, tensors, is_expert, ["self_attn", "mlp.gate", "lm_head"]))
    assert defects_of(folder) == {}
    assert defects_of(folder, source=base) == {"generation_config_unlike_base": ["generation_config.json"]}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 128001}))
    change_json(folder / "config.json", eos_token_id=7)
    assert defects_of(folder, source=base) == {
        "generation_config_unlike_base": ["generation_config.json: eos_token_id"],
        "config_unlike_base": ["config.json: eos_token_id"],
    }  # fmt: skip


def test_a_chat_template_that_training_lost(tmp_path: Path) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/8399: the saved tokenizer_config.json has no chat_template."""
    config, tensors = of_model("qwen3-30b-a3b")
    base = publish(tmp_path / "base", plain(config, tensors))
    folder = publish(tmp_path / "broken", plain(config, tensors))
    assert defects_of(folder, source=base) == {}
    (folder / "chat_template.jinja").unlink()
    assert defects_of(folder, source=base) == {"chat_template_unlike_base": ["chat_template.jinja"]}
