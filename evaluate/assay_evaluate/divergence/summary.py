"""All texts of one measurement -> its Divergence record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from assay.records.divergence import Drift, TextSet
from assay.records.measurement import Divergence, PositionBucket
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.divergence.drift import (
    NOT_NEGATIVE,
    SHARE,
    SPANS,
    Positions,
    drift_of,
    gather,
    spans_of,
    text_mean,
    usable_documents,
)
from assay_evaluate.divergence.positions import PositionDivergence, ScoredDocument, position_divergence, sampling_gap
from assay_evaluate.divergence.structural import StructuralIds, structural


def summarize(
    documents: Sequence[ScoredDocument],
    *,
    reference_checkpoint_sha256: str,
    top_k: int,
    position_buckets: Sequence[int],
    spans: Sequence[int] = SPANS,
    scored_by: Literal["top_k", "exact_ids"] = "top_k",
    structural_ids: StructuralIds | str = "which tokens are structural was not asked",
) -> Divergence:
    """All documents as one Divergence record. Held-out texts count in `drift` only, all other numbers are of sampled ones.

    position_buckets, spans: first positions, ascending; the last one is open. Documents count at every position that is
    finite; the others are counted in `num_non_finite`. structural_ids: of the tokenizer, or why they are not known.
    NotMeasured if fewer than two sampled documents have any.
    """
    scored = [(doc, position_divergence(doc.reference, doc.candidate)) for doc in documents if doc.candidate is not None]
    sampled = [doc for doc in documents if doc.texts != "held_out"]
    usable = usable_documents(sampled, scored)
    num_positions = sum(len(doc.reference.tokens_P) for doc in sampled)
    num_non_finite = num_positions - sum(int(values.finite_P.sum()) for _, values in usable)
    if len(usable) < 2 and not num_non_finite:
        raise NotMeasured(f"both sides have scored {len(sampled)} of the reference's replies, and two are needed")
    if len(usable) < 2:
        raise NotMeasured(
            f"{num_non_finite} of {num_positions} positions have no finite log-probability and fewer than two"
            " documents are left; the model computes NaN or infinity"
        )
    positions = gather(usable)

    by_language = {}
    for language in sorted({doc.language for doc, _ in usable}):
        inside = positions.only(positions.labels_N["language"] == language)
        by_language[language] = text_mean(inside, inside.kl_N, NOT_NEGATIVE)
    median, p90, p99 = np.quantile(positions.kl_N, [0.5, 0.9, 0.99])
    apart = structural_ids if isinstance(structural_ids, str) else structural(usable, positions, structural_ids)
    return Divergence(
        reference_checkpoint_sha256=reference_checkpoint_sha256,
        top_k=top_k,
        num_documents=len(sampled),
        num_positions=num_positions,
        num_non_finite=num_non_finite,
        kl_mean=text_mean(positions, positions.kl_N, NOT_NEGATIVE),
        kl_median=median,
        kl_p90=p90,
        kl_p99=p99,
        kl_max=positions.kl_N.max(),
        kl_corrected_mean=text_mean(positions, positions.unbiased_N),
        tail_mass_mean=positions.tail_mass_N.mean(),
        sampling_gap=text_mean(
            positions, np.concatenate([sampling_gap(doc.reference)[values.finite_P] for doc, values in usable])
        ),
        top1_agreement=text_mean(positions, positions.agrees_N.astype(np.float64), SHARE),
        by_position=_by_position(positions, position_buckets),
        by_language=by_language,
        drift=_drifts(documents, scored, spans),
        scored_by=scored_by,
        structural=None if isinstance(apart, str) else apart,
        no_structural=apart if isinstance(apart, str) else None,
    )


def _drifts(
    documents: Sequence[ScoredDocument], scored: Sequence[tuple[ScoredDocument, PositionDivergence]], spans: Sequence[int]
) -> tuple[Drift, ...]:
    """Of all sampled texts, of each of their sets if there are two, and of held-out texts; sets of one are left out."""
    sets: list[tuple[str, set[str]]] = [("all", {"replies", "suite_replies"})]
    text_sets = {doc.texts for doc in documents}
    names = [name for name in get_args(TextSet) if name in text_sets]
    sets += [(name, {name}) for name in names if name == "held_out" or {"replies", "suite_replies"} <= text_sets]
    records = [
        drift_of(
            name,
            [doc for doc in documents if doc.texts in members],
            scored,
            is_sampled=name != "held_out",
            spans=spans,
        )
        for name, members in sets
    ]
    return tuple(drift for drift in records if drift is not None)


def _by_position(positions: Positions, firsts: Sequence[int]) -> tuple[PositionBucket, ...]:
    """Buckets that have positions; `last` of the open one is the last position there is."""
    buckets = []
    for first, (_, inside_N, end) in zip(firsts, spans_of(positions, firsts), strict=True):
        if inside_N.any():
            inside = positions.only(inside_N)
            buckets.append(
                PositionBucket(
                    first=first,
                    last=int(positions.position_N.max()) if end is None else end - 1,
                    n=len(inside.kl_N),
                    kl_mean=inside.kl_N.mean(),
                    kl_p99=np.quantile(inside.kl_N, 0.99),
                    top1_agreement=inside.agrees_N.mean(),
                )
            )
    return tuple(buckets)
