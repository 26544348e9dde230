"""A family of the user's own: `--family FILE`, or in a model's recipe."""

from __future__ import annotations

import json
from pathlib import Path

import hollow
import hollow_moe
import pytest
import torch
from command_line import Run
from safetensors.torch import load_file, save_file

from assay.errors import RecipeError
from assay.recipes import family_names, own_families
from assay.recipes.base import recipes_dir
from assay.recipes.families import family_of
from assay_pipeline.evaluating import prepare

RECIPE = """schema: 1
name: small
description: "x"
source: {path: checkpoint}
family: mine.yaml
reference: {precision: fp8}
precisions: [w4a16-g32]
suite: quick
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`checkpoint`, of an architecture that assay does not know, and `mine.yaml`, which says how it names its tensors."""
    monkeypatch.setattr(own_families, "FILES", {})
    monkeypatch.setattr(own_families, "RECORDED", {})
    family_names.names_of.cache_clear()
    config = hollow_moe.small("mixtral") | {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    hollow.write_hollow(tmp_path / "checkpoint", config, hollow_moe.MODELS["mixtral"].shapes(config), shards=1)
    shipped = (recipes_dir() / "families" / "mixtral.yaml").read_text()
    own = shipped.replace("name: mixtral", "name: mine").replace("MixtralForCausalLM", "MineForCausalLM")
    (tmp_path / "mine.yaml").write_text(own)
    return tmp_path


def test_plan_and_quantize_take_a_family_from_a_file(run: Run, folder: Path) -> None:
    checkpoint, own = str(folder / "checkpoint"), str(folder / "mine.yaml")
    code, _, err = run("plan", checkpoint, "-p", "w4a16-g32")
    assert code == 2
    assert err.startswith(f"error: {checkpoint}/config.json: architecture MineForCausalLM is not known; `assay family` drafts")
    code, out, err = run("plan", checkpoint, "-p", "w4a16-g32", "--family", own, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["family"] == "mine"
    assert {tensor[4] for tensor in plan["tensors"] if tensor[1] == "routed_expert"} == {"quantize"}


def forget() -> None:
    """As in another process."""
    own_families.FILES.clear()
    own_families.RECORDED.clear()
    family_names.names_of.cache_clear()


def test_inspect_takes_a_family_from_a_file(run: Run, folder: Path) -> None:
    checkpoint = str(folder / "checkpoint")
    _, out, _ = run("inspect", checkpoint)
    assert "not checked: names and modules against a family: architecture MineForCausalLM is not known" in out
    _, out, _ = run("inspect", checkpoint, "--family", str(folder / "mine.yaml"))
    assert out.startswith(f"{checkpoint}: mine, ") and "against a family" not in out


@pytest.fixture
def made(run: Run, folder: Path) -> Path:
    """`made`, quantized from the weights of `source`, both of the user's own family."""
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    source, made = folder / "source", folder / "made"
    tiny = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
            "vocab_size": 64, "num_hidden_layers": 2, "num_local_experts": 2}  # fmt: skip
    config |= tiny
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    shapes = hollow_moe.MODELS["mixtral"].shapes(config)
    tensors = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    own = str(folder / "mine.yaml")
    code, _, err = run("quantize", str(source), "-p", "w4a16-g32", "--out", str(made), "--family", own)
    assert code == 0, err
    return made


def test_what_was_made_with_a_family_of_ones_own_is_verified_and_inspected_without_it(run: Run, made: Path) -> None:
    recorded = json.loads((made / "assay_manifest.json").read_text())["own_family"]
    assert json.loads((made / "assay_plan.json").read_text())["own_family"] == recorded
    assert (recorded["name"], "blocks" in recorded) == ("mine", False)
    names = family_names.names_of("mine")
    forget()
    code, out, err = run("verify", str(made), "--source", str(made.parent / "source"))
    assert code == 0, out + err
    assert family_names.names_of("mine") == names
    forget()
    code, out, _ = run("inspect", str(made))
    assert code == 0 and out.startswith(f"{made}: mine, ")


def test_what_was_made_with_a_family_of_ones_own_is_judged_without_it(run: Run, made: Path) -> None:
    source = str(made.parent / "source")
    forget()
    evaluation = prepare(reference=source, candidates=[str(made)], suite="quick", profile="cpu-emulated")
    assert (evaluation.target.recipe.family, evaluation.compared.candidates[1].notes) == ("mine", ())
    scale = "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale"
    shard = made / json.loads((made / "model.safetensors.index.json").read_text())["weight_map"][scale]
    tensors = load_file(shard)
    save_file({**tensors, scale: torch.zeros_like(tensors[scale])}, shard, {"format": "pt"})
    forget()
    evaluation = prepare(reference=source, candidates=[str(made)], suite="quick", profile="cpu-emulated")
    (damage,) = evaluation.compared.candidates[1].notes
    assert damage.startswith(f"`assay inspect {made}` finds it damaged: scale_zero ({scale}: ")


def test_two_folders_of_a_family_of_ones_own_are_judged_with_its_file(run: Run, made: Path) -> None:
    source, own = str(made.parent / "source"), str(made.parent / "mine.yaml")
    forget()
    words = ("judge", source, f"again={source}", "--profile", "cpu-emulated")
    code, _, err = run(*words)
    assert (code, err.startswith(f"error: {source}/config.json: architecture MineForCausalLM is not known; ")) == (2, True)
    _, _, err = run(*words, "--family", own, "--tasks", "nothing")
    assert "architecture" not in err and "--tasks nothing" in err


def test_a_recorded_family_stands_behind_those_that_ship() -> None:
    forget()
    shipped = family_names.names_of("mixtral")
    family_names.take_up_family({"schema": 1, "name": "mixtral", "architectures": ["MixtralForCausalLM"], "num_experts": ["x"],
                             "reasoning_parser": "x"})  # fmt: skip
    assert family_names.names_of("mixtral") == shipped
    other = {"schema": 1, "name": "other", "architectures": ["MixtralForCausalLM"], "num_experts": ["num_local_experts"]}
    family_names.take_up_family({**other, "reasoning_parser": "x"})
    assert family_of({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}) == "mixtral"
    with pytest.raises(
        RecipeError, match=r"^own_family: reasoning_parser: Field required; restore the record, or give the file"
    ):
        family_names.take_up_family(other)
    with pytest.raises(RecipeError, match=r"^own_family: blocks: must be empty in a record; "):
        family_names.take_up_family({**other, "reasoning_parser": "x", "blocks": ["../mine.yaml"]})
    forget()


def test_a_models_recipe_names_the_file_relative_to_its_own(run: Run, folder: Path) -> None:
    (folder / "small.yaml").write_text(RECIPE)
    code, out, err = run("plan", str(folder / "small.yaml"), "-p", "w4a16-g32", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["family"] == "mine"


def test_a_file_that_is_no_family_is_one_line(run: Run, folder: Path) -> None:
    (folder / "mine.yaml").write_text("schema: 1\nname: mine\n")
    code, out, err = run("plan", str(folder / "checkpoint"), "-p", "w4a16", "--family", str(folder / "mine.yaml"))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {folder}/mine.yaml: 3 problems:")
