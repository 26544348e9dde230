"""What commands print: progress and verdicts to stderr; with `--json` stdout holds the record and nothing else.

What a file or a server said goes through `escape`, `say` or `emit`: it is text there, without markup or control codes.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from assay.foreign_text import in_rich, one_line
from assay.records.base import Record
from assay.records.verdict import GateReport
from assay.records.verification import Verification

console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def escape(text: str) -> str:
    """One line for rich to print as it is: neither markup nor control codes."""
    return in_rich(text)


def say(line: str) -> None:
    """A line of progress."""
    console.print(escape(line))


def say_error(text: str) -> None:
    """Of an error's own lines (a server's last words of its log) each stays one."""
    console.print("[bold red]error:[/] " + "\n".join(map(escape, text.split("\n"))))


def stdout(*, soft_wrap: bool = False) -> Console:
    """For the tables and lines that are a command's result."""
    return Console(highlight=False, soft_wrap=soft_wrap, emoji=False)


def emit(record: Record | dict[str, Any] | list[Any]) -> None:
    data = record.model_dump(mode="json") if isinstance(record, Record) else record
    print("\n".join(map(one_line, json.dumps(data, indent=1, ensure_ascii=False).split("\n"))))


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
        console.print(
            f"[bold red]verification failed[/]: {len(result.damages)} things are wrong in {escape(result.checkpoint)}"
        )


def print_verdicts(gates: GateReport) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line per verdict."""
    from rich.table import Table

    colours = {"PASS": "green", "FAIL": "red", "UNDERPOWERED": "yellow", "NOT MEASURED": "yellow"}
    say(f"{gates.model} against {gates.reference}")
    if console.is_terminal:
        table = Table("candidate", "gate", "verdict", "what was seen")
        for one in gates.verdicts:
            table.add_row(
                escape(one.candidate), escape(one.gate), f"[{colours[one.status]}]{one.status}[/]", escape(one.detail)
            )
        console.print(table)
    else:
        for one in gates.verdicts:
            say(f"{one.candidate:16} {one.gate:26} {one.status:12} {one.detail}")
    if gates.registered_sha256 not in (None, gates.gate_recipe_sha256):
        console.print("[yellow]these are not the limits that stood when measuring began[/]: they were changed after that")
    for candidate, status in gates.overall.items():
        console.print(f"{escape(candidate):16} [bold {colours[status]}]{status}[/]")
