"""Layouts that a family file can express beside those of the shipped families: other roots, experts and MTP blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.errors import PlanError
from assay.recipes.families import num_experts
from assay.recipes.family_names import Classified, classify, forms, ignore_patterns, names_of
from assay.recipes.mtp import declaring_none, mtp_problems, stored_layers
from assay.recipes.runtime_names import fused_members, packed_modules
from assay.recipes.text_config import num_hidden_layers
from assay_quantize.formats.vllm_rules import runtime_modules

HEAD = "schema: 1\nname: mine\narchitectures: [MineForCausalLM]\nreasoning_parser: qwen3\nnum_experts: [num_local_experts]\n"
CONFIG: dict[str, Any] = {"text_config": {"num_hidden_layers": 2, "num_local_experts": 2, "num_mtp_layers": 1}}
MULTIMODAL = f"""{HEAD}
layers: model.language_model.layers
kept: [model.visual]
outside:
  model.language_model.embed_tokens.weight: {{role: embedding, kind: plain, split: rows}}
  lm_head.weight: {{role: lm_head, kind: plain, split: rows}}
layer:
  self_attn.o_proj.weight: {{role: attention, kind: linear, split: columns}}
  block_sparse_moe.gate.weight: {{role: router, kind: bare}}
  "block_sparse_moe.experts.{{expert}}.w1.weight": {{role: routed_expert, kind: linear, split: rows, fused: w13}}
  "block_sparse_moe.experts.{{expert}}.w3.weight": {{role: routed_expert, kind: linear, split: rows, fused: w13}}
  "block_sparse_moe.experts.{{expert}}.w2.weight": {{role: routed_expert, kind: linear, split: columns}}
mtp:
  layers: model.mtp_block
  layer:
    extra.weight: {{role: norm}}
  outside:
    "model.mtp_linear_proj.{{layer}}.weight": {{role: mtp_projection, kind: bare}}
    model.mtp_norm.weight: {{role: norm}}
  required: [model.mtp_norm.weight]
runtime:
  model.language_model: language_model.model
  block_sparse_moe: mlp
"""
EXPERT = "model.language_model.layers.1.block_sparse_moe.experts.1"


@pytest.fixture
def family(tmp_path: Path) -> str:
    (file := tmp_path / "mine.yaml").write_text(MULTIMODAL)
    return str(file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{EXPERT}.w1.weight",
         Classified("routed_expert", "routed_expert", f"{EXPERT}.w1", 1, 1, f"{EXPERT}.w13", True)),
        ("model.mtp_block.0.self_attn.o_proj.weight",
         Classified("mtp", "attention", "model.mtp_block.0.self_attn.o_proj", 0, None, None, True)),
        ("model.mtp_block.0.extra.weight", Classified("mtp", "norm", "model.mtp_block.0.extra", 0, None, None, False)),
        ("model.mtp_linear_proj.0.weight",
         Classified("mtp", "mtp_projection", "model.mtp_linear_proj.0", 0, None, None, False)),
        ("model.visual.blocks.3.attn.qkv.weight",
         Classified("other", "other", "model.visual.blocks.3.attn.qkv", None, None, None, False)),
        ("model.visual.merger.mlp.0.bias", Classified("other", "other", "model.visual.merger.mlp.0", None, None, None, False)),
    ],
)  # fmt: skip
def test_what_a_tensor_is(family: str, name: str, expected: Classified) -> None:
    assert classify(family, name, CONFIG) == expected


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.language_model.layers.2.extra.weight", "model.visuals.x.weight"]
)
def test_names_of_another_root_are_unknown(family: str, name: str) -> None:
    with pytest.raises(PlanError):
        classify(family, name, CONFIG)


def test_numbers_come_from_the_text_config(family: str) -> None:
    assert (num_hidden_layers(CONFIG), num_experts(family, CONFIG)) == (2, 2)
    assert declaring_none(CONFIG)["text_config"]["num_mtp_layers"] == 0
    assert declaring_none(CONFIG).keys() == {"text_config"}
    assert names_of(family).projections == ("w1", "w3", "w2")


def test_every_form_is_listed(family: str) -> None:
    assert {name for name in forms(family) if "mtp" in name and "block_sparse_moe" not in name} == {
        "model.mtp_linear_proj.{layer}.weight", "model.mtp_norm.weight", "model.mtp_block.{layer}.extra.weight",
        "model.mtp_block.{layer}.self_attn.o_proj.weight",
    }  # fmt: skip


def test_the_mtp_block_is_whole(family: str) -> None:
    layer = {"block_sparse_moe.gate", "self_attn.o_proj"} | {
        f"block_sparse_moe.experts.{expert}.{part}" for expert in range(2) for part in ("w1", "w2", "w3")
    }
    names = {f"{root}.{rest}.weight" for rest in layer for root in ("model.language_model.layers.0", "model.mtp_block.0")}
    names |= {"model.mtp_norm.weight"}
    assert stored_layers(family, CONFIG, names) == (0,)
    assert list(mtp_problems(family, CONFIG, names)) == []
    lacking = names - {"model.mtp_block.0.block_sparse_moe.experts.1.w3.weight", "model.mtp_norm.weight"}
    assert [problem.where for problem in mtp_problems(family, CONFIG, lacking)] == [
        "model.mtp_block.0.block_sparse_moe.experts.1.w3.weight", "model.mtp_norm.weight"
    ]  # fmt: skip


def test_patterns_hit_the_names_of_both_sides(family: str) -> None:
    experts = {"routed_expert"}
    assert ignore_patterns(family, experts, mtp="keep", mtp_layers=()) == (
        r"re:(.*\.)?lm_head$",
        r"re:(.*\.)?embed_tokens$",
        r"re:.*\.self_attn\.o_proj$",
        r"re:.*\.block_sparse_moe\.gate$",
        r"re:.*\.mlp\.gate$",
        r"re:(.*\.)?visual\..*$",
        r"re:(.*\.)?model\.mtp_block\..*$",
        r"re:(.*\.)?model\.mtp_linear_proj\..*$",
        r"re:(.*\.)?model\.mtp_norm$",
    )
    assert ignore_patterns(family, experts, mtp="quantize", mtp_layers=())[-1] == r"re:(.*\.)?model\.mtp_linear_proj\.\d+$"


def test_vllms_names_of_modules(family: str) -> None:
    (found,) = runtime_modules(family, [f"{EXPERT}.w1", f"{EXPERT}.w3"], CONFIG)
    experts = "language_model.model.layers.1.mlp.experts"
    assert (found.name, found.kind) == (experts, "experts")
    assert found.judged_by == (f"{experts}.0.w1", f"{experts}.0.w3", f"{experts}.0.w2")


def test_experts_are_no_fused_linear(family: str) -> None:
    """vLLM's `packed_modules_mapping` does not name them; their shared scales go by the family's group."""
    assert (dict(packed_modules(family)), dict(fused_members(family))) == ({}, {"w13": ("w1", "w3")})


def test_vllm_may_count_mtp_layers_on_behind_the_layers(tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text(MULTIMODAL.replace("mtp:\n", "mtp:\n  runtime_layers: model.layers\n"))
    rename = names_of(str(file)).runtime_namer(CONFIG)
    assert rename("model.mtp_block.0.self_attn.o_proj") == "model.layers.2.self_attn.o_proj"
    assert rename("model.language_model.layers.1.self_attn.o_proj") == "language_model.model.layers.1.self_attn.o_proj"
    assert ignore_patterns(str(file), {"routed_expert"}, mtp="keep", mtp_layers=(2,))[-1] == r"re:(.*\.)?model\.layers\.2\..*$"


def test_what_stays_plain_in_a_quantized_mtp_layer_is_named_as_vllm_counts_it(tmp_path: Path) -> None:
    plain = MULTIMODAL.replace("extra.weight: {role: norm}", "e_proj.weight: {role: mtp_projection, kind: plain}")
    (file := tmp_path / "mine.yaml").write_text(plain.replace("mtp:\n", "mtp:\n  runtime_layers: model.layers\n"))
    assert ignore_patterns(str(file), {"routed_expert"}, mtp="quantize", mtp_layers=(2,))[-3:] == (
        r"re:(.*\.)?model\.mtp_linear_proj\.\d+$",
        r"re:(.*\.)?model\.mtp_block\.\d+\.e_proj$",
        r"re:(.*\.)?model\.layers\.2\.e_proj$",
    )
