"""Divergence against limits. It must be shown to lie within, or the candidate does not pass; alone it passes nobody: KL says
how much two models differ, not which is better (arXiv 2606.19558).

- **FAIL**: a number lies beyond the limit with its whole interval: the unbiased or exact KL, or its lower bound. Adjusted by
  Holm over all numbers of all divergence gates of the candidate, for one of several at their limits would fail by chance.
- **PASS**: every number lies within with its whole interval, and none of them is a lower bound (`divergence_numbers`).
- **UNDERPOWERED**: an interval straddles the limit, or too few texts were scored to have shown damage as rare as `max_unseen`.
- **NOT MEASURED**: the number is missing, is over fewer than `FEWEST_TEXTS` texts, or only a lower bound of it is known.

With `decides: fail` the last two are shown and have no say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from assay.quantities import interval_name, percent_short
from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import FEWEST_TEXTS
from assay.records.measurement import Divergence, Measurement
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import holm, unseen_share
from assay_evaluate.verdicts.divergence_limits import Limit, limit_for
from assay_evaluate.verdicts.divergence_numbers import (
    QUANTILES,
    SET_NAMES,
    WITHOUT_UNIT,
    Held,
    Number,
    drifts_of,
    ends_of,
    held_numbers,
    missing,
    value_of,
)

__all__ = ["NOT_CERTIFIED", "WITHOUT_UNIT", "judge_divergence", "judge_divergences", "worst_value"]
WORST: tuple[Status, ...] = ("FAIL", "NOT MEASURED", "UNDERPOWERED", "PASS")
NOT_CERTIFIED = "A small divergence does not show that answers are as good."


@dataclass(frozen=True)
class _Tested:
    """A number against its limit. p_fail: one-sided, of a truth within the limit. None: it has no interval."""

    held: Held
    limit: Limit
    p_fail: float | None
    alpha: float
    by_bound: bool
    """The bound speaks more clearly against it than the number itself."""

    @property
    def shown(self) -> Number:
        return self.held.bound if self.by_bound and self.held.bound is not None else self.held.best


@dataclass(frozen=True)
class _Gate:
    """A gate and what is held against it. verdict: nothing was tested, and why. too_few: what too few texts reach."""

    gate: DivergenceGate
    tested: tuple[_Tested, ...] = ()
    too_few: tuple[str, ...] = ()
    verdict: Verdict | None = None


def judge_divergence(
    gate: DivergenceGate, candidate: Measurement, *, floor: Divergence | None = None, when_passed: str = NOT_CERTIFIED
) -> Verdict:
    """One divergence gate by itself: the worst of the texts and spans that it is over, Holm over these."""
    return judge_divergences([gate], candidate, floor=floor, when_passed=when_passed)[0]


def judge_divergences(
    gates: Sequence[DivergenceGate],
    candidate: Measurement,
    *,
    floor: Divergence | None = None,
    when_passed: str = NOT_CERTIFIED,
) -> list[Verdict]:
    """Every divergence gate of a candidate, in the order given.

    floor: of the reference's own repeat. The repeat itself is held against `max` or `min`: its weights are the reference's own.
    when_passed: what the sentence of a PASS ends with; empty: nor does it say what so few texts cannot show.
    """
    prepared = [_prepare(gate, candidate, floor) for gate in gates]
    tests = [one for each in prepared for one in each.tested if one.p_fail is not None]
    adjusted = dict(zip(map(id, tests), holm([test.p_fail for test in tests if test.p_fail is not None]), strict=True))
    return [_with_its_say(one.gate, _judged(one, candidate, adjusted, when_passed)) for one in prepared]


def worst_value(gate: DivergenceGate, divergence: Divergence) -> float | None:
    """The worse end of the worst number that the gate would be held against. None: there is no such number."""
    ends = [ends_of(held_number.best) for held_number in held_numbers(gate, divergence)]
    if not ends:
        return None
    return max(high for _, high in ends) if gate.max is not None else min(low for low, _ in ends)


# ------------------------------------------------------------------------------------------------ what is tested
def _prepare(gate: DivergenceGate, candidate: Measurement, floor: Divergence | None) -> _Gate:
    if candidate.is_noise_floor:
        gate = gate.model_copy(update={"expect": {}, "times_noise_floor": None})
    divergence = candidate.divergence
    if divergence is None:
        reason = candidate.not_measured.get("divergence", "the suite did not ask for it")
        return _without(gate, candidate, f"No divergence for {candidate.label}: {reason}.")
    if divergence.num_non_finite or any(drift.non_finite_share > 0 for drift in drifts_of(gate, divergence)):
        worst = max([divergence.num_non_finite / divergence.num_positions, *(d.non_finite_share for d in divergence.drift)])
        share = f"{divergence.num_non_finite} of {divergence.num_positions}" if divergence.num_non_finite else f"{worst:.2%} of"
        why = f"{share} positions had no finite log-probability: a mean over the others would hide them."
        return _without(gate, candidate, why)
    held = list(held_numbers(gate, divergence))
    noise = (
        {}
        if floor is None
        else {(held_number.where, held_number.name): value_of(held_number.best) for held_number in held_numbers(gate, floor)}
    )
    too_few = [*(_too_few(gate, one) for one in held if one.num_texts < FEWEST_TEXTS), *_unreached(gate, divergence)]
    tested = [
        _test(gate, one, _limit(gate, candidate, noise.get((one.where, one.name)), one))
        for one in held
        if one.num_texts >= FEWEST_TEXTS
    ]
    if tested:
        return _Gate(gate, tuple(tested), tuple(too_few))
    return _without(gate, candidate, f"{_not_judged(too_few)}." if too_few else f"{missing(gate, candidate)}.")


def _limit(gate: DivergenceGate, candidate: Measurement, noise: float | None, held: Held) -> Limit:
    return limit_for(
        gate, candidate.weight_bits, noise, weight_shares=candidate.weight_shares, by_format=held.by_format
    )  # fmt: skip


def _without(gate: DivergenceGate, candidate: Measurement, why: str) -> _Gate:
    return _Gate(gate, verdict=_verdict(gate, candidate, "NOT MEASURED", why))


def _not_judged(too_few: Sequence[str]) -> str:
    return f"Not judged: {'; '.join(too_few)}; {FEWEST_TEXTS} are needed"


def _too_few(gate: DivergenceGate, one: Held) -> str:
    return f"{_named(gate, one, is_bound=one.number is None)} over {one.num_texts} text{'s' if one.num_texts != 1 else ''}"


def _unreached(gate: DivergenceGate, divergence: Divergence) -> Iterator[str]:
    if gate.over == "spans":
        for drift in drifts_of(gate, divergence):
            yield from (f"no text{SET_NAMES[drift.texts]} reaches positions {name}" for name in drift.unreached_spans)


def _test(gate: DivergenceGate, held: Held, limit: Limit) -> _Tested:
    """Of the number and its bound, what speaks more clearly against it."""
    own = None if held.number is None else _p_beyond(gate, held.number, limit.value)
    of_bound = None if held.bound is None else _p_beyond(gate, held.bound, limit.value)
    by_bound = held.number is None or (of_bound is not None and (own is None or of_bound < own))
    levels = [one.level for one in (held.number, held.bound) if isinstance(one, Interval)]
    return _Tested(held, limit, of_bound if by_bound else own, (1 - levels[0]) / 2 if levels else 0.0, by_bound)


def _p_beyond(gate: DivergenceGate, number: Number, limit: float) -> float | None:
    """One-sided p of a truth within the limit, from the end of the interval that is nearer to it: a normal tail, heavier than
    the interval's own on its short side, where KL has that end. None: the number has no interval."""
    if not isinstance(number, Interval):
        return None
    near = number.low if gate.max is not None else number.high
    beyond = abs(number.value - limit) if _is_beyond(gate, number.value, limit) else 0.0
    reach = abs(number.value - near)
    if reach == 0:
        return 0.0 if beyond > 0 else 1.0
    normal = NormalDist()
    return 1 - normal.cdf(beyond / reach * normal.inv_cdf((1 + number.level) / 2))


# ------------------------------------------------------------------------------------------------ what it says
def _judged(one: _Gate, candidate: Measurement, adjusted: Mapping[int, float], when_passed: str) -> Verdict:
    if one.verdict is not None:
        return one.verdict
    gate = one.gate
    judged = [(_status(gate, each, adjusted), each) for each in one.tested]
    status, worst = min(judged, key=lambda pair: (WORST.index(pair[0]), -_badness(gate, pair[1])))
    verdict = _sentence(gate, candidate, status, worst, len(judged), len(adjusted), when_passed if not one.too_few else "")
    if not one.too_few:
        return verdict
    why = f"{_not_judged(one.too_few)}."
    if status == "FAIL":
        return verdict.model_copy(update={"detail": f"{verdict.detail} {why}"})
    rest = f"{why} The rest does not fail it: {verdict.detail}"
    return verdict.model_copy(update={"status": "NOT MEASURED", "observed": None, "detail": rest})


def _status(gate: DivergenceGate, one: _Tested, adjusted: Mapping[int, float]) -> Status:
    beyond = _is_beyond(gate, value_of(one.shown), one.limit.value) if one.p_fail is None else adjusted[id(one)] <= one.alpha
    if beyond:
        return "FAIL"
    number = one.held.number
    if number is None:
        return "NOT MEASURED"
    end = ends_of(number)[1] if gate.max is not None else ends_of(number)[0]
    return "UNDERPOWERED" if _is_beyond(gate, end, one.limit.value) or _shows_too_little(gate, one.held) else "PASS"


def _is_beyond(gate: DivergenceGate, value: float, limit: float) -> bool:
    return value > limit if gate.max is not None else value < limit


def _shows_too_little(gate: DivergenceGate, held: Held) -> bool:
    return gate.max_unseen is not None and unseen_share(held.num_texts) > gate.max_unseen


def _badness(gate: DivergenceGate, one: _Tested) -> float:
    """How far the number is on the way to its limit, and beyond."""
    value, limit = value_of(one.shown), one.limit.value
    return value / limit if gate.max is not None and limit else limit - value if gate.min is not None else value


def _named(gate: DivergenceGate, held: Held, *, is_bound: bool) -> str:
    """`KL, unbiased, at positions 512 and beyond: 0.05 nats`."""
    if is_bound:
        assert held.bound is not None, "a place without a number has a bound"
        name, number = f"{gate.metric if gate.metric in QUANTILES else 'KL'}, lower bound", held.bound
    else:
        name, number = held.name, held.best
    if gate.metric in WITHOUT_UNIT:
        return f"{name}{held.where} {value_of(number):.4g}"
    return f"{name}{f',{held.where}' if held.where else ''}: {value_of(number):.4g} nats"


def _sentence(
    gate: DivergenceGate, candidate: Measurement, status: Status, one: _Tested, num_held: int, num_tested: int, when_passed: str
) -> Verdict:  # fmt: skip
    unit = "" if gate.metric in WITHOUT_UNIT else " nats"
    is_bound = one.by_bound and status in ("FAIL", "NOT MEASURED")
    number = one.shown if is_bound else one.held.best
    interval = "no interval"
    if isinstance(number, Interval):
        name = interval_name(number.level, number.coverage)
        interval = f"{name}: {number.low:.4g} to {number.high:.4g}"
    seen = _named(gate, one.held, is_bound=is_bound)
    margin = f"allowed {'at most' if gate.max is not None else 'at least'} {one.limit.value:.4g}{unit}{one.limit.why}"
    among = f" The worst of {num_held} numbers of this gate." if num_held > 1 else ""
    inside = _open(gate, one, num_tested) if status == "UNDERPOWERED" else ""
    if status == "NOT MEASURED":
        inside = f"; a lower bound can fail a candidate and not pass one: {one.held.why_bound_only}"
    detail = f"{seen} ({interval}); {margin}{inside}.{among}"
    if status == "PASS" and when_passed:
        detail += f" {_rare(gate, one.held)}{when_passed}"
    observed = number if isinstance(number, Interval) and status != "NOT MEASURED" else None
    verdict = _verdict(gate, candidate, status, detail, observed)
    return verdict.model_copy(update={"limit": one.limit.value, "clause": f"{seen}; {margin}{inside}"})


def _open(gate: DivergenceGate, one: _Tested, num_tested: int) -> str:
    """Why it is undecided."""
    number = one.held.best
    low, high = ends_of(number)
    near, far = (low, high) if gate.max is not None else (high, low)
    if _is_beyond(gate, near, one.limit.value):
        return f"; by itself this fails, but among {num_tested} numbers of divergence it may be chance (Holm)"
    if _is_beyond(gate, far, one.limit.value):
        return ", which lies inside the interval"
    assert gate.max_unseen is not None
    alpha = (1 - (number.level if isinstance(number, Interval) else 0.95)) / 2
    needed = math.ceil(math.log(alpha) / math.log1p(-gate.max_unseen))
    return (
        f"; but damage in 1 text of {1 / gate.max_unseen:.0f} (max_unseen {percent_short(gate.max_unseen)}) may be missing "
        f"among {one.held.num_texts}: that takes {needed}"
    )


def _rare(gate: DivergenceGate, held: Held) -> str:
    if gate.metric in WITHOUT_UNIT or not isinstance(held.number, Interval):
        return ""
    one_in = math.floor(1 / unseen_share(held.num_texts, held.number.level))
    return f"Damage in fewer than 1 of {one_in} such texts may not be among these {held.num_texts}. "


def _with_its_say(gate: DivergenceGate, verdict: Verdict) -> Verdict:
    if gate.decides == "pass_and_fail" or verdict.status in ("FAIL", "PASS"):
        return verdict
    return verdict.model_copy(update={"has_say": False, "detail": f"{verdict.detail} It does not stand against a PASS."})


def _verdict(
    gate: DivergenceGate, candidate: Measurement, status: Status, detail: str, observed: Interval | None = None
) -> Verdict:  # fmt: skip
    names = [f"divergence {gate.metric}"]
    names += {"sampled": [], "held_out": ["held-out text"], "every": ["all texts"]}[gate.texts]
    names += {"all": [], "spans": ["by span"], "structural": ["structural tokens"]}[gate.over]
    limit = gate.max if gate.max is not None else gate.min
    return Verdict(
        gate=", ".join(names), candidate=candidate.label, status=status, observed=observed, limit=limit, detail=detail
    )  # fmt: skip
