"""What was not shown of candidates on deployment profiles."""

from __future__ import annotations

from assay_reports.run import Run


def nothing_scored_there(run: Run) -> str | None:
    where = [f"{one.label} on {one.profile}" for one in run.deployments]
    return (
        f"No task was scored of {', '.join(where)}: there a candidate was held against itself, not against the reference, "
        "which was not served there."
        if where
        else None
    )


def deployments_left_out(run: Run) -> str | None:
    where = [f"{one.label} on {one.profile}" for one in run.old_deployments]
    return (
        f"Left out: what was seen of {', '.join(where)}, for the checkpoint, its measurement or its verdict has changed since; "
        "`assay deployment` serves it again."
        if where
        else None
    )
