"""What the generated tasks ask: how many items, and RULER's cells with the tokens that each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from assay.recipes.suite import ArithmeticTask, NeedleTask, RulerTask, ToolsTask
from assay_evaluate.tasks.ruler import REPLY_TOKENS, Style
from assay_evaluate.tasks.ruler.grid import GRID_TASK
from assay_evaluate.tasks.ruler.grid import REPLY_TOKENS as GRID_REPLY_TOKENS


def num_cells(task: ArithmeticTask | NeedleTask | RulerTask | ToolsTask) -> int:
    """Parts of a task: how often it makes its `num_items`; `longest` counts as one length."""
    match task:
        case ArithmeticTask():
            return len(task.languages)
        case NeedleTask():
            return len(task.languages) * len(task.lengths_tokens)
        case RulerTask():
            of_grid = len(task.depths) * len(task.languages)
            return len(task.lengths_tokens) * sum(of_grid if name == GRID_TASK else 1 for name in task.tasks)
        case ToolsTask():
            return len(task.num_tools) * len(task.prompt_tokens) * len(task.languages)
        case _:
            assert_never(task)


# ------------------------------------------------------------------------------------------------ RULER
@dataclass(frozen=True)
class RulerCell:
    """All items of one task at one length; of the grid, also of one depth and language."""

    task: str
    length_tokens: int
    depth: float | None = None
    language: str = "en"

    @property
    def published_reply_tokens(self) -> int:
        return REPLY_TOKENS.get(self.task, GRID_REPLY_TOKENS)


def ruler_cells(task: RulerTask) -> Iterator[RulerCell]:
    """All that the task asks at lengths that are numbers (`longest.settled`), before it is known what fits."""
    for name in task.tasks:
        for length_tokens in task.stated_tokens:
            if name != GRID_TASK:
                yield RulerCell(name, length_tokens)
                continue
            for depth in task.depths:
                yield from (RulerCell(name, length_tokens, depth, language) for language in task.languages)


def needed_tokens(task: RulerTask, style: Style, cell: RulerCell) -> int:
    """Of prompt and reply together, at most; what needs more than the context is not measured."""
    return cell.length_tokens - reply_within(task, cell) + ruler_max_tokens(task, style, cell.task)


def reply_within(task: RulerTask, cell: RulerCell) -> int:
    """Tokens that the length of the cell keeps for the reply."""
    return task.max_tokens if task.reply_within_length else cell.published_reply_tokens


def ruler_max_tokens(task: RulerTask, style: Style, name: str) -> int:
    """A base model does not know when to stop: it gets the published tokens, others the suite's budget."""
    return min(task.max_tokens, REPLY_TOKENS.get(name, GRID_REPLY_TOKENS)) if style == "base" else task.max_tokens


def planned_style(task: RulerTask, *, is_chat: bool) -> Style:
    """The style that a checkpoint is asked in. is_chat: it has a chat template."""
    if task.style == "auto":
        return "chat" if is_chat else "base"
    return task.style
