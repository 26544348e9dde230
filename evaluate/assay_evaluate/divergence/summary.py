"""All texts of one measurement -> its Divergence record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from assay.records import Divergence, Interval, PositionBucket
from assay_evaluate.client import NotMeasured
from assay_evaluate.divergence.positions import Bools, Floats, ScoredDocument, position_divergence, sampling_gap
from assay_evaluate.statistics import cluster_bootstrap_mean


def summarize(
    documents: Sequence[ScoredDocument],
    *,
    reference_checkpoint_sha256: str,
    top_k: int,
    position_buckets: Sequence[int],
    level: float = 0.95,
    seed: int = 0,
) -> Divergence:
    """All documents as one Divergence record.

    position_buckets: first positions of the buckets, ascending; the last one is open. Documents count at every position
    that is finite; the others are counted in `num_non_finite`. NotMeasured if fewer than two documents have any.
    """
    scored = [(doc, position_divergence(doc.reference, doc.candidate)) for doc in documents if doc.candidate is not None]
    num_positions = sum(len(doc.reference.tokens_P) for doc in documents)
    num_finite = sum(int(one.finite_P.sum()) for _, one in scored)
    usable = [(doc.language, one) for doc, one in scored if one.finite_P.any()]
    if len(usable) < 2:
        raise NotMeasured(
            f"{num_positions - num_finite} of {num_positions} positions have no finite log-probability and fewer than two"
            " documents are left; the model computes NaN or infinity"
        )
    finite = [one.finite_P for _, one in usable]

    def interval(values: list[npt.NDArray[np.float64]], chosen: list[int]) -> Interval:
        """Tokens of one text are not independent: whole documents are resampled."""
        values_N = np.concatenate([values[i][finite[i]] for i in chosen])
        document_N = np.concatenate([np.full(int(finite[i].sum()), i) for i in chosen])
        return cluster_bootstrap_mean(values_N, document_N, level=level, seed=seed)

    every = list(range(len(usable)))
    kl = [one.kl_P for _, one in usable]
    gap = [sampling_gap(doc.reference) for doc, one in scored if one.finite_P.any()]
    by_language = {
        language: interval(kl, chosen)
        for language in sorted({language for language, _ in usable})
        if len(chosen := [i for i in every if usable[i][0] == language]) >= 2
    }
    kl_N = np.concatenate([one.kl_P[one.finite_P] for _, one in usable])
    agrees_N = np.concatenate([one.agrees_P[one.finite_P] for _, one in usable])
    position_N = np.concatenate([np.flatnonzero(mask) for mask in finite])
    tail_N = np.concatenate([one.tail_mass_P[one.finite_P] for _, one in usable])
    median, p90, p99 = np.quantile(kl_N, [0.5, 0.9, 0.99])
    return Divergence(
        reference_checkpoint_sha256=reference_checkpoint_sha256,
        top_k=top_k,
        num_documents=len(documents),
        num_positions=num_positions,
        num_non_finite=num_positions - num_finite,
        kl_mean=interval(kl, every),
        kl_median=median,
        kl_p90=p90,
        kl_p99=p99,
        kl_max=kl_N.max(),
        kl_corrected_mean=interval([one.corrected_P for _, one in usable], every),
        tail_mass_mean=tail_N.mean(),
        sampling_gap=interval(gap, every),
        top1_agreement=interval([one.agrees_P.astype(np.float64) for _, one in usable], every),
        by_position=_by_position(kl_N, agrees_N, position_N, position_buckets),
        by_language=by_language,
    )


def _by_position(
    kl_N: Floats, agrees_N: Bools, position_N: npt.NDArray[np.intp], firsts: Sequence[int]
) -> tuple[PositionBucket, ...]:
    """Buckets that have positions; `last` of the open one is the last position seen."""
    buckets = []
    for first, end in zip(firsts, [*firsts[1:], None], strict=True):
        inside_N = (position_N >= first) & (position_N < (np.inf if end is None else end))
        if inside_N.any():
            buckets.append(
                PositionBucket(
                    first=first,
                    last=int(position_N.max()) if end is None else end - 1,
                    n=int(inside_N.sum()),
                    kl_mean=kl_N[inside_N].mean(),
                    kl_p99=np.quantile(kl_N[inside_N], 0.99),
                    top1_agreement=agrees_N[inside_N].mean(),
                )
            )
    return tuple(buckets)
