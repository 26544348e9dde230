"""vLLM's GPU loaders, replayed on true shapes: what is whole loads on every rank, what is broken is named with what to do.

vLLM, its classes for GPUs and our loader are real; the checkpoints are hollow: true widths, few layers and experts, no data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hollow
import pytest
from serving_interpreter import with_our_plugin

from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Replay
from assay_evaluate.serving.replay import Candidate, PlannedCheckpoint, planned, replay
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.fits import fit_on
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import stored_by

pytestmark = [pytest.mark.slow, pytest.mark.serve]

MODELS = {"glm-5": 8, "glm-4.7": 4, "deepseek-v3": 8, "qwen3-30b-a3b": 2, "qwen3-next-80b-a3b": 4}
"""A model of each family -> the most tensor-parallel ranks on which its W4A16 loads."""
CALIBRATED = [
    ("glm-4.7", "fp8-kv", "8xh200"), ("qwen3-next-80b-a3b", "fp8-kv", "8xh200"), ("glm-4.7", "fp8-static", "8xh200"),
    ("glm-5", "fp8-static", "8xh200"), ("glm-4.7", "nvfp4-calibrated", "8xb200"), ("glm-5", "nvfp4-calibrated", "8xb200"),
    ("glm-4.7", "w4a16-gptq", "8xh200"), ("deepseek-v3", "w4a16-awq", "8xh200"), ("glm-5", "w4a16-fp8-attention", "8xh200"),
    ("glm-4.7", "nvfp4-fp8-attention", "8xb200"), ("glm-4.7", "w4a16-mtp", "8xh200"),
]  # fmt: skip
"""(model, precision, profile): with scales of activations or of the KV cache, weights that text decides, mixes, and a quantized
MTP block."""
MTP_EXPERT = "model.layers.4.mlp.experts.2.down_proj.weight"

MORE = {"stray": "model.layers.1.stray.weight", "one expert more": "model.layers.1.mlp.experts.4.gate_proj.weight_packed"}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_our_plugin(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {model: hollow.hollow_model(folder / model, model) for model in MODELS}


def profile(interpreter: str, name: str = "8xh200", ranks: int = 8, **flags: Any) -> ProfileRecipe:
    recipe = load_recipe(ProfileRecipe, name)
    flags = {**recipe.vllm, "tensor-parallel-size": ranks, "max-model-len": 4096, **flags}
    return recipe.model_copy(update={"interpreter": interpreter, "vllm": flags})


def quantized(source: Path, precision: str) -> PlannedCheckpoint:
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="m", family=None)
    return planned(plan, config_json(plan))


def fp8_release(source: Path) -> PlannedCheckpoint:
    """The source as its FP8 release stores it; what is on disk is told from names."""
    config = json.loads((source / "config.json").read_text())
    shapes, dtypes = hollow.fp8_blocks((name, header.shape) for name, header in open_checkpoint(source).tensors.items())
    tensors = {name: (dtypes.get(name, hollow.dtype_of(name)), shape) for name, shape in shapes}
    return PlannedCheckpoint({**config, "quantization_config": hollow.FP8_BLOCKS}, {"model.safetensors": tensors})


def without(checkpoint: PlannedCheckpoint, *names: str) -> PlannedCheckpoint:
    shards = {s: {n: header for n, header in tensors.items() if n not in names} for s, tensors in checkpoint.shards.items()}
    return replace(checkpoint, shards=shards)


def with_ignore(checkpoint: PlannedCheckpoint, ignore: list[str]) -> PlannedCheckpoint:
    config = json.loads(json.dumps(checkpoint.config))
    config["quantization_config"]["ignore"] = ignore
    return replace(checkpoint, config=config)


@pytest.fixture(scope="module")
def said(interpreter: str, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replay]:
    """Case -> record. One process for all."""
    cases = [*whole(interpreter, sources), *broken(interpreter, sources, tmp_path_factory.mktemp("cut"))]
    return {record.checkpoint: record for record in replay(cases)}


def whole(interpreter: str, sources: dict[str, Path]) -> Iterator[Candidate]:
    for model, ranks in MODELS.items():
        serving, on = load_recipe(ModelRecipe, model).serving, profile(interpreter, ranks=ranks)
        yield Candidate(f"{model} source", sources[model], on, serving)
        for precision in ("w4a16", "nvfp4a16"):
            yield Candidate(f"{model} {precision}", quantized(sources[model], precision), on, serving)
    for model, precision, machine in CALIBRATED:
        serving, on = load_recipe(ModelRecipe, model).serving, profile(interpreter, machine, 2)
        yield Candidate(f"{model} {precision}", quantized(sources[model], precision), on, serving)
    glm5 = load_recipe(ModelRecipe, "glm-5").serving
    yield Candidate("glm-5 FP8", fp8_release(sources["glm-5"]), profile(interpreter), glm5)
    two, qwen3 = profile(interpreter, ranks=2), load_recipe(ModelRecipe, "qwen3-30b-a3b").serving
    alone = quantized(hollow.hollow_model(sources["glm-5"].parent / "alone", "qwen3.5-35b-a3b-text"), "w4a16")
    yield Candidate("without its wrapper", alone, profile(interpreter, ranks=4), Serving(num_speculative_tokens=1))
    untied = quantized(sources["qwen3-30b-a3b"], "w4a16")
    yield Candidate("head though tied", replace(untied, config={**untied.config, "tie_word_embeddings": True}), two, qwen3)
    experts = profile(interpreter, ranks=4, **{"enable-expert-parallel": True})
    yield Candidate("experts apart", quantized(sources["glm-5"], "w4a16"), experts, glm5)


def broken(interpreter: str, sources: dict[str, Path], folder: Path) -> Iterator[Candidate]:
    glm5, glm47, qwen3 = (load_recipe(ModelRecipe, name).serving for name in ("glm-5", "glm-4.7", "qwen3-30b-a3b"))
    on = profile(interpreter, ranks=2)
    w4a16 = quantized(sources["glm-5"], "w4a16")
    ignore = list(w4a16.config["quantization_config"]["ignore"])
    yield Candidate("groups", quantized(sources["glm-4.7"], "w4a16"), profile(interpreter), glm47)
    yield Candidate("blocks", quantized(sources["glm-4.7"], "fp8"), profile(interpreter), glm47)
    yield Candidate("expert groups", quantized(sources["qwen3-30b-a3b"], "w4a16"), profile(interpreter, ranks=4), qwen3)
    air = hollow.hollow_model(folder / "air", "glm-4.5-air", layers=2, dense=1)
    yield Candidate("scales", quantized(air, "nvfp4a16"), profile(interpreter), glm47)
    cached = quantized(sources["glm-4.7"], "fp8-kv")
    yield Candidate("cache scale", without(cached, "model.layers.1.self_attn.k_scale"), on, glm47)
    yield Candidate("MTP expert", without(w4a16, MTP_EXPERT), on, glm5)
    yield Candidate("head", without(w4a16, "lm_head.weight"), on, glm5)
    yield Candidate("half fused", with_ignore(w4a16, [*ignore, r"re:.*\.q_a_proj$"]), on, glm5)
    yield Candidate("ignored experts", with_ignore(w4a16, [*ignore, r"re:.*\.mlp\.experts\..*"]), on, glm5)
    yield Candidate("forgotten MTP", with_ignore(w4a16, [pattern for pattern in ignore if "layers" not in pattern]), on, glm5)
    for name, tensor in MORE.items():
        with_one_more = quantized(sources["qwen3-30b-a3b"], "w4a16")
        more = {**with_one_more.shards, "more.safetensors": {tensor: ("BF16", (768, 2048))}}
        yield Candidate(name, replace(with_one_more, shards=more), on, qwen3)
    cut = hollow.hollow_model(folder / "glm-5", "glm-5")
    with (cut / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    yield Candidate("cut", cut, on, glm5)
    yield Candidate("tool parser", w4a16, on, glm5.model_copy(update={"tool_call_parser": "glm48"}))
    yield Candidate("reasoning parser", w4a16, on, glm5.model_copy(update={"reasoning_parser": "glm48"}))
    yield Candidate("template", w4a16, on, glm5.model_copy(update={"vllm": {"chat-template": "nowhere/template.jinja"}}))
    yield Candidate("int8", quantized(sources["glm-4.7"], "w8a8"), profile(interpreter, "8xb200", 2), glm47)
    yield Candidate("arguments", w4a16, profile(interpreter, **{"kv-cache-dtype": "fp7"}), glm5)
    yield Candidate("pieces of context", w4a16, profile(interpreter, ranks=2, **{"decode-context-parallel-size": 2}), glm5)


def findings(record: Replay) -> list[tuple[str, str | None, tuple[int, ...]]]:
    return [(finding.kind, finding.where, finding.ranks) for finding in record.every_finding]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("what", ["source", "w4a16", "nvfp4a16"])
def test_a_model_of_each_family_loads_on_every_rank(said: dict[str, Replay], model: str, what: str) -> None:
    record = said[f"{model} {what}"]
    assert findings(record) == []
    assert (record.outcome, record.asked) == ("PASS", ())
    drafts = [] if model == "qwen3-30b-a3b" else ["draft"]
    assert [(part.part, part.num_ranks) for part in record.parts] == [(part, MODELS[model]) for part in ("target", *drafts)]


@pytest.mark.parametrize(("model", "precision", "_"), CALIBRATED)
def test_calibrated_and_mixed_precisions_are_taken(said: dict[str, Replay], model: str, precision: str, _: str) -> None:
    record = said[f"{model} {precision}"]
    assert (findings(record), record.outcome) == ([], "PASS")


def test_a_head_that_is_stored_though_tied_is_loaded(said: dict[str, Replay]) -> None:
    """vLLM finds it in the files (https://github.com/vllm-project/vllm/pull/51665); of a plan there are none yet."""
    assert findings(said["head though tied"]) == []


def test_the_language_model_of_qwen35_alone(said: dict[str, Replay]) -> None:
    record = said["without its wrapper"]
    assert findings(record) == []
    assert [part.model_class.rpartition(".")[2] for part in record.parts] == ["Qwen3_5MoeForCausalLM", "Qwen3_5MoeMTP"]


def test_a_cache_of_which_one_scale_is_missing_is_refused(said: dict[str, Replay]) -> None:
    """vLLM itself takes 1 for it in silence."""
    record = said["cache scale"]
    assert record.outcome == "FAIL"
    assert "1 of 8 scales of the KV cache are not in the checkpoint, first model.layers.1.self_attn.attn.k_scale" in str(
        [finding.message for finding in record.every_finding]
    )


def test_sources_are_those_of_the_cuda_wheel(said: dict[str, Replay]) -> None:
    """The two that differ are asked for the version of the distribution only."""
    record = said["glm-5 w4a16"]
    assert record.cuda_wheel == "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert record.different_sources == ("_version.py", "platforms/__init__.py")


def test_model_classes_are_those_for_nvidia(said: dict[str, Replay]) -> None:
    assert [part.model_class for part in said["glm-5 w4a16"].parts] == [
        "vllm.models.deepseek_v32.nvidia.model.DeepseekV32ForCausalLM", "vllm.models.deepseek_v32.nvidia.mtp.DeepseekV32MTP",
    ]  # fmt: skip


def test_every_rank_loads_a_layer_of_each_kind(said: dict[str, Replay]) -> None:
    """GLM-5: dense layers and layers with experts; Qwen3-Next: linear and full attention; the draft has one layer."""
    layers = {name: [part.layers for part in said[f"{name} w4a16"].parts] for name in ("glm-5", "qwen3-next-80b-a3b")}
    assert layers == {
        "glm-5": [("model.layers.0", "model.layers.3"), ("model.layers.4",)],
        "qwen3-next-80b-a3b": [("model.layers.0", "model.layers.3"), ("mtp.layers.0",)],
    }


def test_what_vllm_dequantizes_while_it_loads_is_no_disagreement(said: dict[str, Replay]) -> None:
    """`indexer.wk` of an FP8 release goes into a plain `wk_weights_proj`."""
    assert findings(said["glm-5 FP8"]) == []
    methods = {(row.scheme, row.method) for row in said["glm-5 FP8"].parts[0].modules if row.what == "linear"}
    assert methods == {("quantized", "Fp8LinearMethod"), (None, "UnquantizedLinearMethod")}


def test_experts_apart(said: dict[str, Replay]) -> None:
    assert findings(said["experts apart"]) == []
    assert [part.num_ranks for part in said["experts apart"].parts] == [4, 4]


def test_groups_that_do_not_divide_what_a_rank_holds(said: dict[str, Replay]) -> None:
    everywhere = tuple(range(8))
    assert findings(said["groups"]) == [("group size", "model.layers.3.mlp.shared_experts.down_proj", everywhere)]
    assert said["groups"].every_finding[0].remedy == (
        "one rank holds 192, in groups of 128: 2 times fewer tensor-parallel ranks, or groups of at most 64, or this role in "
        "16 bits"
    )
    assert findings(said["blocks"]) == [("group size", "model.layers.3.mlp.shared_experts.gate_up_proj", everywhere)]
    assert findings(said["expert groups"]) == [("group size", "model.layers.0.mlp.experts", (0, 1, 2, 3))]


def test_scales_that_are_cut_in_silence(said: dict[str, Replay]) -> None:
    """vLLM rounds 85.5 groups down, and raises nothing."""
    module = "model.layers.0.mlp.down_proj"
    assert findings(said["scales"]) == [("group size", module, tuple(range(8)))]
    assert said["scales"].every_finding[0].message == (
        f"{module}: a rank holds 684 of 5,472 columns as stored and 85 of 684 scales of each row, so a group is cut; vLLM "
        "raises nothing, and applies scales of others"
    )


def test_what_is_missing(said: dict[str, Replay]) -> None:
    assert findings(said["MTP expert"]) == [("missing expert", MTP_EXPERT, (0, 1))] * 2, "target and draft read that shard"
    assert findings(said["head"]) == [("missing tensor", "lm_head.weight", (0, 1))]


def test_ignore_lists_that_do_not_say_what_was_done(said: dict[str, Replay]) -> None:
    assert findings(said["half fused"]) == [("ignore list", "model.layers.0.self_attn.fused_qkv_a_proj", (0, 1))]
    assert findings(said["ignored experts"]) == [("quantization", "model.layers.3.mlp.experts.0.down_proj", (0, 1))]
    assert said["ignored experts"].every_finding[0].message == (
        "model.layers.3.mlp.experts.0.down_proj is stored as w4a16, vLLM holds model.layers.3.mlp.experts.routed_experts with "
        "UnquantizedFusedMoEMethod"
    )
    assert findings(said["forgotten MTP"]) == [("quantization", "model.layers.4.self_attn.q_a_proj", (0, 1))]


def test_tensors_that_nothing_takes(said: dict[str, Replay]) -> None:
    assert findings(said["stray"]) == [("unknown tensor", MORE["stray"], (0, 1))]
    assert findings(said["one expert more"]) == [("unused tensor", "model.layers.1.mlp.experts.4.gate_proj", ())]


def test_a_shard_that_was_cut_short(said: dict[str, Replay]) -> None:
    assert findings(said["cut"]) == [("shard", "model-00002-of-00003.safetensors", ())]


def test_what_vllm_does_not_take_and_what_is_not_replayed(said: dict[str, Replay]) -> None:
    assert findings(said["arguments"]) == [("arguments", None, ())]
    assert findings(said["pieces of context"]) == [("unknown", None, ())]
    assert said["pieces of context"].outcome == "UNKNOWN"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tool parser", "invalid tool call parser: glm48; vLLM has"),
        ("reasoning parser", "invalid reasoning parser: glm48; vLLM has"),
        ("template", "nowhere/template.jinja"),
    ],
)
def test_what_the_server_refuses_before_its_engine_starts(said: dict[str, Replay], what: str, words: str) -> None:
    assert findings(said[what]) == [("arguments", None, ())]
    assert words in said[what].every_finding[0].message


def test_a_kernel_that_is_chosen_and_refuses_the_gpu(said: dict[str, Replay]) -> None:
    """vLLM's oracle takes CUTLASS for INT8 on Blackwell, and the compiled code raises at the first step."""
    (finding,) = said["int8"].every_finding
    assert (finding.kind, finding.where, said["int8"].outcome) == ("kernel", "model.layers.0.self_attn.qkv_proj", "FAIL")
    assert "Int8 not supported on SM100" in finding.message


def test_what_one_gpu_holds(said: dict[str, Replay], sources: dict[str, Path]) -> None:
    """vLLM's own parameters and KV cache for one sequence, against the arithmetic that needs no vLLM; target and draft."""
    on = load_recipe(ProfileRecipe, "8xh200")
    for model, ranks in MODELS.items():
        serving, memory = load_recipe(ModelRecipe, model).serving, said[f"{model} w4a16"].memory
        assert memory is not None and memory.kv_cache_bytes is not None and memory.max_model_len == 4096, model
        plan = make_plan(open_checkpoint(sources[model]), load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
        flags = {**on.vllm, "tensor-parallel-size": ranks}
        fit = fit_on(stored_by(plan), on.model_copy(update={"vllm": flags}), serving)
        assert fit.weight_bytes == pytest.approx(memory.weight_bytes, rel=0.03), model
        assert fit.kv_bytes(4096) == pytest.approx(memory.kv_cache_bytes, rel=0.02, abs=10e6), model


def chosen(record: Replay) -> set[tuple[str, str | None, str]]:
    return {(row.what, row.scheme, row.kernel) for row in record.parts[0].modules if row.kernel is not None}


@pytest.mark.full_count
def test_a_model_at_full_count(interpreter: str, said: dict[str, Replay], tmp_path: Path) -> None:
    """GLM-5: 78 + 1 layers, 256 experts, 282 shards whose boundaries run through layers; far less memory than weights."""
    source = hollow.hollow_glm5(tmp_path / "glm-5", own_indexers=True)
    serving = load_recipe(ModelRecipe, "glm-5").serving
    (record,) = replay([Candidate("glm-5", quantized(source, "w4a16"), profile(interpreter), serving)])
    assert (findings(record), record.num_tensors, record.num_shards) == ([], 176_318, 282)
    assert [part.layers for part in record.parts] == [("model.layers.0", "model.layers.3"), ("model.layers.78",)]
    assert chosen(record) == chosen(said["glm-5 w4a16"]), "as with four layers and four experts"
    assert record.max_memory_bytes < 4e9


def test_no_gpu_no_replay(interpreter: str, sources: dict[str, Path]) -> None:
    serving = load_recipe(ModelRecipe, "glm-5").serving
    on = load_recipe(ProfileRecipe, "cpu-emulated")
    with pytest.raises(AssayError, match=r"profile cpu-emulated: names no GPU"):
        replay([Candidate("x", sources["glm-5"], on, serving)])
    odd = profile(interpreter)
    odd = odd.model_copy(update={"hardware": odd.hardware.model_copy(update={"gpu": "A100"})})
    with pytest.raises(AssayError, match=r"the replay knows H100, H200, B200, RTX PRO 6000, not A100"):
        replay([Candidate("x", sources["glm-5"], odd, serving)])
