"""Honest limits of who answered: tasks whose serving was at fault, and evidence that old records lack."""

from __future__ import annotations

from assay_reports.run import Run


def serving_faults(run: Run) -> str | None:
    """Every finding, once: of the reference it stands in every candidate's verdicts."""
    found = [] if run.gates is None else [f"{one.task} ({one.clause})" for one in run.gates.serving]
    return f"Not scored, for the serving is at fault: {'; '.join(dict.fromkeys(found))}." if found else None


def serving_not_looked_at(run: Run) -> str | None:
    """Of records from before replies kept what they say of their serving."""
    if run.gates is None or not run.gates.not_looked_at:
        return None
    labels = ", ".join(run.gates.not_looked_at)
    rules = ", ".join(dict.fromkeys(rule for rules in run.gates.not_looked_at.values() for rule in rules))
    return (
        f"Recorded before replies kept what they say of their serving, so that it was not looked at in {labels}: {rules}. "
        "Measure again to have it looked at."
    )
