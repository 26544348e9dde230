"""What the tasks of a suite need: how many items, RULER's cells, and the tokens of a context.

By these rules a run is refused, prompts are left out, and `longest` among RULER's lengths becomes a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from assay.recipes.suite import LONGEST, ArithmeticTask, NeedleTask, RulerTask, SuiteRecipe, TaskBase, ToolsTask
from assay_evaluate.tasks.ruler.items import Style
from assay_evaluate.tasks.ruler.tasks import GRID_REPLY_TOKENS, GRID_TASK, REPLY_TOKENS


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


def ruler_cells(task: RulerTask) -> Iterator[RulerCell]:
    """All that the task asks at lengths that are numbers (`settle_longest`), before it is known what fits."""
    for name in task.tasks:
        for length_tokens in task.stated_tokens:
            if name != GRID_TASK:
                yield RulerCell(name, length_tokens)
                continue
            for depth in task.depths:
                yield from (RulerCell(name, length_tokens, depth, language) for language in task.languages)


def needed_tokens(task: RulerTask, style: Style, cell: RulerCell) -> int:
    """Of prompt and reply together, at most; what needs more than the context is not measured."""
    return cell.length_tokens - tokens_kept_for_reply(task, cell) + ruler_max_tokens(task, style, cell.task)


def tokens_kept_for_reply(task: RulerTask, cell: RulerCell) -> int:
    """Tokens that the length of the cell keeps for the reply."""
    return task.max_tokens if task.reply_within_length else REPLY_TOKENS.get(cell.task, GRID_REPLY_TOKENS)


def ruler_max_tokens(task: RulerTask, style: Style, name: str) -> int:
    """A base model does not know when to stop: it gets the published tokens, others the suite's budget."""
    return min(task.max_tokens, REPLY_TOKENS.get(name, GRID_REPLY_TOKENS)) if style == "base" else task.max_tokens


def planned_style(task: RulerTask, *, is_chat: bool) -> Style:
    """The style that a checkpoint is asked in. is_chat: it has a chat template."""
    if task.style == "auto":
        return "chat" if is_chat else "base"
    return task.style


# ------------------------------------------------------------------------------------------------ longest
def settle_longest(task: RulerTask, style: Style, context: int | None) -> tuple[RulerTask, str | None]:
    """The task with a number in the place of `longest`, and what to say of it. None: the task does not name it.

    context: of prompt and reply together; None: nobody says. A length that is asked in any case is not asked twice: `longest`
    falls away where it is no more than another one that fits.
    """
    if LONGEST not in task.lengths_tokens:
        return task, None
    without = task.model_copy(update={"lengths_tokens": (*task.stated_tokens,)})
    if context is None:
        return without, f"not measured: {LONGEST}: the server does not say how long its context is; write a number"
    # of a base model only the published tokens are asked for, which the length keeps
    longest = context if task.reply_within_length or style == "base" else context - task.max_tokens
    text = f"{longest:,} tokens"
    if longest != context:
        text += f" ({context:,} of context less {task.max_tokens:,} of reply)"
    if longest < 1:
        return without, f"not measured: {LONGEST}: {text}: no room for a prompt"
    fitting = [
        length
        for length in task.stated_tokens
        if all(needed_tokens(task, style, RulerCell(name, length)) <= context for name in task.tasks)
    ]
    if longest <= (most := max(fitting, default=0)):
        return without, f"{LONGEST} is {text}: not asked, since {most:,} are"
    with_longest = task.model_copy(update={"lengths_tokens": (*task.stated_tokens, longest)})
    return with_longest, f"{LONGEST} is {text}"


def settle_suite(suite: SuiteRecipe, context: int | None, *, is_chat: bool) -> SuiteRecipe:
    """The suite as it is asked with a context, to count what it costs. Without one `longest` stays."""
    if context is None:
        return suite
    tasks = [
        settle_longest(task, planned_style(task, is_chat=is_chat), context)[0] if isinstance(task, RulerTask) else task
        for task in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tuple(tasks)})


# ------------------------------------------------------------------------------------------------ context
def tokens_with_reply(task: TaskBase, prompt_tokens: int) -> int:
    """Tokens of a prompt and the longest reply to it. A prompt with which they are more than the context is left out."""
    return prompt_tokens + task.max_tokens


def tasks_filling_context(suite: SuiteRecipe, context: int | None) -> list[TaskBase]:
    """Tasks whose reply may be as long as the whole context: nothing is left for a prompt, and the run is refused.

    context: None: not known, so none.
    """
    return [task for task in suite.tasks if context is not None and task.max_tokens >= context]
