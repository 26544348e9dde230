"""Whether what a server calls log-probabilities can be natural logarithms of probabilities at temperature 1. Pure functions.

Every sentence says what is off and what to do; a number that is made of such values says nothing of a checkpoint, so whoever
takes log-probabilities (divergence, signatures, probes) asks here first. What is looked at, and the reports behind it:

- values above 0: vLLM's `--logprobs-mode raw_logits` or `processed_logits` (vllm-project/vllm #9453, PR #37082), scores of
  another library (marella/ctransformers #166); all between 0 and 1: probabilities, not their logarithms;
- a position whose listed probabilities sum beyond 1: logarithms to base 10, an id listed twice;
- one value again and again far below the others: clamped (-100, -1e4), so what was cut off is not known;
- whole tenths: rounded, so that a divergence of hundredths is made of rounding;
- a likelier token than the list of the likeliest has: lists and values are of two positions.

Tolerances. FP32 log-softmax, which vLLM, SGLang and TGI use, is off by 1e-6. A value rounded to BF16 (8 bits) is off by 0.4 %
of itself, which moves a sum by at most 0.004 x entropy, below 0.02 at 5 nats; rounding to five digits moves it by 1e-5. Neither
lifts a value above 0; where the subtraction itself is in FP16, logits of 16 to 32 are in steps of 0.016, off by half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from assay.records.serving import ABOVE_ZERO, MOST_LOGPROB
from assay_evaluate.client.journal import TokenLogprobs

MOST_SUM = 1.02
CLAMPED_BELOW, CLAMPED_TIMES = -20.0, 5
"""A value below that stands at so many positions, to the last bit, was not computed: FP32 values there are 2e-6 apart."""
CLAMPED_SHARE = 0.5
"""Of all values below `CLAMPED_BELOW`."""
NEVER = -9998.0
"""vLLM writes -9999 for a log-probability of -infinity, which is one: it is no clamp."""
STEP, FEWEST_VALUES = 10.0, 100
"""Whole tenths, where there are so many values."""
UNLIKE_NATS = 0.1
"""By which a token may be likelier than the list has it: between two computations of one position lies less."""

PROBABILITIES = "log-probabilities lie between 0 and 1: the server gives probabilities; have it give their natural logarithms"

Floats = npt.NDArray[np.float64]


def find_logprob_problem(values: Iterable[float | None]) -> str | None:
    """Of single values, the tokens' own and listed ones: a sentence, or None if they may be log-probabilities."""
    numbers = np.array([value for value in values if value is not None], np.float64)
    return _above_zero(numbers[np.isfinite(numbers)])


def find_scoring_problem(texts: Sequence[TokenLogprobs]) -> str | None:
    """Of all texts that one side scored: a sentence without a capital, or None. What is not finite is not looked at."""
    if not texts:
        return None
    listed_M = np.concatenate([text.logprobs_PK[text.ids_PK >= 0] for text in texts]).astype(np.float64)
    chosen_N = np.concatenate([text.chosen_P for text in texts]).astype(np.float64)
    values = np.concatenate([listed_M, chosen_N])
    values = values[np.isfinite(values)]
    return _above_zero(values) or _rounded(values) or _beyond_one(texts) or _clamped(texts) or _unlike(texts)


def _above_zero(values: Floats) -> str | None:
    largest = float(values.max(initial=-np.inf))
    if largest <= MOST_LOGPROB:
        return None
    if values.min() >= 0 and largest <= 1:
        return PROBABILITIES
    return (
        f"{ABOVE_ZERO} (or processed_logits); {int((values > MOST_LOGPROB).sum())} of {len(values)} values, up to {largest:.3g}"
    )


def _beyond_one(texts: Sequence[TokenLogprobs]) -> str | None:
    sums, twice = [], 0
    for text in texts:
        known_PK = _known(text)
        sums.append(np.where(known_PK, np.exp(np.where(known_PK, text.logprobs_PK.astype(np.float64), 0.0)), 0.0).sum(axis=1))
        sorted_PK = np.sort(text.ids_PK, axis=1)
        twice += int(((sorted_PK[:, 1:] == sorted_PK[:, :-1]) & (sorted_PK[:, 1:] >= 0)).any(axis=1).sum())
    sums_N = np.concatenate(sums)
    if twice:
        return f"at {twice} of {len(sums_N)} positions a token is listed twice among the likeliest; serve with another version"
    if (beyond := int((sums_N > MOST_SUM).sum())) == 0:
        return None
    return (
        f"at {beyond} of {len(sums_N)} positions the listed probabilities sum beyond 1, up to {sums_N.max():.3g}: the server "
        "does not give natural logarithms of probabilities (logarithms to base 10, say)"
    )


def _clamped(texts: Sequence[TokenLogprobs]) -> str | None:
    """Of the least value that each position lists, and of the tokens that stand there. Once a position: ids that a model never
    learned share a value there, and no two positions have the same."""
    least = [np.where(_known(text), text.logprobs_PK, np.inf).min(axis=1, initial=np.inf) for text in texts]
    for values_N in (np.concatenate([text.chosen_P for text in texts]), np.concatenate(least)):
        low = values_N[(values_N < CLAMPED_BELOW) & (values_N > NEVER)]
        distinct, counts = np.unique(low, return_counts=True)
        most = int(counts.max(initial=0))
        if most >= CLAMPED_TIMES and most >= CLAMPED_SHARE * len(low):
            return (
                f"{most} log-probabilities are exactly {distinct[counts.argmax()]:g}: the server cuts them off there, so how "
                "unlikely these tokens are is not known; have it give all of them as they are"
            )
    return None


def _known(text: TokenLogprobs) -> npt.NDArray[np.bool_]:
    return np.asarray((text.ids_PK >= 0) & np.isfinite(text.logprobs_PK))


def _rounded(values: Floats) -> str | None:
    steps = values[values > NEVER] * STEP
    if len(steps) < FEWEST_VALUES or not np.allclose(steps, np.round(steps), atol=1e-3):
        return None
    return "all log-probabilities are whole tenths: the server rounds them, and a divergence of hundredths is made of that"


def _unlike(texts: Sequence[TokenLogprobs]) -> str | None:
    unlike, total = 0, 0
    for text in texts:
        known_PK = _known(text)
        likeliest_P = np.where(known_PK, text.logprobs_PK, -np.inf).max(axis=1, initial=-np.inf)
        looked_P = known_PK.any(axis=1) & np.isfinite(text.chosen_P)
        unlike += int((text.chosen_P[looked_P] > likeliest_P[looked_P] + UNLIKE_NATS).sum())
        total += int(looked_P.sum())
    if unlike == 0:
        return None
    return (
        f"at {unlike} of {total} positions the token that stands there is likelier than all that are listed as the likeliest: "
        "lists and values are not of the same position"
    )
