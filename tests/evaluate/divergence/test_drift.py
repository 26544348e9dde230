"""Drift in numbers: statistics against numpy, the bias table of truncated sums, gates by span."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributions import VOCABULARY, log_softmax, top_k_of
from divergence_measured import measured

from assay.recipes.gate import DivergenceGate
from assay.recipes.suite import DivergenceSpec
from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay.records.measurement import Divergence
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence import ScoredDocument, position_divergence, summarize
from assay_evaluate.verdicts.divergence import judge_divergence

pytestmark = pytest.mark.slow


LARGE = 154_880


def scored(
    seed: int, positions: int, noise: float | np.ndarray, **labels: Any
) -> tuple[ScoredDocument, np.ndarray, np.ndarray]:
    """A text drawn from p with q = p + noise (one number, or one per position), and both full log-distributions."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=(positions, VOCABULARY))
    noise_P1 = np.broadcast_to(np.asarray(noise, float), positions)[:, None]
    ln_p, ln_q = log_softmax(logits), log_softmax(logits + noise_P1 * rng.normal(size=logits.shape))
    tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)
    document = ScoredDocument(f"d{seed}", labels.pop("language", "en"), top_k_of(ln_p, tokens, 64), top_k_of(ln_q, tokens, 64))
    return ScoredDocument(**vars(document) | labels), ln_p, ln_q


def test_statistics_against_numpy() -> None:
    """Every number of a drift record, recomputed from the values per position."""
    labels = [
        {"texts": "replies", "domain": "writing", "first_position": 10, "num_thinking": 40},
        {"texts": "replies", "domain": "sums", "language": "zh", "first_position": 4090},
        {"texts": "suite_replies", "domain": "gsm8k", "num_thinking": 0},
        {"texts": "held_out", "domain": "held-out", "first_position": 1},
        {"texts": "held_out", "domain": "held-out", "language": "zh", "first_position": 1},
    ]
    made = [scored(seed, 100 + seed, 0.1 + 0.1 * seed, **label) for seed, label in enumerate(labels)]
    documents = [document for document, _, _ in made]
    spans = (0, 4096, 32768)
    record = summarize(documents, reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,), spans=spans)
    assert [drift.texts for drift in record.drift] == ["all", "replies", "held_out"]  # one text of suite_replies is too few
    every, _, held_out = record.drift

    parts = [position_divergence(doc.reference, doc.candidate) for doc in documents[:3] if doc.candidate]
    kl_N = np.concatenate([part.kl_P for part in parts])
    p, q = (np.concatenate([np.exp(side[i]) for side in ((ln_p, ln_q) for _, ln_p, ln_q in made[:3])]) for i in (0, 1))
    tokens = np.concatenate([doc.reference.tokens_P for doc in documents[:3]])
    n = np.arange(len(tokens))
    assert (every.num_documents, every.num_positions, every.non_finite_share) == (3, 303, 0)
    assert every.kl_mean.value == pytest.approx(kl_N.mean()) == record.kl_mean.value
    assert [every.kl_median, every.kl_p90, every.kl_p95, every.kl_max] == pytest.approx(
        [*np.percentile(kl_N, [50, 90, 95]), kl_N.max()]
    )
    by_rank = np.sort(kl_N)
    assert every.kl_p99 == by_rank[int(np.ceil(0.99 * 303)) - 1]
    assert every.kl_p999 == by_rank[-1]
    worst = (by_rank[-15:].sum() + 0.15 * by_rank[-16]) / 15.15  # five percent of 303 positions
    assert every.kl_cvar95 == pytest.approx(worst)
    assert every.kl_unbiased_mean == record.kl_corrected_mean
    swaps = p.argmax(1) != q.argmax(1)
    assert (every.num_swaps, every.top1_agreement.value) == (swaps.sum(), pytest.approx(1 - swaps.mean()))
    margins = (p.max(1) - p[n, q.argmax(1)])[swaps]
    assert every.swap_margin_median == pytest.approx(np.median(margins), abs=1e-6)
    assert every.swap_margin_max == pytest.approx(margins.max(), abs=1e-6)
    assert every.num_confident_swaps == (margins > 0.5).sum()
    change = q[n, tokens] - p[n, tokens]
    assert every.probability_change_mean.value == pytest.approx(change.mean(), abs=1e-6)
    assert every.probability_change_rms.value == pytest.approx(np.sqrt((change**2).mean()), abs=1e-6)
    ratio = np.exp(np.log(p[n, tokens] / q[n, tokens]).mean())
    assert every.perplexity_ratio.value == pytest.approx(ratio, abs=1e-6)

    assert [(s.first, s.last, s.num_positions) for s in every.by_span] == [(0, 4095, 100 + 6 + 102), (4096, 32767, 95)]
    assert every.by_span[1].kl_mean == pytest.approx(parts[1].kl_P[6:].mean())
    assert every.by_span[1].kl_mean_interval is None  # one document
    assert every.unreached_spans == ("32768 and beyond",)
    assert {g.name: g.num_positions for g in every.by_domain} == {"gsm8k": 102, "sums": 101, "writing": 100}
    assert {g.name: g.num_positions for g in every.by_language} == {"en": 202, "zh": 101}
    assert {g.name: g.num_positions for g in every.by_part} == {"thinking": 40, "answer": 60 + 102}
    thinking = next(group for group in every.by_part if group.name == "thinking")
    assert thinking.kl_mean == pytest.approx(parts[0].kl_P[:40].mean())
    sure = (p.max(1) >= 0.5) & (p.max(1) < 0.9)
    middle = next(group for group in every.by_confidence if group.name == "0.5 to 0.9")
    assert (middle.num_positions, middle.kl_mean) == (sure.sum(), pytest.approx(kl_N[sure].mean()))
    assert sum(group.num_positions for group in every.by_confidence) == 303

    assert held_out.kl_unbiased_mean is None  # nobody sampled it from the reference
    assert held_out.num_positions == 103 + 104
    assert record.num_documents == 3
    again = summarize(documents, reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,), spans=spans)
    assert again == record  # seeded


# ------------------------------------------------------------------------------------------------ the bias of truncated sums
def zipf_pair(exponent: float, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """ln p, ln q [rows, LARGE]: p falls as rank^-exponent, q is p with logit noise of 0.15."""
    rng = np.random.default_rng(seed)
    ln_p = log_softmax(np.tile(-exponent * np.log(np.arange(1, LARGE + 1)), (rows, 1)))
    return ln_p, log_softmax(ln_p + 0.15 * rng.normal(size=ln_p.shape))


@pytest.mark.parametrize(
    ("name", "exponent", "k", "lumped", "unlumped", "renormalised", "own_lumped", "floor_filled"),
    [
        ("peaked", 2.12, 5, 0.86, 0.78, 0.89, 0.85, 0.71),
        ("peaked", 2.12, 20, 0.96, 0.98, 0.98, 0.96, 0.97),
        ("peaked", 2.12, 64, 0.99, 1.00, 0.99, 0.99, 0.99),
        ("flat", 1.26, 20, 0.58, 0.67, 0.87, 0.57, 0.61),
        ("flat", 1.26, 64, 0.68, 0.75, 0.90, 0.67, 0.71),
    ],
)
def test_bias_table_of_truncated_sums(
    name: str, exponent: float, k: int, lumped: float, unlumped: float, renormalised: float, own_lumped: float,
    floor_filled: float,
) -> None:  # fmt: skip
    """Shares of the full KL at a vocabulary of 154,880. Only the lumped sums stay below it at every single position."""
    ln_p, ln_q = zipf_pair(exponent, 48, seed=k)
    full_P = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
    tokens = np.zeros(len(ln_p), np.int32)
    ids = np.tile(np.arange(k, dtype=np.int32), (len(ln_p), 1))
    top_q = np.argsort(-ln_q[:, : 40 * k], axis=1)[:, :k].astype(np.int32)  # noise of 0.15 reaches no further down

    def of(values: np.ndarray, which: np.ndarray) -> TokenLogprobs:
        taken = np.take_along_axis(values, which, axis=1).astype(np.float32)
        return TokenLogprobs(tokens, which, taken, values[:, 0].astype(np.float32))

    exact_ids = position_divergence(of(ln_p, ids), of(ln_q, ids)).kl_P
    own_top_k = position_divergence(of(ln_p, ids), of(ln_q, top_q)).kl_P
    p, q, ln_ratio = np.exp(ln_p[:, :k]), np.exp(ln_q[:, :k]), (ln_p - ln_q)[:, :k]
    un = (p * ln_ratio).sum(axis=1)
    renormal = (p / p.sum(1, keepdims=True) * (ln_ratio - np.log(p.sum(1) / q.sum(1))[:, None])).sum(axis=1)
    missing = ln_q[:, :k] < np.take_along_axis(ln_q, top_q[:, -1:], axis=1)
    floor = (p * (ln_p[:, :k] - np.where(missing, np.take_along_axis(ln_q, top_q[:, -1:], axis=1), ln_q[:, :k]))).sum(axis=1)

    assert (exact_ids <= full_P + 2e-6).all() and (own_top_k <= exact_ids + 2e-6).all()
    slack = {"peaked": 0.05, "flat": 0.10}[name]
    assert exact_ids.mean() / full_P.mean() == pytest.approx(lumped, abs=slack)
    assert own_top_k.mean() / full_P.mean() == pytest.approx(own_lumped, abs=slack)
    # What is not offered: single positions lie on either side of the truth, so that no mean of them bounds anything.
    for wrong_P, share in ((un, unlumped), (renormal, renormalised), (floor, floor_filled)):
        assert wrong_P.mean() / full_P.mean() == pytest.approx(share, abs=3 * slack)
    assert (un > full_P + 1e-5).any() and (un < full_P - 1e-5).any()


# ------------------------------------------------------------------------------------------------ gates


def gate(**fields: Any) -> DivergenceGate:
    return DivergenceGate(kind="divergence", **({"max": 0.10} if "max" not in fields and "min" not in fields else {}), **fields)


@pytest.fixture(scope="module")
def late() -> Divergence:
    """Forty texts of 300 tokens without drift, half of them after a prompt of as many, and twenty held-out ones of 700 that go
    astray after position 512."""
    short = [scored(seed, 300, 0.1, texts="replies", first_position=seed % 2 * 300)[0] for seed in range(40)]
    astray = np.where(np.arange(700) < 511, 0.1, 1.0)
    long = [scored(50 + seed, 700, astray, texts="held_out", first_position=1)[0] for seed in range(20)]
    return summarize([*short, *long], reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,), spans=(0, 512))


def test_gate_by_span_sees_what_a_mean_over_all_hides(late: Divergence) -> None:
    verdict = judge_divergence(gate(metric="kl_mean"), measured(late))
    assert (verdict.gate, verdict.status) == ("divergence kl_mean", "PASS")
    verdict = judge_divergence(gate(metric="kl_mean", texts="every", over="spans"), measured(late))
    assert (verdict.gate, verdict.status) == ("divergence kl_mean, all texts, by span", "FAIL")
    assert verdict.detail.startswith("KL, lower bound, on held-out text at positions 512 and beyond: 0.")
    assert verdict.detail.endswith("allowed at most 0.1 nats. The worst of 4 numbers of this gate.")
    span = next(drift for drift in late.drift if drift.texts == "held_out").by_span[1]
    assert verdict.observed == span.kl_mean_interval
    sampled = judge_divergence(gate(metric="kl_mean", over="spans"), measured(late))
    assert (sampled.status, sampled.gate) == ("PASS", "divergence kl_mean, by span")


def test_short_replies_are_not_hidden_by_long_ones() -> None:
    """Every second reply is ten tokens long and far off: by tokens that is a fortieth of the text."""
    made = [scored(seed, (10, 400)[seed % 2], (1.2, 0.1)[seed % 2])[0] for seed in range(40)]
    record = summarize(made, reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,))
    by_text = record.drift[0].kl_text_mean
    parts = [(doc, position_divergence(doc.reference, doc.candidate)) for doc in made if doc.candidate is not None]
    lengths = np.array([len(entry.kl_P) for _, entry in parts])
    ending = np.array([entry.corrected_P[-1] - entry.kl_P[-1] for _, entry in parts])
    own = np.array([entry.corrected_P.sum() for _, entry in parts]) - ending
    assert isinstance(by_text, Interval) and by_text.n == 40
    assert by_text.value == pytest.approx((own / lengths + ending / lengths.mean()).mean())
    over_tokens = judge_divergence(gate(metric="kl_mean"), measured(record.model_copy(update={"drift": ()})))
    verdict = judge_divergence(gate(metric="kl_mean"), measured(record))
    assert (over_tokens.status, verdict.status, verdict.observed) == ("PASS", "FAIL", by_text)
    assert verdict.detail == (
        f"KL, unbiased, as a mean over texts: {by_text.value:.4g} nats (interval of at least 95 %: {by_text.low:.4g} to "
        f"{by_text.high:.4g}); allowed at most 0.1 nats. The worst of 2 numbers of this gate."
    )


def test_what_lies_outside_the_list_is_not_passed_unseen() -> None:
    """Ids below the fifth change places (vllm-project/llm-compressor #2646: the tail dominates). The lower bound passed."""
    documents = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        ln_p = log_softmax(2.0 * rng.normal(size=(48, VOCABULARY)))
        ln_q = ln_p.copy()
        for row, ids in enumerate(np.argsort(-ln_p, axis=1)[:, 5:]):
            ln_q[row, ids] = ln_p[row, rng.permutation(ids)]
        tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)
        documents.append(ScoredDocument(f"{seed}", "en", top_k_of(ln_p, tokens, 20), top_k_of(ln_q, tokens, 20)))
    record = summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0,))
    assert isinstance(record.kl_mean, Interval) and record.kl_mean.high < 0.1 < 1 < record.kl_corrected_mean.value
    verdict = judge_divergence(gate(metric="kl_mean"), measured(record))
    assert (verdict.status, verdict.detail.split(":")[0]) == ("FAIL", "KL, unbiased")
    by_bound = gate(metric="kl_mean", texts="held_out")
    held_out = [ScoredDocument(**vars(document) | {"texts": "held_out"}) for document in documents]
    pair = summarize([*documents, *held_out], reference_checkpoint_sha256="r", top_k=20, position_buckets=(0,))
    verdict = judge_divergence(by_bound, measured(pair))
    assert verdict.status == "NOT MEASURED" and verdict.detail.endswith(
        "a lower bound can fail a candidate and not pass one: held-out text was not sampled from the reference, so there is no "
        "unbiased mean; `divergence: {exact: true}` in the suite measures it, where the checkpoints are folders."
    )


def test_one_of_several_numbers_at_their_limit_does_not_fail() -> None:
    """Three spans at their limit failed falsely in 5.7 %: what is beyond alone may be chance among all that are looked at."""

    def spans(*lows: float) -> Divergence:
        near = [Interval(value=0.1 + 2 * (low - 0.1) + 0.02, low=low, high=1.0, n=40) for low in lows]
        record = few(20, 0.1)
        drift = record.drift[0]
        made = [
            drift.by_span[0].model_copy(
                update={"name": f"{i}", "kl_unbiased_mean": entry, "kl_mean_interval": None, "kl_mean": 0.01}
            )
            for i, entry in enumerate(near)
        ]
        every = drift.model_copy(update={"by_span": tuple(made), "unreached_spans": ()})
        return record.model_copy(update={"drift": (every,)})

    by_span = gate(metric="kl_mean", over="spans")
    alone = judge_divergence(by_span, measured(spans(0.1005)))
    among = judge_divergence(by_span, measured(spans(0.1005, 0.01, 0.01)))
    assert (alone.status, among.status) == ("FAIL", "UNDERPOWERED")
    assert among.detail.endswith(
        "allowed at most 0.1 nats; by itself this fails, but among 3 numbers of divergence it may be chance (Holm). The worst "
        "of 3 numbers of this gate."
    )
    assert judge_divergence(by_span, measured(spans(0.15, 0.01, 0.01))).status == "FAIL"


def few(num_late: int, level: float) -> Divergence:
    """Twenty short texts without drift; `num_late` of them reach position 512, where the noise is `level`."""
    noise = np.where(np.arange(600) < 512, 0.1, level)
    texts = [scored(seed, 600 if seed < num_late else 100, noise[: 600 if seed < num_late else 100])[0] for seed in range(20)]
    return summarize(texts, reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,), spans=(0, 512))


def test_span_that_few_texts_reach_is_not_skipped() -> None:
    """One text with nats of drift beyond 512 was a PASS: its span had no interval, so nobody looked."""
    record = few(1, 6.0)
    late = record.drift[0].by_span[1]
    assert late.kl_mean > 1.5 and late.num_documents == 1
    verdict = judge_divergence(gate(metric="kl_mean", over="spans"), measured(record))
    assert (verdict.status, verdict.observed) == ("NOT MEASURED", None)
    first, far = (span.kl_unbiased_mean for span in record.drift[0].by_span)
    assert isinstance(first, Interval) and isinstance(far, Estimate)
    assert verdict.detail == (
        f"Not judged: KL, unbiased, at positions 512 and beyond: {far.value:.4g} nats over 1 text; 20 are needed. The rest "
        f"does not fail it: KL, unbiased, at positions 0 to 511: {first.value:.4g} nats "
        f"(interval of at least 95 %: {first.low:.4g} to {first.high:.4g}); allowed at most 0.1 nats."
    )
    failed = judge_divergence(gate(metric="kl_mean", over="spans", max=1e-6), measured(record))
    assert failed.status == "FAIL" and failed.observed == record.drift[0].by_span[0].kl_mean_interval
    assert failed.detail.startswith("KL, lower bound, at positions 0 to 511: ") and failed.detail.endswith(
        f"Not judged: KL, unbiased, at positions 512 and beyond: {far.value:.4g} nats over 1 text; 20 are needed."
    )


def test_span_that_no_text_reaches_is_said() -> None:
    verdict = judge_divergence(gate(metric="kl_mean", over="spans"), measured(few(0, 6.0)))
    assert verdict.status == "NOT MEASURED"
    assert verdict.detail.startswith("Not judged: no text reaches positions 512 and beyond; 20 are needed. The rest does not")
    assert judge_divergence(gate(metric="kl_mean"), measured(few(0, 6.0))).status == "PASS"


@pytest.mark.parametrize("metric", ["kl_mean", "kl_p99", "kl_p999", "top1_agreement", "kl_unbiased_mean", "perplexity_ratio"])
def test_fewer_than_twenty_texts_are_not_judged(metric: str) -> None:
    """Neither to fail nor to pass: three texts of twice the limit passed in a third of all draws."""
    called = {"kl_mean": "KL, unbiased:", "kl_unbiased_mean": "KL, unbiased:"}.get(metric, metric)
    called += ", lower bound:" if metric.startswith("kl_p") else ""
    for num_texts, words in ((3, "3 texts"), (19, "19 texts")):
        texts = [scored(seed, 60, 0.5)[0] for seed in range(num_texts)]
        record = summarize(texts, reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,))
        for limit in (1e-6, 100.0):
            verdict = judge_divergence(gate(metric=metric, max=limit), measured(record))
            assert (verdict.status, verdict.observed, verdict.limit) == ("NOT MEASURED", None, limit)
            assert verdict.detail.startswith(f"Not judged: {called} ") and f" over {words}; 20 are needed." in verdict.detail
    enough = summarize([*texts, scored(19, 60, 0.5)[0]], reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,))
    statuses = [judge_divergence(gate(metric=metric, max=limit), measured(enough)).status for limit in (1e-6, 100.0)]
    assert statuses == ["FAIL", "NOT MEASURED" if metric.startswith("kl_p") else "PASS"]


def test_spans_beyond_the_context_are_not_asked_for() -> None:
    spec = DivergenceSpec(num_documents=20, max_tokens=8, spans=(0, 4096, 16384))
    assert [spec.spans_within(length) for length in (None, 40960, 16384, 4096)] == [
        (0, 4096, 16384), (0, 4096, 16384), (0, 4096), (0,),
    ]  # fmt: skip


def test_gates_on_the_other_statistics(late: Divergence) -> None:
    every = late.drift[0]
    for metric in ("kl_unbiased_mean", "perplexity_ratio"):
        interval = getattr(every, metric)
        alone = late.model_copy(
            update={"drift": tuple(entry.model_copy(update={"kl_text_mean": None}) for entry in late.drift)}
        )
        for limit, status in ((interval.high + 0.01, "PASS"), (interval.low - 0.01, "FAIL"), (interval.value, "UNDERPOWERED")):
            verdict = judge_divergence(gate(metric=metric, max=limit), measured(alone))
            assert (verdict.status, verdict.observed, verdict.limit) == (status, interval, limit), metric
    for metric in ("kl_p999", "kl_cvar95"):  # by their value; of the lower bound, so that none passes
        value = getattr(every, metric)
        for limit, status in ((value + 0.01, "NOT MEASURED"), (value - 0.01, "FAIL")):
            verdict = judge_divergence(gate(metric=metric, max=limit), measured(late))
            assert (verdict.status, verdict.observed, verdict.limit) == (status, None, limit), metric
            assert verdict.detail.startswith(f"{metric}, lower bound: {value:.4g} nats (no interval); allowed at most "), metric
    verdict = judge_divergence(gate(metric="top1_agreement", texts="held_out", min=0.99), measured(late))
    assert verdict.status == "FAIL" and verdict.detail.startswith("top1_agreement on held-out text 0.")


def test_what_is_missing_is_not_measured(late: Divergence) -> None:
    old = late.model_copy(update={"drift": ()})
    assert judge_divergence(gate(metric="kl_mean"), measured(old)).status == "PASS"
    for other, words in (
        (gate(metric="kl_cvar95"), "Recorded before drift was"),
        (gate(metric="kl_mean", over="spans"), "Recorded before drift was"),
        (gate(metric="kl_mean", texts="held_out"), "No held-out text was scored"),
        (gate(metric="kl_exact_mean"), "Exact mode: the suite did not ask for it"),
    ):
        verdict = judge_divergence(other, measured(old))
        assert verdict.status == "NOT MEASURED" and words in verdict.detail
    reason = {"divergence in exact mode": "lm_head is quantized"}
    assert "lm_head is quantized" in judge_divergence(gate(metric="kl_exact_mean"), measured(late, **reason)).detail
    broken = scored(0, 300, 0.1, texts="held_out")[0]
    assert broken.candidate is not None
    broken.candidate.chosen_P[3] = np.nan
    sets = ["replies"] * 20 + ["held_out"] * 20
    whole = [scored(seed, 100, 0.1, texts=texts)[0] for seed, texts in enumerate(sets, start=1)]
    record = summarize([*whole, broken], reference_checkpoint_sha256="r", top_k=64, position_buckets=(0,))
    assert record.num_non_finite == 0
    assert judge_divergence(gate(metric="kl_mean"), measured(record)).status == "PASS"
    assert judge_divergence(gate(metric="kl_mean", texts="every"), measured(record)).status == "NOT MEASURED"


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        (DivergenceGate, {"metric": "kl_p99", "over": "spans", "max": 1}, "judges kl_mean"),
        (DivergenceGate, {"metric": "kl_exact_mean", "texts": "every", "max": 1}, "is of sampled texts"),
        (DivergenceSpec, {"spans": [512, 0]}, "must begin with 0 and ascend"),
    ],
)
def test_recipes_that_make_no_sense(section: type, fields: dict[str, Any], words: str) -> None:
    needed = {"num_documents": 2, "max_tokens": 1} if section is DivergenceSpec else {"kind": "divergence"}
    with pytest.raises(ValueError, match=words):
        section.model_validate(needed | fields)
