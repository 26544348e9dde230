"""Memory of a machine that serves on its CPUs, from true shapes."""

from __future__ import annotations

from typing import Any

import hollow
import pytest

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.report import Check
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import StoredModel, stored_by
from assay_quantize.preflight.memory import check_cpu_memory

EMULATED = load_recipe(ProfileRecipe, "cpu-emulated")
CPU = EMULATED.model_copy(update={"vllm": {**EMULATED.vllm, "max-model-len": 8192}})
GIB = 2**30


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Qwen3-30B-A3B with two experts. 48 layers attend with 4 key-value heads of 128: 192 KiB a token in FP32."""
    source = open_checkpoint(
        hollow.hollow_model(tmp_path_factory.mktemp("qwen") / "source", "qwen3-30b-a3b", layers=48, experts=2)
    )
    return stored_by(make_plan(source, load_recipe(PrecisionRecipe, "w4a16"), model="m", family=None))


def check_of(model: StoredModel, memory: float, profile: ProfileRecipe = CPU, **given: Any) -> Check:
    asked: dict[str, Any] = {"bytes_each": 4, "space": "2", **given}
    return check_cpu_memory("w4a16", model, profile, Serving(), memory_bytes=int(memory * GIB), **asked)


def test_weights_count_as_dequantized(qwen: StoredModel) -> None:
    """Two billion of four bytes each, whatever a checkpoint of W4A16 has."""
    assert check_of(qwen, 12) == Check(
        check="memory", subject="w4a16", outcome="PASS",
        detail="11.4 GiB needed, 12.0 usable in this machine: weights 7.4 (4 bytes each), KV cache 2.0 "
        "(VLLM_CPU_KVCACHE_SPACE), allowed for the rest 2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "outcome", "more"), [(11, "UNKNOWN", "; it fits if the rest takes no more than 1.6"), (9, "FAIL", "")]
)
def test_too_little(qwen: StoredModel, memory: int, outcome: str, more: str) -> None:
    check = check_of(qwen, memory)
    assert (check.outcome, check.detail) == (
        outcome,
        f"11.4 GiB needed, {memory:.1f} usable in this machine: weights 7.4 (4 bytes each), KV cache 2.0 "
        f"(VLLM_CPU_KVCACHE_SPACE), allowed for the rest 2{more}",
    )
    assert check.remedy == (
        "take a machine with more memory, or a profile for GPUs; `dtype: bfloat16` in the profile's `vllm:` takes half of it, "
        "and is slower"
    )
    assert check_of(qwen, memory, bytes_each=2).outcome == "PASS"


@pytest.mark.parametrize("space", ["1", "0", "1.5", "much"])
def test_a_cache_that_holds_no_sequence(qwen: StoredModel, space: str) -> None:
    """8,192 tokens."""
    check = check_of(qwen, 4096, space=space)
    assert (check.outcome, check.detail, check.remedy) == (
        "FAIL",
        f"VLLM_CPU_KVCACHE_SPACE is '{space}': vLLM takes a whole number of GiB, and one sequence of max-model-len 8,192 needs "
        "1.50 GiB of KV cache",
        "set VLLM_CPU_KVCACHE_SPACE to 2 or more in the profile's `environment:`, or lower its max-model-len",
    )


@pytest.mark.parametrize("space", [None, ""])
def test_without_the_variable_the_cache_takes_what_is_left(qwen: StoredModel, space: str | None) -> None:
    check = check_of(qwen, 16, space=space)
    assert (check.outcome, check.detail) == (
        "PASS",
        "10.9 GiB needed, 14.7 usable in this machine: weights 7.4 (4 bytes each), KV cache 1.5 (one sequence of "
        "max-model-len 8,192), allowed for the rest 2",
    )
    assert check_of(qwen, 11.5, space=space).outcome == "UNKNOWN", "0.92 of it"


def test_two_ranks_have_a_cache_each(qwen: StoredModel) -> None:
    two = CPU.model_copy(update={"vllm": {**CPU.vllm, "tensor-parallel-size": 2}})
    assert "KV cache 4.0 (VLLM_CPU_KVCACHE_SPACE), allowed for the rest 4" in check_of(qwen, 12, two).detail


def test_native_kernels_are_not_known(qwen: StoredModel) -> None:
    assert check_of(qwen, 1, bytes_each=None) == Check(
        check="memory", subject="w4a16", outcome="UNKNOWN",
        detail="profile cpu-emulated does not emulate, and how vLLM's kernels for CPUs hold the weights is not known here",
    )  # fmt: skip
