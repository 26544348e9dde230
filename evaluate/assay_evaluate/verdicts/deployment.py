"""Does a verdict also hold on other hardware? A candidate on a deployment profile, held against itself where it was judged.

What was lost to quantization was judged against the reference, which does not fit there. What is left to show is that the other
hardware serves the same model: the same next-token probabilities, the same drafts accepted, no failure that was not there.

- **Divergence**: for each divergence gate of the run, on texts that the candidate wrote where it was judged. Allowed is a tenth
  of what the gate allows between reference and candidate, or the noise of the candidate's own repeat if that is more; never
  more than the gate itself.
- **Acceptance**: the gate's own limit, between the same questions answered here and there.
- **Probes**: none alarms that did not alarm there.

Each is PASS, FAIL, UNDERPOWERED or NOT MEASURED; only if all pass does the verdict hold there as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from assay.recipes.gate import AcceptanceGate, DivergenceGate, GateRecipe
from assay.records.measurement import Divergence, Measurement
from assay.records.probe import ProbeReport
from assay.records.verdict import Status, Verdict
from assay_evaluate.verdicts.acceptance import DraftingSide, compare_acceptance
from assay_evaluate.verdicts.divergence import WITHOUT_UNIT, judge_divergences, worst_value
from assay_evaluate.verdicts.gates import SEVERITY

SHARE = 0.1
"""Of what a gate allows between reference and candidate, so much is allowed between one candidate on two profiles."""
NEEDS_A_PAIR = "speculation"
"""The one probe that compares two servers, with drafts and without; it is not run on a deployment."""


@dataclass(frozen=True)
class Seen:
    """One candidate where it was judged and where it is deployed. not_measured: what could not be had -> why."""

    measured: Measurement
    profile: str
    """Where it is deployed."""
    divergence: Divergence | None
    noise_floor: Divergence | None
    drafts: tuple[DraftingSide, DraftingSide]
    """Where it was judged, and here."""
    probes_there: ProbeReport | None
    probes: ProbeReport | None
    not_measured: dict[str, str] = field(default_factory=dict)

    @property
    def judged_on(self) -> str:
        return self.measured.fingerprint.profile


def judge_deployment(gates: GateRecipe, seen: Seen) -> tuple[Verdict, ...]:
    """One verdict for each check. gates: the limits that the candidate was judged by."""
    return (*_divergence(gates, seen), _acceptance(gates, seen), _probes(seen))


def outcome_of(checks: Sequence[Verdict]) -> Status:
    """The worst of those that count."""
    return min((check.status for check in checks if check.has_say), key=SEVERITY.index)


def sentence_of(checks: Sequence[Verdict], profile: str, verdict: Status) -> str:
    """Whether the verdict of the gates also holds there; if it does not, or is not known, the first check that says so."""
    outcome = outcome_of(checks)
    if outcome == "PASS":
        passed = [check.gate for check in checks if check.status == "PASS"]
        others = [check.gate for check in checks if check.status != "PASS"]
        uncounted = f"; not measured and not counted: {'; '.join(others)}" if others else ""
        return f"the verdict {verdict} also holds on {profile}: {len(passed)} checks passed ({'; '.join(passed)}){uncounted}"
    first = next(check for check in checks if check.has_say and check.status == outcome)
    why = f"{first.gate}: {first.detail.removesuffix('.')}"
    if outcome == "FAIL":
        return f"the verdict {verdict} does not hold on {profile}: {why}"
    return f"whether the verdict {verdict} also holds on {profile} is not known: {why}"


# ------------------------------------------------------------------------------------------------ divergence
def _divergence(gates: GateRecipe, seen: Seen) -> Iterator[Verdict]:
    """Of every divergence gate; the exact mean, which needs servers of its own, by its unbiased estimate."""
    every = [gate for gate in gates.gates if isinstance(gate, DivergenceGate)]
    exact = {"metric": "kl_unbiased_mean"}
    own = [one.model_copy(update=exact) if one.metric == "kl_exact_mean" else one for one in every]
    own = [one for number, one in enumerate(own) if one not in own[:number]]
    if not own:
        yield _verdict(
            seen, "divergence", "NOT MEASURED", "The gates have no limit on divergence, so none says how far is too far."
        )
    as_measured = seen.measured.model_copy(
        update={"divergence": seen.divergence, "not_measured": dict(seen.not_measured)}
    )  # fmt: skip
    for gate, judged in zip(
        own, judge_divergences([_of_itself(gate, seen) for gate in own], as_measured, when_passed=""), strict=True
    ):
        yield _from_itself(gate, judged, seen)


def _of_itself(gate: DivergenceGate, seen: Seen) -> DivergenceGate:
    """The gate with the limit of a candidate against itself: what is expected of its format says nothing here."""
    limit, share = _limit_and_share(gate, _floor(gate, seen))
    same, name = _no_difference(gate), "max" if gate.max is not None else "min"
    nothing: dict[str, object] = {"expect": {}, "times_noise_floor": None, "max_unseen": None}
    return gate.model_copy(update={name: same + share * (limit - same), **nothing})


def _floor(gate: DivergenceGate, seen: Seen) -> float | None:
    return None if seen.noise_floor is None else worst_value(gate, seen.noise_floor)


def _from_itself(gate: DivergenceGate, judged: Verdict, seen: Seen) -> Verdict:
    """What is said beside the verdict: where its limit is from, and positions that are not finite here only."""
    floor = _floor(gate, seen)
    limit, share = _limit_and_share(gate, floor)
    if judged.status != "NOT MEASURED":
        repeat = f"its own repeat on {seen.judged_on}: {'not measured' if floor is None else f'{floor:.2g}'}"
        source = f"a tenth of the gate's {limit:g}" if share == SHARE else f"its own noise, within the gate's {limit:g}"
        return judged.model_copy(update={"detail": f"{judged.detail} The limit is {source}; {repeat}."})
    broken = _non_finite(seen.divergence) - _non_finite(seen.noise_floor)
    if seen.divergence is None or broken <= 0:
        return judged
    detail = f"{broken} positions have no finite log-probability that had one on {seen.judged_on}."
    return judged.model_copy(update={"status": "FAIL", "detail": detail})


def _limit_and_share(gate: DivergenceGate, floor: float | None) -> tuple[float, float]:
    """The gate's limit, and what of the way from "no difference" to it is allowed: a tenth, or as far as the noise reaches,
    never beyond the limit."""
    limit = gate.max if gate.max is not None else gate.min
    assert limit is not None, "the recipe's own check: either max or min"
    way = limit - _no_difference(gate)
    return limit, SHARE if floor is None or not way else min(1.0, max(SHARE, (floor - _no_difference(gate)) / way))


def _no_difference(gate: DivergenceGate) -> float:
    return 1.0 if gate.metric in WITHOUT_UNIT else 0.0


def _non_finite(divergence: Divergence | None) -> int:
    if divergence is None:
        return 0
    return max([divergence.num_non_finite, *(round(d.non_finite_share * d.num_positions) for d in divergence.drift)])


# ------------------------------------------------------------------------------------------------ drafts, probes
def _acceptance(gates: GateRecipe, seen: Seen) -> Verdict:
    gate = next((gate for gate in gates.gates if isinstance(gate, AcceptanceGate)), None)
    if gate is None:
        none = "The gates have no limit on acceptance, so it does not count."
        return _verdict(seen, "acceptance", "NOT MEASURED", none).model_copy(update={"has_say": False})
    return compare_acceptance(gate, *seen.drafts, seen.measured.label, gates.level)


def _probes(seen: Seen) -> Verdict:
    now, before = seen.probes, seen.probes_there
    if now is None:
        return _verdict(seen, "probes", "NOT MEASURED", f"No probes: {seen.not_measured.get('probes', 'none were run')}.")
    old = set() if before is None else {alarm.name for alarm in before.alarms}
    new = [alarm for alarm in now.alarms if alarm.name not in old]
    if new:
        also = f" (alarms also in {', '.join(one.name for one in new[1:])})" if new[1:] else ""
        return _verdict(seen, "probes", "FAIL", f"{new[0].name}: {new[0].reason}{also}.")
    lost = _ran(before) - _ran(now) - {NEEDS_A_PAIR}
    if lost:
        what = ", ".join(sorted(lost))
        return _verdict(seen, "probes", "NOT MEASURED", f"Ran on {seen.judged_on} and could not here: {what}.")
    there = f"it was not probed on {seen.judged_on}" if before is None else _alarmed_there(old, seen.judged_on)
    detail = f"No new alarm in {len(_ran(now))} probes, {now.num_requests:,} requests; {there}."
    return _verdict(seen, "probes", "PASS", detail)


def _alarmed_there(names: set[str], profile: str) -> str:
    return f"on {profile} {', '.join(sorted(names))} alarmed as well" if names else f"none on {profile} either"


def _ran(report: ProbeReport | None) -> set[str]:
    return set() if report is None else {result.name for result in report.results if result.status != "not_run"}


def _verdict(seen: Seen, gate: str, status: Status, detail: str) -> Verdict:
    return Verdict(gate=gate, candidate=seen.measured.label, status=status, observed=None, limit=None, detail=detail)
