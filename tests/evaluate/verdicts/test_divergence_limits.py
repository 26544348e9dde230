"""Limits of divergence gates by the bits of the weights and the reference's own repeat: whole sentences."""

from __future__ import annotations

from typing import Any

import pytest
from blank_records import blank_fingerprint
from pydantic import ValidationError

from assay.recipes.gate import DivergenceGate, GateRecipe
from assay.recipes.load import load_recipe
from assay.records.base import Interval
from assay.records.measurement import Divergence, Measurement
from assay_evaluate.verdicts.divergence import Limit, judge_divergence, limit_for

KL = DivergenceGate(kind="divergence", metric="kl_mean", max=0.10, expect={8: 0.02, 4: 0.08}, times_noise_floor=2)
AGREEMENT = DivergenceGate(kind="divergence", metric="top1_agreement", min=0.90, expect={8: 0.97, 4: 0.92}, times_noise_floor=2)


def divergence(kl: float, agreement: float = 0.99) -> Divergence:
    near = {name: Interval(value=kl, low=0.9 * kl, high=1.1 * kl, n=40) for name in ("kl_mean", "kl_corrected_mean")}
    agrees = Interval(value=agreement, low=agreement - 0.005, high=agreement + 0.005, n=40)
    return Divergence(
        reference_checkpoint_sha256="r", top_k=64, num_documents=40, num_positions=4000, num_non_finite=0, **near,
        kl_median=kl, kl_p90=kl, kl_p99=kl, kl_max=kl, tail_mass_mean=0.0, top1_agreement=agrees, by_position=(),
        by_language={},
    )  # fmt: skip


def measured(kl: float, weight_bits: int | None, *, agreement: float = 0.99, is_noise_floor: bool = False) -> Measurement:
    fingerprint = blank_fingerprint(system_fingerprint=None)
    return Measurement(
        model="m", label="candidate", is_reference=False, is_noise_floor=is_noise_floor, checkpoint="c", checkpoint_sha256="c",
        checkpoint_bytes=1, weight_bits=weight_bits, suite="s", suite_sha256="s", suite_recipe={}, fingerprint=fingerprint,
        tasks=(), divergence=divergence(kl, agreement), acceptance=None, not_measured={}, started="2026-01-01", seconds=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gate", "weight_bits", "floor", "limit"),
    [
        (KL, 8, None, Limit(0.02, " for 8-bit weights")),
        (KL, 16, None, Limit(0.02, " for 16-bit weights")),
        (KL, 6, 0.001, Limit(0.08, " for 6-bit weights")),
        (KL, 4, 0.03, Limit(0.08, " for 4-bit weights")),
        (KL, 3, 0.03, Limit(0.10, " for any format (nothing is expected of 3-bit weights)")),
        (KL, None, 0.03, Limit(0.10, " for any format (the bits of its weights are not known)")),
        (KL, 8, 0.0115, Limit(0.023, " (2 times the reference's own repeat, 0.0115; 0.02 for 8-bit weights with less noise)")),
        (KL, 8, 0.06, Limit(0.10, " for any format (2 times the reference's own repeat, 0.06, would be more)")),
        (AGREEMENT, 4, 0.995, Limit(0.92, " for 4-bit weights")),
        (
            AGREEMENT,
            8,
            0.98,
            Limit(0.96, " (2 times the reference's own repeat, 0.98; 0.97 for 8-bit weights with less noise)"),
        ),
        (AGREEMENT, 8, 0.94, Limit(0.90, " for any format (2 times the reference's own repeat, 0.94, would be more)")),
        (KL.model_copy(update={"times_noise_floor": None}), 8, 0.06, Limit(0.02, " for 8-bit weights")),
        (KL.model_copy(update={"expect": {}, "times_noise_floor": None}), 8, 0.06, Limit(0.10)),
    ],
)
def test_which_limit_applies(gate: DivergenceGate, weight_bits: int | None, floor: float | None, limit: Limit) -> None:
    result = limit_for(gate, weight_bits, floor)
    assert (result.value, result.reason) == (pytest.approx(limit.value), limit.reason)


@pytest.mark.parametrize(
    ("shares", "limit", "why"),
    [
        ({8: 0.987, 4: 0.013}, 0.02156, " for 1.3 % 4-bit and 99 % 8-bit weights"),
        ({16: 0.1, 8: 0.6, 4: 0.3}, 0.056, " for 30 % 4-bit and 60 % 8-bit and 10 % 16-bit weights"),
        ({16: 0.5, 4: 0.5}, 0.08, " for 50 % 4-bit and 50 % 16-bit weights"),
        ({16: 0.1, 4: 0.9}, 0.08, " for 90 % 4-bit and 10 % 16-bit weights"),
        ({8: 0.9, 2: 0.1}, 0.036, " for 10 % 2-bit and 90 % 8-bit weights"),
        ({4: 0.8, 2: 0.2}, 0.088, " for 20 % 2-bit and 80 % 4-bit weights"),
        ({4: 1.0}, 0.08, " for 4-bit weights"),
        ({}, 0.08, " for 4-bit weights"),
    ],
)
def test_one_layer_of_few_bits_does_not_raise_the_limit_of_all(shares: dict[int, float], limit: float, why: str) -> None:
    """The limit of a single 4-bit layer among 78 of 8 bits was that of a 4-bit checkpoint, four times as high."""
    result = limit_for(KL, min(shares, default=4), None, weight_shares=shares)
    assert (result.value, result.reason) == (pytest.approx(limit), why)


def test_agreement_falls_with_the_share_as_kl_rises() -> None:
    limit = limit_for(AGREEMENT, 4, None, weight_shares={8: 0.75, 4: 0.25})
    assert (limit.value, limit.reason) == (pytest.approx(0.945), " for 25 % 4-bit and 75 % 8-bit weights")


def test_a_mean_over_texts_is_held_against_the_limit_of_every_format() -> None:
    """Limits by format are of means over tokens, and nobody publishes another."""
    assert limit_for(KL, 8, 0.001, by_format=False) == Limit(0.10, " for any format")


@pytest.mark.parametrize(
    ("kl", "weight_bits", "floor", "status", "detail"),
    [
        (
            0.05, 8, None, "FAIL",
            "KL, unbiased: 0.05 nats (95 % interval: 0.045 to 0.055); allowed at most 0.02 nats for 8-bit weights.",
        ),
        (
            0.05, 4, 1e-5, "PASS",
            "KL, unbiased: 0.05 nats (95 % interval: 0.045 to 0.055); allowed at most 0.08 nats for 4-bit weights. "
            "Damage in fewer than 1 of 11 such texts may not be among these 40. A small divergence does not show that answers "
            "are as good.",
        ),
        (
            0.02, 8, 0.03, "PASS",
            "KL, unbiased: 0.02 nats (95 % interval: 0.018 to 0.022); allowed at most 0.06 nats (2 times the reference's own "
            "repeat, 0.03; 0.02 for 8-bit weights with less noise). Damage in fewer than 1 of 11 such texts may not be among "
            "these 40. A small divergence does not show that answers are as good.",
        ),
        (
            0.02, 16, None, "UNDERPOWERED",
            "KL, unbiased: 0.02 nats (95 % interval: 0.018 to 0.022); allowed at most 0.02 nats for 16-bit weights, which lies "
            "inside the interval.",
        ),
        (
            0.05, None, None, "PASS",
            "KL, unbiased: 0.05 nats (95 % interval: 0.045 to 0.055); allowed at most 0.1 nats for any format (the bits of its "
            "weights are not known). Damage in fewer than 1 of 11 such texts may not be among these 40. A small divergence "
            "does not show that answers are as good.",
        ),
    ],
)  # fmt: skip
def test_whole_sentences(kl: float, weight_bits: int | None, floor: float | None, status: str, detail: str) -> None:
    verdict = judge_divergence(KL, measured(kl, weight_bits), floor=None if floor is None else divergence(floor))
    assert (verdict.status, verdict.detail) == (status, detail)
    assert verdict.observed == divergence(kl).kl_mean


def test_two_bits_per_weight_no_longer_pass() -> None:
    """0.1216 nats and 88.9 % were near every limit; half of it, 0.0608 nats with 91 %, passed as 8-bit weights."""
    assert judge_divergence(KL, measured(0.0608, 8)).status == "FAIL"
    assert judge_divergence(AGREEMENT, measured(0.0608, 8, agreement=0.91)).status == "FAIL"
    assert judge_divergence(AGREEMENT, measured(0.0608, 4, agreement=0.91)).status == "FAIL"
    assert judge_divergence(KL, measured(0.1216, 2)).status == "FAIL"


def test_the_repeat_itself_is_held_against_the_limit_of_every_format() -> None:
    verdict = judge_divergence(KL, measured(0.05, 16, is_noise_floor=True), floor=divergence(0.05))
    assert (verdict.status, verdict.limit) == ("PASS", 0.10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max": 0.1, "expect": {8: 0.2}}, "expect 8: 0.2 is above max 0.1, the limit of every format"),
        (
            {"metric": "top1_agreement", "min": 0.9, "expect": {4: 0.8}},
            "expect 4: 0.8 is below min 0.9, the limit of every format",
        ),
        ({"max": 0.1, "times_noise_floor": 2}, "times_noise_floor raises the limits of `expect`, and there are none"),
        (
            {"metric": "perplexity_ratio", "max": 1.1, "expect": {8: 1.05}, "times_noise_floor": 2},
            "times_noise_floor needs a metric that is a distance; perplexity_ratio is none",
        ),
    ],
)
def test_what_contradicts_itself(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DivergenceGate(kind="divergence", **{"metric": "kl_mean", **fields})


@pytest.mark.parametrize("name", ["quick", "full", "default"])
def test_shipped_gates_tell_formats_apart(name: str) -> None:
    recipe = load_recipe(GateRecipe, name)
    gates = {gate.metric: gate for gate in recipe.gates if isinstance(gate, DivergenceGate) and gate.over == "all"}
    unseen = {"quick": 0.05, "full": 0.015, "default": None}[name]
    assert gates == {
        "kl_mean": KL.model_copy(update={"max_unseen": unseen}),
        "top1_agreement": AGREEMENT.model_copy(update={"decides": "fail"}),
    }
    again = GateRecipe.model_validate(recipe.model_dump(mode="json", by_alias=True))
    assert again == recipe and again.sha256 == recipe.sha256  # as `gates.registered.json` has it
