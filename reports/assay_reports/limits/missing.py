"""What is missing altogether, and judged by rules that came late or on faults."""

from assay.quantities import capital
from assay_reports.limits.entries import with_entries
from assay_reports.run import Run
from assay_reports.sentences import limits as english
from assay_reports.text import and_list, grouped


def unmeasured(run: Run) -> str | None:
    return None if run.measurements else english.UNMEASURED


def screened_out(run: Run) -> str | None:
    """What was excluded and never measured after all."""
    measured = {measurement.label for measurement in run.measurements}
    entries = [
        english.SCREENED_OUT_ENTRY.format(label=label, reason=reason)
        for label, reason in run.screened_out.items()
        if label not in measured
    ]
    return with_entries(english.SCREENED_OUT, entries)


def not_measured(run: Run) -> str | None:
    gaps = []
    for m in run.measurements:
        gaps += [((what, reason), m.label) for what, reason in sorted(m.not_measured.items())]
        gaps += [
            ((task.task, task.note or english.NO_REASON), m.label)
            for task in m.tasks
            if task.accuracy is None and task.task not in m.not_measured
        ]
    return with_entries(
        english.NOT_MEASURED,
        (
            english.NOT_MEASURED_ENTRY.format(what=what, labels=and_list(labels), reason=reason)
            for (what, reason), labels in grouped(gaps).items()
        ),
    )


def gates_not_before(run: Run) -> str | None:
    """Who chooses the limits after the scores are known can let anything pass."""
    late = run.gates.late if run.gates is not None else None
    return english.GATES_NOT_BEFORE.format(late=capital(late)) if late else None


def serving_faults(run: Run) -> str | None:
    """Every finding, once: of the reference it stands in every candidate's verdicts."""
    findings = () if run.gates is None else run.gates.serving
    return with_entries(english.SERVING_FAULTS, dict.fromkeys(f"{finding.task} ({finding.clause})" for finding in findings))


def serving_not_looked_at(run: Run) -> str | None:
    """Of records from before replies kept what they say of their serving."""
    if run.gates is None or not run.gates.not_looked_at:
        return None
    rules = dict.fromkeys(rule for rules in run.gates.not_looked_at.values() for rule in rules)
    return english.SERVING_NOT_LOOKED_AT.format(labels=", ".join(run.gates.not_looked_at), rules=", ".join(rules))
