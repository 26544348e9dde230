"""Divergence from top-k log-probabilities, against the full-vocabulary KL computed here with plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from distributions import VOCABULARY, log_softmax, top_k_of

from assay.errors import MeasureError
from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay.records.measurement import Divergence
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence import ScoredDocument, position_divergence, sampling_gap, summarize


def sampled_pair(seed: int, positions: int, sharpness: float, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ln p, ln q and tokens drawn from p."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(positions, VOCABULARY))
    ln_p, ln_q = log_softmax(logits), log_softmax(logits + noise * rng.normal(size=logits.shape))
    tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)  # the Gumbel trick: a draw from p in every row
    return ln_p, ln_q, tokens


def one_position(token: int, ids: list[int], probabilities: list[float], chosen: float) -> TokenLogprobs:
    """A text of one token of probability `chosen`."""
    ln_p_PK = np.log([probabilities]).astype(np.float32)
    return TokenLogprobs(np.array([token], np.int32), np.array([ids], np.int32), ln_p_PK, np.log([chosen]).astype(np.float32))


def test_by_hand() -> None:
    """Two shared ids and a tail: 0.5 ln(0.5/0.4) + 0.2 ln(0.2/0.1) + 0.3 ln(0.3/0.5); the sampled token is in the tail."""
    reference = one_position(9, [3, 5], [0.5, 0.2], 0.05)
    candidate = one_position(9, [3, 5], [0.4, 0.1], 0.04)
    result = position_divergence(reference, candidate)
    kl = 0.5 * np.log(0.5 / 0.4) + 0.2 * np.log(0.2 / 0.1) + 0.3 * np.log(0.3 / 0.5)
    assert kl == pytest.approx(0.0969535)
    assert result.kl_P == pytest.approx([kl], abs=1e-7)
    assert result.corrected_P == pytest.approx([kl + np.log(0.05 / 0.04) - np.log(0.3 / 0.5)], abs=1e-6)
    assert result.tail_mass_P == pytest.approx([0.3], abs=1e-7)
    assert result.agrees_P.tolist() == [True]
    assert result.finite_P.tolist() == [True]


def test_id_missing_from_the_candidate_goes_into_the_tail_on_both_sides() -> None:
    """Reference {3: .5, 5: .2}, candidate {3: .4, 7: .3}: only id 3 is shared, the tails are .5 and .6."""
    reference = one_position(5, [3, 5], [0.5, 0.2], 0.2)
    candidate = one_position(5, [3, 7], [0.4, 0.3], 0.15)
    result = position_divergence(reference, candidate)
    kl = 0.5 * np.log(0.5 / 0.4) + 0.5 * np.log(0.5 / 0.6)
    assert result.kl_P == pytest.approx([kl], abs=1e-7)
    assert result.corrected_P == pytest.approx([kl + np.log(0.2 / 0.15) - np.log(0.5 / 0.6)], abs=1e-6)
    assert result.tail_mass_P == pytest.approx([0.3], abs=1e-7)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("k", [1, 5, 20, 64])
def test_lumped_is_a_lower_bound_everywhere(sharpness: float, k: int) -> None:
    ln_p, ln_q, tokens = sampled_pair(seed=k, positions=300, sharpness=sharpness, noise=0.5)
    full_P = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
    lumped_P = position_divergence(top_k_of(ln_p, tokens, k), top_k_of(ln_q, tokens, k)).kl_P
    assert (lumped_P <= full_P + 1e-6).all()
    assert lumped_P.mean() > 0


def test_equal_to_the_full_kl_when_the_tail_ratio_is_constant() -> None:
    """q = p outside the top 20 up to one factor: lumping the tail loses nothing."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(100, VOCABULARY))
    order = np.argsort(-logits, axis=1)
    changed = logits.copy()
    np.put_along_axis(
        changed, order[:, :20], np.take_along_axis(logits, order[:, :20], 1) + 0.01 * rng.normal(size=(100, 20)), 1
    )
    ln_p, ln_q = log_softmax(logits), log_softmax(changed)
    same_set = [set(a[:20]) == set(b[:20]) for a, b in zip(order, np.argsort(-ln_q, axis=1), strict=True)]
    assert sum(same_set) > 50
    full_P = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
    tokens = order[:, 0]
    lumped_P = position_divergence(top_k_of(ln_p, tokens, 20), top_k_of(ln_q, tokens, 20)).kl_P
    assert lumped_P[same_set] == pytest.approx(full_P[same_set], abs=2e-6)


def test_equal_to_the_full_kl_when_k_is_the_vocabulary() -> None:
    ln_p, ln_q, tokens = sampled_pair(seed=1, positions=200, sharpness=2.0, noise=0.5)
    full_P = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
    result = position_divergence(top_k_of(ln_p, tokens, VOCABULARY), top_k_of(ln_q, tokens, VOCABULARY))
    assert result.kl_P == pytest.approx(full_P, abs=5e-6)
    assert result.corrected_P == pytest.approx(result.kl_P)
    assert result.tail_mass_P == pytest.approx(np.zeros(200), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("sharpness", "k"), [(2.0, 5), (1.0, 20)])
def test_correction_is_unbiased(sharpness: float, k: int) -> None:
    """Mean over 40,000 sampled positions against the exact KL, within 4 standard errors; the bound alone is far below."""
    differences, lumped_gap = [], []
    for seed in range(8):
        ln_p, ln_q, tokens = sampled_pair(seed, 5000, sharpness, noise=0.4)
        full_P = (np.exp(ln_p) * (ln_p - ln_q)).sum(axis=1)
        result = position_divergence(top_k_of(ln_p, tokens, k), top_k_of(ln_q, tokens, k))
        differences.append(result.corrected_P - full_P)
        lumped_gap.append(full_P - result.kl_P)
    difference_N, gap = np.concatenate(differences), np.concatenate(lumped_gap).mean()
    standard_error = difference_N.std() / np.sqrt(len(difference_N))
    assert abs(difference_N.mean()) < 4 * standard_error
    assert gap > 8 * standard_error  # so the test would see a correction that is missing


def test_candidate_tail_lost_to_rounding_is_merged_not_infinite() -> None:
    """The candidate's top 2 sum to 1, the reference leaves 10 % outside: a finite lower bound, not infinity."""
    reference = one_position(1, [1, 2], [0.6, 0.3], 0.6)
    candidate = one_position(1, [1, 2], [0.7, 0.3], 0.7)
    result = position_divergence(reference, candidate)
    assert result.kl_P == pytest.approx([0.6 * np.log(0.6 / 0.7) + 0.4 * np.log(0.4 / 0.3)], abs=1e-6)
    assert result.finite_P.all()


def test_itself_is_exactly_zero() -> None:
    ln_p, _, tokens = sampled_pair(seed=5, positions=400, sharpness=2.0, noise=0.5)
    scored = top_k_of(ln_p, tokens, 20)
    result = position_divergence(scored, scored)
    assert not result.kl_P.any()
    assert not result.corrected_P.any()
    assert result.agrees_P.all()


def test_non_finite_positions_are_counted_and_left_out() -> None:
    ln_p, ln_q, tokens = sampled_pair(seed=6, positions=40, sharpness=2.0, noise=0.5)
    broken = ln_q.copy()
    broken[7] = np.nan
    broken[9, ln_p[9].argmax()] = -9999.0  # the reference's favourite is impossible in the candidate
    reference, candidate = top_k_of(ln_p, tokens, 500), top_k_of(broken, tokens, 500)
    result = position_divergence(reference, candidate)
    assert np.flatnonzero(~result.finite_P).tolist() == [7, 9]
    whole = [
        ScoredDocument("a", "en", reference, candidate),
        ScoredDocument("b", "en", reference, None),
        ScoredDocument("c", "zh", reference, top_k_of(ln_q, tokens, 500)),
    ]
    record = summarize(whole, reference_checkpoint_sha256="r", top_k=500, position_buckets=(0,))
    assert (record.num_documents, record.num_positions, record.num_non_finite) == (3, 120, 42)
    with pytest.raises(MeasureError, match="computes NaN or infinity"):
        summarize(whole[1:], reference_checkpoint_sha256="r", top_k=500, position_buckets=(0,))


def test_record_by_position_and_language() -> None:
    """Whole record against numpy over the same positions."""
    documents, parts = [], []
    for i, language in enumerate(["en"] * 10 + ["zh"] * 10):
        ln_p, ln_q, tokens = sampled_pair(seed=20 + i, positions=50 + i, sharpness=2.0, noise=0.2 + 0.04 * i)
        reference, candidate = top_k_of(ln_p, tokens, 20), top_k_of(ln_q, tokens, 20)
        documents.append(ScoredDocument(f"d{i}", language, reference, candidate))
        parts.append(position_divergence(reference, candidate))
    record = summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0, 10, 32, 999))
    kl_N = np.concatenate([part.kl_P for part in parts])
    assert record.kl_mean.value == pytest.approx(kl_N.mean())
    assert record.kl_mean.low < record.kl_mean.value < record.kl_mean.high
    assert (record.kl_mean.n, record.num_positions, record.num_non_finite) == (20, 1190, 0)
    assert [record.kl_median, record.kl_p90, record.kl_p99, record.kl_max] == pytest.approx(
        [np.median(kl_N), np.percentile(kl_N, 90), np.percentile(kl_N, 99), kl_N.max()]
    )
    agrees_N = np.concatenate([part.agrees_P for part in parts])
    assert record.top1_agreement.value == pytest.approx(agrees_N.mean())
    assert record.tail_mass_mean == pytest.approx(np.concatenate([part.tail_mass_P for part in parts]).mean())
    assert record.kl_corrected_mean.value == pytest.approx(np.concatenate([part.corrected_P for part in parts]).mean())
    assert [(b.first, b.last, b.n) for b in record.by_position] == [(0, 9, 200), (10, 31, 440), (32, 998, 550)]
    first_ten = np.concatenate([part.kl_P[:10] for part in parts])
    assert record.by_position[0].kl_mean == pytest.approx(first_ten.mean())
    assert record.by_position[0].kl_p99 == pytest.approx(np.percentile(first_ten, 99))
    # Ten texts of a language have no interval.
    assert record.by_language == {
        language: Estimate(value=np.concatenate([entry.kl_P for entry in some]).mean(), n=10)
        for language, some in (("en", parts[:10]), ("zh", parts[10:]))
    }
    again = summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0, 10, 32, 999))
    assert again == record  # seeded


@pytest.mark.slow
def test_sampling_gap_tells_sampled_text_from_text_of_a_broken_sampler() -> None:
    """0 within its interval for text drawn from the model, with a tail too; far from it at another temperature."""
    for sharpness, top_k in ((1.0, 20), (3.0, 20), (3.0, 500)):
        ln_p, _, tokens = sampled_pair(seed=5, positions=4_000, sharpness=sharpness, noise=0.1)
        gap_P = sampling_gap(top_k_of(ln_p, tokens, top_k))
        assert abs(gap_P.mean()) < 4 * gap_P.std() / np.sqrt(len(gap_P))
        hot = (ln_p / 5 + np.random.default_rng(6).gumbel(size=ln_p.shape)).argmax(axis=1)
        if top_k == VOCABULARY:
            gap_P = sampling_gap(top_k_of(ln_p, hot, top_k))
            assert gap_P.mean() == pytest.approx((-np.exp(log_softmax(ln_p / 5)) * ln_p).sum(1).mean()
                                                 + (np.exp(ln_p) * ln_p).sum(1).mean(), rel=0.05)  # fmt: skip
            assert gap_P.mean() > 2


@pytest.mark.parametrize("num_texts", [2, 19, 20])
def test_no_interval_below_twenty_texts(num_texts: int) -> None:
    """Of no number of the record: not of the mean, the estimate, the agreement, a span or the ratio of perplexities."""
    documents = []
    for i in range(num_texts):
        ln_p, ln_q, tokens = sampled_pair(seed=70 + i, positions=40, sharpness=2.0, noise=0.3)
        documents.append(ScoredDocument(f"d{i}", "en", top_k_of(ln_p, tokens, 20), top_k_of(ln_q, tokens, 20)))
    record = summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0,))
    drift = record.drift[0]
    means = [
        record.kl_mean, record.kl_corrected_mean, record.sampling_gap, record.top1_agreement, record.by_language["en"],
        drift.kl_mean, drift.kl_unbiased_mean, drift.top1_agreement, drift.probability_change_mean,
        drift.probability_change_rms, drift.perplexity_ratio,
    ]  # fmt: skip
    requested = Interval if num_texts >= 20 else Estimate
    assert [(type(mean), mean.n) for mean in means if mean is not None] == [(requested, num_texts)] * 11
    groups = [*drift.by_span, *drift.by_language, *drift.curve, *drift.by_confidence]
    assert [group.kl_mean_interval is not None for group in groups] == [group.num_documents >= 20 for group in groups]
    assert [text.item for text in drift.kl_by_text] == [f"d{i}" for i in range(num_texts)]
    assert sum(text.kl for text in drift.kl_by_text) == pytest.approx(40 * num_texts * drift.kl_mean.value)
    assert drift.kl_unbiased_mean is not None
    assert sum(text.unbiased for text in drift.kl_by_text) == pytest.approx(40 * num_texts * drift.kl_unbiased_mean.value)
    assert Divergence.model_validate_json(record.model_dump_json()) == record


def test_sampling_gap_of_the_record_has_an_interval() -> None:
    documents = []
    for i in range(24):
        ln_p, ln_q, tokens = sampled_pair(seed=50 + i, positions=200, sharpness=2.0, noise=0.1)
        documents.append(ScoredDocument(f"d{i}", "en", top_k_of(ln_p, tokens, 20), top_k_of(ln_q, tokens, 20)))
    gap = summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0,)).sampling_gap
    assert isinstance(gap, Interval) and gap.n == 24
    assert gap.low < 0 < gap.high
    assert gap.value == pytest.approx(np.concatenate([sampling_gap(doc.reference) for doc in documents]).mean())


def test_too_few_texts_are_not_called_nan() -> None:
    ln_p, ln_q, tokens = sampled_pair(seed=1, positions=20, sharpness=1.0, noise=0.5)
    entry = ScoredDocument("a", "en", top_k_of(ln_p, tokens, 5), top_k_of(ln_q, tokens, 5))
    for documents in ([], [entry]):
        with pytest.raises(MeasureError) as error:
            summarize(documents, reference_checkpoint_sha256="x", top_k=5, position_buckets=[0])
        assert str(error.value) == f"both sides have scored {len(documents)} of the reference's replies, and two are needed"
