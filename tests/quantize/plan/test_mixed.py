"""Plans that mix schemes: config groups, ignore list, what vLLM and compressed-tensors read; then quantized and verified."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from rich.console import Console
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe, store_as_fp8

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import load_manifest
from assay.records.plan import Plan
from assay.records.verification import Verification
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.config_groups import quantization_config
from assay_quantize.formats.targets import targets_by_scheme
from assay_quantize.plan.planner import check_ignore, make_plan
from assay_quantize.plan.show import print_plan
from assay_quantize.verify.verify import verify

MIX = {"attention": "fp8_block", "dense_mlp": "w4a16", "shared_expert": "w4a16", "routed_expert": "nvfp4a16"}


def mix(**changes: Any) -> PrecisionRecipe:
    """w4a16 with schemes by role, and changes."""
    data = load_recipe(PrecisionRecipe, "w4a16").model_dump(by_alias=True)
    return PrecisionRecipe.model_validate({**data, "name": "mix", "scheme": None, "quantize": MIX, **changes})


def plan_of(folder: Path, recipe: PrecisionRecipe) -> Plan:
    return make_plan(open_checkpoint(folder), recipe, model="tiny", family=None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the first of them dense, and an MTP block as layer 4."""
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("mixed") / "source", num_layers=4, num_experts=2)


def schemes(plan: Plan) -> dict[str, str | None]:
    """Module -> scheme, of all matrices that are not dropped."""
    return {t.module: t.scheme for t in plan.tensors if len(t.shape) == 2 and t.action != "drop"}


# ------------------------------------------------------------------------------------------------ config groups
def test_each_scheme_has_a_group_with_closed_patterns(source: Path) -> None:
    config = quantization_config(plan_of(source, mix()))
    groups = {name: (group["format"], group["targets"]) for name, group in config["config_groups"].items()}
    assert groups == {
        "group_0": ("float-quantized", [r"re:.*\.self_attn\.(k_proj|o_proj|q_proj|v_proj)$"]),
        "group_1": ("nvfp4-pack-quantized", [r"re:.*\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$"]),
        "group_2": (
            "pack-quantized",
            [r"re:.*\.mlp\.(down_proj|gate_proj|up_proj)$", r"re:.*\.mlp\.shared_experts\.(down_proj|gate_proj|up_proj)$"],
        ),
    }
    assert config["format"] == "mixed-precision"
    assert config["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]


def test_two_schemes_of_one_format_need_no_mixed_format(source: Path) -> None:
    config = quantization_config(plan_of(source, mix(quantize=MIX | {"attention": "w4a16_g32", "routed_expert": "w4a16"})))
    assert config["format"] == "pack-quantized"
    assert [group["weights"]["group_size"] for group in config["config_groups"].values()] == [128, 32]


def test_one_scheme_stays_one_group_of_linears(source: Path) -> None:
    plan = plan_of(source, mix(quantize=dict.fromkeys(MIX, "w4a16")))
    single = plan_of(source, load_recipe(PrecisionRecipe, "w4a16"))
    assert quantization_config(plan) == quantization_config(single)
    assert plan.tensors == single.tensors


def test_layers_have_patterns_of_their_own(source: Path) -> None:
    layers = {"1, 3": {"routed_expert": "fp8_block"}, "0-1": {"attention": "bf16"}}
    plan = plan_of(source, mix(layers=layers))
    assert targets_by_scheme(plan.tensors) == {
        "fp8_block": (
            r"re:(.*\.)?model\.layers\.(1|3)\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$",
            r"re:.*\.self_attn\.(k_proj|o_proj|q_proj|v_proj)$",
        ),
        "nvfp4a16": (r"re:(.*\.)?model\.layers\.2\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$",),
        "w4a16": (
            r"re:.*\.mlp\.(down_proj|gate_proj|up_proj)$", r"re:.*\.mlp\.shared_experts\.(down_proj|gate_proj|up_proj)$",
        ),
    }  # fmt: skip
    assert plan.ignore[-1] == r"re:(.*\.)?model\.layers\.(0|1)\.self_attn\.(k_proj|o_proj|q_proj|v_proj)$"
    found = schemes(plan)
    assert [found[f"model.layers.{n}.self_attn.q_proj"] for n in range(5)] == [None, None, "fp8_block", "fp8_block", None]
    assert [found[f"model.layers.{n}.mlp.experts.1.up_proj"] for n in range(1, 5)] == [
        "fp8_block", "nvfp4a16", "fp8_block", None,
    ]  # fmt: skip


@pytest.mark.parametrize("mtp", ["keep", "quantize", "drop"])
@pytest.mark.parametrize("layers", [{}, {"1, 3": {"routed_expert": "fp8_block"}, "0-1": {"attention": "bf16"}}])
def test_compressed_tensors_finds_one_target_for_each_module(source: Path, mtp: str, layers: dict[str, Any]) -> None:
    """By its own matching, over every module: exactly one target, in the group of the planned scheme, unless it is ignored."""
    plan = plan_of(source, mix(mtp=mtp, layers=layers))
    targets = {target: scheme for scheme, found in targets_by_scheme(plan.tensors).items() for target in found}
    linear = torch.nn.Linear(1, 1)
    for module, scheme in schemes(plan).items():
        if module.endswith("embed_tokens"):
            continue
        matched = match_targets(module, linear, targets)
        ignored = bool(match_targets(module, linear, plan.ignore))
        assert ignored == (scheme is None), module
        assert ignored or [targets[target] for target in matched] == [scheme], (module, matched)


# ------------------------------------------------------------------------------------------------ what does not go together
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (r"model\.layers\.2\.self_attn\.k_proj",
         "vLLM loads the weights of model.layers.2.self_attn.qkv_proj with one scheme, but model.layers.2.self_attn.k_proj is "
         "w4a16, model.layers.2.self_attn.q_proj is fp8_block; give both the same scheme"),
        (r"model\.layers\.2\.mlp\.experts\.\d+\.down_proj",
         "vLLM loads the weights of model.layers.2.mlp.experts with one scheme, but model.layers.2.mlp.experts.0.down_proj is "
         "w4a16, model.layers.2.mlp.experts.0.gate_proj is nvfp4a16; give both the same scheme"),
        (r"model\.layers\.2\.mlp\.shared_experts\.gate_proj", None),
    ],
)  # fmt: skip
def test_fused_members_that_disagree_are_both_named(source: Path, changed: str, message: str | None) -> None:
    plan = plan_of(source, mix())
    tensors = tuple(
        t._replace(scheme="w4a16") if re.fullmatch(changed, t.module) and t.scheme else t for t in plan.tensors
    )  # fmt: skip
    damaged = plan.model_copy(update={"tensors": tensors})
    if message is None:
        check_ignore(damaged)
        return
    with pytest.raises(PlanError) as caught:
        check_ignore(damaged)
    assert str(caught.value) == message


def test_a_layer_that_is_not_there(source: Path) -> None:
    with pytest.raises(
        PlanError, match=r"precision mix: layers\.2-4: there is no layer 4; .* has layers 0 to 3 \(the MTP block"
    ):
        plan_of(source, mix(layers={"2-4": {"attention": "bf16"}}))


def test_the_plan_shows_what_each_role_becomes(source: Path) -> None:
    console = Console(width=120, file=io.StringIO())
    print_plan(plan_of(source, mix(layers={"1": {"routed_expert": "fp8_block"}})), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.search(r"attention .* 16 fp8_block, 12 BF16 as is", text)
    assert re.search(r"routed_expert .* 12 nvfp4a16, 6 fp8_block", text)


# ------------------------------------------------------------------------------------------------ made and verified
@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "mix"
    quantize(plan_of(source, mix(mtp="quantize", layers={"1": {"routed_expert": "w4a16"}})), source, folder)
    return folder


def check(folder: Path, source: Path | None) -> Verification:
    return verify(folder, source=source, workers=1)


def test_every_weight_is_that_of_its_scheme_alone(source: Path, made: Path, tmp_path: Path) -> None:
    """A mix is made of the very bytes that each scheme alone makes."""
    alone: dict[str, dict[str, torch.Tensor]] = {}
    for scheme in ("fp8_block", "w4a16", "nvfp4a16"):
        recipe = mix(mtp="quantize", quantize=dict.fromkeys(MIX, scheme))
        quantize(plan_of(source, recipe), source, tmp_path / scheme)
        alone[scheme] = {n: t for f in (tmp_path / scheme).glob("*.safetensors") for n, t in load_file(f).items()}
    ours = {n: t for f in made.glob("*.safetensors") for n, t in load_file(f).items()}
    plan = plan_of(source, mix(mtp="quantize", layers={"1": {"routed_expert": "w4a16"}}))
    found = schemes(plan)
    for name, tensor in ours.items():
        same = alone[found.get(name.rpartition(".")[0]) or "w4a16"][name]
        assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8)), name


def test_it_verifies_with_and_without_its_source(source: Path, made: Path) -> None:
    found = check(made, source)
    assert found.damages == ()
    errors = found.mean_relative_error
    assert sorted(errors) == [
        "attention", "dense_mlp", "mtp (fp8_block)", "mtp (nvfp4a16)", "mtp (w4a16)", "routed_expert (nvfp4a16)",
        "routed_expert (w4a16)", "shared_expert",
    ]  # fmt: skip
    assert errors["attention"] < 0.03 < 0.08 < errors["routed_expert (nvfp4a16)"] < errors["routed_expert (w4a16)"] < 0.13
    assert check(made, None).damages == ()
    manifest = load_manifest(made)
    assert manifest is not None
    assert manifest.precision_recipe["quantize"] == MIX


def test_a_group_that_names_other_modules_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    config = json.loads((made / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"], groups["group_2"]["targets"] = groups["group_2"]["targets"], groups["group_0"]["targets"]
    (copy / "config.json").write_text(json.dumps(config))
    damages = {(d.check, d.where): d.what for d in verify(copy, hashes=False, contents=False).damages}
    assert damages["runtime", "model.layers.0.self_attn.qkv_proj"] == (
        "vLLM expects w4a16 weights for it, stored are fp8_block ones"
    )
    assert ("config", "config.json: quantization_config.config_groups") in damages


def test_fp8_weights_of_the_source_are_carried_where_the_mix_wants_them(source: Path, tmp_path: Path) -> None:
    released = store_as_fp8(source, tmp_path / "fp8")
    plan = plan_of(released, mix())
    kept = {t.role for t in plan.tensors if t.action == "keep" and t.scheme == "fp8_block"}
    assert kept == {"attention"}
    assert {t.scheme for t in plan.tensors if t.action == "quantize"} == {"w4a16", "nvfp4a16"}
    quantize(plan, released, tmp_path / "out")
    assert check(tmp_path / "out", released).damages == ()
