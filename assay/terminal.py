"""What commands print: progress and verdicts to stderr; with `--json` stdout holds the record and nothing else."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from assay.records import Record, Verification
from assay.verdict_records import GateReport

console = Console(stderr=True, highlight=False, soft_wrap=True)


def escape(text: str) -> str:
    return text.replace("[", r"\[")


def emit(record: Record | dict[str, Any] | list[Any]) -> None:
    data = record.model_dump(mode="json") if isinstance(record, Record) else record
    print(json.dumps(data, indent=1, ensure_ascii=False))


def print_verification(result: Verification) -> None:
    looked = sum(result.checks.values())
    if result.passed:
        errors = ", ".join(f"{role} {error:.4f}" for role, error in sorted(result.mean_relative_error.items()))
        console.print(f"           verified: {looked:,} checks passed; mean weight error: {errors or 'not measured'}")
    for damage in result.damages[:20]:
        console.print(f"[bold red]damaged[/] {escape(damage.where)}: {escape(damage.what)} ({damage.check})")
    if len(result.damages) > 20:
        console.print(f"... and {len(result.damages) - 20} more; --json lists all")
    for skipped in result.not_checked:
        console.print(f"           not checked: {escape(skipped)}")
    if not result.passed:
        console.print(f"[bold red]verification failed[/]: {len(result.damages)} things are wrong in {result.checkpoint}")


def print_verdicts(gates: GateReport) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line per verdict."""
    from rich.table import Table

    colours = {"PASS": "green", "FAIL": "red", "UNDERPOWERED": "yellow", "NOT MEASURED": "yellow"}
    console.print(f"{gates.model} against {gates.reference}")
    if console.is_terminal:
        table = Table("candidate", "gate", "verdict", "what was seen")
        for one in gates.verdicts:
            table.add_row(one.candidate, one.gate, f"[{colours[one.status]}]{one.status}[/]", escape(one.detail))
        console.print(table)
    else:
        for one in gates.verdicts:
            console.print(f"{one.candidate:16} {one.gate:26} {one.status:12} {escape(one.detail)}")
    if gates.registered_sha256 not in (None, gates.gate_recipe_sha256):
        console.print("[yellow]these are not the limits that stood when measuring began[/]: they were changed after that")
    for candidate, status in gates.overall.items():
        console.print(f"{candidate:16} [bold {colours[status]}]{status}[/]")
