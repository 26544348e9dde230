"""What a divergence gate is over: every number that is held against its limit, and which kind of KL it is.

A limit from above is passed by a number that is not too small on average: the unbiased mean, which only text sampled from the
reference has, or the exact one. The lower bound (all ids outside the reference's top k in one bucket) may only fail: what it
leaves out can be anything. So on held-out text, on structural tokens, which are chosen by the token that stands there, and of
quantiles, PASS takes exact mode. Agreement and perplexity ratio are what they are, whatever the text is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import EXACT_MODE, Drift, DriftSpan, Estimate
from assay.records.measurement import Divergence, Measurement

Number = Interval | Estimate | float
SET_NAMES = {"all": "", "held_out": " on held-out text"}
WITHOUT_UNIT = frozenset({"top1_agreement", "perplexity_ratio"})
QUANTILES = frozenset({"kl_p99", "kl_p999", "kl_cvar95"})
EXACT = "`divergence: {exact: true}` in the suite measures it, where the checkpoints are folders"


@dataclass(frozen=True)
class Held:
    """A number at one place. where: of which texts and positions. by_format: limits by the bits of the weights hold for it."""

    where: str
    name: str
    """What sentences call `number`; of the bound they say so."""
    number: Number | None
    """What may pass and fail. None: there is only a bound, and `why_bound_only` says why."""
    bound: Number | None
    """Lower bound of a KL, which may fail. None: `number` is no KL, or exact."""
    num_texts: int
    by_format: bool = True
    why_bound_only: str = ""

    @property
    def best(self) -> Number:
        """`number`; without it the bound."""
        found = self.bound if self.number is None else self.number
        assert found is not None, "a place is held only if it has one of the two"
        return found


def value_of(number: Number) -> float:
    return number if isinstance(number, float) else number.value


def ends_of(number: Number) -> tuple[float, float]:
    return (number.low, number.high) if isinstance(number, Interval) else (value_of(number), value_of(number))


def drifts_of(gate: DivergenceGate, divergence: Divergence) -> list[Drift]:
    """Of the texts that the gate is over."""
    wanted = {"sampled": {"all"}, "held_out": {"held_out"}, "every": {"all", "held_out"}}[gate.texts]
    return [drift for drift in divergence.drift if drift.texts in wanted]


def not_sampled(divergence: Divergence) -> str | None:
    """Why no estimate is unbiased on the sampled texts: they are not what the reference samples at temperature 1, or its
    log-probabilities are of another temperature or base. None: nothing speaks against it."""
    gap = divergence.gap_of_unsampled
    if gap is None:
        return None
    return (
        f"the texts' tokens are {gap.value:+.2g} nats ({gap.low:+.2g} to {gap.high:+.2g}) more surprising to the reference "
        "than its own entropy, so they were not sampled from these log-probabilities at temperature 1: see to the reference's "
        "sampler, and that its server gives natural logarithms without a temperature"
    )


def held_numbers(gate: DivergenceGate, divergence: Divergence) -> Iterator[Held]:
    """Every number that the gate is over; none if the record lacks it."""
    if gate.metric == "kl_exact_mean":
        yield from _exact_means(divergence)
    elif gate.over == "structural":
        yield from _structural(gate, divergence)
    elif gate.metric in ("kl_mean", "kl_unbiased_mean"):
        held = _spans(gate, divergence) if gate.over == "spans" else _means(gate, divergence)
        yield from (one if gate.metric == "kl_mean" else replace(one, bound=None) for one in held if _has(gate, one))
    elif gate.texts == "sampled" and gate.metric in {"kl_p99", "top1_agreement"}:
        yield _other(gate, divergence, "", getattr(divergence, gate.metric), divergence.num_documents)
    else:
        for drift in drifts_of(gate, divergence):
            yield _other(gate, divergence, SET_NAMES[drift.texts], getattr(drift, gate.metric), drift.num_documents)


def _has(gate: DivergenceGate, one: Held) -> bool:
    return one.number is not None or (gate.metric == "kl_mean" and one.bound is not None)


def _texts(number: Number, otherwise: int) -> int:
    return otherwise if isinstance(number, float) else number.n


# ------------------------------------------------------------------------------------------------ means
def _means(gate: DivergenceGate, divergence: Divergence) -> Iterator[Held]:
    """Over tokens, and over texts."""
    if gate.texts != "held_out":
        why = not_sampled(divergence)
        mean, bound = divergence.kl_corrected_mean, divergence.kl_mean
        yield Held("", "KL, unbiased", None if why else mean, bound, bound.n, why_bound_only=why or "")
        every = next((drift for drift in divergence.drift if drift.texts == "all"), None)
        if every is not None and every.kl_text_mean is not None and why is None:
            by_text = every.kl_text_mean
            yield Held("", "KL, unbiased, as a mean over texts", by_text, None, by_text.n, by_format=False)
    for drift in drifts_of(gate, divergence):
        if drift.texts == "held_out":
            exact = None if divergence.exact is None else divergence.exact.held_out
            yield _held_out(drift.kl_mean, None if exact is None else exact.kl_mean, "")


def _held_out(bound: Interval | Estimate, exact: Interval | Estimate | None, at: str) -> Held:
    why = (
        "" if exact is not None else f"held-out text was not sampled from the reference, so there is no unbiased mean; {EXACT}"
    )
    return Held(f" on held-out text{at}", "KL, exact", exact, bound, bound.n, why_bound_only=why)


def _spans(gate: DivergenceGate, divergence: Divergence) -> Iterator[Held]:
    not_ours = not_sampled(divergence)
    for drift in drifts_of(gate, divergence):
        for span in drift.by_span:
            at, bound = f" at positions {span.name}", _mean_of(span)
            if drift.texts == "held_out":
                exact = None if divergence.exact is None else divergence.exact.held_out
                own = None if exact is None else next((one for one in exact.by_span if one.name == span.name), None)
                yield _held_out(bound, None if own is None else _mean_of(own), at)
                continue
            why = not_ours or ("" if span.kl_unbiased_mean else "recorded before spans had an unbiased mean; measure again")
            number = None if why else span.kl_unbiased_mean
            yield Held(f" at positions {span.name}", "KL, unbiased", number, bound, span.num_documents, why_bound_only=why)


def _mean_of(span: DriftSpan) -> Interval | Estimate:
    return span.kl_mean_interval or Estimate(value=span.kl_mean, n=span.num_documents)


def _exact_means(divergence: Divergence) -> Iterator[Held]:
    if divergence.exact is not None:
        drift = divergence.exact.drift
        yield Held("", "KL, exact", drift.kl_mean, None, drift.kl_mean.n)
        if drift.kl_text_mean is not None:
            by_text = drift.kl_text_mean
            yield Held("", "KL, exact, as a mean over texts", by_text, None, by_text.n, by_format=False)


# ------------------------------------------------------------------------------------------------ other numbers
def _structural(gate: DivergenceGate, divergence: Divergence) -> Iterator[Held]:
    if divergence.structural is None:
        return
    found = getattr(divergence.structural, gate.metric)
    where = " on structural tokens"
    if gate.metric == "top1_agreement":
        yield Held(where, gate.metric, found, None, found.n)
        return
    why = "positions that are chosen by the token that stands there have no unbiased mean; `decides: fail` asks for no more"
    yield Held(where, "KL", None, found, found.n, why_bound_only=why)


def _other(gate: DivergenceGate, divergence: Divergence, where: str, found: Number, num_documents: int) -> Held:
    """A quantile of the lower bound, or a number that is no KL."""
    num_texts = _texts(found, num_documents)
    if gate.metric not in QUANTILES:
        return Held(where, gate.metric, found, None, num_texts)
    exact = divergence.exact
    drift = None if exact is None else exact.held_out if where else exact.drift
    number = None if drift is None else float(getattr(drift, gate.metric))
    why = "" if drift is not None else f"only the mean has an unbiased estimate; {EXACT}"
    return Held(where, f"{gate.metric}, exact", number, found, num_texts, why_bound_only=why)


def missing(gate: DivergenceGate, candidate: Measurement) -> str:
    """Why there is no number at all."""
    if gate.over == "structural":
        why = None if candidate.divergence is None else candidate.divergence.no_structural
        return f"Structural tokens: {why or 'recorded before they were told apart; measure again'}"
    if gate.metric == "kl_exact_mean":
        return f"Exact mode: {candidate.not_measured.get(EXACT_MODE, 'the suite did not ask for it')}"
    if gate.texts == "held_out":
        return "No held-out text was scored: the suite did not ask for it, or the reference's record says why"
    if gate.metric == "kl_unbiased_mean" and candidate.divergence is not None:
        return f"No unbiased mean: {not_sampled(candidate.divergence) or 'recorded before there was one; measure again'}"
    return "Recorded before drift was: measure again"
