"""Divergence against limits. It can fail a candidate and never passes one by itself: KL says how much two models differ, not
which is better (arXiv 2606.19558), so PASS means "not failed".

With fewer than `FEWEST_TEXTS` texts nothing is judged: KL of twice the limit would pass by chance. A gate by span judges every
span that the suite asks for; one that too few texts reach, or none, is NOT MEASURED by name, unless another span fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from assay.quantities import interval_name
from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import EXACT_MODE, FEWEST_TEXTS, Drift, Estimate, Structural
from assay.records.measurement import Divergence, Measurement
from assay.records.verdict import Status, Verdict
from assay_evaluate.verdicts.divergence_limits import Limit, limit_for

WORST: tuple[Status, ...] = ("FAIL", "UNDERPOWERED", "PASS")
SET_NAMES = {"all": "", "held_out": " on held-out text"}
WITHOUT_UNIT = frozenset({"top1_agreement", "perplexity_ratio"})


@dataclass(frozen=True)
class _Seen:
    """One number that is held against the limit. where: of which texts and positions, for the sentence."""

    where: str
    value: Interval | Estimate | float
    num_texts: int

    @property
    def number(self) -> float:
        return self.value if isinstance(self.value, float) else self.value.value

    @property
    def ends(self) -> tuple[float, float]:
        return (self.value.low, self.value.high) if isinstance(self.value, Interval) else (self.number, self.number)


NOT_CERTIFIED = "A small divergence fails nothing; it does not show that answers are as good."


def judge_divergence(
    gate: DivergenceGate, candidate: Measurement, *, floor: Divergence | None = None, when_passed: str = NOT_CERTIFIED
) -> Verdict:
    """One divergence gate on one candidate: the worst of the texts and spans that it is over.

    floor: of the reference's own repeat. The repeat itself is held against `max` or `min`: its weights are the reference's own.
    when_passed: what the sentence of a PASS ends with.
    """
    if candidate.is_noise_floor:
        gate = gate.model_copy(update={"expect": {}, "times_noise_floor": None})
    divergence = candidate.divergence
    if divergence is None:
        reason = candidate.not_measured.get("divergence", "the suite did not ask for it")
        return _verdict(gate, candidate, "NOT MEASURED", f"No divergence for {candidate.label}: {reason}.")
    if divergence.num_non_finite or any(drift.non_finite_share > 0 for drift in _drifts(gate, divergence)):
        worst = max([divergence.num_non_finite / divergence.num_positions, *(d.non_finite_share for d in divergence.drift)])
        share = f"{divergence.num_non_finite} of {divergence.num_positions}" if divergence.num_non_finite else f"{worst:.2%} of"
        return _verdict(
            gate,
            candidate,
            "NOT MEASURED",
            f"{share} positions had no finite log-probability: a mean over the others would hide them.",
        )
    seen = list(_values(gate, divergence))
    too_few = [*(_too_few(gate, one) for one in seen if one.num_texts < FEWEST_TEXTS), *_unreached(gate, divergence)]
    noise = {} if floor is None else {one.where: one.number for one in _values(gate, floor)}
    limits = {one.where: limit_for(gate, candidate.weight_bits, noise.get(one.where)) for one in seen}
    judged = [(_status(gate, one, limits[one.where].value), one) for one in seen if one.num_texts >= FEWEST_TEXTS]
    if not judged and not too_few:
        return _verdict(gate, candidate, "NOT MEASURED", f"{_missing(gate, candidate)}.")
    why = f"Not judged: {'; '.join(too_few)}; {FEWEST_TEXTS} are needed."
    if not judged:
        return _verdict(gate, candidate, "NOT MEASURED", why)
    status, worst_one = min(judged, key=lambda found: (WORST.index(found[0]), -_badness(gate, found[1])))
    limit = limits[worst_one.where]
    if not too_few:
        return _sentence(gate, candidate, status, worst_one, limit, len(judged), when_passed)
    verdict = _sentence(gate, candidate, status, worst_one, limit, len(judged), "")
    if status == "FAIL":
        return verdict.model_copy(update={"detail": f"{verdict.detail} {why}"})
    rest = f"{why} The rest does not fail it: {verdict.detail}"
    return verdict.model_copy(update={"status": "NOT MEASURED", "observed": None, "detail": rest})


def _too_few(gate: DivergenceGate, one: _Seen) -> str:
    return f"{gate.metric}{one.where} {one.number:.4g} over {one.num_texts} text{'s' if one.num_texts != 1 else ''}"


def _unreached(gate: DivergenceGate, divergence: Divergence) -> Iterator[str]:
    if gate.over == "spans":
        for drift in _drifts(gate, divergence):
            yield from (f"no text{SET_NAMES[drift.texts]} reaches positions {name}" for name in drift.unreached_spans)


def _status(gate: DivergenceGate, one: _Seen, limit: float) -> Status:
    low, high = one.ends
    if gate.max is not None:
        return "FAIL" if low > limit else "PASS" if high <= limit else "UNDERPOWERED"
    return "FAIL" if high < limit else "PASS" if low >= limit else "UNDERPOWERED"


def _badness(gate: DivergenceGate, one: _Seen) -> float:
    return one.number if gate.max is not None else -one.number


def worst_value(gate: DivergenceGate, divergence: Divergence) -> float | None:
    """The worse end of the worst number that the gate would be held against. None: there is no such number."""
    ends = [one.ends for one in _values(gate, divergence)]
    if not ends:
        return None
    return max(high for _, high in ends) if gate.max is not None else min(low for low, _ in ends)


def _sentence(
    gate: DivergenceGate, candidate: Measurement, status: Status, one: _Seen, limit: Limit, num_seen: int, when_passed: str
) -> Verdict:  # fmt: skip
    unit = "" if gate.metric in WITHOUT_UNIT else " nats"
    interval = "no interval"
    if isinstance(one.value, Interval):
        name = interval_name(one.value.level, one.value.coverage)
        interval = f"{name}: {one.value.low:.4g} to {one.value.high:.4g}"
    seen = f"{gate.metric}{one.where} {one.number:.4g}{unit}"
    margin = f"allowed {'at most' if gate.max is not None else 'at least'} {limit.value:.4g}{unit}{limit.why}"
    among = f" The worst of {num_seen}." if num_seen > 1 else ""
    ends = {"PASS": f". {when_passed}".rstrip(), "FAIL": ".", "UNDERPOWERED": ", which lies inside the interval."}
    observed = one.value if isinstance(one.value, Interval) else None
    verdict = _verdict(gate, candidate, status, f"{seen} ({interval}); {margin}{ends[status]}{among}", observed)
    inside = ends[status].removesuffix(".") if status == "UNDERPOWERED" else ""
    return verdict.model_copy(update={"limit": limit.value, "clause": f"{seen}; {margin}{inside}"})


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


# ------------------------------------------------------------------------------------------------ what a gate is over
def _drifts(gate: DivergenceGate, divergence: Divergence) -> list[Drift]:
    wanted = {"sampled": {"all"}, "held_out": {"held_out"}, "every": {"all", "held_out"}}[gate.texts]
    return [drift for drift in divergence.drift if drift.texts in wanted]


def _values(gate: DivergenceGate, divergence: Divergence) -> Iterator[_Seen]:
    if gate.metric == "kl_exact_mean":
        if divergence.exact is not None:
            yield _Seen("", divergence.exact.drift.kl_mean, divergence.exact.drift.kl_mean.n)
        return
    if gate.over == "structural":
        if divergence.structural is not None:
            yield _seen(" on structural tokens", divergence.structural, gate.metric)
        return
    if gate.texts == "sampled" and gate.over == "all" and gate.metric in {"kl_mean", "kl_p99", "top1_agreement"}:
        yield _seen("", divergence, gate.metric)
        return
    for drift in _drifts(gate, divergence):
        name = SET_NAMES[drift.texts]
        if gate.over == "all":
            yield _seen(name, drift, gate.metric)
            continue
        for span in drift.by_span:
            mean = span.kl_mean_interval or span.kl_mean
            yield _Seen(f"{name} at positions {span.name}", mean, span.num_documents)


def _seen(where: str, record: Divergence | Drift | Structural, metric: str) -> _Seen:
    found: Interval | Estimate | float = getattr(record, metric)
    return _Seen(where, found, record.num_documents if isinstance(found, float) else found.n)


def _missing(gate: DivergenceGate, candidate: Measurement) -> str:
    if gate.over == "structural":
        why = None if candidate.divergence is None else candidate.divergence.no_structural
        return f"Structural tokens: {why or 'recorded before they were told apart; measure again'}"
    if gate.metric == "kl_exact_mean":
        return f"Exact mode: {candidate.not_measured.get(EXACT_MODE, 'the suite did not ask for it')}"
    if gate.texts == "held_out":
        return "No held-out text was scored: the suite did not ask for it, or the reference's record says why"
    return "Recorded before drift was: measure again"
