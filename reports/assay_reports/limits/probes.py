"""Probes and deployments."""

from assay.quantities import percent_of_events
from assay.records.probe import find_probes
from assay_evaluate.statistics.rates import TYPICAL_FAULT, trials_needed
from assay_reports.limits.entries import with_entries
from assay_reports.run import Run
from assay_reports.sentences import limits as english


def no_load(run: Run) -> str | None:
    if not run.measurements or any("load" in m.suite_recipe for m in run.measurements):
        return None
    requests = min(sum(task.num_items - task.num_failed for task in m.tasks) for m in run.measurements)
    unprobed = [m.label for m in run.measurements if find_probes(run.probes, m) is None]
    if not unprobed:
        return None
    rate = percent_of_events(min(1.0, 3 / max(requests, 1)))
    return english.NO_LOAD.format(
        of="" if len(unprobed) == len(run.measurements) else english.NO_LOAD_OF.format(labels=", ".join(unprobed)),
        bound=english.NO_LOAD_BOUND.format(requests=requests, rate=rate) if requests else "",
    )


def probes_not_run(run: Run) -> str | None:
    return with_entries(
        english.PROBES_NOT_RUN,
        (
            english.PROBE.format(probe=result.name, label=report.label, reason=result.reason)
            for report in run.probes
            for result in report.results
            if result.status == "not_run"
        ),
    )


def probes_not_judged(run: Run) -> str | None:
    if run.gates is not None and any(gate["kind"] == "probes" for gate in run.gates.gate_recipe.get("gates", ())):
        return None
    return with_entries(
        english.PROBES_NOT_JUDGED,
        (
            english.PROBE.format(probe=alarm.name, label=report.label, reason=alarm.reason)
            for report in run.probes
            for alarm in report.alarms
        ),
    )


def rare_faults(run: Run) -> str | None:
    needed = trials_needed(TYPICAL_FAULT)
    few = [
        f"{result.trials:,} of {report.label}"
        for report in run.probes
        if (result := report.result("garble")) is not None and result.trials is not None and result.trials < needed
    ]
    if not few:
        return None
    return english.RARE_FAULTS.format(rate=TYPICAL_FAULT * 1e4, needed=needed, made=", ".join(few))


def nothing_scored_there(run: Run) -> str | None:
    places = [english.DEPLOYED.format(label=record.label, profile=record.profile) for record in run.deployments]
    return english.NOTHING_SCORED_THERE.format(places=", ".join(places)) if places else None


def deployments_left_out(run: Run) -> str | None:
    places = [english.DEPLOYED.format(label=record.label, profile=record.profile) for record in run.old_deployments]
    return english.DEPLOYMENTS_LEFT_OUT.format(places=", ".join(places)) if places else None
