"""`assay plan TARGET --profile P`, as a table."""

from __future__ import annotations

from rich.console import Console

from assay.quantities import tokens_short
from assay.records.choice.hardware import HardwarePlan, PrecisionOnHardware
from assay_cli.terminal import escape, print_rows


def print_hardware_plan(plan: HardwarePlan, out: Console) -> None:
    """What fits in one clause, then a row for each precision."""
    fitting = [row.precision for row in plan.rows if row.fits]
    what = ", ".join(fitting) if fitting else "none of them"
    where = f"{plan.users} users at {tokens_short(plan.context)} tokens on {plan.num_gpus} x {plan.gpu}"
    out.print(escape(f"{plan.model}: {what} {'fit' if len(fitting) != 1 else 'fits'} {where}"))
    drafted = max((step.drafted for row in plan.rows for step in row.steps), default=0)
    off_on = f"off / MTP {drafted}" if drafted else "off"
    columns = (
        "precision", "weights GB/GPU", "KV GB/GPU", "users that fit", "experts run", f"GB a step {off_on}",
        f"floor TPOT ms {off_on}",
    )  # fmt: skip
    print_rows(columns, [_cells(row) for row in plan.rows], out)
    for row in plan.rows:
        if row.problem is not None:
            out.print(escape(f"{row.precision}: {row.problem}"))
    out.print(escape(f"Assumed: {'; '.join(plan.assumptions)}. Shapes: {plan.source}."))


def _cells(row: PrecisionOnHardware) -> tuple[str, ...]:
    from assay_evaluate.roofline.kernels import RunsAs

    if row.weight_bytes is None or row.kv_bytes is None:
        return (escape(row.precision), *["-"] * 6)
    runs = "not known"
    if row.runs_as is not None:
        runs = RunsAs(bool(row.native), row.runs_as, row.kernels).words
    floors = [step.floor_tpot_s for step in row.steps]
    users = f"{row.users_that_fit:,}"
    return (
        escape(row.precision),
        f"{row.weight_bytes / 1e9:,.1f}",
        f"{row.kv_bytes / 1e9:,.1f}",
        users if row.fits else f"[red]{users}[/]",
        escape(runs),
        " / ".join(f"{(step.target_bytes + step.draft_bytes + step.kv_bytes) / 1e9:,.0f}" for step in row.steps),
        " / ".join("-" if floor is None else f"{1e3 * floor:.2f}" for floor in floors),
    )
