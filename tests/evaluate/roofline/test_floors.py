"""Bytes of a decoding step and floors, against a published table for GLM-5.2 and against arithmetic by hand."""

from __future__ import annotations

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.speed import SpeedRepeat, SpeedRow
from assay_evaluate.roofline.devices import DEVICES
from assay_evaluate.roofline.rows import SHARE, compare_with_roofline, predicted_rows
from assay_evaluate.roofline.weights import ServedWeights, StepWeights, floor_s, step_of, step_weights, tpot_floor_s
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.shipped import ShippedModel, shipped_model
from assay_quantize.plan.stored import is_draft, stored_by

REST = ("attention", "dense_mlp", "shared_expert")
FP8 = dict.fromkeys((*REST, "routed_expert"), "fp8_block")
W4_AND_FP8 = {**FP8, "routed_expert": "w4a16_g64"}
W4_AND_BF16 = {"routed_expert": "w4a16_g64"}
"""The table counts 4.25 bits for a weight of an expert: groups of 64."""
TABLE = {
    # tokens in a step: experts of a layer, GB of FP8, of W4 + BF16, of W4 + FP8, floors in ms on eight H200 of the first two
    1: (8, 41, 48, 30, 1.06, 1.25),
    6: (44, 144, 103, 85, 3.74, 2.68),
    48: (200, 585, 337, 319, 15.2, 8.8),
    192: (255, 741, 420, 402, 19.3, 10.9),
}
"""18.0 billion weights outside the experts, 37.7 million in an expert, 75 layers of 256, 8 of which a token takes."""


@pytest.fixture(scope="module")
def glm() -> ShippedModel:
    return shipped_model("glm-5.2")


def weights_with(glm: ShippedModel, quantize: dict[str, str]) -> StepWeights:
    recipe = load_recipe(PrecisionRecipe, "w4a16").model_dump(mode="json", by_alias=True)
    kept = [role for role in REST if role not in quantize]
    keep = {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router", "indexer", *kept], "fp32": ["router_bias"]}
    mixed = PrecisionRecipe.model_validate({**recipe, "name": "mixed", "scheme": None, "quantize": quantize, "keep": keep})
    stored = glm.whole(stored_by(make_plan(glm.checkpoint, mixed, model="glm-5.2", family=None)))
    target = [(one.name, one.shape, one.num_bytes) for one in stored.served(False).weights]
    draft = [(one.name, one.shape, one.num_bytes) for one in stored.served(True).weights if is_draft(stored, one.name)]
    return step_weights(stored.family, stored.config, target, draft)


@pytest.mark.parametrize("tokens", TABLE)
def test_glm52_reads_what_was_published(glm: ShippedModel, tokens: int) -> None:
    """Within 3 %; W4 + FP8, which has no floor there, within 4 %: our head and routers stay in BF16."""
    experts, fp8_gb, bf16_gb, mixed_gb, fp8_ms, bf16_ms = TABLE[tokens]
    users, drafted = (1, 0) if tokens == 1 else (tokens // 6, 5)
    for quantize, gigabytes, milliseconds in ((FP8, fp8_gb, fp8_ms), (W4_AND_BF16, bf16_gb, bf16_ms)):
        step = step_of(weights_with(glm, quantize), users=users, drafted=drafted)
        assert step.tokens == tokens
        assert step.experts_share * 256 == pytest.approx(experts, abs=0.6)
        assert step.target_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)
        assert 1e3 * floor_s(step.target_bytes, DEVICES["H200"], 8) == pytest.approx(milliseconds, rel=0.03)
    mixed = step_of(weights_with(glm, W4_AND_FP8), users=users, drafted=drafted)
    assert mixed.target_bytes / 1e9 == pytest.approx(mixed_gb, rel=0.04)


def test_drafting_reads_the_block_and_the_head_for_every_drafted_token(glm: ShippedModel) -> None:
    weights = weights_with(glm, FP8)
    assert weights.draft is not None
    head, block = 154_880 * 6144 * 2, 256 * 3 * 6144 * 2048 * 2
    assert weights.draft.expert_bytes == block  # the MTP block stays in BF16
    rest = weights.draft.shared_bytes - head
    attention = 2048 * 6144 + 64 * 256 * 2048 + 576 * 6144 + 64 * 448 * 512 + 6144 * 16384
    projections = 2 * (6144 * 12288 + 3 * 6144 * 2048 + attention)
    indexer_and_router = 2 * (32 * 128 * 2048 + 128 * 6144 + 32 * 6144 + 256 * 6144)
    assert rest == pytest.approx(projections + indexer_and_router, rel=1e-3)  # norms
    step = step_of(weights, users=1, drafted=5)
    assert step.draft_bytes == pytest.approx(5 * (weights.draft.shared_bytes + block * 8 / 256))
    assert step_of(weights, users=1).draft_bytes == 0


WEIGHTS = StepWeights(ServedWeights(1_000_000_000, 16_000_000_000, 10**9, 16, 2), ServedWeights(10**8, 0, 10**8, 0, 0))


def test_a_step_by_hand() -> None:
    """Two tokens of 2 experts in 16 miss an expert with chance (14/16)^2."""
    step = step_of(WEIGHTS, users=1, drafted=1, kv_bytes_each=5e7)
    assert step.experts_share == pytest.approx(1 - (14 / 16) ** 2)
    assert step.num_bytes == pytest.approx(1e9 + 16e9 * (1 - 49 / 64) + 1e8 + 5e7)
    assert tpot_floor_s(step, DEVICES["H100"], 2, 1.5) == pytest.approx(step.num_bytes / (2 * 3.35e12) / 1.5)


def row(tokens_s: float, *, speculation: int | None = 0, acceptance: float | None = None, hardware: str = "1xH100") -> SpeedRow:
    return SpeedRow(
        checkpoint="w4a16", origin="imported", source="s", hardware=hardware, num_gpus=0 if hardware == "a CPU" else 1,
        speculation=speculation, prompts="chat", concurrency=1,
        repeats=(SpeedRepeat(output_tokens_s=tokens_s, acceptance_length=acceptance),),
    )  # fmt: skip


def test_rows_beside_their_floor() -> None:
    """One token alone reads 1e9 + 2e9 bytes: 1,117 tokens/s at most on an H100."""
    most = 3.35e12 / 3e9
    for share, flag in ((1.01, "faster than memory allows"), (0.9, None), (0.04, "far from the roofline")):
        seen = compare_with_roofline(row(share * most), WEIGHTS)
        assert seen is not None
        assert (seen.flag, seen.share) == (flag, pytest.approx(share))
        assert seen.floor_tpot_s == pytest.approx(1 / most)
        assert (seen.words is None) == (flag is None)
    drafting = compare_with_roofline(row(100.0, speculation=1, acceptance=1.5), WEIGHTS)
    assert drafting is not None and drafting.acceptance == 1.5
    untold = compare_with_roofline(row(100.0, speculation=1), WEIGHTS)
    assert untold is not None and untold.acceptance == 2.0  # the most there can be: nothing is flagged that may be true
    assert compare_with_roofline(row(100.0, speculation=None), WEIGHTS) is None
    assert compare_with_roofline(row(100.0, hardware="a CPU"), WEIGHTS) is None


def test_predicted_rows_say_what_they_assume() -> None:
    rows = list(
        predicted_rows(
            "w4a16", "w4a16", WEIGHTS, hardware="1xH100", device=DEVICES["H100"], num_gpus=1, tensor_parallel=1,
            speculation=(0, 1), concurrency=(1, 4), context=1000, kv_bytes_each=0.0,
        )
    )  # fmt: skip
    assert [(one.speculation, one.concurrency, one.origin) for one in rows] == [
        (0, 1, "predicted"), (0, 4, "predicted"), (1, 1, "predicted"), (1, 4, "predicted"),
    ]  # fmt: skip
    assert rows[0].repeats[0].output_tokens_s == pytest.approx(SHARE * 3.35e12 / 3e9)
    assert rows[0].assumptions == (
        "0.17 of the roofline, as published servers reach 0.10 to 0.30 of it",
        "every token is routed on its own and to every expert alike",
        "KV cache of 1,000 tokens for each stream; prompts cost nothing",
    )
    assert rows[2].assumptions[-1] == "40% of the drafted tokens are accepted, 1 at a time"
    assert rows[2].repeats[0].acceptance_length == pytest.approx(1.4)
