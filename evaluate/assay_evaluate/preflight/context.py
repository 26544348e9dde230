"""Do the prompts and replies that a suite asks for fit the context with which the checkpoints are served?

By the rules of the run itself (`tasks/cells.py`): a budget that fills the context stops it, a prompt of a stated length that
does not fit is left out. FAIL: the run is refused, or nothing is left of a task that a required gate judges. Where some lengths
are left out the task is measured on the others: PASS, and said. So it is where texts of the divergence are cut
(`divergence/documents.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from assay.recipes.suite import DivergenceSpec, NeedleTask, RulerTask, SuiteRecipe, TaskBase, ToolsTask
from assay.records.preflight.replay import Outcome
from assay.records.preflight.report import Check
from assay_evaluate.tasks.cells import (
    needed_tokens,
    planned_style,
    ruler_cells,
    settle_longest,
    tasks_filling_context,
    tokens_with_reply,
)


def check_context(
    suite: SuiteRecipe, context: int | None, required: Collection[str], *, is_chat: bool
) -> Iterator[Check]:  # fmt: skip
    """One check for each task, and one for the divergence.

    context: of prompt and reply together (`context_tokens`); None: nobody says. required: tasks that a required gate judges.
    is_chat: there is a chat template; without one RULER's replies have the published lengths.
    """
    if context is None:
        detail = "neither profile nor config.json says how long prompt and reply may be together"
        remedy = "write max-model-len into the profile's `vllm:`"
        yield _check(None, detail, remedy, outcome="UNKNOWN")
        return
    filling = {task.name for task in tasks_filling_context(suite, context)}
    for task in suite.tasks:
        if task.name in filling:
            detail = f"a reply may have {task.max_tokens:,} tokens, and prompt and reply together have {context:,}: "
            remedy = "lower max_tokens in the suite, or raise max-model-len if the model allows more"
            yield _check(task.name, f"{detail}the run is refused", remedy, outcome="FAIL")
        else:
            yield _fitting(task, context, task.name in required, is_chat)
    if suite.divergence is not None:
        yield _texts(suite.divergence, context)


def _check(subject: str | None, detail: str, remedy: str | None = None, *, outcome: Outcome = "PASS") -> Check:
    return Check(check="context", subject=subject, outcome=outcome, detail=detail, remedy=remedy)


def _fitting(task: TaskBase, context: int, is_required: bool, is_chat: bool) -> Check:
    note = None
    if isinstance(task, RulerTask):
        task, note = settle_longest(task, planned_style(task, is_chat=is_chat), context)
    lengths = _needed(task, is_chat)
    if not lengths:
        detail = f"{task.max_tokens:,} tokens of reply leave {context - task.max_tokens:,} of {context:,} for a prompt"
        return _check(task.name, detail)
    left_out = [length for length, needed in lengths.items() if needed > context]
    longest = max(lengths)
    detail = f"prompts to {longest:,} tokens need {lengths[longest]:,} of {context:,} with their reply"
    if note is not None:
        detail = f"{note}; {detail}"
    if not left_out:
        return _check(task.name, detail)
    remedy = f"for {longest:,} tokens lower max_tokens to {context - longest:,} in the suite, or raise max-model-len"
    if context <= longest:
        remedy = "raise max-model-len if the model allows more, or take the length out of the suite"
    if len(left_out) < len(lengths):
        detail += f": NOT MEASURED at {', '.join(f'{short:,}' for short in left_out)}, measured at the other lengths"
        return _check(task.name, detail, remedy)
    detail += ": the task is NOT MEASURED" + ("" if is_required else ", and no required gate judges it")
    return _check(task.name, detail, remedy, outcome="FAIL" if is_required else "PASS")


def _texts(spec: DivergenceSpec, context: int) -> Check:
    """Replies and held-out texts, of which the context leaves room for one more token. Replies to the tasks' own questions have
    the tasks' budgets."""
    lengths = {"replies": ("max_tokens", spec.max_tokens)}
    if spec.held_out_documents:
        lengths["held-out texts"] = ("held_out_tokens", spec.held_out_tokens)
    cut = {what: (key, num_tokens) for what, (key, num_tokens) in lengths.items() if num_tokens > context - 1}
    detail = " and ".join(f"{what} to {num_tokens:,} tokens" for what, (_, num_tokens) in lengths.items())
    if not cut:
        return _check("divergence", f"{detail} fit into {context:,}")
    detail += f": {' and '.join(cut)} are cut to {context - 1:,} of {context:,}, question included"
    if beyond := [first for first in spec.spans if first >= context - 1]:
        detail += f"; positions from {min(beyond):,} on, which the suite names as a span, do not exist"
    remedy = f"lower {' and '.join(key for key, _ in cut.values())} of `divergence:` in the suite, or raise max-model-len"
    return _check("divergence", detail, remedy)


def _needed(task: TaskBase, is_chat: bool) -> dict[int, int]:
    """Stated length of a prompt -> tokens of prompt and reply, at most. Empty: the task states none."""
    if isinstance(task, NeedleTask):
        return {length: tokens_with_reply(task, length) for length in task.lengths_tokens}
    if isinstance(task, ToolsTask):
        return {length: tokens_with_reply(task, length) for length in task.prompt_tokens if length}
    if not isinstance(task, RulerTask):
        return {}
    needed: dict[int, int] = {}
    style = planned_style(task, is_chat=is_chat)
    for cell in ruler_cells(task):
        needed[cell.length_tokens] = max(needed.get(cell.length_tokens, 0), needed_tokens(task, style, cell))
    return needed
