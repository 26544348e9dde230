"""Values per position of many texts -> `Drift`: how far, where, and how sure that is.

Tokens of one text are not independent, so every interval resamples whole documents (cluster bootstrap; BCa for means and
ratios, percentiles for quantiles and the mean of the worst 5 %). Gates and readers compare these with the same numbers of the
reference against itself; nothing here divides by that noise floor, which is exactly 0 on some machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.records.base import Interval
from assay.records.divergence import Drift, DriftGroup, DriftSpan, TextSet
from assay_evaluate.divergence.positions import Bools, Floats, PositionDivergence, ScoredDocument
from assay_evaluate.statistics import cluster_bootstrap_mean

SPANS = (0, 4096, 32768)
CURVE = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CONFIDENCE = ((0.0, "below 0.5"), (0.5, "0.5 to 0.9"), (0.9, "0.9 to 0.99"), (0.99, "0.99 and above"))
WORST_SHARE = 0.05
CONFIDENT_MARGIN = 0.5
NUM_RESAMPLES = 400
"""Of quantiles: each costs a pass over all positions. Means are resampled 2,000 times."""

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Positions:
    """All finite positions of some texts, one after the other (N), and what each belongs to."""

    document_N: Ints
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

    def only(self, mask_N: Bools) -> Positions:
        """Those where `mask_N`."""
        arrays = {name: value[mask_N] for name, value in vars(self).items() if name != "labels_N"}
        return Positions(**arrays, labels_N={name: value[mask_N] for name, value in self.labels_N.items()})


def gather(scored: Sequence[tuple[ScoredDocument, PositionDivergence]]) -> Positions:
    """Finite positions of the texts as flat arrays."""

    def flat(values: Callable[[ScoredDocument, PositionDivergence], npt.ArrayLike], dtype: Any = np.float64) -> Any:
        parts = [np.broadcast_to(values(doc, one), one.finite_P.shape)[one.finite_P] for doc, one in scored]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    numbers = {id(doc): number for number, (doc, _) in enumerate(scored)}
    return Positions(
        document_N=flat(lambda doc, one: numbers[id(doc)], np.intp),
        position_N=flat(lambda doc, one: doc.first_position + np.arange(len(one.finite_P)), np.intp),
        kl_N=flat(lambda doc, one: one.kl_P),
        unbiased_N=flat(lambda doc, one: one.corrected_P),
        tail_mass_N=flat(lambda doc, one: one.tail_mass_P),
        agrees_N=flat(lambda doc, one: one.agrees_P, np.bool_),
        confidence_N=flat(lambda doc, one: one.confidence_P),
        swap_margin_N=flat(lambda doc, one: one.swap_margin_P),
        ln_ratio_N=flat(lambda doc, one: one.ln_ratio_P),
        probability_change_N=flat(lambda doc, one: one.probability_change_P),
        labels_N={
            "domain": flat(lambda doc, one: doc.domain, np.str_),
            "language": flat(lambda doc, one: doc.language, np.str_),
            "part": flat(lambda doc, one: _parts(doc, len(one.finite_P)), np.str_),
        },
    )


def _parts(doc: ScoredDocument, num_positions: int) -> npt.ArrayLike:
    if doc.num_thinking is None:
        return ""
    return np.where(np.arange(num_positions) < doc.num_thinking, "thinking", "answer")


def drift_of(
    texts: TextSet | str,
    scored: Sequence[tuple[ScoredDocument, PositionDivergence]],
    *,
    num_documents: int,
    num_positions: int,
    is_sampled: bool,
    spans: Sequence[int] = SPANS,
    level: float = 0.95,
    seed: int = 0,
) -> Drift:
    """Statistics over the finite positions of the texts; at least two must have some.

    num_documents, num_positions: of all texts, those without a finite position too. is_sampled: the texts were drawn from the
    reference at T=1, so that the unbiased estimate holds. spans: first positions of the spans that are judged, ascending.
    """
    found = gather(scored)

    def mean(values_N: Floats) -> Interval:
        return cluster_bootstrap_mean(values_N, found.document_N, level=level, seed=seed)

    median, p90, p95 = np.quantile(found.kl_N, [0.5, 0.9, 0.95])
    p99, p999, worst = _upper_tail(found.kl_N, found.document_N, level, seed)
    margins = found.swap_margin_N[~found.agrees_N]
    return Drift.model_validate(
        {
            "texts": texts,
            "num_documents": num_documents,
            "num_positions": num_positions,
            "non_finite_share": 1 - len(found.kl_N) / num_positions,
            "kl_mean": mean(found.kl_N),
            "kl_median": median,
            "kl_p90": p90,
            "kl_p95": p95,
            "kl_p99": p99,
            "kl_p999": p999,
            "kl_max": found.kl_N.max(),
            "kl_cvar95": worst,
            "kl_unbiased_mean": mean(found.unbiased_N) if is_sampled else None,
            "tail_mass_mean": found.tail_mass_N.mean(),
            "tail_mass_p99": np.quantile(found.tail_mass_N, 0.99),
            "top1_agreement": mean(found.agrees_N.astype(np.float64)),
            "num_swaps": len(margins),
            "swap_margin_median": np.median(margins) if len(margins) else None,
            "swap_margin_max": margins.max() if len(margins) else None,
            "num_confident_swaps": int((margins > CONFIDENT_MARGIN).sum()),
            "probability_change_mean": mean(found.probability_change_N),
            "probability_change_rms": _mapped(mean(found.probability_change_N**2), np.sqrt),
            "perplexity_ratio": _mapped(mean(found.ln_ratio_N), np.exp),
            "by_span": _by_position(found, spans, level, seed),
            "by_confidence": tuple(_by_confidence(found, level, seed)),
            **{f"by_{label}": tuple(_by_label(found, label, level, seed)) for label in found.labels_N},
            "curve": _by_position(found, CURVE, level, seed),
        }
    )


# ------------------------------------------------------------------------------------------------ the upper tail
def _upper_tail(kl_N: Floats, document_N: Ints, level: float, seed: int) -> tuple[Interval, Interval, Interval]:
    """99th and 99.9th percentile and the mean of the worst 5 % of positions, with percentile-bootstrap intervals by document.

    A resample gives every document a weight, so that sorting once is enough. Quantiles are inverted distribution functions.
    """
    order = np.argsort(kl_N, kind="stable")
    sorted_N, document_N = kl_N[order], document_N[order]
    numbers, index_N = np.unique(document_N, return_inverse=True)
    rng = np.random.default_rng(seed)
    seen = _tail_statistics(sorted_N, np.ones(len(sorted_N)))
    resampled = np.array(
        [
            _tail_statistics(
                sorted_N, np.bincount(rng.integers(0, len(numbers), len(numbers)), minlength=len(numbers))[index_N]
            )
            for _ in range(NUM_RESAMPLES)
        ]
    )
    low, high = np.quantile(resampled, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    p99, p999, worst = (
        Interval(value=v, low=min(a, v), high=max(b, v), n=len(numbers), level=level)
        for v, a, b in zip(seen, low, high, strict=True)
    )
    return p99, p999, worst


def _tail_statistics(sorted_N: Floats, weight_N: npt.NDArray[np.generic]) -> Floats:
    upto_N = np.cumsum(weight_N, dtype=np.float64)
    total = upto_N[-1]
    p99, p999 = (sorted_N[min(int(np.searchsorted(upto_N, q * total)), len(sorted_N) - 1)] for q in (0.99, 0.999))
    in_worst_N = np.diff(np.maximum(upto_N - (1 - WORST_SHARE) * total, 0.0), prepend=0.0)
    return np.array([p99, p999, (in_worst_N * sorted_N).sum() / in_worst_N.sum()])


def _mapped(interval: Interval, function: Any) -> Interval:
    """The interval of an increasing function (exp, sqrt) of what `interval` is of."""
    least = 0.0 if function is np.sqrt else -np.inf  # a bootstrap's end can lie below what the mean of squares can be
    ends = {name: float(function(max(getattr(interval, name), least))) for name in ("value", "low", "high")}
    return interval.model_copy(update=ends)


# ------------------------------------------------------------------------------------------------ groups
def _by_position(found: Positions, firsts: Sequence[int], level: float, seed: int) -> tuple[DriftSpan, ...]:
    """Spans that have positions; `last` of the open one is the last position seen."""
    spans = []
    for first, end in zip(firsts, [*firsts[1:], None], strict=True):
        inside_N = (found.position_N >= first) & (found.position_N < (np.inf if end is None else end))
        if inside_N.any():
            last = int(found.position_N.max()) if end is None else end - 1
            group = _group(
                f"{first} to {last}" if end is not None else f"{first} and beyond", found.only(inside_N), level, seed
            )
            spans.append(DriftSpan(**vars(group), first=first, last=last))
    return tuple(spans)


def _by_confidence(found: Positions, level: float, seed: int) -> Iterable[DriftGroup]:
    ends = [*(low for low, _ in CONFIDENCE[1:]), np.inf]
    for (low, name), high in zip(CONFIDENCE, ends, strict=True):
        inside_N = (found.confidence_N >= low) & (found.confidence_N < high)
        if inside_N.any():
            yield _group(name, found.only(inside_N), level, seed)


def _by_label(found: Positions, label: str, level: float, seed: int) -> Iterable[DriftGroup]:
    label_N = found.labels_N[label]
    for name in sorted({*label_N} - {""}):
        yield _group(str(name), found.only(label_N == name), level, seed)


def _group(name: str, found: Positions, level: float, seed: int) -> DriftGroup:
    num_documents = len(np.unique(found.document_N))
    return DriftGroup(
        name=name,
        num_positions=len(found.kl_N),
        num_documents=num_documents,
        kl_mean=found.kl_N.mean(),
        kl_mean_interval=(
            cluster_bootstrap_mean(found.kl_N, found.document_N, level=level, seed=seed) if num_documents > 1 else None
        ),
        kl_p99=np.quantile(found.kl_N, 0.99),
        top1_agreement=found.agrees_N.mean(),
    )
