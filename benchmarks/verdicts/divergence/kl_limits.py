"""How often a divergence gate passes what lies beyond its limit, and fails what does not: before and after decision 210.

    python benchmarks/verdicts/divergence/kl_limits.py [--draws 2000]

No model and no server. Intervals and verdicts are made by the product's own functions; *before* they had other constants, and a
gate held the lower bound, over tokens alone, span by span. The committed result is kl_limits.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

sys.path.insert(0, str(Path(__file__).parents[1]))
from coverage_texts import DESIGNS, POPULATIONS, Design, Population

from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import Drift, DriftSpan
from assay.records.measurement import Divergence, Measurement
from assay.records.serving import Fingerprint
from assay.records.verdict import Status
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence import ScoredDocument, summarize
from assay_evaluate.divergence.drift import Positions, mean_over_texts
from assay_evaluate.divergence.strata import strata_of
from assay_evaluate.statistics import skewed
from assay_evaluate.statistics.skewed import skewed_ends, unseen_share
from assay_evaluate.verdicts.divergence import judge_divergence

Floats = NDArray[np.float64]
LIMIT = 0.08
BEFORE = {"LACKING": 6, "MOST_LACKING": 4, "HALF_AT_DEGREES": 0}
BROKEN = 100.0
"""KL of a broken text over that of another."""


@contextmanager
def as_before() -> Iterator[None]:
    """The interval of decision 132."""
    now = {name: getattr(skewed, name) for name in BEFORE}
    try:
        vars(skewed).update(BEFORE)
        yield
    finally:
        vars(skewed).update(now)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(title: str, words: Sequence[str], head: str, rows: Iterator[str]) -> Iterator[str]:
    yield from (f"## {title}", "", *words, "", head, "|" + "---|" * (head.count("|") - 1))
    yield from rows
    yield ""


# ------------------------------------------------------------------------------------------------ intervals
def high_ends(what: Population | Design, n: int, draws: int, seed: int = 1) -> Floats:
    """Upper ends over the true mean."""
    rng = np.random.default_rng(seed)
    kinds = what.kinds if isinstance(what, Design) else [()] * n
    strata = np.unique([str(one) for one in strata_of(kinds)], return_inverse=True)[1]
    return np.array([skewed_ends(*what.draw(rng, n), strata)[1] for _ in range(draws)]) / what.mean


def at_the_limit(draws: int) -> Iterator[str]:
    cases = [(one, n) for one in POPULATIONS for n in (20, 60, 240)] + [(one, len(one.kinds)) for one in DESIGNS]
    for what, n in cases:
        with as_before():
            old = high_ends(what, n, draws)
        new = high_ends(what, n, draws)
        passes = [percent(float((ends < LIMIT / mean).mean())) for mean in (0.035, 0.055) for ends in (old, new)]
        cells = [percent(float((ends < 1).mean())) for ends in (old, new)] + [f"{np.median(ends):.2f}" for ends in (old, new)]
        yield f"| {n} | {what.name} | {' | '.join([*cells, *passes])} |"


# ------------------------------------------------------------------------------------------------ rare broken texts
def broken(share: float, times_limit: float) -> Population:
    """Texts that are nearly all sound, and so many broken ones that the true mean is so many times the limit."""
    sound = times_limit * LIMIT / (1 + share * (BROKEN - 1))

    def sums(rng: np.random.Generator, counts: Floats) -> Floats:
        size = np.where(rng.random(len(counts)) < share, BROKEN, 1.0) * sound
        return counts * size * np.exp(0.5 * rng.standard_normal(len(counts)) - 0.125)

    return Population(f"{percent(share)} broken", "", times_limit * LIMIT, sums)


def rare(draws: int) -> Iterator[str]:
    for n in (20, 60, 100, 240, 400):
        for share in (0.02, unseen_share(n)):
            what = broken(share, 2.0)
            with as_before():
                old = high_ends(what, n, draws)
            new = high_ends(what, n, draws)
            said = "at what PASS says" if share == unseen_share(n) else "rarer" if share < unseen_share(n) else "more often"
            told = " | ".join(percent(float((ends * what.mean <= LIMIT).mean())) for ends in (old, new))
            yield f"| {n} | 1 in {1 / unseen_share(n):.0f} | {percent(share)} ({said}) | {told} |"


def paid(draws: int) -> Iterator[str]:
    """Texts from which on a candidate passes in 95 %, if every text that may not have been seen counts so many nats."""
    numbers = (20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400)
    for mean in (0.001, 0.02, 0.035, 0.055):
        found = []
        for nats in (0.0, 1.0, 8.0):
            enough = (
                n for n in numbers
                if np.mean(high_ends(POPULATIONS[2], n, draws // 4) * mean + nats * unseen_share(n) <= LIMIT) >= 0.95
            )  # fmt: skip
            found.append(str(next(enough, f"> {numbers[-1]:,}")))
        yield f"| {mean:g} | {' | '.join(found)} |"


# ------------------------------------------------------------------------------------------------ whole verdicts
GATE = DivergenceGate(kind="divergence", metric="kl_mean", max=LIMIT)
SPANS = DivergenceGate(kind="divergence", metric="kl_mean", over="spans", max=LIMIT)


def measured(divergence: Divergence) -> Measurement:
    fingerprint = Fingerprint(
        server="s", versions={}, hardware={}, profile="p", flags={}, environment={}, speculation=None, checkpoint_flags={},
        emulated=None, kernels=(),
    )  # fmt: skip
    return Measurement(
        model="m", label="c", is_reference=False, is_noise_floor=False, checkpoint="c", checkpoint_sha256="c",
        checkpoint_bytes=1, suite="s", suite_sha256="s", suite_recipe={},
        fingerprint=fingerprint, tasks=(), divergence=divergence, acceptance=None,
        not_measured={}, started="", seconds=1,
    )  # fmt: skip


def before(interval: Interval) -> Status:
    return "FAIL" if interval.low > LIMIT else "PASS" if interval.high <= LIMIT else "UNDERPOWERED"


def texts(
    seed: int, num: int, length: Callable[[int], int], noise: Callable[[int], float], shuffled: bool = False
) -> Divergence:
    """Texts of a reference with 400 ids, listed to the 20th. noise: of the candidate's logits in text i. shuffled: below the
    fifth its likeliest ids change places at random."""
    rng, documents = np.random.default_rng(seed), []
    for i in range(num):
        ln_p = _log_softmax(2.2 * rng.normal(size=(length(i), 400)))
        ln_q = _shuffled(rng, ln_p) if shuffled else _log_softmax(ln_p + noise(i) * rng.normal(size=ln_p.shape))
        tokens = (ln_p + rng.gumbel(size=ln_p.shape)).argmax(axis=1)
        documents.append(ScoredDocument(f"{i}", "en", _listed(ln_p, tokens), _listed(ln_q, tokens)))
    return summarize(documents, reference_checkpoint_sha256="r", top_k=20, position_buckets=(0,))


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _shuffled(rng: np.random.Generator, ln_p: Floats) -> Floats:
    order = np.argsort(-ln_p, axis=1)
    made = ln_p.copy()
    for row, ids in enumerate(order):
        made[row, ids[5:]] = ln_p[row, rng.permutation(ids[5:])]
    return made


def _listed(ln_PV: Floats, tokens: NDArray[np.intp]) -> TokenLogprobs:
    ids = np.argsort(-ln_PV, axis=1)[:, :20]
    chosen = ln_PV[np.arange(len(tokens)), tokens]
    values = np.take_along_axis(ln_PV, ids, axis=1)
    return TokenLogprobs(tokens.astype(np.int32), ids.astype(np.int32), values.astype(np.float32), chosen.astype(np.float32))


def verdicts(draws: int) -> Iterator[str]:
    cases: list[tuple[str, Callable[[int], Divergence]]] = [
        ("a lossless copy", lambda seed: texts(seed, 24, lambda i: 48, lambda i: 0.01)),
        ("all ids below the fifth change places", lambda seed: texts(seed, 24, lambda i: 48, lambda i: 0.0, shuffled=True)),
        (
            "every second reply is short (10 tokens of 400) and far off",
            lambda seed: texts(seed, 40, lambda i: (10, 400)[i % 2], lambda i: (1.2, 0.12)[i % 2]),
        ),
    ]
    for name, draw in cases:
        drawn = [draw(seed) for seed in range(draws)]
        drift = [one.drift[0] for one in drawn]
        mean = [np.mean([_value(one.kl_mean) for one in drawn]), np.mean([_value(one.kl_corrected_mean) for one in drawn])]
        mean.append(np.mean([_value(one.kl_text_mean) for one in drift]))
        old = [before(one.kl_mean) for one in drawn if isinstance(one.kl_mean, Interval)]
        new = [judge_divergence(GATE, measured(one)).status for one in drawn]
        said = [f"{percent(said.count('PASS') / draws)}, {percent(said.count('FAIL') / draws)}" for said in (old, new)]
        yield f"| {name} | {' | '.join(f'{value:.3g}' for value in mean)} | {' | '.join(said)} |"


def _value(number: object) -> float:
    return number.value if isinstance(number, Interval) else float("nan")


def length_by_token(draws: int) -> Iterator[str]:
    """Replies that end when a token is drawn: of the list, or of the tail. Each position has the same KL."""
    rng = np.random.default_rng(3)
    for name, end in (("2 %, listed", 0.02), ("0.5 %, in the tail", 0.005)):
        listed = np.array([0.4, 0.2, 0.1, 0.05, 0.05]) * (1 - (end if end > 0.01 else 0))
        tail = np.full(100, (1 - listed.sum() - end) / 100)
        p = np.concatenate([listed, tail, [end]])
        ln_ratio = 0.8 * rng.standard_normal(len(p))
        q = p * np.exp(-ln_ratio)
        q /= q.sum()
        ln_ratio, in_list = np.log(p / q), np.r_[np.ones(5, bool), np.zeros(100, bool), end > 0.01]
        truth = float((p * ln_ratio).sum())
        p_tail, q_tail = p[~in_list].sum(), q[~in_list].sum()
        lumped = float((p * ln_ratio)[in_list].sum() + p_tail * np.log(p_tail / q_tail))
        value = np.where(in_list, lumped, lumped + ln_ratio - np.log(p_tail / q_tail))
        lengths = np.minimum(rng.geometric(end, draws * 40), 1000)
        drawn = rng.choice(len(p) - 1, size=lengths.sum(), p=p[:-1] / p[:-1].sum())
        ends = np.cumsum(lengths)
        drawn[ends[lengths < 1000] - 1] = len(p) - 1
        sums = np.add.reduceat(value[drawn], ends - lengths)
        by_token, plain = sums.sum() / lengths.sum(), float((sums / lengths).mean())
        by_text = mean_over_texts(_positions(lengths, value[drawn], lumped)).value
        yield f"| {name} | {lengths.mean():.0f} | {truth:.4f} | {lumped:.4f} | {by_token:.4f} | {plain:.4f} | {by_text:.4f} |"


def _positions(lengths: NDArray[np.intp], unbiased_N: Floats, lumped: float) -> Positions:
    text_N, zero_N = np.repeat(np.arange(len(lengths)), lengths), np.zeros(len(unbiased_N))
    return Positions(
        text_N, text_N, zero_N.astype(np.intp), zero_N + lumped, unbiased_N, zero_N, zero_N > 0, zero_N, zero_N, zero_N, zero_N,
        {}, ((),) * len(lengths),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ several numbers
def spans_of(draws: int, num_spans: int, times_limit: float, n: int = 60, sigma: float = 0.8) -> tuple[float, float]:
    """FAIL by any span, each tested alone (before), and by the gate now. All spans have the same truth."""
    rng, old, new = np.random.default_rng(num_spans), 0, 0
    for _ in range(draws):
        found = []
        for _ in range(num_spans):
            counts = rng.integers(30, 250, n).astype(np.float64)
            sums = counts * times_limit * LIMIT * np.exp(sigma * rng.standard_normal(n) - sigma**2 / 2)
            low, high = skewed_ends(sums, counts, np.zeros(n, np.intp))
            found.append(Interval(value=float(sums.sum() / counts.sum()), low=max(low, 0.0), high=high, n=n))
        old += any(one.low > LIMIT for one in found)
        new += judge_divergence(SPANS, measured(with_spans(found))).status == "FAIL"
    return old / draws, new / draws


def with_spans(found: Sequence[Interval]) -> Divergence:
    spans = tuple(
        DriftSpan(
            name=f"span {i}", num_positions=1000, num_documents=one.n, kl_mean=one.value, kl_mean_interval=one, kl_p99=1.0,
            top1_agreement=1.0, kl_unbiased_mean=one, first=i, last=i,
        )
        for i, one in enumerate(found)
    )  # fmt: skip
    zero = found[0]
    drift = Drift(
        texts="all", num_documents=zero.n, num_positions=1000, non_finite_share=0.0, kl_mean=zero, kl_median=0, kl_p90=0,
        kl_p95=0, kl_p99=0, kl_p999=0, kl_max=0, kl_cvar95=0, kl_unbiased_mean=zero, tail_mass_mean=0, tail_mass_p99=0,
        top1_agreement=zero,
        num_swaps=0, swap_margin_median=None, swap_margin_max=None, num_confident_swaps=0, probability_change_mean=zero,
        probability_change_rms=zero, perplexity_ratio=zero, by_span=spans, unreached_spans=(), by_confidence=(), by_domain=(),
        by_language=(), by_part=(), curve=(),
    )  # fmt: skip
    return Divergence(
        reference_checkpoint_sha256="r", top_k=20, num_documents=zero.n, num_positions=1000, num_non_finite=0, kl_mean=zero,
        kl_median=0, kl_p90=0, kl_p99=0, kl_max=0, kl_corrected_mean=zero, tail_mass_mean=0, top1_agreement=zero,
        by_position=(), by_language={}, drift=(drift,),
    )  # fmt: skip


def several(draws: int) -> Iterator[str]:
    for num_spans in (1, 3, 6):
        told = [percent(share) for times in (1.0, 1.5, 2.0) for share in spans_of(draws, num_spans, times)]
        yield f"| {num_spans} | {' | '.join(told)} |"


def lines(draws: int) -> Iterator[str]:
    error = 100 * norm.ppf(0.975) * np.sqrt(0.025 * 0.975 / draws)
    yield from ("# Limits of KL", "", f"`python benchmarks/verdicts/divergence/kl_limits.py --draws {draws}`", "")
    yield f"{draws:,} draws a row unless said: a rate of 2.5 % is known to {error:.1f} points. The limit is {LIMIT:g} nats"
    yield "throughout. *before*: the interval of decision 132, the lower bound, over tokens alone, each span by itself."
    yield ""
    yield from table(
        "The truth at the limit, and candidates below it",
        ("*false PASS*: the truth is the limit. *end*: median upper end over the truth. The last columns: PASS where the true",
         "mean is 0.035 and 0.055 nats, what published 4-bit checkpoints have. Populations as in interval_coverage.md."),
        "| texts | population | false PASS, before | now | end, before | now | 0.035: before | now | 0.055: before | now |",
        at_the_limit(draws),
    )  # fmt: skip
    yield from table(
        "Rare broken texts",
        (f"The true mean is twice the limit, because some texts have {BROKEN:g} times the KL of the others. Nothing in a",
         "sample without such a text tells of them. *PASS says*: of damage rarer than that it says nothing."),
        "| texts | PASS says | texts that are broken | PASS, before | now |",
        rare(draws),
    )  # fmt: skip
    yield from table(
        "What it would cost to count unseen texts",
        ("Texts from which on a candidate passes in 95 %, if each text of the share that may not have been seen is taken to",
         "have no damage (now), 1 nat (ruined), or 8 nats (noise). Text means log-normal, sigma 0.8."),
        "| true KL | 0 nats | 1 nat | 8 nats |",
        paid(draws),
    )  # fmt: skip
    few = max(20, draws // 40)
    yield from table(
        "Whole verdicts",
        (f"{few} draws; PASS, FAIL.",),
        "| candidate | KL, lower bound | unbiased | as a mean over texts | before | now |",
        verdicts(few),
    )
    yield from table(
        "Is the mean over texts unbiased where a token ends the reply?",
        (
            "All positions have the same KL; the end of the reply is a token of the list, or of the tail. *plainly*: each",
            "text's values over its own length.",
        ),
        "| chance to end | mean length | KL | lower bound | estimate, over tokens | over texts, plainly | as it is |",
        length_by_token(draws),
    )
    yield from table(
        "Spans at their limit",
        ("FAIL of a candidate whose spans (60 texts each, log-normal with sigma 0.8) all lie at the limit, where any FAIL is",
         "false, and at 1.5 and 2 times it. *before*: each span by itself."),
        "| spans | at the limit, before | now | 1.5 times, before | now | 2 times, before | now |",
        several(draws),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    for line in lines(parser.parse_args().draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
