"""Sources whose layers differ in kind: experts in three 3-D tensors, MTP layers without experts, layers that are one mixer."""

from __future__ import annotations

from pathlib import Path

import hollow
import hollow_hybrids
import pytest
import torch
from small_models import TINY, make_tiny_model
from tiny_checkpoints import read_shards, write_shards

from assay.errors import CheckpointError, PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

HYBRIDS = tuple(hollow_hybrids.MODELS)


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def test_three_stacked_tensors_give_the_checkpoint_of_single_experts(tmp_path: Path) -> None:
    stacked = make_tiny_model(tmp_path / "stacked", "step-3.5-flash")
    single = tmp_path / "single"
    single.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        (single / file).write_bytes((stacked / file).read_bytes())
    tensors = dict(one for name, tensor in stored(stacked).items() for one in _unstacked(name, tensor).items())
    write_shards(single, {"model.safetensors": tensors})

    assert open_checkpoint(stacked).notes == (
        "6 tensors hold all experts of a layer; they are read as 24 tensors of single experts",
    )
    for source in (stacked, single):
        quantize(plan_of(source, "w4a16"), source, tmp_path / f"from-{source.name}")
        assert verify(tmp_path / f"from-{source.name}", source=source).damages == ()
    made, wanted = stored(tmp_path / "from-stacked"), stored(tmp_path / "from-single")
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in wanted)
    assert "model.layers.2.moe.experts.3.down_proj.weight_packed" in made


def _unstacked(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.dim() < 3:
        return {name: tensor}
    return {name.replace(".moe.", f".moe.experts.{expert}."): one.clone() for expert, one in enumerate(tensor)}


STEP = {"architectures": ["Step3p5ForCausalLM"], "moe_num_experts": 4, "num_hidden_layers": 2}


def test_scales_of_stacked_tensors_are_split_with_them(tmp_path: Path) -> None:
    moe, (experts, rows, columns) = "model.layers.1.moe", (4, 1280, 4096)
    config = STEP | {"hidden_size": columns, "moe_intermediate_size": rows, "quantization_config": hollow.FP8_BLOCKS}
    shapes = [(f"{moe}.up_proj.weight", (experts, rows, columns)), (f"{moe}.up_proj.weight_scale_inv", (experts, 10, 32))]
    dtypes = {f"{moe}.up_proj.weight": "F8_E4M3", f"{moe}.up_proj.weight_scale_inv": "F32"}
    found = open_checkpoint(hollow.write_hollow(tmp_path / "fp8", config, iter(shapes), shards=1, dtypes=dtypes)).tensors
    assert {name: (header.dtype, header.shape) for name, header in found.items()} == {
        f"{moe}.experts.{expert}.up_proj.{leaf}": (dtype, shape)
        for expert in range(experts)
        for leaf, dtype, shape in (("weight", "F8_E4M3", (rows, columns)), ("weight_scale_inv", "F32", (10, 32)))
    }


def test_a_stacked_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = STEP | {"hidden_size": 4096, "moe_intermediate_size": 1280}
    shapes = iter([("model.layers.1.moe.gate_proj.weight", (4, 4096, 1284))])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(hollow.write_hollow(tmp_path / "other", config, shapes, shards=1))
    assert str(caught.value) == (
        f"{tmp_path}/other: model.layers.1.moe.gate_proj.weight has shape [4, 4096, 1284]; by config.json it should be "
        "[experts, 1280, 4096] or the other way round; save the model again with one tensor per expert"
    )


@pytest.mark.parametrize("model", [model for model in TINY if model in HYBRIDS])
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16", "fp8-channel"])
def test_a_small_model_is_quantized_and_verified(model: str, precision: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", model)
    plan = plan_of(source, precision)
    quantize(plan, source, tmp_path / "made")
    assert verify(tmp_path / "made", source=source).damages == ()
    assert {tensor.part for tensor in plan.tensors if tensor.scheme} >= {"attention", "routed_expert"}


# ------------------------------------------------------------------------------------------------ what is missing
def lacking(folder: Path, model: str, *gone: str) -> Path:
    """A hollow checkpoint of four layers without the tensors whose names begin with one of `gone`."""
    base, shapes_of = hollow.MODELS[model]
    config = hollow_hybrids.cut_to(base, 4) | {next(k for k in ("moe_num_experts", "n_routed_experts") if k in base): 4}
    every = list(shapes_of(config))
    kept = [(name, shape) for name, shape in every if not name.startswith(gone)]
    assert len(kept) < len(every)
    return hollow.write_hollow(folder, config, iter(kept), shards=1)


@pytest.mark.parametrize(
    ("model", "gone", "message"),
    [
        ("mimo-v2-flash", "model.layers.2.self_attn.o_proj.weight", "layer 2 has no {rest}, which layer 1 has"),
        ("mimo-v2-flash", "model.mtp.layers.1.mlp.up_proj.weight", "{gone} is missing from the MTP block"),
        ("step-3.5-flash", "model.layers.5.transformer.shared_head.output.weight", "{gone} is missing from the MTP block"),
        ("step-3.5-flash", "model.layers.6.", "model.layers.6 is declared in config.json (MTP), but no shard holds any"),
        ("nemotron-3-nano", "backbone.layers.3.mixer.D", "layer 3 has no {rest}, which layer 0 has"),
        ("nemotron-3-nano", "backbone.layers.2.mixer.experts.2.down_proj.weight", "layer 2 has no down_proj of expert 2"),
        ("nemotron-3-super", "mtp.layers.0.eh_proj.weight", "{gone} is missing from the MTP block"),
        ("nemotron-3-super", "mtp.layers.0.mixer.v_proj.weight", "{gone} is missing from the MTP block"),
        ("nemotron-3-super", "mtp.layers.1.mixer.fc1_latent_proj.weight", "{gone} is missing from the MTP block"),
        ("nemotron-3-super", "mtp.layers.1.mixer.experts.2.up_proj.weight", "{gone} is missing from the MTP block"),
        ("nemotron-3-super", "mtp.layers.1.mixer.experts.", "mtp.layers.1.mixer.experts.0.down_proj.weight is missing"),
        ("nemotron-3-super", "mtp.layers.1.final_layernorm.weight", "{gone} is missing from the MTP block"),
        ("nemotron-3-super", "mtp.layers.1.", "mtp.layers.1 is declared in config.json (MTP), but no shard holds any"),
        ("nemotron-3-super", "mtp.", "mtp.layers.0 is declared in config.json (MTP), but no shard holds any"),
    ],
)
def test_what_is_missing_is_named(model: str, gone: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(lacking(tmp_path / "source", model, gone), "nvfp4a16")
    assert message.format(gone=gone, rest=gone.partition("layers.")[2][2:]) in str(caught.value)


def test_a_step_of_nemotrons_mtp_block_has_two_layers(tmp_path: Path) -> None:
    """config.json counts it as one; what is kept of it is kept whole, and by `mtp: quantize` only its linears are quantized."""
    config = hollow_hybrids.cut_to(hollow_hybrids.NEMOTRON3_SUPER_CONFIG, 3) | {"n_routed_experts": 4}
    source = hollow.write_hollow(tmp_path / "source", config, hollow_hybrids.nemotron3_shapes(config), shards=1)
    kept, quantized = plan_of(source, "w4a16-g32"), plan_of(source, "w4a16-mtp")
    assert {tensor.action for tensor in kept.tensors if tensor.role == "mtp"} == {"keep"}
    assert r"re:(.*\.)?mtp\..*$" in kept.ignore and config_json(kept)["num_nextn_predict_layers"] == 1
    plain = {tensor.name for tensor in quantized.tensors if tensor.role == "mtp" and tensor.scheme is None}
    assert {name for name in plain if "norm" not in name} == {
        "mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight", "mtp.layers.1.mixer.gate.e_score_correction_bias",
        "mtp.layers.1.mixer.fc1_latent_proj.weight", "mtp.layers.1.mixer.fc2_latent_proj.weight",
    }  # fmt: skip

    two = hollow_hybrids.nemotron3_shapes(config | {"mtp_hybrid_override_pattern": "*E*E"})
    with pytest.raises(PlanError) as caught:
        plan_of(hollow.write_hollow(tmp_path / "two", config, two, shards=1), "w4a16-g32")
    assert "mtp.layers.2 holds an MTP block, but config.json declares 1 MTP layers of 2 layers each" in str(caught.value)


def test_an_mtp_layer_may_treat_a_weight_otherwise_than_a_decoder_layer(tmp_path: Path) -> None:
    """vLLM gives `o_proj` of MiMo's MTP layers no quantization config: it stays as it is even where the block is quantized."""
    plan = plan_of(lacking(tmp_path / "source", "mimo-v2-flash", "model.mtp.layers.2."), "w4a16-mtp")
    scheme_of = {tensor.name.partition("layers.")[2]: tensor.scheme for tensor in plan.tensors if "model.mtp" in tensor.name}
    assert {scheme_of[f"{layer}.self_attn.q_proj.weight"] for layer in (0, 1)} == {"w4a16"}
    assert {scheme_of[f"{layer}.self_attn.o_proj.weight"] for layer in (0, 1)} == {None}
    assert r"re:(.*\.)?model\.mtp\.layers\.\d+\.self_attn\.o_proj$" in plan.ignore
    assert {tensor.scheme for tensor in plan.tensors if tensor.name == "model.layers.0.self_attn.o_proj.weight"} == {"w4a16"}
