"""Servers that give other numbers under the name of log-probabilities: whole sentences, and none for what is only rounded.

Kinds from public reports: logits (vllm-project/vllm #9453, PR #37082), scores above 0 (marella/ctransformers #166).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from distributions import log_softmax, top_k_of

from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Reply, TokenLogprobs
from assay_evaluate.client.logprob_checks import find_logprob_problem, find_scoring_problem
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.scoring import pair_scores

K, TEXTS, POSITIONS = 20, 6, 40


def two_sides(noise: float, seed: int = 1) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Texts drawn from p, scored by p and by a q whose logits are `noise` apart."""
    rng = np.random.default_rng(seed)
    reference, candidate = [], []
    for _ in range(TEXTS):
        logits = 3.0 * rng.normal(size=(POSITIONS, 200))
        ln_p, ln_q = log_softmax(logits), log_softmax(logits + noise * rng.normal(size=logits.shape))
        tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)
        reference.append(top_k_of(ln_p, tokens, K))
        candidate.append(top_k_of(ln_q, tokens, K))
    return reference, candidate


def mapped(texts: list[TokenLogprobs], change: Callable[[np.ndarray], np.ndarray]) -> list[TokenLogprobs]:
    """Every value changed in the same way."""
    return [
        replace(
            text, logprobs_PK=change(text.logprobs_PK).astype(np.float32), chosen_P=change(text.chosen_P).astype(np.float32)
        )
        for text in texts
    ]


def compared(reference: list[TokenLogprobs], candidate: list[TokenLogprobs]) -> str:
    """What is said of the pair; empty: nothing."""
    documents = [Document(f"t{i}", "en", (1,), tuple(int(t) for t in entry.tokens_P)) for i, entry in enumerate(reference)]
    sides = ([Reply("answered", logprobs=entry) for entry in side] for side in (reference, candidate))
    try:
        pair_scores(documents, *sides)
    except NotMeasured as error:
        return str(error)
    return ""


OURS, THEIRS = two_sides(0.3)
NUM_VALUES = TEXTS * POSITIONS * (K + 1)


def test_logits_are_named_with_the_remedy() -> None:
    """A divergence of 250,000 nats was made of these."""
    logits = mapped(THEIRS, lambda value: value + 22.5)
    largest = max(float(logit.logprobs_PK.max()) for logit in logits)
    text = (
        "log-probabilities above 0: start vLLM without --logprobs-mode raw_logits (or processed_logits); "
        f"{NUM_VALUES} of {NUM_VALUES} values, up to {largest:.3g}"
    )
    assert compared(OURS, logits) == text
    assert compared(logits, THEIRS) == f"the reference's server: {text}"
    assert find_logprob_problem([-1.0, 3.0, None, float("nan")]) == text.split(";")[0] + "; 1 of 2 values, up to 3"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            np.exp,
            "log-probabilities lie between 0 and 1: the server gives probabilities; have it give their natural logarithms",
        ),
        (lambda value: value / np.log(10), "positions the listed probabilities sum beyond 1, up to "),
        (
            lambda value: value / np.log(2),
            "log-probabilities are 1.44 times the reference's throughout: its server gives logarithms to base 2; have it give "
            "natural ones",
        ),
        (
            lambda value: np.where(value < -3.5, -100.0, value),
            "log-probabilities are exactly -100: the server cuts them off there, so how unlikely these tokens are is not "
            "known; have it give all of them as they are",
        ),
        (
            lambda value: np.round(value, 1),
            "all log-probabilities are whole tenths: the server rounds them, and a divergence of hundredths is made of that",
        ),
    ],
)
def test_other_numbers_are_named(change: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    assert words in compared(OURS, mapped(THEIRS, change))


@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7])
def test_a_temperature_on_one_side_is_named(temperature: float) -> None:
    """Processed log-probabilities (or a default temperature of the server) of weights that are rounded to 4 bits."""
    rng = np.random.default_rng(3)
    reference, candidate = [], []
    for _ in range(TEXTS):
        logits = 3.0 * rng.normal(size=(POSITIONS, 200))
        ln_p = log_softmax(logits)
        ln_q = log_softmax((logits + 0.2 * rng.normal(size=logits.shape)) / temperature)
        tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)
        reference.append(top_k_of(ln_p, tokens, K))
        candidate.append(top_k_of(ln_q, tokens, K))
    text = compared(reference, candidate)
    assert text.startswith("log-probabilities are the reference's at temperature ") and text.endswith(
        " throughout: start its server without a default temperature and without --logprobs-mode processed_logprobs; weights "
        "that scale all logits would look the same"
    )


@pytest.mark.parametrize(("by", "which"), [(-1, "next"), (1, "previous")])
def test_rows_one_position_off_are_named(by: int, which: str) -> None:
    shifted = [
        replace(entry, ids_PK=np.roll(entry.ids_PK, by, axis=0), logprobs_PK=np.roll(entry.logprobs_PK, by, axis=0))
        for entry in OURS
    ]
    text = compared(OURS, shifted)
    assert text.startswith("at ") and "likelier than all that are listed" in text  # the token's own value stayed
    whole = [replace(entry, chosen_P=np.full_like(entry.chosen_P, -9.0)) for entry in shifted]
    text = compared(OURS, whole)
    assert (
        f"of {TEXTS * (POSITIONS - 2)} positions the candidate's likeliest token is the reference's of the {which} position"
        in text
    )
    assert text.endswith("its server gives log-probabilities one position off")


def test_an_id_listed_twice_is_named() -> None:
    twice = [replace(entry, ids_PK=np.where(np.arange(K) == 3, entry.ids_PK[:, :1], entry.ids_PK)) for entry in THEIRS]
    number = TEXTS * POSITIONS
    assert compared(OURS, twice) == (
        f"at {number} of {number} positions a token is listed twice among the likeliest; serve with another version"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value,
        lambda value: np.round(value, 5),
        lambda value: np.round(value, 2),
        lambda value: value.astype(np.float16),
        # BF16: the upper half of an FP32 number, rounded
        lambda value: ((value.astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32),
        lambda value: value + 5e-6,
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3, 1.0])
def test_rounding_is_no_fault(change: Callable[[np.ndarray], np.ndarray], noise: float) -> None:
    """A lossless copy, 8 bits, 4 bits and a ruined model, as FP32, FP16, BF16 and text of five digits."""
    reference, candidate = two_sides(noise, seed=5)
    assert compared(mapped(reference, change), mapped(candidate, change)) == ""


def test_padded_lists_never_and_sure_positions_are_no_fault() -> None:
    """Lists may be short; -9999 is vLLM's minus infinity; a model that is sure lists what it never learned at one low value."""
    rng = np.random.default_rng(7)
    sure = []
    for entry in OURS:
        logprobs_PK = np.full((POSITIONS, K), np.nan, np.float32)
        logprobs_PK[:, 0] = -1e-9
        logprobs_PK[:, 1:6] = (-25 - rng.random((POSITIONS, 1))).astype(np.float32)
        logprobs_PK[:, 6] = -9999.0
        ids_PK = np.where(np.arange(K) < 7, np.arange(K) + 7, -1).astype(np.int32) * np.ones((POSITIONS, 1), np.int32)
        ids_PK[:, 0] = entry.tokens_P + 200
        sure.append(TokenLogprobs(entry.tokens_P + 200, ids_PK, logprobs_PK, logprobs_PK[:, 0]))
    assert find_scoring_problem(sure) is None
