"""How many items the generated tasks make."""

from __future__ import annotations

from typing import assert_never

from assay.recipes.suite import ArithmeticTask, NeedleTask, RulerTask, ToolsTask


def num_cells(task: ArithmeticTask | NeedleTask | RulerTask | ToolsTask) -> int:
    """How often a task makes its `num_items`."""
    match task:
        case ArithmeticTask():
            return len(task.languages)
        case NeedleTask():
            return len(task.languages) * len(task.lengths_tokens)
        case RulerTask():
            of_grid = len(task.depths) * len(task.languages)
            return len(task.lengths_tokens) * sum(of_grid if name == "needle_grid" else 1 for name in task.tasks)
        case ToolsTask():
            return len(task.num_tools) * len(task.prompt_tokens) * len(task.languages)
        case _:
            assert_never(task)
