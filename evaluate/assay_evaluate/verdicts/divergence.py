"""Divergence against limits. It must be shown to lie within, or the candidate does not pass; alone it passes nobody: KL says
how much two models differ, not which is better (arXiv 2606.19558).

- **FAIL**: a number lies beyond the limit with its whole interval: the unbiased or exact KL, or its lower bound. Adjusted by
  Holm over all numbers of all divergence gates of the candidate, for one of several at their limits would fail by chance.
- **PASS**: every number lies within with its whole interval, and none of them is a lower bound.
- **UNDERPOWERED**: an interval straddles the limit, or too few texts were scored to have shown damage as rare as `max_unseen`.
- **NOT MEASURED**: the number is missing, is over fewer than `FEWEST_TEXTS` texts, or only a lower bound of it is known.

With `decides: fail` the last two are shown and have no say.

A limit from above is passed by a number that is not too small on average: the unbiased mean, which only text sampled from the
reference has, or the exact one. The lower bound (all ids outside the reference's top k in one bucket) may only fail: what it
leaves out can be anything. So on held-out text, on structural tokens, which are chosen by the token that stands there, and of
quantiles, PASS takes exact mode. Agreement and perplexity ratio are what they are, whatever the text is.

A single limit for all formats lets through what is broken for its own: good checkpoints of 8-bit weights lie near 0.01 nats, of
4-bit weights near 0.05 (docs/decisions/kl-gates.md, 113, has the sources). One 4-bit layer does not make an 8-bit
checkpoint a 4-bit one: the limit rises with the share of the weights that have fewer bits, up to half of them (decision 213).
Serving that is itself noisy cannot show less, so the limit is at least a multiple of the repeat's distance; `max` or `min`
stands above both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType

from assay.quantities import interval_name, percent_of_events, percent_short
from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import EXACT_MODE, FEWEST_TEXTS, Drift, DriftSpan, Estimate
from assay.records.measurement import Divergence, Measurement
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.skewed import unseen_share

Number = Interval | Estimate | float
SEVERITY: tuple[Status, ...] = ("FAIL", "NOT MEASURED", "UNDERPOWERED", "PASS")
DIVERGENCE = "divergence "
"""Begins the names of these gates."""
NOT_CERTIFIED = "A small divergence does not show that answers are as good."
SET_NAMES = {"all": "", "held_out": " on held-out text"}
WITHOUT_UNIT = frozenset({"top1_agreement", "perplexity_ratio"})
QUANTILES = frozenset({"kl_p99", "kl_p999", "kl_cvar95"})
EXACT = "`divergence: {exact: true}` in the suite measures it, where the checkpoints are folders"
WHOLE_FROM = 0.5
"""Share of the weights with so few bits from which on their limit holds as a whole."""


@dataclass(frozen=True)
class Limit:
    """reason: ends the clause "allowed at most 0.02 nats" in the verdict's sentence."""

    value: float
    reason: str = ""


@dataclass(frozen=True)
class GatedNumber:
    """What a gate is compared with at one place. where: of which texts and positions. by_format: limits by the bits of the
    weights hold for it."""

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
        best = self.bound if self.number is None else self.number
        assert best is not None, "there is one of the two"
        return best


@dataclass(frozen=True)
class _Test:
    """A number against its limit. p_fail: one-sided, of a truth within the limit. None: it has no interval."""

    gate: DivergenceGate
    gated: GatedNumber
    limit: Limit
    p_fail: float | None
    alpha: float
    by_bound: bool
    """The bound speaks more clearly against it than the number itself."""

    @property
    def shown(self) -> Number:
        return self.gated.bound if self.by_bound and self.gated.bound is not None else self.gated.best

    def is_beyond(self, value: float) -> bool:
        return value > self.limit.value if self.gate.max is not None else value < self.limit.value

    def status(self, adjusted: Mapping[int, float]) -> Status:
        is_beyond = self.is_beyond(value_of(self.shown)) if self.p_fail is None else adjusted[id(self)] <= self.alpha
        number, most = self.gated.number, self.gate.max_unseen
        if is_beyond or number is None:
            return "FAIL" if is_beyond else "NOT MEASURED"
        low, high = ends_of(number)
        shows_too_little = most is not None and unseen_share(self.gated.num_texts) > most
        return "UNDERPOWERED" if self.is_beyond(high if self.gate.max is not None else low) or shows_too_little else "PASS"

    @property
    def severity(self) -> float:
        """How far the number is on the way to its limit, and beyond."""
        value, limit = value_of(self.shown), self.limit.value
        return value / limit if self.gate.max is not None and limit else limit - value if self.gate.min is not None else value


@dataclass(frozen=True)
class _Prepared:
    """A gate and what is compared with it. verdict: nothing was tested, and why. too_few: what too few texts reach."""

    gate: DivergenceGate
    tests: Sequence[_Test] = ()
    too_few: Sequence[str] = ()
    verdict: Verdict | None = None


def judge_divergence(gate: DivergenceGate, candidate: Measurement, *, floor: Divergence | None = None) -> Verdict:
    """One divergence gate by itself: the worst of the texts and spans that it is over, Holm over these."""
    return judge_divergences([gate], candidate, floor=floor)[0]


def judge_divergences(
    gates: Sequence[DivergenceGate],
    candidate: Measurement,
    *,
    floor: Divergence | None = None,
    when_passed: str = NOT_CERTIFIED,
) -> list[Verdict]:
    """Every divergence gate of a candidate, in the order given.

    floor: of the reference's own repeat. The repeat itself is compared with `max` or `min`: it has the reference's weights.
    when_passed: what the sentence of a PASS ends with; empty: nor does it say what so few texts cannot show.
    """
    prepared_gates = [_prepare(gate, candidate, floor) for gate in gates]
    tests = [(test, test.p_fail) for prepared in prepared_gates for test in prepared.tests if test.p_fail is not None]
    adjusted = dict(zip((id(test) for test, _ in tests), holm([p for _, p in tests]), strict=True))
    verdicts = []
    for prepared in prepared_gates:
        verdict = prepared.verdict or _judge(prepared, candidate, adjusted, when_passed)
        if prepared.gate.decides != "pass_and_fail" and verdict.status not in ("FAIL", "PASS"):
            detail = f"{verdict.detail} It does not stand against a PASS."
            verdict = verdict.model_copy(update={"has_say": False, "detail": detail})
        verdicts.append(verdict)
    return verdicts


def worst_value(gate: DivergenceGate, divergence: Divergence) -> float | None:
    """The worse end of the worst number that the gate would be compared with. None: there is no such number."""
    ends = [ends_of(gated.best) for gated in gated_numbers(gate, divergence)]
    if not ends:
        return None
    return max(high for _, high in ends) if gate.max is not None else min(low for low, _ in ends)


# ------------------------------------------------------------------------------------------------ what is tested
def _prepare(gate: DivergenceGate, candidate: Measurement, floor: Divergence | None) -> _Prepared:
    if candidate.is_noise_floor:
        gate = gate.model_copy(update={"expect": {}, "times_noise_floor": None})

    def not_tested(reason: str) -> _Prepared:
        return _Prepared(gate, verdict=_verdict(gate, candidate, "NOT MEASURED", reason))

    divergence = candidate.divergence
    if divergence is None:
        reason = candidate.not_measured.get("divergence", "the suite did not ask for it")
        return not_tested(f"No divergence for {candidate.label}: {reason}.")
    if divergence.num_non_finite or any(drift.non_finite_share > 0 for drift in drifts_of(gate, divergence)):
        worst = max([divergence.num_non_finite / divergence.num_positions, *(d.non_finite_share for d in divergence.drift)])
        share = f"{divergence.num_non_finite} of {divergence.num_positions}" if divergence.num_non_finite else f"{worst:.2%} of"
        return not_tested(f"{share} positions had no finite log-probability: a mean over the others would hide them.")
    noise = {} if floor is None else {(n.where, n.name): value_of(n.best) for n in gated_numbers(gate, floor)}
    too_few, tests = [], []
    for gated in gated_numbers(gate, divergence):
        if gated.num_texts < FEWEST_TEXTS:
            texts = f"{gated.num_texts} text{'s' if gated.num_texts != 1 else ''}"
            too_few.append(f"{_named(gate, gated, is_bound=gated.number is None)} over {texts}")
            continue
        limit = limit_for(
            gate, candidate.weight_bits, noise.get((gated.where, gated.name)), weight_shares=candidate.weight_shares,
            by_format=gated.by_format,
        )  # fmt: skip
        # Of the number and its bound, what speaks more clearly against it.
        own = None if gated.number is None else _p_beyond(gate, gated.number, limit.value)
        of_bound = None if gated.bound is None else _p_beyond(gate, gated.bound, limit.value)
        by_bound = gated.number is None or (of_bound is not None and (own is None or of_bound < own))
        levels = [number.level for number in (gated.number, gated.bound) if isinstance(number, Interval)]
        alpha = (1 - levels[0]) / 2 if levels else 0.0
        tests.append(_Test(gate, gated, limit, of_bound if by_bound else own, alpha, by_bound))
    if gate.over == "spans":
        for drift in drifts_of(gate, divergence):
            too_few += [f"no text{SET_NAMES[drift.texts]} reaches positions {name}" for name in drift.unreached_spans]
    if tests:
        return _Prepared(gate, tests, too_few)
    return not_tested(f"{_not_judged(too_few)}." if too_few else f"{why_missing(gate, candidate)}.")


def _not_judged(too_few: Sequence[str]) -> str:
    return f"Not judged: {'; '.join(too_few)}; {FEWEST_TEXTS} are needed"


def _p_beyond(gate: DivergenceGate, number: Number, limit: float) -> float | None:
    """One-sided p of a truth within the limit, from the end of the interval that is nearer to it: a normal tail, heavier than
    the interval's own on its short side, where KL has that end. None: the number has no interval."""
    if not isinstance(number, Interval):
        return None
    near = number.low if gate.max is not None else number.high
    is_beyond = number.value > limit if gate.max is not None else number.value < limit
    beyond = abs(number.value - limit) if is_beyond else 0.0
    reach = abs(number.value - near)
    if reach == 0:
        return 0.0 if beyond > 0 else 1.0
    normal = NormalDist()
    return 1 - normal.cdf(beyond / reach * normal.inv_cdf((1 + number.level) / 2))


# ------------------------------------------------------------------------------------------------ the limit
def limit_for(
    gate: DivergenceGate, weight_bits: int | None, floor: float | None, *,
    weight_shares: Mapping[int, float] = MappingProxyType({}), by_format: bool = True,
) -> Limit:  # fmt: skip
    """weight_bits: the fewest; None: not known. weight_shares: bits -> share of the weights; empty: all have the fewest.

    floor: the gate's number of the reference's own repeat, on the same texts and positions. None: there is none.

    by_format: False for a number of which nothing is known by format (a mean over texts): `max` or `min` holds.
    """
    last = gate.max if gate.max is not None else gate.min
    assert last is not None, "the recipe's own check: either max or min"
    if not gate.expect:
        return Limit(last)
    if not by_format:
        return Limit(last, " for any format")
    expected = _expected(gate, weight_bits, weight_shares, last)
    if gate.times_noise_floor is None or floor is None or expected.value == last:
        return expected
    same = 0.0 if gate.max is not None else 1.0
    by_noise = same + gate.times_noise_floor * (floor - same)
    if (by_noise <= expected.value) if gate.max is not None else (by_noise >= expected.value):
        return expected
    noise = f"{gate.times_noise_floor:g} times the reference's own repeat, {floor:.4g}"
    if (by_noise > last) if gate.max is not None else (by_noise < last):
        return Limit(last, f" for any format ({noise}, would be more)")
    return Limit(by_noise, f" ({noise}; {expected.value:.4g}{expected.reason} with less noise)")


def _expected(gate: DivergenceGate, weight_bits: int | None, weight_shares: Mapping[int, float], last: float) -> Limit:
    """Of the bits of the weights, whatever the noise."""

    def of_bits(bits: int) -> float:
        return gate.expect[max(entry for entry in gate.expect if entry <= bits)] if min(gate.expect) <= bits else last

    if weight_bits is None:
        return Limit(last, " for any format (the bits of its weights are not known)")
    shares = {bits: weight_shares[bits] for bits in sorted(weight_shares) if weight_shares[bits] > 0}
    if len(shares) < 2:
        bits = next(iter(shares), weight_bits)
        if min(gate.expect) > bits:
            return Limit(last, f" for any format (nothing is expected of {bits}-bit weights)")
        return Limit(of_bits(bits), f" for {bits}-bit weights")
    # From the limit of the most bits on, each step towards that of fewer in proportion to the share that has so few.
    most, *fewer = reversed(shares)
    limit = before = of_bits(most)
    for bits in fewer:
        share = sum(share for other, share in weight_shares.items() if share > 0 and other <= bits)
        limit += min(1.0, share / WHOLE_FROM) * (of_bits(bits) - before)
        before = of_bits(bits)
    weights = " and ".join(f"{percent_of_events(share)} {bits}-bit" for bits, share in shares.items())
    return Limit(limit, f" for {weights} weights")


# ------------------------------------------------------------------------------------------------ what it says
def _judge(prepared: _Prepared, candidate: Measurement, adjusted: Mapping[int, float], when_passed: str) -> Verdict:
    too_few = prepared.too_few
    judged = [(test.status(adjusted), test) for test in prepared.tests]
    status, worst = min(judged, key=lambda pair: (SEVERITY.index(pair[0]), -pair[1].severity))
    verdict = _sentence(candidate, status, worst, len(judged), len(adjusted), when_passed if not too_few else "")
    if not too_few:
        return verdict
    reason = f"{_not_judged(too_few)}."
    if status == "FAIL":
        return verdict.model_copy(update={"detail": f"{verdict.detail} {reason}"})
    rest = f"{reason} The rest does not fail it: {verdict.detail}"
    return verdict.model_copy(update={"status": "NOT MEASURED", "observed": None, "detail": rest})


def _named(gate: DivergenceGate, gated: GatedNumber, *, is_bound: bool) -> str:
    """`KL, unbiased, at positions 512 and beyond: 0.05 nats`."""
    name, number, where = gated.name, gated.best, gated.where
    if is_bound:
        assert gated.bound is not None, "a place without a number has a bound"
        name, number = f"{gate.metric if gate.metric in QUANTILES else 'KL'}, lower bound", gated.bound
    if gate.metric in WITHOUT_UNIT:
        return f"{name}{where} {value_of(number):.4g}"
    return f"{name}{f',{where}' if where else ''}: {value_of(number):.4g} nats"


def _sentence(
    candidate: Measurement, status: Status, test: _Test, num_numbers: int, num_tested: int, when_passed: str
) -> Verdict:
    gate, gated = test.gate, test.gated
    is_bound = test.by_bound and status in ("FAIL", "NOT MEASURED")
    number = test.shown if is_bound else gated.best
    interval = "no interval"
    if isinstance(number, Interval):
        interval = f"{interval_name(number.level, number.coverage)}: {number.low:.4g} to {number.high:.4g}"
    unit = "" if gate.metric in WITHOUT_UNIT else " nats"
    value = _named(gate, gated, is_bound=is_bound)
    margin = f"allowed {'at most' if gate.max is not None else 'at least'} {test.limit.value:.4g}{unit}{test.limit.reason}"
    among = f" The worst of {num_numbers} numbers of this gate." if num_numbers > 1 else ""
    is_open = _why_open(test, num_tested) if status == "UNDERPOWERED" else ""
    if status == "NOT MEASURED":
        is_open = f"; a lower bound can fail a candidate and not pass one: {gated.why_bound_only}"
    detail = f"{value} ({interval}); {margin}{is_open}.{among}"
    if status == "PASS" and when_passed:
        rare = ""
        if gate.metric not in WITHOUT_UNIT and isinstance(gated.number, Interval):
            one_in = math.floor(1 / unseen_share(gated.num_texts, gated.number.level))
            rare = f"Damage in fewer than 1 of {one_in} such texts may not be among these {gated.num_texts}. "
        detail += f" {rare}{when_passed}"
    observed = number if isinstance(number, Interval) and status != "NOT MEASURED" else None
    verdict = _verdict(gate, candidate, status, detail, observed)
    return verdict.model_copy(update={"limit": test.limit.value, "clause": f"{value}; {margin}{is_open}"})


def _why_open(test: _Test, num_tested: int) -> str:
    """Why it is undecided."""
    gate, number = test.gate, test.gated.best
    low, high = ends_of(number)
    near, far = (low, high) if gate.max is not None else (high, low)
    if test.is_beyond(near):
        return f"; by itself this fails, but among {num_tested} numbers of divergence it may be chance (Holm)"
    if test.is_beyond(far):
        return ", which lies inside the interval"
    assert gate.max_unseen is not None
    alpha = (1 - (number.level if isinstance(number, Interval) else 0.95)) / 2
    needed = math.ceil(math.log(alpha) / math.log1p(-gate.max_unseen))
    return (
        f"; but damage in 1 text of {1 / gate.max_unseen:.0f} (max_unseen {percent_short(gate.max_unseen)}) may be missing "
        f"among {test.gated.num_texts}: that takes {needed}"
    )


def _verdict(
    gate: DivergenceGate, candidate: Measurement, status: Status, detail: str, observed: Interval | None = None
) -> Verdict:  # fmt: skip
    names = [f"{DIVERGENCE}{gate.metric}"]
    names += {"sampled": [], "held_out": ["held-out text"], "every": ["all texts"]}[gate.texts]
    names += {"all": [], "spans": ["by span"], "structural": ["structural tokens"]}[gate.over]
    limit = gate.max if gate.max is not None else gate.min
    return Verdict(
        gate=", ".join(names), candidate=candidate.label, status=status, observed=observed, limit=limit, detail=detail
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what a gate is over
def value_of(number: Number) -> float:
    return number if isinstance(number, float) else number.value


def ends_of(number: Number) -> tuple[float, float]:
    return (number.low, number.high) if isinstance(number, Interval) else (value_of(number), value_of(number))


def drifts_of(gate: DivergenceGate, divergence: Divergence) -> list[Drift]:
    """Of the texts that the gate is over."""
    texts = {"sampled": {"all"}, "held_out": {"held_out"}, "every": {"all", "held_out"}}[gate.texts]
    return [drift for drift in divergence.drift if drift.texts in texts]


def why_not_sampled(divergence: Divergence) -> str | None:
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


def gated_numbers(gate: DivergenceGate, divergence: Divergence) -> Iterator[GatedNumber]:
    """Every number that the gate is over; none if the record lacks it."""
    if gate.metric == "kl_exact_mean":
        if divergence.exact is not None:
            mean, by_text = divergence.exact.drift.kl_mean, divergence.exact.drift.kl_text_mean
            yield GatedNumber("", "KL, exact", mean, None, mean.n)
            if by_text is not None:
                yield GatedNumber("", "KL, exact, as a mean over texts", by_text, None, by_text.n, by_format=False)
    elif gate.over == "structural":
        yield from _structural(gate, divergence)
    elif gate.metric in ("kl_mean", "kl_unbiased_mean"):
        for gated in _spans(gate, divergence) if gate.over == "spans" else _means(gate, divergence):
            if gate.metric == "kl_mean" and (gated.number is not None or gated.bound is not None):
                yield gated
            elif gate.metric != "kl_mean" and gated.number is not None:
                yield replace(gated, bound=None)
    elif gate.texts == "sampled" and gate.metric in {"kl_p99", "top1_agreement"}:
        yield _other(gate, divergence, "", getattr(divergence, gate.metric), divergence.num_documents)
    else:
        for drift in drifts_of(gate, divergence):
            yield _other(gate, divergence, SET_NAMES[drift.texts], getattr(drift, gate.metric), drift.num_documents)


def _means(gate: DivergenceGate, divergence: Divergence) -> Iterator[GatedNumber]:
    """Over tokens, and over texts."""
    if gate.texts != "held_out":
        reason = why_not_sampled(divergence)
        mean, bound = divergence.kl_corrected_mean, divergence.kl_mean
        yield GatedNumber("", "KL, unbiased", None if reason else mean, bound, bound.n, why_bound_only=reason or "")
        by_text = next((drift.kl_text_mean for drift in divergence.drift if drift.texts == "all"), None)
        if by_text is not None and reason is None:
            yield GatedNumber("", "KL, unbiased, as a mean over texts", by_text, None, by_text.n, by_format=False)
    for drift in drifts_of(gate, divergence):
        if drift.texts == "held_out":
            exact = None if divergence.exact is None else divergence.exact.held_out
            yield _held_out(drift.kl_mean, None if exact is None else exact.kl_mean, "")


def _held_out(bound: Interval | Estimate, exact: Interval | Estimate | None, at: str) -> GatedNumber:
    no_mean = f"held-out text was not sampled from the reference, so there is no unbiased mean; {EXACT}"
    reason = "" if exact is not None else no_mean
    return GatedNumber(f" on held-out text{at}", "KL, exact", exact, bound, bound.n, why_bound_only=reason)


def _spans(gate: DivergenceGate, divergence: Divergence) -> Iterator[GatedNumber]:
    not_sampled = why_not_sampled(divergence)
    exact = None if divergence.exact is None else divergence.exact.held_out
    exact_spans = {} if exact is None else {span.name: _mean_of(span) for span in exact.by_span}
    for drift in drifts_of(gate, divergence):
        for span in drift.by_span:
            at, bound = f" at positions {span.name}", _mean_of(span)
            if drift.texts == "held_out":
                yield _held_out(bound, exact_spans.get(span.name), at)
                continue
            old = "" if span.kl_unbiased_mean else "recorded before spans had an unbiased mean; measure again"
            reason = not_sampled or old
            number = None if reason else span.kl_unbiased_mean
            yield GatedNumber(at, "KL, unbiased", number, bound, span.num_documents, why_bound_only=reason)


def _mean_of(span: DriftSpan) -> Interval | Estimate:
    return span.kl_mean_interval or Estimate(value=span.kl_mean, n=span.num_documents)


def _structural(gate: DivergenceGate, divergence: Divergence) -> Iterator[GatedNumber]:
    if divergence.structural is None:
        return
    number, where = getattr(divergence.structural, gate.metric), " on structural tokens"
    if gate.metric == "top1_agreement":
        yield GatedNumber(where, gate.metric, number, None, number.n)
        return
    reason = "positions that are chosen by the token that stands there have no unbiased mean; `decides: fail` asks for no more"
    yield GatedNumber(where, "KL", None, number, number.n, why_bound_only=reason)


def _other(gate: DivergenceGate, divergence: Divergence, where: str, number: Number, num_documents: int) -> GatedNumber:
    """A quantile of the lower bound, or a number that is no KL."""
    num_texts = num_documents if isinstance(number, float) else number.n
    if gate.metric not in QUANTILES:
        return GatedNumber(where, gate.metric, number, None, num_texts)
    exact = divergence.exact
    drift = None if exact is None else exact.held_out if where else exact.drift
    exact_number = None if drift is None else float(getattr(drift, gate.metric))
    reason = "" if drift is not None else f"only the mean has an unbiased estimate; {EXACT}"
    return GatedNumber(where, f"{gate.metric}, exact", exact_number, number, num_texts, why_bound_only=reason)


def why_missing(gate: DivergenceGate, candidate: Measurement) -> str:
    """Why there is no number at all."""
    if gate.over == "structural":
        reason = None if candidate.divergence is None else candidate.divergence.no_structural
        return f"Structural tokens: {reason or 'recorded before they were told apart; measure again'}"
    if gate.metric == "kl_exact_mean":
        return f"Exact mode: {candidate.not_measured.get(EXACT_MODE, 'the suite did not ask for it')}"
    if gate.texts == "held_out":
        return "No held-out text was scored: the suite did not ask for it, or the reference's record says why"
    if gate.metric == "kl_unbiased_mean" and candidate.divergence is not None:
        return f"No unbiased mean: {why_not_sampled(candidate.divergence) or 'recorded before there was one; measure again'}"
    return "Recorded before drift was: measure again"
