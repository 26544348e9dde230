"""Values per position of many texts -> `Drift`: how far, where, and how sure that is.

Tokens of one text are not independent, so every interval is over whole texts, with the kinds of text that the suite fixes as
strata, and fewer than `FEWEST_TEXTS` have none. Texts that answer one question, as its translations do, count as one. Quantiles
and the mean of the worst 5 % have no interval: over tens of texts none covers. Gates and readers compare these with the same
numbers of the reference against itself; nothing here divides by that noise floor, which is exactly 0 on some machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.records.base import Interval
from assay.records.divergence import FEWEST_TEXTS, Drift, DriftGroup, DriftSpan, Estimate, TextKl, TextMean, TextSet
from assay_evaluate.divergence.positions import Bools, Floats, PositionDivergence, ScoredDocument
from assay_evaluate.divergence.strata import Kind, strata_of
from assay_evaluate.statistics.skewed import skewed_mean

SPANS = (0,)
CURVE = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CONFIDENCE = ((0.0, "below 0.5"), (0.5, "0.5 to 0.9"), (0.9, "0.9 to 0.99"), (0.99, "0.99 and above"))
WORST_SHARE = 0.05
CONFIDENT_MARGIN = 0.5
SIGNED, NOT_NEGATIVE, SHARE = (-np.inf, np.inf), (0.0, np.inf), (0.0, 1.0)
"""What a mean can be."""

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Positions:
    """All finite positions of some texts, one after the other (N), and what each belongs to."""

    cluster_N: Ints
    """Texts that answer one question in several languages, or at several lengths, are one; any other text is its own."""
    text_N: Ints
    position_N: Ints
    """In the text, prompt included."""
    kl_N: Floats
    unbiased_N: Floats
    tail_mass_N: Floats
    agrees_N: Bools
    confidence_N: Floats
    swap_margin_N: Floats
    ln_ratio_N: Floats
    probability_change_N: Floats
    labels_N: dict[str, npt.NDArray[np.str_]]
    """`domain`, `language`, `part` of each; empty where not known."""
    kinds: tuple[Kind, ...]
    """Of each cluster: set, domain, language; an empty one where its texts are in several."""

    def only(self, mask_N: Bools | Ints) -> Positions:
        """Those where `mask_N`, or at these places."""
        arrays = {name: value[mask_N] for name, value in vars(self).items() if name not in {"labels_N", "kinds"}}
        labels_N = {name: value[mask_N] for name, value in self.labels_N.items()}
        return Positions(**arrays, labels_N=labels_N, kinds=self.kinds)


def usable_documents(
    documents: Sequence[ScoredDocument], scored: Sequence[tuple[ScoredDocument, PositionDivergence]]
) -> list[tuple[ScoredDocument, PositionDivergence]]:
    """Those of the documents that have a finite position."""
    ids = {id(doc) for doc in documents}
    return [(doc, divergence) for doc, divergence in scored if id(doc) in ids and divergence.finite_P.any()]


def gather(scored: Sequence[tuple[ScoredDocument, PositionDivergence]]) -> Positions:
    """Finite positions of the texts as flat arrays."""

    def flat(values: Callable[[ScoredDocument, PositionDivergence], npt.ArrayLike], dtype: Any = np.float64) -> Any:
        parts = [
            np.broadcast_to(values(doc, divergence), divergence.finite_P.shape)[divergence.finite_P]
            for doc, divergence in scored
        ]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    def part(doc: ScoredDocument, divergence: PositionDivergence) -> npt.ArrayLike:
        if doc.num_thinking is None:
            return ""
        return np.where(np.arange(len(divergence.finite_P)) < doc.num_thinking, "thinking", "answer")

    clusters: dict[str | int, list[ScoredDocument]] = {}
    for doc, _ in scored:
        clusters.setdefault(doc.cluster or id(doc), []).append(doc)
    kinds = [
        (docs[0].texts, docs[0].domain, docs[0].language if len({doc.language for doc in docs}) == 1 else "")
        for docs in clusters.values()
    ]
    numbers = {id(doc): number for number, docs in enumerate(clusters.values()) for doc in docs}
    texts = {id(doc): number for number, (doc, _) in enumerate(scored)}
    return Positions(
        cluster_N=flat(lambda doc, divergence: numbers[id(doc)], np.intp),
        text_N=flat(lambda doc, divergence: texts[id(doc)], np.intp),
        position_N=flat(lambda doc, divergence: doc.first_position + np.arange(len(divergence.finite_P)), np.intp),
        kl_N=flat(lambda doc, divergence: divergence.kl_P),
        unbiased_N=flat(lambda doc, divergence: divergence.corrected_P),
        tail_mass_N=flat(lambda doc, divergence: divergence.tail_mass_P),
        agrees_N=flat(lambda doc, divergence: divergence.agrees_P, np.bool_),
        confidence_N=flat(lambda doc, divergence: divergence.confidence_P),
        swap_margin_N=flat(lambda doc, divergence: divergence.swap_margin_P),
        ln_ratio_N=flat(lambda doc, divergence: divergence.ln_ratio_P),
        probability_change_N=flat(lambda doc, divergence: divergence.probability_change_P),
        labels_N={
            "domain": flat(lambda doc, divergence: doc.domain, np.str_),
            "language": flat(lambda doc, divergence: doc.language, np.str_),
            "part": flat(part, np.str_),
        },
        kinds=tuple(kinds),
    )


def drift_of(
    texts: TextSet | str,
    documents: Sequence[ScoredDocument],
    scored: Sequence[tuple[ScoredDocument, PositionDivergence]],
    *,
    is_sampled: bool,
    spans: Sequence[int] = SPANS,
    keeps_texts: bool = True,
) -> Drift | None:
    """Statistics over the finite positions of the documents; None if fewer than two have some.

    scored: of these and perhaps other documents. is_sampled: the texts were drawn from the reference at T=1, so that the
    unbiased estimate holds. spans: first positions of the spans that are judged, ascending. keeps_texts: the record has the
    sums of every text.
    """
    usable = usable_documents(documents, scored)
    if len(usable) < 2:
        return None
    positions = gather(usable)
    num_positions = sum(len(doc.reference.tokens_P) for doc in documents)

    median, p90, p95 = np.quantile(positions.kl_N, [0.5, 0.9, 0.95])
    # 99th and 99.9th percentile (inverted distribution function) and the mean of the worst 5 % of positions
    sorted_N = np.sort(positions.kl_N)
    upto_N = np.arange(1, len(sorted_N) + 1, dtype=np.float64)
    p99, p999 = (float(sorted_N[np.searchsorted(upto_N, q * len(sorted_N))]) for q in (0.99, 0.999))
    in_worst_N = np.diff(np.maximum(upto_N - (1 - WORST_SHARE) * len(sorted_N), 0.0), prepend=0.0)
    worst = float((in_worst_N * sorted_N).sum() / in_worst_N.sum())
    confidence_N, ends = positions.confidence_N, [*(low for low, _ in CONFIDENCE[1:]), np.inf]
    by_confidence = [
        (name, (confidence_N >= low) & (confidence_N < high)) for (low, name), high in zip(CONFIDENCE, ends, strict=True)
    ]
    margins = positions.swap_margin_N[~positions.agrees_N]
    return Drift.model_validate(
        {
            "texts": texts,
            "num_documents": len(documents),
            "num_positions": num_positions,
            "non_finite_share": 1 - len(positions.kl_N) / num_positions,
            "kl_mean": text_mean(positions, positions.kl_N, NOT_NEGATIVE),
            "kl_median": median,
            "kl_p90": p90,
            "kl_p95": p95,
            "kl_p99": p99,
            "kl_p999": p999,
            "kl_max": positions.kl_N.max(),
            "kl_cvar95": worst,
            "kl_unbiased_mean": text_mean(positions, positions.unbiased_N) if is_sampled else None,
            "kl_text_mean": mean_over_texts(positions) if is_sampled else None,
            "tail_mass_mean": positions.tail_mass_N.mean(),
            "tail_mass_p99": np.quantile(positions.tail_mass_N, 0.99),
            "top1_agreement": text_mean(positions, positions.agrees_N.astype(np.float64), SHARE),
            "num_swaps": len(margins),
            "swap_margin_median": np.median(margins) if len(margins) else None,
            "swap_margin_max": margins.max() if len(margins) else None,
            "num_confident_swaps": int((margins > CONFIDENT_MARGIN).sum()),
            "probability_change_mean": text_mean(positions, positions.probability_change_N),
            "probability_change_rms": _mapped(text_mean(positions, positions.probability_change_N**2, NOT_NEGATIVE), np.sqrt),
            "perplexity_ratio": _mapped(text_mean(positions, positions.ln_ratio_N), np.exp),
            "by_span": _by_position(positions, spans, is_sampled),
            "unreached_spans": [name for name, inside_N, _ in spans_of(positions, spans) if not inside_N.any()],
            "by_confidence": groups_of(positions, by_confidence, is_sampled=is_sampled),
            **{
                f"by_{label}": groups_of(
                    positions,
                    [(str(name), label_N == name) for name in sorted({*label_N} - {""})],
                    is_sampled=is_sampled,
                )
                for label, label_N in positions.labels_N.items()
            },
            "curve": _by_position(positions, CURVE, is_sampled),
            "kl_by_text": _kl_by_text(usable, positions) if keeps_texts else (),
        }
    )


def _kl_by_text(usable: Sequence[tuple[ScoredDocument, PositionDivergence]], positions: Positions) -> list[TextKl]:
    items: dict[str | int, str] = {}
    for doc, _ in usable:
        items.setdefault(doc.cluster or id(doc), doc.item)
    kl_D, unbiased_D = (
        np.bincount(positions.cluster_N, weights=values_N) for values_N in (positions.kl_N, positions.unbiased_N)
    )
    return [
        TextKl(item=item, kl=kl, unbiased=unbiased) for item, kl, unbiased in zip(items.values(), kl_D, unbiased_D, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ one number
def text_mean(positions: Positions, values_N: Floats, within: tuple[float, float] = SIGNED, level: float = 0.95) -> TextMean:
    """Mean of a value per position, with an interval over whole texts if there are enough of them."""
    texts, text_N = np.unique(positions.cluster_N, return_inverse=True)
    if len(texts) < FEWEST_TEXTS:
        return Estimate(value=float(values_N.mean()), n=len(texts))
    strata = strata_of([positions.kinds[text] for text in texts])
    number = {stratum: i for i, stratum in enumerate(dict.fromkeys(strata))}
    stratum_N = np.array([number[stratum] for stratum in strata])[text_N]
    return skewed_mean(values_N, text_N, stratum_N, least=within[0], most=within[1], level=level)


def mean_over_texts(positions: Positions) -> TextMean:
    """Unbiased KL of each text, and the mean over texts, each counting once however long it is.

    A text's length depends on what is drawn in it: the token that ends it weighs more in a short text, and were its correction
    divided by that length the mean could be off by a third (benchmarks/verdicts/divergence/kl_limits.md). So it weighs as in a
    text of mean length.
    """
    _, first, text_N = np.unique(positions.text_N, return_index=True, return_inverse=True)
    sums, counts = np.bincount(text_N, weights=positions.unbiased_N), np.bincount(text_N)
    last = np.zeros(len(first), np.intp)
    last[text_N] = np.arange(len(text_N))
    ending = (positions.unbiased_N - positions.kl_N)[last]
    return text_mean(positions.only(first), (sums - ending) / counts + ending / counts.mean())


def _mapped(mean: TextMean, function: Any) -> TextMean:
    """The mean and its ends through an increasing function (exp, sqrt)."""
    names = ("value", "low", "high") if isinstance(mean, Interval) else ("value",)
    return mean.model_copy(update={name: float(function(getattr(mean, name))) for name in names})


# ------------------------------------------------------------------------------------------------ groups
# Which positions belong to a group is known from the text before them (where they stand, what the reference expects), so the
# estimate stays unbiased over a group. Not so where the token that stands there chooses: structural tokens.
def _by_position(positions: Positions, firsts: Sequence[int], is_sampled: bool) -> tuple[DriftSpan, ...]:
    """Spans that have positions; `last` of the open one is the last position seen."""
    spans = []
    for (name, inside_N, end), first in zip(spans_of(positions, firsts), firsts, strict=True):
        if inside_N.any():
            last = int(positions.position_N.max()) if end is None else end - 1
            group = group_of(name, positions.only(inside_N), is_sampled=is_sampled)
            spans.append(DriftSpan(**vars(group), first=first, last=last))
    return tuple(spans)


def spans_of(positions: Positions, firsts: Sequence[int]) -> Iterable[tuple[str, Bools, int | None]]:
    """(name, which positions lie inside, where it ends) of each span; the last one is open."""
    for first, end in zip(firsts, [*firsts[1:], None], strict=True):
        name = f"{first} and beyond" if end is None else f"{first} to {end - 1}"
        yield name, (positions.position_N >= first) & (positions.position_N < (np.inf if end is None else end)), end


def groups_of(positions: Positions, masks: Iterable[tuple[str, Bools]], *, is_sampled: bool) -> tuple[DriftGroup, ...]:
    """Of those that have positions. masks: which positions, by the group's name."""
    return tuple(group_of(name, positions.only(inside_N), is_sampled=is_sampled) for name, inside_N in masks if inside_N.any())


def group_of(name: str, positions: Positions, *, is_sampled: bool) -> DriftGroup:
    """Statistics of some positions. is_sampled: the unbiased estimate holds on them."""
    mean = text_mean(positions, positions.kl_N, NOT_NEGATIVE)
    return DriftGroup(
        name=name,
        num_positions=len(positions.kl_N),
        num_documents=mean.n,
        kl_mean=mean.value,
        kl_mean_interval=mean if isinstance(mean, Interval) else None,
        kl_p99=np.quantile(positions.kl_N, 0.99),
        top1_agreement=positions.agrees_N.mean(),
        kl_unbiased_mean=text_mean(positions, positions.unbiased_N) if is_sampled else None,
    )
