"""Whether two sides' log-probabilities of the same texts are of one kind: what a checkpoint is must not be said of its server.

Weights that were rounded change every log-probability by a little of its own. A server that shows logarithms to another base,
or distributions at a temperature, or each row one position late, changes all of them alike: the candidate's are then a function
of the reference's, or the reference's own of the next position, and no divergence of weights. A checkpoint whose damage is a
wrong scale of all logits cannot be told from that, and is NOT MEASURED by divergence as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay_evaluate.client.client import NotMeasured
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


def check_same_scale(documents: Sequence[ScoredDocument]) -> None:
    """NotMeasured: the candidate's values are the reference's at another base or temperature, or of other positions."""
    for why in (_other_scale(documents), _other_position(documents)):
        if why is not None:
            raise NotMeasured(why)


def _other_scale(documents: Sequence[ScoredDocument]) -> str | None:
    found = [_moments(doc) for doc in documents if doc.candidate is not None]
    if not found:
        return None
    rows, both, var_p, var_q, ratio = (float(sum(part[i] for part in found)) for i in range(5))
    if rows < FEWEST_ROWS or min(var_p, var_q) == 0:
        return None
    slope, correlation = both / var_p, both / np.sqrt(var_p * var_q)
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
    ours, theirs = doc.reference, doc.candidate
    same_PKK = (ours.ids_PK[:, :, None] == theirs.ids_PK[:, None, :]) & (ours.ids_PK >= 0)[:, :, None]
    ln_p_PK = ours.logprobs_PK.astype(np.float64)
    ln_q_PK = np.take_along_axis(theirs.logprobs_PK.astype(np.float64), same_PKK.argmax(axis=2), axis=1)
    both_PK = same_PKK.any(axis=2) & np.isfinite(ln_p_PK) & np.isfinite(ln_q_PK) & (ln_p_PK > NEVER) & (ln_q_PK > NEVER)
    both_PK &= (both_PK.sum(axis=1) >= 2)[:, None]
    n_P1 = np.maximum(both_PK.sum(axis=1), 1)[:, None]
    means = [np.where(both_PK, side, 0.0).sum(axis=1, keepdims=True) / n_P1 for side in (ln_p_PK, ln_q_PK)]
    off_p, off_q = (np.where(both_PK, side - mean, 0.0) for side, mean in zip((ln_p_PK, ln_q_PK), means, strict=True))
    rows_P = both_PK.any(axis=1) & (means[0][:, 0] < 0)
    ratios = means[1][rows_P, 0] / means[0][rows_P, 0]
    return rows_P.sum(), (off_p * off_q).sum(), (off_p**2).sum(), (off_q**2).sum(), ratios.sum()


def _other_position(documents: Sequence[ScoredDocument]) -> str | None:
    """Whether the candidate's likeliest ids are the reference's of the position before, or behind."""
    own, shifted, total = 0, {-1: 0, 1: 0}, 0
    for doc in documents:
        if doc.candidate is None or len(doc.reference.ids_PK) < 3:
            continue
        ours, theirs = doc.reference.ids_PK[:, 0], doc.candidate.ids_PK[:, 0]
        own += int((ours == theirs)[1:-1].sum())
        for by in shifted:
            shifted[by] += int((np.roll(ours, by) == theirs)[1:-1].sum())
        total += len(ours) - 2
    by, most = max(shifted.items(), key=lambda one: one[1])
    if total < FEWEST_ROWS or most < SHIFTED_SHARE * total or most < TIMES_UNSHIFTED * own:
        return None
    return (
        f"at {most} of {total} positions the candidate's likeliest token is the reference's of the "
        f"{'next' if by == -1 else 'previous'} position: its server gives log-probabilities one position off"
    )
