"""Serving-fidelity probes as a gate: an alarm fails, what was not probed is NOT MEASURED, too few requests are UNDERPOWERED."""

from __future__ import annotations

from collections.abc import Sequence

from assay.recipes.gate import ProbesGate
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ProbeResult, find_probes
from assay.records.verdict import Status, Verdict


def judge_probes(gate: ProbesGate, reports: Sequence[ProbeReport], candidate: Measurement) -> Verdict:
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
    if report.alarms:
        first = report.alarms[0]
        also = ", ".join(one.name for one in report.alarms[1:])
        return verdict("FAIL", f"{first.name}: {first.reason}{f' (alarms also in {also})' if also else ''}.", first.rate)
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


def _tightest(ran: Sequence[ProbeResult]) -> str:
    garble = next((one for one in ran if one.name == "garble"), None)
    return f" garble: {garble.sentence}." if garble is not None else ""
