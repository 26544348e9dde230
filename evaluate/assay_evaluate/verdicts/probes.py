"""Serving-fidelity probes as a gate: an alarm fails a candidate if the reference, served alike, has surely fewer of its events.

An alarm on both sides is a fault of the serving: NOT MEASURED, and so is one without a reference to compare with. A few events
against none may be chance: UNDERPOWERED, with the number of requests that would tell. The reference's own alarms are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.recipes.gate import ProbesGate
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ProbeResult, find_probes
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.rates import exceeds_p, trials_to_tell
from assay_evaluate.verdicts.divergence import SEVERITY

ALPHA = 0.025
"""Of all probes of a candidate together: an innocent one FAILs so often at most."""


def judge_probes(gate: ProbesGate, reports: Sequence[ProbeReport], reference: Measurement, candidate: Measurement) -> Verdict:
    """The verdict of one candidate; `observed` is the rate of the probe that decides, where one does.

    An alarm says that something is wrong where the candidate was served; that it is the candidate shows only beside the
    reference, which is served in the same way. A probe that counts rare events is compared with the reference's by an exact
    test of requests (events of one request are one): one garbled reply of 7,500 against none is chance.
    """

    def verdict(status: Status, detail: str, observed: Interval | None = None, limit: float | None = None) -> Verdict:
        return Verdict(
            gate="probes", candidate=candidate.label, status=status, observed=observed, limit=limit, detail=detail
        )  # fmt: skip

    report = find_probes(reports, candidate)
    if report is None:
        is_other = any(report.label == candidate.label for report in reports)
        reason = "the probes of that name are of another checkpoint" if is_other else "it was not probed"
        return verdict("NOT MEASURED", f"No probes of {candidate.label}: {reason}; `assay diagnose probe` does it.")
    before = find_probes(reports, reference)
    if report.alarms:
        alpha = ALPHA / _num_compared(report, before)
        judged = [(alarm, *_judge_alarm(alarm, before, reference.label, alpha)) for alarm in report.alarms]
        alarm, status, reason = min(judged, key=lambda row: SEVERITY.index(row[1]))
        others = [other.name for other in report.alarms if other is not alarm]
        also = f" (alarms also in {', '.join(others)})" if others else ""
        return verdict(status, f"{alarm.name}: {alarm.reason}{also}; {reason}.", alarm.rate)
    for name in gate.required:
        result = report.result(name)
        if result is None or result.status == "not_run":
            missing = "it was not asked for" if result is None else result.reason
            return verdict("NOT MEASURED", f"Probe {name} did not run: {missing}.")
    for name, limit in gate.max_rate.items():
        result = report.result(name)
        if result is None or result.upper is None:
            return verdict("NOT MEASURED", f"Probe {name} did not run, so no rate of it is bounded.", None, limit)
        if result.upper > limit:
            return verdict("UNDERPOWERED", f"{name}: {result.sentence}; allowed {limit:.2g}.", result.rate, limit)
    passed = [result for result in report.results if result.status == "ok"]
    detail = f"No alarm in {len(passed)} probes, {report.num_requests:,} requests."
    detail += "".join(f" garble: {result.sentence}." for result in passed if result.name == "garble")
    if before is not None and before.alarms:
        alarms = "; ".join(f"{alarm.name}: {alarm.reason}" for alarm in before.alarms)
        detail += f" {reference.label} itself alarms: {alarms}."
    return verdict("PASS", detail)


@dataclass(frozen=True)
class Hit:
    """Requests of a probe in which something was wrong, and all that it looked at."""

    requests: int
    of: int

    def __str__(self) -> str:
        return f"{self.requests or 'none'} of {self.of:,}"


def _hit(result: ProbeResult | None) -> Hit | None:
    """None: the probe did not run, or counts nothing by request."""
    if result is None or result.status == "not_run" or not result.trials or result.events is None:
        return None
    if result.requests_hit is not None and result.unit == "request":
        return Hit(min(result.requests_hit, result.trials), result.trials)
    if result.requests_hit is not None:
        return Hit(min(result.requests_hit, result.num_requests), result.num_requests) if result.num_requests else None
    if result.unit == "request":
        return Hit(result.events, result.trials)
    named = len({witness.request for witness in result.witnesses})  # a record of before requests were counted
    return Hit(min(named, result.num_requests), result.num_requests) if result.num_requests else None


def _num_compared(report: ProbeReport, before: ProbeReport | None) -> int:
    """Probes with an event on either side: the tests among which chance may choose.

    Given the events of both sides together, on which the test is conditioned, this number does not tell the sides apart.
    """
    results = [*report.results, *(before.results if before is not None else ())]
    return max(1, len({result.name for result in results if (hit := _hit(result)) is not None and hit.requests}))


def _judge_alarm(alarm: ProbeResult, before: ProbeReport | None, reference: str, alpha: float) -> tuple[Status, str]:
    """(what it makes of the candidate, the reason)."""
    other = None if before is None else before.result(alarm.name)
    if other is None or other.status == "not_run":
        return (
            "NOT MEASURED",
            f"whether {reference} does the same was not probed, so it may be the serving's: probe {reference}",
        )
    own, its = _hit(alarm), _hit(other)
    if own is None or its is None or not own.requests or alarm.stands_without_events:
        is_shared = other.status == "alarm" and (other.stands_without_events or its is None or not its.requests)
        if is_shared:
            return "NOT MEASURED", f"{reference} has the same alarm, so the serving is at fault and not this checkpoint"
        return "FAIL", f"no alarm in {reference}" if other.status == "ok" else f"{reference} has it in single requests only"
    p_value = exceeds_p(own.requests, own.of, its.requests, its.of)
    if p_value <= alpha:
        return "FAIL", f"in {reference} {its} requests, here {own} (p {p_value:.1g})"
    if its.requests:
        shared = f"{reference} has it too, in {its} requests (here {own}, p {p_value:.2g})"
        return "NOT MEASURED", f"{shared}: the serving is at fault, and not shown to be this checkpoint"
    needed = trials_to_tell(own.requests / own.of, 0.0, alpha)
    more = "" if needed is None else f"; about {needed:,} requests of each would tell, if that is its rate"
    return "UNDERPOWERED", f"in {reference} {its} requests: so many more come by chance with p {p_value:.2g}{more}"
