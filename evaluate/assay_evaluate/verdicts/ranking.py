"""Which candidate diverges less, where a suite asks no task: KL against KL on the same texts, as in a screening.

Of two candidates what both have is compared: the exact KL, else the unbiased estimate, else (held-out texts alone) the lower
bound. Tasks rank nothing of this: a smaller KL is no better score (arXiv 2606.19558).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from assay.records.divergence import FEWEST_TEXTS, Ranking, TextKl
from assay.records.measurement import Divergence, Measurement
from assay_evaluate.statistics.skewed import skewed_ratio


def rank_candidates(candidates: Sequence[Measurement], level: float) -> tuple[Ranking, ...]:
    """Each against the next, the least KL first; those without a divergence, and the reference's repeat, are in none."""
    divergences = {
        candidate.label: candidate.divergence
        for candidate in candidates
        if candidate.divergence is not None and not candidate.is_noise_floor
    }
    is_exact = all(divergence.exact is not None for divergence in divergences.values())
    sums = {label: _sums(divergence, is_exact=is_exact) for label, divergence in divergences.items()}
    return tuple(_rankings({label: of_texts for label, of_texts in sums.items() if of_texts}, level))


def _rankings(sums: dict[str, dict[str, float]], level: float) -> Iterator[Ranking]:
    """sums: label -> text -> sum of its KL."""
    ordered = sorted(sums, key=lambda label: sum(sums[label].values()))
    for first, second in itertools.pairwise(ordered):
        if sums[first].keys() != sums[second].keys():
            continue  # other texts
        pairs_D2 = np.array([(sums[first][item], sums[second][item]) for item in sums[first]])
        ratio = skewed_ratio(pairs_D2[:, 0], pairs_D2[:, 1], level) if len(pairs_D2) >= FEWEST_TEXTS else None
        yield Ranking(first=first, second=second, ratio=ratio, is_ranked=ratio is not None and ratio.high < 1)


def _sums(divergence: Divergence, *, is_exact: bool) -> dict[str, float]:
    drift = divergence.exact.drift if is_exact and divergence.exact else next(iter(divergence.drift), None)
    if drift is None:
        return {}

    def sum_of(text: TextKl) -> float:
        return text.kl if is_exact or drift.kl_unbiased_mean is None else text.unbiased

    return {text.item: sum_of(text) for text in drift.kl_by_text}
