"""Screenings that nobody made: of two candidates, with figures that are given. For tests only."""

from __future__ import annotations

from typing import Any

from assay.records.base import Interval
from assay.records.divergence import Drift, Estimate, Ranking, TextMean
from assay.records.screening import Numerics, Panel, Screened, Screening, StatedTexts, Surprise

REFERENCE_SHA256, PANEL_SHA256 = "a" * 64, "b" * 64


def mean(value: float, low: float, high: float, n: int = 100) -> Interval:
    return Interval(value=value, low=low, high=high, n=n, level=0.975)


def make_screened(label: str, kl: TextMean, **changes: Any) -> Screened:
    """Of 10,000 tokens. Its weights are named after the label."""
    n = kl.n
    drift = Drift(
        texts="held_out", num_documents=n, num_positions=10_000, non_finite_share=0.0, kl_mean=kl, kl_median=0.0, kl_p90=0.0,
        kl_p95=0.0, kl_p99=0.0, kl_p999=0.0, kl_max=1.0, kl_cvar95=0.0, kl_unbiased_mean=None, tail_mass_mean=0.0,
        tail_mass_p99=0.0, top1_agreement=Estimate(value=0.931, n=n), num_swaps=690, swap_margin_median=None,
        swap_margin_max=None, num_confident_swaps=0, probability_change_mean=Estimate(value=0.0, n=n),
        probability_change_rms=Estimate(value=0.0, n=n), perplexity_ratio=Estimate(value=1.01, n=n), by_span=(),
        unreached_spans=(), by_confidence=(), by_domain=(), by_language=(), by_part=(), curve=(),
    )  # fmt: skip
    screened = Screened(
        label=label, location=f"/data/{label}", weights_sha256=label.encode().hex().ljust(64, "0"),
        stored_as="INT4, groups of 128", bits_per_weight=4.13, word="not failed", limit=0.08,
        limit_for=" for 4-bit weights", tokens_needed=None, drift=drift,
        reverse_kl_mean=Estimate(value=kl.value, n=n), jensen_shannon_mean=Estimate(value=0.0, n=n),
        top_k_shared=Estimate(value=0.9, n=n), by_entropy=(), routers=(), not_applied=(),
    )  # fmt: skip
    return screened.model_copy(update=changes)


def make_screening(*candidates: Screened, ratio: Interval | None = None, **changes: Any) -> Screening:
    """ratio: of the first candidate's KL to the second's. changes: of the record."""
    rankings = () if len(candidates) < 2 else (
        Ranking(
            first=candidates[0].label, second=candidates[1].label, ratio=ratio, is_ranked=ratio is not None and ratio.high < 1
        ),
    )  # fmt: skip
    record = Screening(
        reference="/data/models/GLM-4.5-Air", reference_sha256=REFERENCE_SHA256, reference_stored_as="not quantized",
        numerics=Numerics(arithmetic="fp32", device="cpu", torch="2.13.0+cpu", transformers="5.14.0"),
        panel=Panel(
            files=("/home/me/replies.jsonl",), sha256=PANEL_SHA256, num_texts=100, num_tokens=10_000,
            stated=StatedTexts(source="replies of GLM-4.5-Air", licence="MIT", date="2026-11"),
        ),
        surprise=Surprise(nll=1.2, entropy=1.1), candidates=candidates, rankings=rankings, num_texts_given=100, seconds=12.0,
    )  # fmt: skip
    return record.model_copy(update=changes)
