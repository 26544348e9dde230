"""What a run costs: counts by hand, rates against what was measured, and what is said where something is not known."""

from __future__ import annotations

from typing import Any

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay_evaluate.diagnosis.probes.planned import Load
from assay_evaluate.preflight.cost import check_cost, cost_of, held_by, rates_on, workload_of
from assay_evaluate.roofline.weights import ServedWeights, served_weights

GLM5_FP8 = ServedWeights(20_000_000_000, 724_000_000_000, 40_000_000_000, 256, 8)
GLM5_W4A16 = ServedWeights(30_000_000_000, 375_000_000_000, 40_000_000_000, 256, 8)
H200 = load_recipe(ProfileRecipe, "8xh200")
CPU = load_recipe(ProfileRecipe, "cpu-emulated")


def suite(**changes: Any) -> SuiteRecipe:
    tasks = [
        {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": 10, "max_tokens": 50},
        {"kind": "needle", "name": "needle", "num_items": 5, "lengths_tokens": [1000, 3000], "max_tokens": 9},
        {
            "kind": "lm_eval",
            "name": "grade",
            "tasks": ["gsm8k_cot_zeroshot"],
            "limit": 100,
            "num_samples": 2,
            "temperature": 1.0,
            "max_tokens": 4096,
        },
    ]
    return SuiteRecipe.model_validate({"schema": 1, "name": "some", "seed": "eval-1", "tasks": tasks, **changes})


def test_requests_and_tokens_are_counted() -> None:
    work = workload_of(suite(), Serving(reasoning_parser="glm45"))
    # 10 sums of 100 tokens, 20 needles of 2,000 on average, 2 x 100 questions of 120; no reply above its budget
    assert work.tasks == Load(10 + 20 + 200, 1_000 + 40_000 + 24_000, 500 + 180 + 240_000)
    assert (work.writing, work.scoring, work.probes, work.unknown) == (Load(), Load(), Load(), ())
    assert work.candidate == work.tasks
    assert work.reference == work.tasks.times(2)


def test_a_reference_answers_all_items_of_a_generated_range() -> None:
    """40 sums, and the first 10 once more; of a candidate 10, or 10 and 40 by halves."""
    sums = {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": {"min": 10, "max": 40}, "max_tokens": 50}
    work = workload_of(suite(tasks=[sums]), Serving())
    assert (work.tasks.num_requests, work.reference.num_requests, work.most.num_requests) == (10, 10 + 40, 40)
    half = workload_of(suite(tasks=[sums]), Serving(), stops={"sums": (0.5, 0.0, 0.5)})
    assert (half.tasks.num_requests, half.reference.num_requests) == (25, 10 + 40)


def test_a_model_that_does_not_think_writes_less() -> None:
    assert workload_of(suite(), Serving()).tasks.output_tokens == 500 + 180 + 200 * 200


def test_texts_are_written_once_and_scored_by_everyone() -> None:
    spec = {"languages": ["en"], "num_documents": 4, "max_tokens": 200, "held_out_documents": 2, "held_out_tokens": 500}
    work = workload_of(suite(divergence=spec), Serving())
    assert work.writing == Load(4, 400, 400)
    assert work.scoring == Load(6, 400 + 400 + 1_000, 6)
    assert work.reference == work.tasks.times(2) + work.writing + work.scoring.times(2)


def test_texts_of_their_own_are_fewer_and_scored_twice() -> None:
    spec = {"languages": ["en"], "num_documents": 40, "max_tokens": 200, "held_out_documents": 2, "held_out_tokens": 500}
    without, work = (workload_of(suite(divergence=spec), Serving(), own_texts=own) for own in (False, True))
    assert without.own == Load()
    assert work.own == Load(24, 2_400, 2_400) + Load(26, 2_400 + 2_400 + 1_000, 26).times(2)
    assert work.candidate == without.candidate + work.own
    assert work.reference == without.reference
    assert workload_of(suite(), Serving(), own_texts=True).own == Load()


def test_one_pass_of_full_on_glm_5() -> None:
    """The prompts by hand: RULER 13 x 8 x 376,832, needles 2 x 50 x 102,400, half of the tools' at 65,536."""
    recipe = load_recipe(ModelRecipe, "glm-5")
    work = workload_of(as_model_asks(load_recipe(SuiteRecipe, "full"), recipe.sampling), recipe.serving)
    assert work.unknown == ()
    once = 400 + 300 + 1319 + 500 + 60 + 198 + 14 * 50 + 541 + 520 + 480
    assert work.tasks.num_requests == once
    assert work.again.num_requests == once  # second replies, in one pass
    assert work.most.num_requests == 2 * 700 + 5 * (1319 + 500 + 60 + 198 + 541) + 14 * 200 + 3 * (520 + 480)
    assert 39.1e6 + 10.2e6 + 15.7e6 < work.tasks.prompt_tokens < 70e6
    assert 10e6 < work.candidate.output_tokens < 30e6


@pytest.mark.parametrize(
    ("weights", "concurrency", "measured"),
    [(GLM5_FP8, 1, 94.4), (GLM5_FP8, 32, 921.4), (GLM5_W4A16, 1, 125.7), (GLM5_W4A16, 32, 828.4)],
)
def test_what_was_measured_on_eight_h200_lies_in_the_range(weights: ServedWeights, concurrency: int, measured: float) -> None:
    """GLM-5.2 with five drafted tokens: https://huggingface.co/canada-quant/GLM-5.2-W4A16-MTP."""
    rates = rates_on(H200.model_copy(update={"concurrency": concurrency}), weights, Serving(num_speculative_tokens=5))
    assert rates is not None
    assert rates.output_tokens_s[0] < measured < rates.output_tokens_s[1]


def test_experts_that_no_token_uses_are_not_read() -> None:
    weights = ServedWeights(100, 1000, 10, 4, 1)
    assert weights.touched_bytes(1) == 100 + 250
    assert weights.touched_bytes(2) == 100 + 1000 * (1 - 0.75**2)
    assert ServedWeights(100, 0, 10, 0, 0).touched_bytes(5) == 100


def test_weights_by_their_names() -> None:
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    stored = [
        ("model.embed_tokens.weight", (1000, 8), 16_000),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8), 128),
        *((expert.format(number), (4, 8), 20) for number in range(4)),
    ]
    config = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    assert served_weights("glm4_moe", config, stored) == ServedWeights(128, 80, 64 + 64, 4, 2)
    unknown_router = served_weights("glm4_moe", {**config, "num_experts_per_tok": None}, stored)
    assert unknown_router == ServedWeights(128, 80, 64 + 128, 0, 0)
    assert held_by(CPU) == 4
    assert held_by(H200) is None
    assert served_weights("glm4_moe", config, stored, bytes_each=4) == ServedWeights(256, 512, 64 + 64, 4, 2)


def test_hours_of_a_checkpoint_and_of_the_run() -> None:
    checks = check_cost(
        suite(), H200, Serving(reasoning_parser="x"), reference="fp8", weights={"fp8": GLM5_FP8, "w4a16": GLM5_W4A16}
    )
    assert [(check.subject, check.outcome) for check in checks] == [("fp8", "PASS"), ("w4a16", "PASS"), (None, "PASS")]
    assert checks[0].detail.startswith(
        "asked twice (its repeat is the noise floor), and writes the texts: 460 requests, 130 k prompt"
    )
    assert checks[1].detail.startswith("asked once: 230 requests, 65 k prompt tokens, 130 k to 450 k output tokens, ")
    assert "2 servers started one after the other: 690 requests" in checks[2].detail
    assert checks[2].detail.count("GPU-hours") == 1


def test_gpu_hours_are_hours_of_all_gpus_and_a_cpu_has_none() -> None:
    load = Load(1, 10**6, 10**6)
    cost = cost_of("fp8", load, GLM5_FP8, H200, Serving())
    assert cost is not None
    assert cost.gpu_hours == (8 * cost.hours[0], 8 * cost.hours[1])
    assert cost.hours[0] < cost.hours[1]
    on_cpu = cost_of("tiny", load, ServedWeights(10**7, 10**7, 3 * 10**6, 8, 2), CPU, Serving())
    assert on_cpu is not None
    assert on_cpu.gpu_hours is None


def test_a_task_of_unknown_length_is_named_and_in_no_sum() -> None:
    task = {"kind": "lm_eval", "name": "mine", "tasks": ["my-task"], "max_tokens": 64}
    asked = suite(tasks=[*suite().model_dump()["tasks"], task])
    last = check_cost(asked, H200, Serving(), reference="fp8", weights={"fp8": GLM5_FP8})[-1]
    assert last.outcome == "UNKNOWN"
    assert "; without mine: how many items it has is not known here" in last.detail


@pytest.mark.parametrize(
    ("hardware", "weights", "why"),
    [
        ({"device": "cuda", "gpu": "MI300X", "num_gpus": 8}, GLM5_FP8, "no rate is known for GPUs called MI300X"),
        ({"device": "cuda", "gpu": "H200", "num_gpus": 8}, None, "the weights of fp8 are not known"),
    ],
)
def test_without_a_speed_there_are_tokens_and_no_hours(
    hardware: dict[str, Any], weights: ServedWeights | None, why: str
) -> None:
    profile = ProfileRecipe.model_validate({"schema": 1, "name": "mine", "hardware": hardware})
    (check,) = check_cost(suite(), profile, Serving(), reference="fp8", weights={"fp8": weights})
    assert check.outcome == "UNKNOWN"
    assert check.detail.endswith(f"hours unknown: {why}")


def test_a_reply_that_cannot_end_before_its_deadline_fails() -> None:
    """GLM-5 on a CPU: not a token a second for each request."""
    (check,) = check_cost(suite(), CPU, Serving(), reference="fp8", weights={"fp8": GLM5_FP8})
    assert (check.subject, check.outcome) == ("fp8", "FAIL")
    assert "a reply of 4,096 tokens, which task grade allows" in check.detail
    assert check.detail.endswith("a request is given up after 1.2 h")
    assert check.remedy == "lower max_tokens in the suite, or `concurrency` in the profile, or take a faster profile"
