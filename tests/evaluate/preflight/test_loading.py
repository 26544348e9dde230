"""vLLM's loaders in a preflight: one line for what loads, one for each kind of thing that stands against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hollow
import pytest

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Finding, Modules, RankMemory, Replay, ReplayedPart
from assay.records.preflight.report import Check
from assay_evaluate.preflight.loading import check_loading, checks_of, too_large
from assay_evaluate.serving.replay import Candidate, PlannedCheckpoint, planned
from assay_evaluate.serving.server import find_interpreter
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

REPOSITORY = Path(__file__).resolve().parents[3]
LINEAR = Modules(
    what="linear", scheme="w4a16", method="M", kernel="MacheteLinearKernel", why=None, num_modules=3, example="model.x"
)
REPLAY = Replay(
    checkpoint="w4a16", profile="8xh200", gpu="H200", vllm="0.32.0", cuda_wheel="w", different_sources=(), flags={},
    undrafted=None, num_tensors=1, num_shards=1, findings=(), asked=(), cpu_s=1.0, max_memory_bytes=1,
    parts=(
        ReplayedPart(part="target", model_class="C", num_ranks=8, layers=(), modules=(LINEAR,), findings=()),
        ReplayedPart(part="draft", model_class="D", num_ranks=8, layers=(), modules=(LINEAR,), findings=()),
    ),
)  # fmt: skip


def finding(**changes: Any) -> Finding:
    return Finding(**{"kind": "refused", "where": None, "message": "no", "remedy": None, "count": 1, "ranks": (), **changes})


def test_what_loads_is_one_line() -> None:
    assert list(checks_of(REPLAY)) == [
        Check(
            check="loading", subject="w4a16", outcome="PASS",
            detail="vLLM 0.32.0 loads target and draft on 8 ranks; modules: linear w4a16 MacheteLinearKernel (6)",
        )
    ]  # fmt: skip


def test_each_kind_is_one_line_with_what_to_do() -> None:
    findings = (
        finding(kind="refused", message="no such layer", where="model.x", count=2, ranks=(0, 1)),
        finding(kind="refused", message="another"),
        finding(kind="unknown", message="cannot tell"),
        finding(kind="shard", where="a.safetensors", message="a.safetensors is cut short"),
    )
    assert list(checks_of(REPLAY.model_copy(update={"findings": findings}))) == [
        Check(
            check="loading", subject="w4a16", outcome="FAIL",
            detail="refused: model.x: no such layer (and 2 more), on rank 0, 1",
            remedy="if vLLM refuses the unquantized model in the same words, correct the checkpoint or take a vLLM of your own "
            "(`interpreter:` of the profile); if not, take another profile or another precision",
        ),
        Check(check="loading", subject="w4a16", outcome="UNKNOWN", detail="unknown: cannot tell"),
        Check(
            check="loading", subject="w4a16", outcome="FAIL", detail="shard: a.safetensors is cut short",
            remedy="download the shard again",
        ),
    ]  # fmt: skip


def test_what_is_too_large_by_vllms_own_account() -> None:
    """A million tokens beside the reference of GLM-5.2. Nothing is said without figures."""
    memory = RankMemory(weight_bytes=96_000_000_000, kv_cache_bytes=57_400_000_000, max_model_len=1_048_576)
    h200, large = load_recipe(ProfileRecipe, "8xh200"), REPLAY.model_copy(update={"memory": memory})
    assert list(too_large(large, h200)) == [
        Check(
            check="memory", subject="w4a16", outcome="FAIL",
            detail="by vLLM's own account each GPU holds 89.4 GiB of weights, and one sequence of 1,048,576 tokens 53.5 GiB of "
            "KV cache, and 125.7 GiB are usable, of which activations and CUDA graphs take their part, too",
            remedy="lower `max-model-len` (`serving:` of the model's recipe, or the profile), or take a profile with more "
            "memory",
        )
    ]  # fmt: skip
    assert "; a GPU holds 89.4 GiB of weights, and one sequence of 1,048,576 tokens 53.5 GiB of KV cache; modules: " in (
        next(checks_of(large)).detail
    )
    silent = h200.model_copy(update={"hardware": h200.hardware.model_copy(update={"memory_bytes_each": None})})
    small = large.model_copy(update={"memory": memory.model_copy(update={"kv_cache_bytes": 30_000_000_000})})
    assert [*too_large(REPLAY, h200), *too_large(large, silent), *too_large(small, h200)] == []


def test_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_evaluate.preflight.loading.find_interpreter", lambda profile: None)
    assert list(check_loading([], load_recipe(ProfileRecipe, "8xh200"), print)) == [
        Check(
            check="loading", subject=None, outcome="UNKNOWN",
            detail="no serving environment here, whose vLLM would be asked", remedy="make setup",
        )
    ]  # fmt: skip
    (result,) = check_loading([], load_recipe(ProfileRecipe, "cpu-emulated"), print)
    assert (result.outcome, result.remedy) == ("PASS", None)


# ------------------------------------------------------------------------------------------------ vLLM itself
@pytest.mark.slow
@pytest.mark.serve
def test_broken_checkpoints_in_vllms_words(tmp_path: Path) -> None:
    """Groups that ranks cannot share, an MTP expert that is missing, an ignore list that names one member of a fused weight."""
    on = eight_h200(tmp_path)
    glm5, glm47 = (load_recipe(ModelRecipe, name).serving for name in ("glm-5", "glm-4.7"))
    w4a16 = quantized(hollow.hollow_model(tmp_path / "glm-5", "glm-5"))
    gone = "model.layers.4.mlp.experts.2.down_proj.weight"
    shards = {shard: {n: h for n, h in tensors.items() if not n.startswith(gone)} for shard, tensors in w4a16.shards.items()}
    config = json.loads(json.dumps(w4a16.config))
    config["quantization_config"]["ignore"].append(r"re:.*\.q_a_proj$")
    cases = [
        Candidate("whole", w4a16, on, glm5),
        Candidate("MTP expert", replace(w4a16, shards=shards), on, glm5),
        Candidate("half fused", replace(w4a16, config=config), on, glm5),
        Candidate("groups", quantized(hollow.hollow_model(tmp_path / "glm-4.7", "glm-4.7")), on, glm47),
    ]
    result = list(check_loading(cases, on, lambda line: None))
    assert [(check.subject, check.outcome) for check in result] == [
        ("whole", "PASS"), ("MTP expert", "FAIL"), ("half fused", "FAIL"), ("groups", "FAIL"),
    ]  # fmt: skip
    assert [(check.detail, check.remedy) for check in result] == [
        (
            "vLLM 0.32.0 loads target and draft on 8 ranks; a GPU holds 0.9 GiB of weights, and one sequence of 4,096 tokens "
            "0.0 GiB of KV cache; modules: attention FLASHMLA_SPARSE (5), experts TRITON (TritonExperts) (1), experts w4a16 "
            "MARLIN (MarlinExperts) (1), linear w4a16 MacheteLinearKernel (20), linear w4a16 MarlinLinearKernel (4)",
            None,
        ),
        (
            f"missing expert: ValueError: experts are incomplete in the checkpoint: {gone} missing (and 1 more), on every rank",
            "make the checkpoint again from a whole source",
        ),
        (
            "ignore list: ValueError: Found different quantization schemes for the shards of "
            "model.layers.0.self_attn.fused_qkv_a_proj. vLLM requires all to use the same scheme., on every rank",
            "the ignore list must name all members or none",
        ),
        (
            "group size: ValueError: Weight input_size_per_partition=192 for layer "
            "'model.layers.3.mlp.shared_experts.down_proj' is not divisible by group_size=128. This happens when "
            "tensor_parallel_size splits the layer input into shards that are not a whole number of quant groups. Consider "
            "reducing tensor_parallel_size., on every rank",
            "one rank holds 192, in groups of 128: 2 times fewer tensor-parallel ranks, or groups of at most 64, or this role "
            "in 16 bits",
        ),
    ]


def eight_h200(folder: Path) -> ProfileRecipe:
    """With the plugin of this checkout."""
    real = find_interpreter(None)
    assert real is not None, "no .venv-serve here: run `make setup`"
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY}/evaluate exec {real.absolute()} "$@"\n')
    path.chmod(0o755)
    profile = load_recipe(ProfileRecipe, "8xh200")
    return profile.model_copy(update={"interpreter": str(path), "vllm": {**profile.vllm, "max-model-len": 4096}})


def quantized(source: Path) -> PlannedCheckpoint:
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None)
    return planned(plan, config_json(plan))
