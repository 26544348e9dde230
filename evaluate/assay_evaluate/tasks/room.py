"""How many tokens of a context a task needs: the rules by which a run is refused, and by which prompts are left out."""

from __future__ import annotations

from assay.recipes.suite import SuiteRecipe, TaskBase


def with_reply(task: TaskBase, prompt_tokens: int) -> int:
    """Tokens of a prompt and the longest reply to it. A prompt with which they are more than the context is left out."""
    return prompt_tokens + task.max_tokens


def fills_context(suite: SuiteRecipe, context: int | None) -> list[TaskBase]:
    """Tasks whose reply may be as long as the whole context: nothing is left for a prompt, and the run is refused.

    context: None: not known, so none.
    """
    return [task for task in suite.tasks if context is not None and task.max_tokens >= context]
