"""Whether token budgets suffice, a line for each task."""

from __future__ import annotations

from rich.console import Console

from assay.records.measurement import BudgetCheck
from assay_cli.terminal import escape


def print_budgets(checked: BudgetCheck, out: Console) -> None:
    """One line a task, then what to do."""
    for task in checked.tasks:
        mark = "[green]ok   [/]" if task.suffices else "[red]short[/]" if task.is_required else "[yellow]note [/]"
        excuse = "" if task.suffices or task.is_required else " (its gate is not required: this fails nothing)"
        out.print(f"{mark} {task.task:16} {escape(task.detail)}{excuse}")
