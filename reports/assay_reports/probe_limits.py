"""Honest limits of serving-fidelity probes: who was not probed, what could not run, what nobody judged, what is too rare."""

from __future__ import annotations

from assay.quantities import percent_of_events
from assay.records.probe import find_probes
from assay_evaluate.statistics.rates import TYPICAL_FAULT, trials_needed
from assay_reports.run import Run


def no_load(run: Run) -> str | None:
    if not run.measurements or any("load" in m.suite_recipe for m in run.measurements):
        return None
    requests = min(sum(task.num_items - task.num_failed for task in m.tasks) for m in run.measurements)
    unprobed = [m.label for m in run.measurements if find_probes(run.probes, m) is None]
    if not unprobed:
        return None
    bound = percent_of_events(min(1.0, 3 / max(requests, 1)))
    seen = f", and {requests:,} requests without one would bound their rate only at {bound}" if requests else ""
    who = "" if len(unprobed) == len(run.measurements) else f" of {', '.join(unprobed)}"
    return f"No load test and no probes{who}: failures that need concurrency or long uptime were not looked for{seen}."


def probes_not_run(run: Run) -> str | None:
    gaps = [
        f"{one.name} of {report.label} ({one.reason})"
        for report in run.probes
        for one in report.results
        if one.status == "not_run"
    ]
    return f"Probes that could not run: {'; '.join(gaps)}." if gaps else None


def probes_not_judged(run: Run) -> str | None:
    gated = run.gates is not None and any(gate["kind"] == "probes" for gate in run.gates.gate_recipe.get("gates", ()))
    alarms = [f"{one.name} of {report.label} ({one.reason})" for report in run.probes for one in report.alarms]
    return f"Probes that alarm, and no gate judges them: {'; '.join(alarms)}." if alarms and not gated else None


def rare_faults(run: Run) -> str | None:
    needed = trials_needed(TYPICAL_FAULT)
    few = [
        f"{found.trials:,} of {report.label}"
        for report in run.probes
        if (found := report.result("garble")) is not None and found.trials is not None and found.trials < needed
    ]
    if not few:
        return None
    return (
        f"Garbled replies at {TYPICAL_FAULT * 1e4:g} in 10,000, as production has seen them, need {needed:,} loaded requests "
        f"to be seen once with 95 %; the probes made {', '.join(few)}."
    )
