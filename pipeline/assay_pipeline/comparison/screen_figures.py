"""From values at every token of a candidate's texts to what a screening says of it: means with intervals, word, ranking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import Drift, Ranking
from assay.records.screening import AppliedFloor, Drafts, RouterChange, Screened, ScreenWord, Surprise
from assay_pipeline.comparison.screen_power import root_moved, tokens_that_decide

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike

    from assay_evaluate.divergence.drift import Positions
    from assay_evaluate.divergence.positions import Bools, PositionDivergence, ScoredDocument
    from assay_evaluate.verdicts.divergence import Limit
    from assay_pipeline.comparison.screen_passes import MadePass, ScreenReference
    from assay_pipeline.comparison.screen_sources import ScreenSource
    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.screen.compare import TextDivergence
    from assay_quantize.screen.draft import DraftAcceptance
    from assay_quantize.screen.forward import States
    from assay_quantize.screen.texts import ScreenText

ENTROPY = ((0.0, "below 0.1 nats"), (0.1, "0.1 to 0.5"), (0.5, "0.5 to 1.5"), (1.5, "1.5 and above"))


def router_changes(texts: Sequence[ScreenText], reference: States, candidate: States) -> tuple[RouterChange, ...]:
    from assay_quantize.screen.compare import other_experts

    changes = other_experts([entry.scored for entry in texts], reference, candidate)
    return tuple(
        RouterChange(layer=layer, changed=changed, replaced=replaced) for layer, (changed, replaced) in changes.items()
    )


def _documents(
    texts: Sequence[ScreenText], values: Sequence[TextDivergence]
) -> list[tuple[ScoredDocument, PositionDivergence]]:
    """As the statistics of served divergence take them."""
    import numpy as np

    from assay_evaluate.client.journal import TokenLogprobs
    from assay_evaluate.divergence.positions import PositionDivergence, ScoredDocument

    pairs = []
    for entry, text in zip(texts, values, strict=True):
        none = np.zeros((len(text.kl_P), 0))
        scored = TokenLogprobs(
            text.tokens_P.astype(np.int32), none.astype(np.int32), none.astype(np.float32), text.ln_p_P.astype(np.float32)
        )
        document = ScoredDocument(
            entry.name, entry.language, scored, scored, "held_out", entry.domain, entry.scored.first, entry.num_thinking
        )
        divergence = PositionDivergence(
            text.kl_P, text.kl_P, np.zeros_like(text.kl_P), text.agrees_P, np.ones(len(text.kl_P), bool), text.confidence_P,
            text.margin_P, text.ln_p_P - text.ln_q_P, np.exp(text.ln_q_P) - np.exp(text.ln_p_P),
        )  # fmt: skip
        pairs.append((document, divergence))
    return pairs


def screened_candidate(
    label: str, source: ScreenSource, stored: StoredCheckpoint, made: MadePass, gate: DivergenceGate,
    reference: ScreenReference, values: Sequence[TextDivergence], routers: tuple[RouterChange, ...], level: float,
) -> Screened:  # fmt: skip
    import numpy as np

    from assay_evaluate.divergence.drift import NOT_NEGATIVE, SHARE, drift_of, gather, groups_of, text_mean

    texts = reference.texts
    pairs = _documents(texts, values)
    drift = drift_of("held_out", [document for document, _ in pairs], pairs, is_sampled=False, keeps_texts=False)
    if drift is None:
        raise AssayError(f"{label}: {len(texts)} text is too few for a divergence; give at least two")
    positions: Positions = gather(pairs)
    kl_mean = text_mean(positions, positions.kl_N, NOT_NEGATIVE, level)
    if isinstance(kl_mean, Interval):
        kl_mean = with_higher_low(kl_mean, [text.kl_P.sum() for text in values], [len(text.kl_P) for text in values])
    drift = drift.model_copy(update={"kl_mean": kl_mean})
    if reference.floor is not None and isinstance(drift.kl_mean, Interval):
        drift = drift.model_copy(update={"kl_mean": _widened(drift.kl_mean, reference.floor.kl)})
    flat = {
        name: np.concatenate([getattr(text, name) for text in values]) for name in ("reverse_kl_P", "js_P", "top_k_shared_P")
    }
    entropy_N = np.concatenate([text.entropy_P for text in values])
    ends = [*(low for low, _ in ENTROPY[1:]), math.inf]
    limit = limit_by_bits(gate, source.folder)
    word, needed = _word(drift, limit.value, surprise_of(values), reference.floor)
    return Screened(
        label=label,
        location=source.location,
        weights_sha256=made.sha256,
        stored_as=stored.what,
        bits_per_weight=8 * sum(w.num_bytes for w in stored.weights) / sum(w.shape[0] * w.shape[1] for w in stored.weights),
        word=word,
        limit=limit.value,
        limit_for=limit.reason,
        tokens_needed=needed,
        drift=drift,
        floor=reference.floor,
        reverse_kl_mean=text_mean(positions, flat["reverse_kl_P"], NOT_NEGATIVE),
        jensen_shannon_mean=text_mean(positions, flat["js_P"], NOT_NEGATIVE),
        top_k_shared=text_mean(positions, flat["top_k_shared_P"], SHARE),
        by_entropy=groups_of(
            positions,
            [(name, (entropy_N >= low) & (entropy_N < high)) for (low, name), high in zip(ENTROPY, ends, strict=True)],
            is_sampled=False,
        ),
        by_structural=groups_of(positions, _structural_masks(source.folder, values), is_sampled=False),
        routers=routers,
        fp8_kv_cache=made.model.fp8_kv_cache,
        drafts=_drafts(reference.drafts, made.drafts),
        not_applied=tuple(_not_applied(stored, reference.drafts, made.drafts)),
    )


def limit_by_bits(gate: DivergenceGate, folder: Path) -> Limit:
    """What a gate allows a checkpoint of so many bits."""
    from assay_evaluate.run.weight_bits import weight_bits, weight_shares
    from assay_evaluate.verdicts.divergence import limit_for

    bits = weight_bits(folder)
    return limit_for(gate, bits, None, weight_shares=weight_shares(folder, bits))


def kl_of_texts(sums_T: ArrayLike, counts_T: ArrayLike, level: float = 0.95) -> Interval:
    """Mean KL a token, of the KL and the tokens of each text: as of a screening, all texts being of one kind."""
    import numpy as np

    from assay_evaluate.statistics.skewed import skewed_ends

    sums, counts = np.asarray(sums_T, np.float64), np.asarray(counts_T, np.float64)
    mean = float(sums.sum() / counts.sum())
    low, high = skewed_ends(sums, counts, np.zeros(len(sums), np.intp), level) if np.ptp(sums / counts) else (mean, mean)
    interval = Interval(value=mean, low=max(low, 0.0), high=high, n=len(sums), level=level, coverage="at_least")
    return with_higher_low(interval, sums, counts)


def with_higher_low(mean: Interval, sums_T: ArrayLike, counts_T: ArrayLike) -> Interval:
    """The lower end is that of KL over tokens as a ratio of two sums over texts (Fieller 1954), where that is the higher one.

    sums_T, counts_T: KL and tokens of each text. Around the mean a long text that loses nothing lies so far below that the
    interval of 60 texts of 1 nat begins at 0. What its tokens lie below a limit of hundredths is little. The higher of the two
    ends lies above the truth about as often as the first alone (benchmarks/screen/intervals.md).
    """
    from assay_evaluate.statistics.skewed import skewed_ratio

    ratio = skewed_ratio(sums_T, counts_T, mean.level)
    return mean if ratio is None else mean.model_copy(update={"low": min(max(mean.low, ratio.low), mean.value)})


def _structural_masks(folder: Path, values: Sequence[TextDivergence]) -> list[tuple[str, Bools]]:
    """Kind of structural token -> where one stands; empty: the folder does not name them."""
    import numpy as np

    from assay_evaluate.client.client import NotMeasured
    from assay_evaluate.divergence.structural import structural_ids

    try:
        kinds = structural_ids(folder)
    except NotMeasured:
        return []
    kind_N = np.array([kinds.get(int(token), "") for text in values for token in text.tokens_P], np.str_)
    return [(kind, kind_N == kind) for kind in ("thinking", "tools", "end", "other")]


def _drafts(reference: list[DraftAcceptance] | str, candidate: list[DraftAcceptance] | str) -> Drafts | None:
    import numpy as np

    from assay.records.divergence import FEWEST_TEXTS
    from assay_evaluate.statistics.clustered import cluster_bootstrap_mean

    if isinstance(reference, str) or isinstance(candidate, str):
        return None
    accepted = [np.concatenate([text.accepted_D for text in side]) for side in (reference, candidate)]
    greedy = [np.concatenate([text.agrees_D for text in side]) for side in (reference, candidate)]
    if not len(accepted[0]):
        return None
    texts_D = np.repeat(np.arange(len(candidate)), [len(text.accepted_D) for text in candidate])
    has_interval = len(np.unique(texts_D)) >= FEWEST_TEXTS
    return Drafts(
        num_drafts=len(accepted[0]),
        reference_accepted=float(accepted[0].mean()),
        accepted=float(accepted[1].mean()),
        change=cluster_bootstrap_mean(accepted[1] - accepted[0], texts_D) if has_interval else None,
        reference_greedy=float(greedy[0].mean()),
        greedy=float(greedy[1].mean()),
    )


def _not_applied(
    stored: StoredCheckpoint, reference: list[DraftAcceptance] | str, candidate: list[DraftAcceptance] | str
) -> Iterator[str]:
    from assay_quantize.screen.kv_cache import is_computed

    if stored.kv.number is not None and not is_computed(stored.kv):
        yield f"KV cache in {stored.kv.number}"
    if isinstance(candidate, str):
        yield f"MTP drafts: {candidate}"
    elif isinstance(reference, str):
        yield f"MTP drafts of the reference: {reference}"


def _widened(mean: Interval, floor: float) -> Interval:
    low, high = root_moved(mean.low, -math.sqrt(floor)), root_moved(mean.high, math.sqrt(floor))
    return mean.model_copy(update={"low": low, "high": high, "coverage": "at_least"})


def surprise_of(values: Sequence[TextDivergence]) -> Surprise:
    """The same of every candidate: it is the reference's."""
    import numpy as np

    return Surprise(
        nll=-float(np.concatenate([text.ln_p_P for text in values]).mean()),
        entropy=float(np.concatenate([text.entropy_P for text in values]).mean()),
    )


def _word(drift: Drift, limit: float, surprise: Surprise, floor: AppliedFloor | None) -> tuple[ScreenWord, int | None]:
    """What the interval of the mean says of the limit; the scored tokens that would decide, at this spread of texts."""
    mean = drift.kl_mean
    if not isinstance(mean, Interval):
        return "UNDERPOWERED", None
    if mean.low > limit:
        return ("UNDERPOWERED" if surprise.is_foreign else "FAIL"), None
    if mean.high <= limit:
        return "not failed", None
    return "UNDERPOWERED", tokens_that_decide(mean, drift.num_positions, limit, floor)


def rankings_of(screened: Sequence[Screened], values: dict[str, list[TextDivergence]], level: float) -> Iterator[Ranking]:
    """Each candidate against the next, paired by text."""
    import numpy as np

    from assay.records.divergence import FEWEST_TEXTS
    from assay_evaluate.statistics.skewed import skewed_ratio

    for first, second in itertools.pairwise(screened):
        sums = [np.array([text.kl_P.sum() for text in values[label]]) for label in (first.label, second.label)]
        ratio = skewed_ratio(sums[0], sums[1], level) if len(sums[0]) >= FEWEST_TEXTS else None
        yield Ranking(first=first.label, second=second.label, ratio=ratio, is_ranked=ratio is not None and ratio.high < 1)
