"""Serving-fidelity probes as a gate: an alarm that the reference does not have fails, what was not probed is NOT MEASURED, too
few requests are UNDERPOWERED.

An alarm on both sides is a fault of the serving, not of the candidate: NOT MEASURED, unless the candidate's rate is surely the
higher one.
"""

from __future__ import annotations

from collections.abc import Sequence

from assay.recipes.gate import ProbesGate
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ProbeResult, find_probes
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import independent_difference


def judge_probes(gate: ProbesGate, reports: Sequence[ProbeReport], reference: Measurement, candidate: Measurement) -> Verdict:
    """The verdict of one candidate; `observed` is the rate of the probe that decides, where one does."""

    def verdict(status: Status, detail: str, observed: Interval | None = None, limit: float | None = None) -> Verdict:
        return Verdict(
            gate="probes", candidate=candidate.label, status=status, observed=observed, limit=limit, detail=detail
        )  # fmt: skip

    report = find_probes(reports, candidate)
    if report is None:
        other = any(one.label == candidate.label for one in reports)
        why = "the probes of that name are of another checkpoint" if other else "it was not probed"
        return verdict("NOT MEASURED", f"No probes of {candidate.label}: {why}; `assay probe` does it.")
    before = find_probes(reports, reference)
    own = [one for one in report.alarms if not _is_shared(one, before, report.settings.level)]
    if own:
        also = ", ".join(one.name for one in own[1:])
        detail = f"{own[0].name}: {own[0].reason}{f' (alarms also in {also})' if also else ''}"
        return verdict("FAIL", f"{detail}; {_beside(own[0], before, reference)}.", own[0].rate)
    if report.alarms:
        names = ", ".join(one.name for one in report.alarms)
        detail = f"{names}: {reference.label} has the same alarm, so the serving is at fault and not this checkpoint"
        return verdict("NOT MEASURED", f"{detail}: {report.alarms[0].reason}.", report.alarms[0].rate)
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
    ran = [one for one in report.results if one.status == "ok"]
    return verdict("PASS", f"No alarm in {len(ran)} probes, {report.num_requests:,} requests.{_tightest(ran)}")


def _is_shared(alarm: ProbeResult, before: ProbeReport | None, level: float) -> bool:
    """Whether the reference has this alarm too, and no surely smaller rate of its events."""
    other = None if before is None else before.result(alarm.name)
    if other is None or other.status != "alarm":
        return False
    if not alarm.trials or not other.trials or alarm.events is None or other.events is None:
        return True
    return independent_difference(alarm.events, alarm.trials, other.events, other.trials, level).low <= 0


def _beside(alarm: ProbeResult, before: ProbeReport | None, reference: Measurement) -> str:
    other = None if before is None else before.result(alarm.name)
    if other is None or other.status == "not_run":
        return f"whether {reference.label} does the same was not probed"
    if other.status == "ok":
        return f"no alarm in {reference.label}"
    return f"{reference.label} has the alarm too, but fewer events: {other.events} of {other.trials} {alarm.unit}s"


def _tightest(ran: Sequence[ProbeResult]) -> str:
    garble = next((one for one in ran if one.name == "garble"), None)
    return f" garble: {garble.sentence}." if garble is not None else ""
