"""vLLM's GPU loaders, replayed for families without a recipe: hollow at true widths, and small with real weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import hollow
import hollow_gpt_oss
import pytest
from serving_interpreter import with_our_plugin
from small_models import TINY, as_published, make_tiny_model

from assay.recipes.families import family_of
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan
from assay.records.preflight.replay import Replay
from assay_evaluate.serving.replay import Candidate, PlannedCheckpoint, planned, replay
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.fits import fit_on
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import stored_in

pytestmark = [pytest.mark.slow, pytest.mark.serve]

PROFILES = ("8xh200", "8xb200")
LAYERS = {
    "qwen3.5-35b-a3b": 4, "nemotron-3-nano": 3, "nemotron-3-super": 3, "deepseek-v4-flash": 3, "deepseek-v4-pro": 3,
}  # fmt: skip
"""One layer of each kind; of the others two do."""


class Case(NamedTuple):
    """ranks: tensor parallelism. precisions: that fit on so many ranks. target, draft: classes of vLLM on NVIDIA's GPUs."""

    ranks: int
    precisions: tuple[str, ...]
    target: str
    draft: str | None


CASES = {
    "glm-4.7-flash": Case(
        2, ("w4a16", "fp8", "nvfp4a16"), "vllm.model_executor.models.glm4_moe_lite.Glm4MoeLiteForCausalLM",
        "vllm.model_executor.models.glm4_moe_lite_mtp.Glm4MoeLiteMTP",
    ),
    "deepseek-v3.2": Case(
        8, ("w4a16", "fp8", "nvfp4a16"), "vllm.models.deepseek_v32.nvidia.model.DeepseekV32ForCausalLM",
        "vllm.models.deepseek_v32.nvidia.mtp.DeepseekV32MTP",
    ),
    "step-3.5-flash": Case(
        2, ("w4a16", "fp8", "nvfp4a16"), "vllm.model_executor.models.step3p5.Step3p5ForCausalLM", None,
    ),
    "mimo-v2-flash": Case(
        2, ("w4a16", "fp8", "nvfp4a16"), "vllm.model_executor.models.mimo_v2.MiMoV2FlashForCausalLM",
        "vllm.model_executor.models.mimo_v2_mtp.MiMoV2MTP",
    ),
    "nemotron-3-nano": Case(
        1, ("w4a16-g64", "fp8-channel", "nvfp4a16"), "vllm.model_executor.models.nemotron_h.NemotronHForCausalLM", None
    ),
    "nemotron-3-super": Case(
        1, ("w4a16-g32", "fp8-channel", "nvfp4a16", "w4a16-mtp"), "vllm.model_executor.models.nemotron_h.NemotronHForCausalLM",
        "vllm.model_executor.models.nemotron_h_mtp.NemotronHMTP",
    ),
    "kimi-k2-thinking": Case(
        8, ("w4a16", "w4a16-g32", "fp8", "nvfp4a16"), "vllm.model_executor.models.deepseek_v2.DeepseekV3ForCausalLM", None
    ),
    "minimax-m2": Case(
        4, ("w4a16", "w4a16-fp8-attention", "w4a16-experts", "nvfp4a16"),
        "vllm.model_executor.models.minimax_m2.MiniMaxM2ForCausalLM", None
    ),
    "qwen3.5-35b-a3b": Case(
        4, ("w4a16", "w4a16-fp8-attention", "w4a16-mtp", "nvfp4a16"),
        "vllm.model_executor.models.qwen3_5.Qwen3_5MoeForConditionalGeneration",
        "vllm.model_executor.models.qwen3_5_mtp.Qwen3_5MoeMTP",
    ),
    "kimi-k2.5": Case(
        8, ("w4a16-fp8-attention", "w4a16-g32", "nvfp4a16"),
        "vllm.model_executor.models.kimi_k25.KimiK25ForConditionalGeneration", None
    ),
    "ernie-4.5-21b": Case(
        4, ("w4a16", "w4a16-fp8-attention", "w4a16-mtp", "nvfp4a16"),
        "vllm.model_executor.models.ernie45_moe.Ernie4_5_MoeForCausalLM", "vllm.model_executor.models.ernie_mtp.ErnieMTP",
    ),
    "deepseek-v4-flash": Case(
        4, ("w4a16", "fp8", "nvfp4a16", "w4a16-fp8-attention", "w4a16-mtp", "mxfp8"),
        "vllm.models.deepseek_v4.nvidia.model.DeepseekV4ForCausalLM", "vllm.models.deepseek_v4.nvidia.mtp.DeepSeekV4MTP",
    ),
    "deepseek-v4-pro": Case(
        8, ("w4a16", "nvfp4a16"), "vllm.models.deepseek_v4.nvidia.model.DeepseekV4ForCausalLM",
        "vllm.models.deepseek_v4.nvidia.mtp.DeepSeekV4MTP",
    ),
}  # fmt: skip


MADE = TINY.keys() - {"kimi-k2.5"}
"""Small models with weights. Kimi-K2.5's tower vLLM builds at its true size, whatever config.json says (`vt_hidden_size`)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Replay]:
    """`MODEL WHAT PROFILE` or `gpt-oss CASE` -> record. One process for each profile."""
    interpreter, made = with_our_plugin(folder), list(checkpoints(folder))
    cases = []
    for name in PROFILES:
        recipe = load_recipe(ProfileRecipe, name)
        for model, what, ranks, checkpoint in made:
            if what == "made" and name != PROFILES[0]:
                continue
            flags = {**recipe.vllm, "tensor-parallel-size": ranks, "max-model-len": 65_536}
            profile = recipe.model_copy(update={"interpreter": interpreter, "vllm": flags})
            serving = Serving(num_speculative_tokens=1 if CASES[model].draft else None)
            cases.append(Candidate(f"{model} {what} {name}", checkpoint, profile, serving))
    drafting = next(one for one in cases if one.name == f"step-3.5-flash w4a16 {PROFILES[0]}")
    cases.append(replace(drafting, name="step-3.5-flash drafting", serving=Serving(num_speculative_tokens=1)))
    plan = plan_of(open_checkpoint(folder / "deepseek-v4-flash"), "mxfp4")
    for name in PROFILES:
        experts = next(one for one in cases if one.name == f"deepseek-v4-flash w4a16 {name}")
        on = f"deepseek-v4-flash mxfp4 {name}"
        cases.append(replace(experts, name=on, checkpoint=planned(plan, config_json(plan))))
    one_rank = next(one for one in cases if one.name == f"nemotron-3-nano source {PROFILES[0]}")
    for name, checkpoint in hollow_gpt_oss.checkpoints(folder / "gpt-oss").items():
        cases.append(replace(one_rank, name=f"gpt-oss {name}", checkpoint=checkpoint))
    return {record.checkpoint: record for record in replay(cases)}


def checkpoints(folder: Path) -> Iterator[tuple[str, str, int, Path | PlannedCheckpoint]]:
    """(model, what, ranks, checkpoint): sources and what is planned at true widths, and what was made of small ones."""
    for model, case in CASES.items():
        source = hollow.hollow_model(folder / model, model, layers=LAYERS.get(model, 2), dense=1)
        yield model, "source", case.ranks, source
        opened = open_checkpoint(source)
        for precision in case.precisions:
            plan = plan_of(opened, precision)
            yield model, precision, case.ranks, planned(plan, config_json(plan))
        if model in MADE:
            tiny = make_tiny_model(folder / f"plain-{model}", model)
            tiny = as_published(tiny, folder / f"tiny-{model}", model)
            yield model, "made", 1, quantized(open_checkpoint(tiny), tiny, folder / f"made-{model}")


def plan_of(opened: Checkpoint, precision: str) -> Plan:
    return make_plan(opened, load_recipe(PrecisionRecipe, precision), model="m", family=None)


def quantized(opened: Checkpoint, source: Path, made: Path) -> Path:
    quantize(plan_of(opened, "w4a16"), source, made)
    return made


LOADED = [
    (model, what, profile)
    for model, case in CASES.items()
    for profile in PROFILES
    for what in ("source", *case.precisions, *(["made"] if model in MADE and profile == PROFILES[0] else []))
]
"""What was made has the names and dtypes of what is planned: one GPU is asked about it."""


REFUSED = {("mimo-v2-flash", "8xb200"): "NotImplementedError: FlashAttention does not support fp8 kv-cache on this device."}
"""(model, profile) -> why vLLM 0.32 does not serve it with the profile's KV cache."""


@pytest.mark.parametrize(("model", "what", "profile"), LOADED)
def test_vllm_loads_it_on_every_rank(said: dict[str, Replay], model: str, what: str, profile: str) -> None:
    if (why := REFUSED.get((model, profile))) is not None:
        assert {finding.message for finding in said[f"{model} {what} {profile}"].every_finding} == {why}
        return
    record, case = said[f"{model} {what} {profile}"], CASES[model]
    assert [(finding.kind, finding.where, finding.message) for finding in record.every_finding] == []
    assert (record.outcome, record.asked) == ("PASS", ())
    ranks = 1 if what == "made" else case.ranks
    classes = [case.target] + ([case.draft] if case.draft else [])
    assert [(part.model_class, part.num_ranks) for part in record.parts] == [(name, ranks) for name in classes]


def test_vllm_cannot_draft_with_step_3_5_flash(said: dict[str, Replay]) -> None:
    """Its config class cuts `layer_types` off behind the decoder layers (https://github.com/vllm-project/vllm/issues/40000)."""
    record = said["step-3.5-flash drafting"]
    found = [(finding.kind, finding.where, finding.message) for finding in record.every_finding]
    assert found == [("refused", "model.layers.2.mtp_block", "IndexError: list index out of range")]
    assert [part.model_class for part in record.parts] == [CASES["step-3.5-flash"].target, None]


@pytest.mark.parametrize(
    ("profile", "kernel"), [("8xh200", "MARLIN (MarlinExperts)"), ("8xb200", "CUTLASS (CutlassExpertsMxfp4)")]
)
def test_experts_in_mxfp4(said: dict[str, Replay], profile: str, kernel: str) -> None:
    """Whether CUTLASS multiplies by them is told by compiled code: on Blackwell with 10 in front, not with 12."""
    record = said[f"deepseek-v4-flash mxfp4 {profile}"]
    assert (record.outcome, record.asked) == ("PASS", ())
    assert {row.kernel for row in record.parts[0].modules if row.what == "experts"} == {kernel}


COUNTED_OTHERWISE = {"mimo-v2-flash": 0.27, "qwen3.5-35b-a3b": 0.14, "kimi-k2.5": 0.06, "nemotron-3-super": 0.3}
"""Model -> share by which the count here is off, where layers are few: MTP layers with which vLLM does not draft, towers for
images, which it splits; of Nemotron 3 Super the output head, which its draft loads a second time, is not counted."""


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("profile", PROFILES)
def test_arithmetic_says_what_vllm_says_of_memory(said: dict[str, Replay], folder: Path, model: str, profile: str) -> None:
    """Weights and the KV cache of 65,536 tokens on one GPU. vLLM rounds windows, states and rows up to one page size."""
    if (model, profile) in REFUSED:
        return
    memory, case = said[f"{model} source {profile}"].memory, CASES[model]
    assert memory is not None and memory.kv_cache_bytes is not None and memory.max_model_len == 65_536
    source = open_checkpoint(folder / model)
    stored = stored_in(source, family_of(source.config), "source")
    recipe = load_recipe(ProfileRecipe, profile)
    on = recipe.model_copy(update={"vllm": {**recipe.vllm, "tensor-parallel-size": case.ranks}})
    fit = fit_on(stored, on, Serving(num_speculative_tokens=1 if case.draft else None))
    assert fit.weight_bytes == pytest.approx(memory.weight_bytes, rel=COUNTED_OTHERWISE.get(model, 0.05))
    assert fit.kv_bytes(65_536) == pytest.approx(memory.kv_cache_bytes, rel=0.3 + 2 * COUNTED_OTHERWISE.get(model, 0))


def test_what_vllm_takes_of_gpt_oss(said: dict[str, Replay]) -> None:
    """INT4 it takes under names that no other tool writes; `weight_shape` has no way in, and is read nowhere. FP8 it wants
    transposed, and has no place for biases."""
    records = {name: said[f"gpt-oss {name}"] for name in hollow_gpt_oss.CASES}
    found = {name: (record.outcome, [finding.message for finding in record.every_finding]) for name, record in records.items()}
    experts = "model.layers.{}.mlp.experts.routed_experts."
    assert found == {
        "as published": ("PASS", []),
        "int4": (
            "FAIL",
            [
                f"not initialized from the checkpoint: {experts.format(0)}w13_weight_packed, "
                f"{experts.format(0)}w2_weight_packed, {experts.format(1)}w13_weight_packed and 1 more"
            ],
        ),
        "int4, vLLM's names": ("PASS", []),
        "fp8, vLLM's names": (
            "FAIL",
            ["RuntimeError: The size of tensor a (2880) must match the size of tensor b (5760) at non-singleton dimension 1"],
        ),
    }
