"""Does a verdict also hold on other hardware? A candidate on a deployment profile, compared with itself where it was judged.

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
from assay.records.verdict import Overall, Status, Verdict
from assay_evaluate.verdicts.acceptance import DraftingSide, compare_acceptance
from assay_evaluate.verdicts.divergence import SEVERITY, WITHOUT_UNIT, judge_divergences, worst_value

SHARE = 0.1
"""Of what a gate allows between reference and candidate, so much is allowed between one candidate on two profiles."""
NEEDS_A_PAIR = "speculation"
"""The one probe that compares two servers, with drafts and without; it is not run on a deployment."""


@dataclass(frozen=True)
class DeployedCandidate:
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


def judge_deployment(gates: GateRecipe, deployed: DeployedCandidate) -> tuple[Verdict, ...]:
    """One verdict for each check. gates: the limits that the candidate was judged by."""
    acceptance = next((gate for gate in gates.gates if isinstance(gate, AcceptanceGate)), None)
    if acceptance is None:
        none = "The gates have no limit on acceptance, so it does not count."
        drafts = _verdict(deployed, "acceptance", "NOT MEASURED", none).model_copy(update={"has_say": False})
    else:
        drafts = compare_acceptance(acceptance, *deployed.drafts, deployed.measured.label, gates.level)
    return (*_divergence(gates, deployed), drafts, _probes(deployed))


def outcome_of(checks: Sequence[Verdict]) -> Status:
    """The worst of those that count."""
    return min((check.status for check in checks if check.has_say), key=SEVERITY.index)


def outcome_sentence(checks: Sequence[Verdict], profile: str, verdict: Overall) -> str:
    """Whether the verdict of the gates also holds there; if it does not, or is not known, the first check that says so."""
    outcome = outcome_of(checks)
    if outcome == "PASS":
        passed = [check.gate for check in checks if check.status == "PASS"]
        others = [check.gate for check in checks if check.status != "PASS"]
        uncounted = f"; not measured and not counted: {'; '.join(others)}" if others else ""
        return f"the verdict {verdict} also holds on {profile}: {len(passed)} checks passed ({'; '.join(passed)}){uncounted}"
    first = next(check for check in checks if check.has_say and check.status == outcome)
    reason = f"{first.gate}: {first.detail.removesuffix('.')}"
    if outcome == "FAIL":
        return f"the verdict {verdict} does not hold on {profile}: {reason}"
    return f"whether the verdict {verdict} also holds on {profile} is not known: {reason}"


# ------------------------------------------------------------------------------------------------ divergence
def _divergence(gates: GateRecipe, deployed: DeployedCandidate) -> Iterator[Verdict]:
    """Of every divergence gate; the exact mean, which needs servers of its own, by its unbiased estimate.

    A candidate against itself has a limit of its own: what is expected of its format says nothing here. Of the way from "no
    difference" to the gate's limit a tenth is allowed, or as far as the noise reaches, never beyond the limit.
    """
    own: list[DivergenceGate] = []
    for gate in gates.gates:
        if isinstance(gate, DivergenceGate):
            unbiased = {"metric": "kl_unbiased_mean"} if gate.metric == "kl_exact_mean" else {}
            if (gate := gate.model_copy(update=unbiased)) not in own:
                own.append(gate)
    if not own:
        yield _verdict(
            deployed, "divergence", "NOT MEASURED", "The gates have no limit on divergence, so none says how far is too far."
        )
    judged_as, notes = [], []
    for gate in own:
        limit = gate.max if gate.max is not None else gate.min
        assert limit is not None, "the recipe's own check: either max or min"
        same = 1.0 if gate.metric in WITHOUT_UNIT else 0.0
        floor = None if deployed.noise_floor is None else worst_value(gate, deployed.noise_floor)
        share = SHARE if floor is None or limit == same else min(1.0, max(SHARE, (floor - same) / (limit - same)))
        update: dict[str, object] = {"max" if gate.max is not None else "min": same + share * (limit - same)}
        judged_as.append(gate.model_copy(update={**update, "expect": {}, "times_noise_floor": None, "max_unseen": None}))
        source = f"a tenth of the gate's {limit:g}" if share == SHARE else f"its own noise, within the gate's {limit:g}"
        repeat = "not measured" if floor is None else f"{floor:.2g}"
        notes.append(f"The limit is {source}; its own repeat on {deployed.judged_on}: {repeat}.")
    as_measured = deployed.measured.model_copy(
        update={"divergence": deployed.divergence, "not_measured": dict(deployed.not_measured)}
    )
    num_broken = _num_non_finite(deployed.divergence) - _num_non_finite(deployed.noise_floor)
    for verdict, note in zip(judge_divergences(judged_as, as_measured, when_passed=""), notes, strict=True):
        if verdict.status != "NOT MEASURED":
            yield verdict.model_copy(update={"detail": f"{verdict.detail} {note}"})
        elif deployed.divergence is None or num_broken <= 0:
            yield verdict
        else:
            detail = f"{num_broken} positions have no finite log-probability that had one on {deployed.judged_on}."
            yield verdict.model_copy(update={"status": "FAIL", "detail": detail})


def _num_non_finite(divergence: Divergence | None) -> int:
    if divergence is None:
        return 0
    return max([divergence.num_non_finite, *(round(d.non_finite_share * d.num_positions) for d in divergence.drift)])


# ------------------------------------------------------------------------------------------------ probes
def _probes(deployed: DeployedCandidate) -> Verdict:
    now, before, judged_on = deployed.probes, deployed.probes_there, deployed.judged_on
    if now is None:
        reason = deployed.not_measured.get("probes", "none were run")
        return _verdict(deployed, "probes", "NOT MEASURED", f"No probes: {reason}.")
    old = set() if before is None else {alarm.name for alarm in before.alarms}
    new = [alarm for alarm in now.alarms if alarm.name not in old]
    if new:
        also = f" (alarms also in {', '.join(alarm.name for alarm in new[1:])})" if new[1:] else ""
        return _verdict(deployed, "probes", "FAIL", f"{new[0].name}: {new[0].reason}{also}.")
    ran_here, ran_there = (
        set() if report is None else {result.name for result in report.results if result.status != "not_run"}
        for report in (now, before)
    )
    if lost := ran_there - ran_here - {NEEDS_A_PAIR}:
        detail = f"Ran on {judged_on} and could not here: {', '.join(sorted(lost))}."
        return _verdict(deployed, "probes", "NOT MEASURED", detail)
    alarmed = f"on {judged_on} {', '.join(sorted(old))} alarmed as well" if old else f"none on {judged_on} either"
    compared = f"it was not probed on {judged_on}" if before is None else alarmed
    detail = f"No new alarm in {len(ran_here)} probes, {now.num_requests:,} requests; {compared}."
    return _verdict(deployed, "probes", "PASS", detail)


def _verdict(deployed: DeployedCandidate, gate: str, status: Status, detail: str) -> Verdict:
    return Verdict(gate=gate, candidate=deployed.measured.label, status=status, observed=None, limit=None, detail=detail)
