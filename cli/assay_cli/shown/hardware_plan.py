"""`assay plan TARGET --profile P`, as a table."""

from __future__ import annotations

from rich.console import Console

from assay.quantities import tokens_short
from assay.records.choice.hardware import HardwarePlan, PrecisionOnHardware
from assay_cli.terminal import escape, print_rows


def print_hardware_plan(plan: HardwarePlan, out: Console) -> None:
    """What fits in one clause, then a row for each precision."""
    fitting = [row.precision for row in plan.rows if row.fits]
    gpus = f"{plan.num_gpus} x {plan.gpu}"
    where = f"{plan.users} users at {tokens_short(plan.context)} tokens on {gpus}"
    if fitting:
        says = f"{', '.join(fitting)} {'fit' if len(fitting) != 1 else 'fits'} {where}"
    elif any((row.users_that_fit or 0) >= plan.users for row in plan.rows):  # memory is not what is wrong
        says = f"no precision can be served on {gpus} with profile {plan.profile}; the reasons stand below the table"
    else:
        says = f"no precision fits {where}"
    out.print(escape(f"{plan.model}: {says}"))
    drafted = max((step.drafted for row in plan.rows for step in row.steps), default=0)
    modes = f": without / with MTP {drafted}" if drafted else ""
    columns = (
        "precision", "weights GB/GPU", "KV GB/GPU", "users that fit", "experts run", f"GB read per step{modes}",
        f"least TPOT in ms{modes}",
    )  # fmt: skip
    print_rows(columns, [_cells(row, plan.users) for row in plan.rows], out)
    for row in plan.rows:
        if row.problem is not None:
            out.print(escape(f"{row.precision}: {row.problem}"))
    out.print(escape(f"Assumed: {'; '.join(plan.assumptions)}. Shapes: {plan.source}."))


def _cells(row: PrecisionOnHardware, users_asked: int) -> tuple[str, ...]:
    from assay_evaluate.roofline.kernels import RunsAs

    if row.weight_bytes is None or row.kv_bytes is None:
        return (escape(row.precision), *["-"] * 6)
    runs = "not known"
    if row.runs_as is not None:
        runs = RunsAs(bool(row.native), row.runs_as, row.kernels).words
    floors = [step.floor_tpot_s for step in row.steps]
    held = row.users_that_fit or 0
    users = f"{held:,}" if row.fits or held < users_asked else "-"
    return (
        escape(row.precision),
        _gigabytes(row.weight_bytes),
        _gigabytes(row.kv_bytes),
        users if row.fits else f"[red]{users}[/]",
        escape(runs),
        " / ".join(f"{(step.target_bytes + step.draft_bytes + step.kv_bytes) / 1e9:,.0f}" for step in row.steps),
        " / ".join("-" if floor is None else f"{1e3 * floor:.2f}" for floor in floors),
    )


def _gigabytes(num_bytes: float) -> str:
    """10^9 bytes; two digits of what is less than one."""
    return f"{num_bytes / 1e9:,.1f}" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.2g}"
