"""One answer to "does this checkpoint carry an MTP block, and is it whole?", and what is planned and launched by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hollow
import pytest
from fake_interpreter import fake_python

from assay.errors import CheckpointError, ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.mtp import CONFIG_KEYS, MtpBlock, declaring_none, mtp_block, mtp_problems
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan
from assay.safetensors_index import INDEX_NAME, tensor_names
from assay_evaluate.serving.server import ServerSpec, serve
from assay_evaluate.serving.vllm_command import VllmCommand, vllm_command
from assay_pipeline.targets import resolve_target
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import index_json
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.show import mtp_line
from assay_reports.cards.serving import serve_command

DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


def names_of(model: str) -> list[str]:
    config, shapes = hollow.MODELS[model]
    return [name for name, _ in shapes(config)]


# ------------------------------------------------------------------------------------------------ the answer
@pytest.mark.parametrize(
    ("model", "config", "block", "num_layers"),
    [
        ("qwen3-next-80b-a3b", {}, MtpBlock(None, 1), 1),
        ("qwen3-next-80b-a3b", {"num_nextn_predict_layers": 0}, MtpBlock(0, 1), 0),
        ("qwen3-30b-a3b", {}, MtpBlock(None, 0), 0),
        ("glm-5", {}, MtpBlock(1, 1), 1),
        ("glm-4.7", {}, MtpBlock(1, 1), 1),
        ("deepseek-v3", {"num_nextn_predict_layers": None}, MtpBlock(None, 1), 1),
        ("nemotron-3-nano", {}, MtpBlock(None, 0), 0),
        ("nemotron-3-super", {}, MtpBlock(1, 1), 1),
        (
            "nemotron-3-super", {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["attention", "moe"]},
            MtpBlock(1, 1), 1,
        ),
        ("kimi-k2", {}, MtpBlock(0, 0), 0),
        ("kimi-k2", {"num_nextn_predict_layers": 2}, MtpBlock(2, 0), 0),
    ],
)  # fmt: skip
def test_config_and_names_together(model: str, config: dict[str, Any], block: MtpBlock, num_layers: int) -> None:
    found = mtp_block({**hollow.MODELS[model][0], **config}, names_of(model))
    assert (found, found.num_layers) == (block, num_layers)


def test_names_of_a_quantized_checkpoint_count_as_well() -> None:
    names = [name.replace(".weight", ".weight_packed") for name in names_of("qwen3-next-80b-a3b")]
    assert mtp_block(hollow.QWEN3_NEXT_CONFIG, names) == MtpBlock(None, 1)


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_architectures_that_cannot_be_planned_are_taken_at_their_word(key: str) -> None:
    multimodal = {"architectures": ["Glm4vMoeForConditionalGeneration"], "text_config": {key: 1, "num_experts": 8}}
    for names in ([], ["model.language_model.layers.0.x", "mtp.fc.weight"], None):
        assert mtp_block(multimodal, names) == MtpBlock(1, None)
    assert mtp_block({key: 2}, None).num_layers == 2
    assert mtp_block({"architectures": ["LlamaForCausalLM"]}, ["mtp.fc.weight"]).num_layers == 0


def test_how_a_dropped_block_is_declared() -> None:
    assert declaring_none({"a": 1}) == {"a": 1, "num_nextn_predict_layers": 0}
    assert declaring_none({"num_mtp_layers": 1, "a": 1}) == {"num_mtp_layers": 0, "a": 1}


# ------------------------------------------------------------------------------------------------ names of a folder
def test_tensor_names_of_a_folder(tmp_path: Path) -> None:
    indexed = hollow.hollow_model(tmp_path / "indexed", "qwen3-next-80b-a3b", shards=2)
    single = hollow.hollow_model(tmp_path / "single", "qwen3-next-80b-a3b", shards=1)
    assert tensor_names(indexed) == tensor_names(single) == open_checkpoint(indexed).tensors.keys()
    hollow.write_hollow_shard(indexed / "beside.safetensors", [("not.in.the.index", "BF16", (1,))])
    assert tensor_names(indexed) == tensor_names(single)
    assert tensor_names(tmp_path) is None
    (single / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: 5 bytes are no safetensors file; download it again"):
        tensor_names(single)
    (indexed / INDEX_NAME).write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"'\.\./b\.safetensors' is not the name of a safetensors file in the same"):
        tensor_names(indexed)


# ------------------------------------------------------------------------------------------------ Qwen3-Next
@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next with its published config, its true shapes and every tensor, and no data: 75,944 tensors, 41 shards."""
    folder = tmp_path_factory.mktemp("qwen") / "Qwen3-Next"
    return hollow.write_hollow(folder, hollow.QWEN3_NEXT_CONFIG, hollow.qwen3_next_shapes(hollow.QWEN3_NEXT_CONFIG), shards=41)


@pytest.fixture(scope="module")
def plans(qwen3_next: Path) -> dict[str, Plan]:
    source = open_checkpoint(qwen3_next)
    recipes = {name: load_recipe(PrecisionRecipe, name) for name in ("w4a16", "w4a16-nomtp")}
    return {name: make_plan(source, recipe, model="m", family="qwen3_next") for name, recipe in recipes.items()}


def candidate(plan: Plan, folder: Path) -> Path:
    """What a launch reads of the checkpoint that `plan` makes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(plan)))
    (folder / INDEX_NAME).write_text(json.dumps(index_json(plan)))
    return folder


def launch(checkpoint: Path) -> VllmCommand:
    serving, profile = load_recipe(ModelRecipe, "qwen3-next-80b-a3b").serving, load_recipe(ProfileRecipe, "8xh200")
    return vllm_command(checkpoint, profile, serving, speculate=True, port=1, served_model_name="model")


@pytest.mark.slow
def test_the_source_is_planned_and_launched_with_speculation(qwen3_next: Path, plans: dict[str, Plan]) -> None:
    assert mtp_line(plans["w4a16"]) == "mtp.* (1,553 tensors, 3.30 GB) is kept, BF16 as is"
    command = launch(qwen3_next)
    assert (command.speculation, command.reason_undrafted) == (DRAFTS, None)
    assert json.loads(command.arguments[command.arguments.index("--speculative-config") + 1]) == DRAFTS
    assert command.flags["per-request-spec-decode-metrics"] == "summary"
    assert resolve_target(str(qwen3_next)).recipe.serving.num_speculative_tokens == 1


@pytest.mark.slow
def test_a_candidate_with_its_mtp_block_is_launched_alike(qwen3_next: Path, plans: dict[str, Plan], tmp_path: Path) -> None:
    command, source = launch(candidate(plans["w4a16"], tmp_path / "w4a16")), launch(qwen3_next)
    assert (command.speculation, command.flags, command.reason_undrafted) == (DRAFTS, source.flags, None)
    assert "num_nextn_predict_layers" not in config_json(plans["w4a16"])


@pytest.mark.slow
def test_a_dropped_block_is_not_drafted_with_and_that_is_said(plans: dict[str, Plan], tmp_path: Path) -> None:
    assert config_json(plans["w4a16-nomtp"])["num_nextn_predict_layers"] == 0
    folder = candidate(plans["w4a16-nomtp"], tmp_path / "nomtp")
    command = launch(folder)
    assert command.speculation is None and "--speculative-config" not in command.arguments
    said = f"{folder}: served without the 2 draft tokens that were asked for: config.json declares 0 MTP layers"
    assert command.reason_undrafted == said
    assert resolve_target(str(folder)).recipe.serving.num_speculative_tokens is None
    lines: list[str] = []
    spec = ServerSpec(
        folder, load_recipe(ProfileRecipe, "8xh200"), Serving(num_speculative_tokens=2), speculate=True,
        log_path=tmp_path / "log", interpreter=fake_python(tmp_path, "sys.exit(1)"),
    )  # fmt: skip
    with pytest.raises(ServeError, match="stopped before it was ready"), serve(spec, lines.append):
        pass
    assert lines == [said]


@pytest.mark.slow
def test_an_index_without_the_block_is_not_drafted_with(qwen3_next: Path, tmp_path: Path) -> None:
    """Qwen3-Coder-Next is published so: the same architecture and config, no `mtp.*`."""
    index = json.loads((qwen3_next / INDEX_NAME).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    (tmp_path / "config.json").write_text(json.dumps(hollow.QWEN3_NEXT_CONFIG))
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    command = launch(tmp_path)
    assert command.speculation is None
    asked = f"{tmp_path}: served without the 2 draft tokens that were asked for"
    assert command.reason_undrafted == f"{asked}: no MTP layers are declared in config.json or stored"
    declared = {**hollow.QWEN3_NEXT_CONFIG, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    why = launch(tmp_path).reason_undrafted
    assert why == f"{asked}: config.json declares 1 MTP layer(s), but none is stored"


def test_other_ways_to_draft_need_no_mtp_block(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    serving, profile = Serving(vllm={"speculative-config": ngram}), load_recipe(ProfileRecipe, "8xh200")
    command = vllm_command(tmp_path, profile, serving, speculate=True, port=1, served_model_name="m")
    assert (command.speculation, command.reason_undrafted) == (ngram, None)
    quiet = vllm_command(tmp_path, profile, serving, speculate=False, port=1, served_model_name="m")
    assert (quiet.speculation, quiet.reason_undrafted) == (None, None)


def test_the_card_recommends_drafting_only_with_a_block() -> None:
    recipe = load_recipe(ModelRecipe, "qwen3-next-80b-a3b")
    assert "--speculative-config" in serve_command(None, recipe, has_mtp=True)
    assert "--speculative-config" not in serve_command(None, recipe, has_mtp=False)


# ------------------------------------------------------------------------------------------------ whole or not
def problems(config: dict[str, Any], names: set[str], family: str) -> list[tuple[str, str]]:
    return [(problem.where, problem.what) for problem in mtp_problems(family, config, names)]


MISSING = "is missing from the MTP block: vLLM would load it and draft noise"


def test_what_is_wrong_with_a_block_beside_the_layers() -> None:
    config = {**hollow.QWEN3_NEXT_CONFIG, "num_hidden_layers": 4, "num_experts": 2}
    whole = {name for name, _ in hollow.qwen3_next_shapes(config)}
    without = {name for name in whole if not name.startswith("mtp.")}
    assert problems(config, whole, "qwen3_next") == problems(config, without, "qwen3_next") == []
    assert problems(config, without | {"mtp.fc.weight"}, "qwen3_next") == [
        ("mtp.layers.0", "is not there, but other parts of an MTP block are"),
        ("mtp.norm.weight", MISSING),
        ("mtp.pre_fc_norm_embedding.weight", MISSING),
        ("mtp.pre_fc_norm_hidden.weight", MISSING),
    ]
    gone = {"mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"}
    assert problems(config, whole - gone, "qwen3_next") == [
        ("mtp.layers.0.mlp.experts.1.up_proj.weight", MISSING),
        ("mtp.layers.0.self_attn.o_proj.weight", MISSING),
        ("mtp.fc.weight", MISSING),
    ]
    none = {**config, "num_nextn_predict_layers": 0}
    assert problems(none, without, "qwen3_next") == []
    assert problems(none, whole, "qwen3_next") == [
        ("mtp.layers.0", "holds an MTP block, but config.json declares 0 MTP layers"),
        ("mtp.fc.weight", "belongs to an MTP block, but config.json declares 0 MTP layers"),
    ]


def test_what_is_wrong_with_an_inlined_block() -> None:
    config = {**hollow.GLM5_CONFIG, "num_hidden_layers": 4, "n_routed_experts": 2}
    whole = {name for name, _ in hollow.glm5_shapes(config, {0, 3})}  # layers 1 and 2 share an indexer
    assert problems(config, whole, "glm_moe_dsa") == []
    without_indexer = {name for name in whole if not name.startswith("model.layers.4.self_attn.indexer.")}
    assert problems(config, without_indexer, "glm_moe_dsa") == [
        (f"model.layers.4.self_attn.indexer.{rest}", MISSING)
        for rest in ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")
    ]
    part = whole - {"model.layers.4.self_attn.indexer.wk.weight"}
    assert problems(config, part, "glm_moe_dsa") == [("model.layers.4.self_attn.indexer.wk.weight", MISSING)]
    extra = whole | {"model.layers.4.mlp.experts.7.up_proj.weight"}
    assert problems(config, extra, "glm_moe_dsa") == [
        ("model.layers.4.mlp.experts.7", "is there, but config.json declares 2 experts")
    ]
    shifted = {name.replace("model.layers.4.", "model.layers.5.") for name in whole}
    assert problems({**config, "num_nextn_predict_layers": None}, shifted, "glm_moe_dsa") == [
        ("model.layers.5", "holds an MTP block, but vLLM looks for 1 from model.layers.4 on"),
        ("model.layers.4", "is not there, but other parts of an MTP block are"),
    ]


def test_what_is_wrong_with_a_dense_block_beside_the_layers() -> None:
    """ERNIE-4.5's has no experts, though most layers of the model have; vLLM takes the weights outside the layer by number."""
    config = {**hollow.MODELS["ernie-4.5-21b"][0], "num_hidden_layers": 4, "moe_num_experts": 2}
    whole = {name for name, _ in hollow.ernie_shapes(config)}
    without = {name for name in whole if "mtp" not in name}
    assert mtp_block(config, whole) == MtpBlock(1, 1)
    assert problems(config, whole, "ernie4_5_moe") == []
    assert problems(config, without, "ernie4_5_moe")[0] == (
        "model.mtp_block.0", "is declared in config.json (MTP), but no shard holds any tensor of it"
    )  # fmt: skip
    gone = {"model.mtp_emb_norm.0.weight", "model.mtp_block.0.mlp.up_proj.weight", "model.mtp_block.0.self_attn.q_proj.weight"}
    assert [where for where, _ in problems(config, whole - gone, "ernie4_5_moe")] == sorted(
        gone, key=lambda name: ("emb_norm" in name, name)
    )
    none = {**config, "num_nextn_predict_layers": 0}
    assert problems(none, whole, "ernie4_5_moe") == [
        ("model.mtp_block.0", "holds an MTP block, but config.json declares 0 MTP layers"),
        ("model.mtp_emb_norm.0.weight", "belongs to an MTP block, but config.json declares 0 MTP layers"),
    ]
