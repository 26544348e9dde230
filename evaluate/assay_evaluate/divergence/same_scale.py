"""Whether two sides' log-probabilities of the same texts are of one kind: what a checkpoint is must not be said of its server.

Weights that were rounded change every log-probability by a little of its own. A server that shows logarithms to another base,
or distributions at a temperature, or each row one position late, changes all of them alike: the candidate's are then a function
of the reference's, or the reference's own of the next position, and no divergence of weights. A checkpoint whose damage is a
wrong scale of all logits cannot be told from that, and is NOT MEASURED by divergence as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay_evaluate.client.logprob_checks import NEVER
from assay_evaluate.divergence.positions import ScoredDocument

FEWEST_ROWS = 50
"""Positions from which on anything is said."""
OTHER_SLOPE, STRAIGHT = 0.35, 0.95
"""Of a line through both sides' log-probabilities within positions: how far its slope is from 1, and the correlation. Rounding
to 4 bits leaves the slope within 0.03 of 1, and damage that changes it much scatters. Temperatures up to 0.74 are seen; nearer
to 1 a server's temperature is taken for a damage of the weights, and fails by its KL."""
BASE_2 = 1 / np.log(2)
SAME_BASE = 0.03
SHIFTED_SHARE, TIMES_UNSHIFTED = 0.6, 3.0
"""Share of positions whose likeliest id is the reference's of a neighbouring position, and beside that of its own."""


def other_scale(documents: Sequence[ScoredDocument]) -> str | None:
    """Whether the candidate's values are the reference's at another base or temperature, in a sentence."""
    moments = [_moments(doc) for doc in documents if doc.candidate is not None]
    if not moments:
        return None
    rows, covariance, var_p, var_q, ratio = (float(sum(part[i] for part in moments)) for i in range(5))
    if rows < FEWEST_ROWS or min(var_p, var_q) == 0:
        return None
    slope, correlation = covariance / var_p, covariance / np.sqrt(var_p * var_q)
    if abs(slope - 1) < OTHER_SLOPE or correlation < STRAIGHT:
        return None
    if abs(slope / BASE_2 - 1) < SAME_BASE and abs(ratio / rows / BASE_2 - 1) < SAME_BASE:
        return (
            "log-probabilities are 1.44 times the reference's throughout: its server gives logarithms to base 2; have it give "
            "natural ones"
        )
    return (
        f"log-probabilities are the reference's at temperature {1 / slope:.2g} throughout: start its server without a default "
        "temperature and without --logprobs-mode processed_logprobs; weights that scale all logits would look the same"
    )


def _moments(doc: ScoredDocument) -> tuple[float, float, float, float, float]:
    """Over positions with two shared ids or more: their number; sums of products and squares of what each side's
    log-probabilities are off their mean at the position; and the sum of the ratios of these means."""
    assert doc.candidate is not None, "the caller leaves out texts without a candidate"
    reference, candidate = doc.reference, doc.candidate
    same_PKK = (reference.ids_PK[:, :, None] == candidate.ids_PK[:, None, :]) & (reference.ids_PK >= 0)[:, :, None]
    ln_p_PK = reference.logprobs_PK.astype(np.float64)
    ln_q_PK = np.take_along_axis(candidate.logprobs_PK.astype(np.float64), same_PKK.argmax(axis=2), axis=1)
    shared_PK = same_PKK.any(axis=2) & np.isfinite(ln_p_PK) & np.isfinite(ln_q_PK) & (ln_p_PK > NEVER) & (ln_q_PK > NEVER)
    shared_PK &= (shared_PK.sum(axis=1) >= 2)[:, None]
    n_P1 = np.maximum(shared_PK.sum(axis=1), 1)[:, None]
    means = [np.where(shared_PK, side, 0.0).sum(axis=1, keepdims=True) / n_P1 for side in (ln_p_PK, ln_q_PK)]
    off_p, off_q = (np.where(shared_PK, side - mean, 0.0) for side, mean in zip((ln_p_PK, ln_q_PK), means, strict=True))
    rows_P = shared_PK.any(axis=1) & (means[0][:, 0] < 0)
    ratios = means[1][rows_P, 0] / means[0][rows_P, 0]
    return rows_P.sum(), (off_p * off_q).sum(), (off_p**2).sum(), (off_q**2).sum(), ratios.sum()


def other_position(documents: Sequence[ScoredDocument]) -> str | None:
    """Whether the candidate's likeliest ids are the reference's of the position before, or behind, in a sentence."""
    own, shifted, total = 0, {-1: 0, 1: 0}, 0
    for doc in documents:
        if doc.candidate is None or len(doc.reference.ids_PK) < 3:
            continue
        reference_P, candidate_P = doc.reference.ids_PK[:, 0], doc.candidate.ids_PK[:, 0]
        own += int((reference_P == candidate_P)[1:-1].sum())
        for by in shifted:
            shifted[by] += int((np.roll(reference_P, by) == candidate_P)[1:-1].sum())
        total += len(reference_P) - 2
    by, most = max(shifted.items(), key=lambda item: item[1])
    if total < FEWEST_ROWS or most < SHIFTED_SHARE * total or most < TIMES_UNSHIFTED * own:
        return None
    return (
        f"at {most} of {total} positions the candidate's likeliest token is the reference's of the "
        f"{'next' if by == -1 else 'previous'} position: its server gives log-probabilities one position off"
    )
