"""`longest` among RULER's lengths: the longest that the context leaves room for, as the number it stands for."""

from __future__ import annotations

from assay.recipes.suite import LONGEST, RulerTask, SuiteRecipe
from assay_evaluate.tasks.cells import RulerCell, needed_tokens, planned_style
from assay_evaluate.tasks.ruler import Style


def longest_tokens(task: RulerTask, style: Style, context: int) -> int:
    """The context less the budget of a reply, where that lies beyond the length."""
    within = task.reply_within_length or style == "base"  # of a base model only the published tokens, which the length keeps
    return context - (0 if within else task.max_tokens)


def settled(task: RulerTask, style: Style, context: int | None) -> tuple[RulerTask, str | None]:
    """The task with a number in the place of `longest`, and what to say of it. None: the task does not name it.

    context: of prompt and reply together; None: nobody says. A length that is asked in any case is not asked twice: `longest`
    falls away where it is no more than another one that fits.
    """
    if LONGEST not in task.lengths_tokens:
        return task, None
    if context is None:
        return _with(task, None), f"not measured: {LONGEST}: the server does not say how long its context is; write a number"
    found = longest_tokens(task, style, context)
    what = f"{found:,} tokens"
    if found != context:
        what += f" ({context:,} of context less {task.max_tokens:,} of reply)"
    if found < 1:
        return _with(task, None), f"not measured: {LONGEST}: {what}: no room for a prompt"
    asked = max((length for length in task.stated_tokens if _fits(task, style, length, context)), default=0)
    if found <= asked:
        return _with(task, None), f"{LONGEST} is {what}: not asked, since {asked:,} are"
    return _with(task, found), f"{LONGEST} is {what}"


def settled_suite(suite: SuiteRecipe, context: int | None, *, is_chat: bool) -> SuiteRecipe:
    """The suite as it is asked with a context, to count what it costs. Without one `longest` stays."""
    if context is None:
        return suite
    tasks = [
        settled(task, planned_style(task, is_chat=is_chat), context)[0] if isinstance(task, RulerTask) else task
        for task in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tuple(tasks)})


def _with(task: RulerTask, number: int | None) -> RulerTask:
    lengths = (*task.stated_tokens, *([] if number is None else [number]))
    return task.model_copy(update={"lengths_tokens": lengths})


def _fits(task: RulerTask, style: Style, length: int, context: int) -> bool:
    return all(needed_tokens(task, style, RulerCell(name, length)) <= context for name in task.tasks)
