"""Next-token divergence of a candidate from its reference, from top-k log-probabilities; all in nats. Pure functions.

Per position, S = ids that are among both models' top k, and one bucket T for all others on both sides:

    KL(p‖q) = Σ_S p ln(p/q) + p_T ln(p_T/q_T) + p_T · KL(P_T‖Q_T)

The first two terms are the *lumped-tail* KL, a lower bound of the true one (data-processing inequality); un-lumped,
renormalised or floor-filled sums are not bounds and are not offered. On text sampled from the reference (T=1, top_p=1, no
penalties) the term 1{x ∉ S} · [ln p(x)/q(x) − ln p_T/q_T] has the missing third term as its mean, so adding it gives an
unbiased estimate of the full-vocabulary KL: noisier, but not too small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from assay.records.divergence import TextSet
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.client.logprob_checks import NEVER

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ROUNDING = 1e-6
"""Probability below which 1 − Σ p is rounding of float32 log-probabilities rather than mass of a tail."""


@dataclass(frozen=True, eq=False)
class ScoredDocument:
    """One text of the reference, scored by both models at the same P positions (the reply's own tokens)."""

    item: str
    language: str
    reference: TokenLogprobs
    candidate: TokenLogprobs | None
    """None: the candidate's log-probabilities were not finite, so the server could not write them down."""
    texts: TextSet = "replies"
    domain: str = ""
    """What the text is about, or the task it answers."""
    first_position: int = 0
    """Tokens before the first of the P positions: the prompt's."""
    num_thinking: int | None = None
    """The first so many of the P are thinking, the others the answer. None: not known."""
    cluster: str | None = None
    """What the text shares with others, such as the question that it answers in another language. None: nothing."""


@dataclass(frozen=True, eq=False)
class PositionDivergence:
    """Per position of one text. Values of positions that are not `finite_P` are meaningless (set to 0)."""

    kl_P: Floats
    """Lumped-tail KL."""
    corrected_P: Floats
    """Lumped-tail KL plus the unbiased correction."""
    tail_mass_P: Floats
    """Reference probability outside its own top k."""
    agrees_P: Bools
    """Both give the same id the largest probability."""
    finite_P: Bools
    confidence_P: Floats
    """Largest probability the reference gives."""
    swap_margin_P: Floats
    """Where they disagree, by how much the reference prefers its own first: p(its first) - p(the candidate's first); if that
    is outside the reference's top k, the least it can be. Elsewhere 0."""
    ln_ratio_P: Floats
    """ln p(x) - ln q(x) of the token that stands there."""
    probability_change_P: Floats
    """q(x) - p(x) of the token that stands there."""


def position_divergence(reference: TokenLogprobs, candidate: TokenLogprobs) -> PositionDivergence:
    """Divergence at each of P positions; both must have been scored on the same ids."""
    assert np.array_equal(reference.tokens_P, candidate.tokens_P), "reference and candidate scored different texts"
    ln_p_PK = reference.logprobs_PK.astype(np.float64)
    same_PKK = (reference.ids_PK[:, :, None] == candidate.ids_PK[:, None, :]) & (reference.ids_PK >= 0)[:, :, None]
    in_s_PK = same_PKK.any(axis=2)
    ln_q_PK = np.take_along_axis(candidate.logprobs_PK.astype(np.float64), same_PKK.argmax(axis=2), axis=1)

    finite_P = _is_finite(reference) & _is_finite(candidate)
    finite_P &= ~(in_s_PK & (ln_q_PK < NEVER) & (ln_p_PK >= NEVER)).any(axis=1)  # q = 0 where p > 0: infinite
    p_PK = np.where(finite_P[:, None] & (reference.ids_PK >= 0), np.exp(np.where(finite_P[:, None], ln_p_PK, 0)), 0.0)
    q_PK = np.where(finite_P[:, None] & in_s_PK, np.exp(np.where(finite_P[:, None], ln_q_PK, 0)), 0.0)
    tail_mass_P = np.clip(1.0 - p_PK.sum(axis=1), 0.0, 1.0)
    agrees_P = in_s_PK[:, 0] & (ln_q_PK[:, 0] >= candidate.logprobs_PK[:, 0])

    p_tail_P, q_tail_P = _tails(p_PK, q_PK, in_s_PK)
    # A tail that has weight in the reference and only rounding in the candidate has no usable ratio: its least likely
    # shared id joins it. A coarser partition is still a lower bound, and does not depend on the sampled token.
    while (coarsen_P := finite_P & (q_tail_P <= ROUNDING) & (p_tail_P > ROUNDING) & in_s_PK.any(axis=1)).any():
        rows = np.flatnonzero(coarsen_P)
        last = in_s_PK.shape[1] - 1 - in_s_PK[rows, ::-1].argmax(axis=1)
        in_s_PK[rows, last] = False
        p_tail_P, q_tail_P = _tails(p_PK, q_PK, in_s_PK)

    shared_PK = in_s_PK & (p_PK > 0)
    kl_P = np.where(shared_PK, p_PK * (ln_p_PK - ln_q_PK), 0.0).sum(axis=1)
    has_tail_P = (p_tail_P > 0) & (q_tail_P > ROUNDING)
    ratio_P = np.log(np.where(has_tail_P, p_tail_P, 1.0) / np.where(has_tail_P, q_tail_P, 1.0))
    kl_P = np.where(finite_P, np.maximum(kl_P + p_tail_P * ratio_P, 0.0), 0.0)  # below zero is rounding

    corrected_P = kl_P.copy()
    outside_P = finite_P & ~(in_s_PK & (reference.ids_PK == reference.tokens_P[:, None])).any(axis=1)
    ln_px, ln_qx = reference.chosen_P[outside_P].astype(np.float64), candidate.chosen_P[outside_P].astype(np.float64)
    # The sampled token is in the tail, so the tail weighs at least as much, whatever rounding says.
    ln_tail_ratio = np.log(np.maximum(p_tail_P[outside_P], np.exp(ln_px)))
    ln_tail_ratio -= np.log(np.maximum(q_tail_P[outside_P], np.exp(ln_qx)))
    corrected_P[outside_P] += ln_px - ln_qx - ln_tail_ratio
    agrees_P &= finite_P
    ln_x, ln_y = (np.where(finite_P, side.chosen_P.astype(np.float64), 0.0) for side in (reference, candidate))
    return PositionDivergence(
        kl_P,
        corrected_P,
        tail_mass_P,
        agrees_P,
        finite_P,
        confidence_P=p_PK[:, 0],
        swap_margin_P=np.where(finite_P & ~agrees_P, p_PK[:, 0] - _preferred(reference, candidate, p_PK), 0.0),
        ln_ratio_P=ln_x - ln_y,
        probability_change_P=np.exp(ln_y) - np.exp(ln_x),
    )


def _preferred(reference: TokenLogprobs, candidate: TokenLogprobs, p_PK: Floats) -> Floats:
    """Reference probability of the candidate's first choice; if it is outside the top k, the most it can be."""
    is_it_PK = reference.ids_PK == candidate.ids_PK[:, :1]
    least_P = np.where(reference.ids_PK >= 0, p_PK, np.inf).min(axis=1)
    return np.asarray(np.where(is_it_PK.any(axis=1), np.where(is_it_PK, p_PK, 0.0).sum(axis=1), least_P))


def sampling_gap(reference: TokenLogprobs) -> Floats:
    """Per position: surprise of the token that stands there, if it is among the top k, minus the top k's part of the entropy.

    The mean is 0 for text drawn from the reference at T=1, whatever the tail is: both terms leave it out. A server whose
    sampler is broken shows here (vLLM 0.32 on CPUs with speculation: +4 nats), while every greedy score stays perfect.
    """
    log_p_PK = np.where(reference.ids_PK >= 0, reference.logprobs_PK.astype(np.float64), -np.inf)
    p_PK = np.exp(log_p_PK)
    entropy_P = -(p_PK * np.where(p_PK > 0, log_p_PK, 0.0)).sum(axis=1)
    among_P = (reference.ids_PK == reference.tokens_P[:, None]).any(axis=1)
    return np.asarray(np.where(among_P, -reference.chosen_P.astype(np.float64), 0.0) - entropy_P)


def _is_finite(scored: TokenLogprobs) -> Bools:
    known_PK = scored.ids_PK >= 0
    ok_P = (np.isfinite(scored.logprobs_PK) | ~known_PK).all(axis=1) & known_PK.any(axis=1)
    return np.asarray(ok_P & np.isfinite(scored.chosen_P) & (scored.chosen_P >= NEVER))


def _tails(p_PK: Floats, q_PK: Floats, in_s_PK: Bools) -> tuple[Floats, Floats]:
    p_tail_P = np.clip(1.0 - np.where(in_s_PK, p_PK, 0.0).sum(axis=1), 0.0, 1.0)
    q_tail_P = np.clip(1.0 - np.where(in_s_PK, q_PK, 0.0).sum(axis=1), 0.0, 1.0)
    return p_tail_P, q_tail_P
