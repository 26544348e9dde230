"""All texts of one measurement -> its Divergence record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from assay.records.divergence import Drift, TextMean, TextSet
from assay.records.measurement import Divergence, PositionBucket
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.divergence.drift import NOT_NEGATIVE, SHARE, SIGNED, SPANS, Positions, drift_of, gather, text_mean
from assay_evaluate.divergence.positions import Floats, PositionDivergence, ScoredDocument, position_divergence, sampling_gap
from assay_evaluate.divergence.structural import StructuralIds, structural

ComparedDocument = tuple[ScoredDocument, PositionDivergence]


def summarize(
    documents: Sequence[ScoredDocument],
    *,
    reference_checkpoint_sha256: str,
    top_k: int,
    position_buckets: Sequence[int],
    spans: Sequence[int] = SPANS,
    scored_by: Literal["top_k", "exact_ids"] = "top_k",
    structural_ids: StructuralIds | str = "which tokens are structural was not asked",
    level: float = 0.95,
) -> Divergence:
    """All documents as one Divergence record. Held-out texts count in `drift` only, all other numbers are of sampled ones.

    position_buckets, spans: first positions, ascending; the last one is open. Documents count at every position that is
    finite; the others are counted in `num_non_finite`. structural_ids: of the tokenizer, or why they are not known.
    NotMeasured if fewer than two sampled documents have any.
    """
    scored = [(doc, position_divergence(doc.reference, doc.candidate)) for doc in documents if doc.candidate is not None]
    sampled = [doc for doc in documents if doc.texts != "held_out"]
    usable = _usable(scored, sampled)
    num_positions = sum(len(doc.reference.tokens_P) for doc in sampled)
    num_non_finite = num_positions - sum(int(one.finite_P.sum()) for _, one in usable)
    if len(usable) < 2 and not num_non_finite:
        raise NotMeasured(f"both sides have scored {len(sampled)} of the reference's replies, and two are needed")
    if len(usable) < 2:
        raise NotMeasured(
            f"{num_non_finite} of {num_positions} positions have no finite log-probability and fewer than two"
            " documents are left; the model computes NaN or infinity"
        )
    found = gather(usable)

    def mean(values_N: Floats, within: tuple[float, float] = SIGNED) -> TextMean:
        return text_mean(found, values_N, within, level=level)

    by_language = {}
    for language in sorted({doc.language for doc, _ in usable}):
        inside = found.only(found.labels_N["language"] == language)
        by_language[language] = text_mean(inside, inside.kl_N, NOT_NEGATIVE, level=level)
    median, p90, p99 = np.quantile(found.kl_N, [0.5, 0.9, 0.99])
    apart = structural_ids if isinstance(structural_ids, str) else structural(usable, found, structural_ids, level)
    return Divergence(
        reference_checkpoint_sha256=reference_checkpoint_sha256,
        top_k=top_k,
        num_documents=len(sampled),
        num_positions=num_positions,
        num_non_finite=num_non_finite,
        kl_mean=mean(found.kl_N, NOT_NEGATIVE),
        kl_median=median,
        kl_p90=p90,
        kl_p99=p99,
        kl_max=found.kl_N.max(),
        kl_corrected_mean=mean(found.unbiased_N),
        tail_mass_mean=found.tail_mass_N.mean(),
        sampling_gap=mean(np.concatenate([sampling_gap(doc.reference)[one.finite_P] for doc, one in usable])),
        top1_agreement=mean(found.agrees_N.astype(np.float64), SHARE),
        by_position=_by_position(found, position_buckets),
        by_language=by_language,
        drift=drifts(documents, scored, spans=spans, level=level),
        scored_by=scored_by,
        structural=None if isinstance(apart, str) else apart,
        no_structural=apart if isinstance(apart, str) else None,
    )


def drifts(
    documents: Sequence[ScoredDocument], scored: Sequence[ComparedDocument], *, spans: Sequence[int], level: float
) -> tuple[Drift, ...]:
    """Of all sampled texts, of each of their sets if there are two, and of held-out texts; sets of one are left out."""
    sets: list[tuple[str, set[str]]] = [("all", {"replies", "suite_replies"})]
    there = {doc.texts for doc in documents}
    names = [name for name in get_args(TextSet) if name in there]
    sets += [(name, {name}) for name in names if name == "held_out" or {"replies", "suite_replies"} <= there]
    found = []
    for name, members in sets:
        chosen = [doc for doc in documents if doc.texts in members]
        usable = _usable(scored, chosen)
        if len(usable) >= 2:
            found.append(
                drift_of(
                    name,
                    usable,
                    num_documents=len(chosen),
                    num_positions=sum(len(doc.reference.tokens_P) for doc in chosen),
                    is_sampled=name != "held_out",
                    spans=spans,
                    level=level,
                )
            )
    return tuple(found)


def _usable(scored: Sequence[ComparedDocument], chosen: Sequence[ScoredDocument]) -> list[ComparedDocument]:
    """Those of the chosen documents that have a finite position."""
    wanted = {id(doc) for doc in chosen}
    return [(doc, one) for doc, one in scored if id(doc) in wanted and one.finite_P.any()]


def _by_position(found: Positions, firsts: Sequence[int]) -> tuple[PositionBucket, ...]:
    """Buckets that have positions; `last` of the open one is the last position seen."""
    buckets = []
    for first, end in zip(firsts, [*firsts[1:], None], strict=True):
        inside_N = (found.position_N >= first) & (found.position_N < (np.inf if end is None else end))
        if inside_N.any():
            inside = found.only(inside_N)
            buckets.append(
                PositionBucket(
                    first=first,
                    last=int(found.position_N.max()) if end is None else end - 1,
                    n=len(inside.kl_N),
                    kl_mean=inside.kl_N.mean(),
                    kl_p99=np.quantile(inside.kl_N, 0.99),
                    top1_agreement=inside.agrees_N.mean(),
                )
            )
    return tuple(buckets)
