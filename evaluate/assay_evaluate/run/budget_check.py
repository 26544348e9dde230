"""Before hours are spent: a few items of every task on the reference, and whether its token budgets suffice.

Replies are kept in the run's journal, so that the whole run does not ask these items again where they are the same ones.
"""

from __future__ import annotations

import math
from pathlib import Path

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.quantities import interval_name, percent_plain
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SuiteRecipe, SweTask, ToolsTask
from assay.records.measurement import BudgetCheck, TaskBudget, TaskResult
from assay_evaluate.client.journal import Journal
from assay_evaluate.run.candidate import Candidate, StartServer, check_context, open_server
from assay_evaluate.run.identity import identity
from assay_evaluate.run.suite import ServedCheckpoint, measure_suite
from assay_evaluate.run.weights import check_weights, keep_weights, named_sha256, times_remeasured
from assay_evaluate.serving.server import serve
from assay_evaluate.statistics.proportions import clopper_pearson
from assay_evaluate.tasks.cells import num_cells
from assay_evaluate.tasks.lm_eval.load import configs_of
from assay_evaluate.tasks.published.choice import settle_sources
from assay_evaluate.verdicts.truncation import truncation_limit

NUM_ITEMS = 20
"""Of each task, at least: without a cut among them more than 17 % are excluded (95 %, exact)."""
CLOSE = 0.8
"""Share of the budget beyond which the longest reply is called close."""
Task = ArithmeticTask | NeedleTask | LmEvalTask | RulerTask | ToolsTask


def check_budgets(
    model: str,
    reference: Candidate,
    *,
    suite: SuiteRecipe,
    gates: GateRecipe,
    profile: ProfileRecipe,
    serving: Serving,
    run_dir: Path,
    on_progress: Say = lambda line: None,
    start_server: StartServer = serve,
) -> BudgetCheck:
    """Serve the reference, ask at least `NUM_ITEMS` items of every task, say for each task whether its budget suffices.

    Raises what `run.evaluate` raises; MeasureError: no task of the suite has such a budget.
    """
    few = first_items(suite, NUM_ITEMS)
    if not few.tasks:
        raise MeasureError(
            f"suite {suite.name}: nothing to check: its tasks are trajectories, whose steps have a budget each;"
            " leave out --budget-check"
        )
    check_context(few, reference, profile, serving)
    with Journal(run_dir / "journal.db") as journal:
        settle_sources(few, journal, on_progress)
        checkpoint = named_sha256(reference, journal)
        with open_server(reference, profile, serving, run_dir, start_server, on_progress) as server:
            attempt = times_remeasured(reference.label, journal)
            if reference.endpoint is not None:
                known = keep_weights(reference, server, journal, check_weights(reference, server, journal)[1])
                checkpoint, attempt = known.checkpoint_sha256, attempt + known.attempt
            assert checkpoint is not None, "a folder, or a server that has signed"
            who = identity(checkpoint, server.fingerprint, suite.name, attempt)
            served = ServedCheckpoint(
                few, server, journal, who, reference.checkpoint, serving, profile.concurrency, on_progress
            )
            results = measure_suite(served, None, is_noise_floor=False, asks_twice=False)
    optional = {gate.task for gate in gates.gates if isinstance(gate, ScoreGate) and not gate.required}
    return BudgetCheck(
        model=model,
        label=reference.label,
        checkpoint_sha256=checkpoint,
        suite=suite.name,
        suite_sha256=suite.sha256,
        tasks=tuple(
            judge_budget(task, truncation_limit(gates, task.task), is_required=task.task not in optional)
            for task in results["tasks"]
        ),
    )


def judge_budget(task: TaskResult, max_truncated: float, *, is_required: bool = True) -> TaskBudget:
    """What the replies to a few items say: enough if no more of them ran into the budget or the context than the gates allow.

    A reply that ends of its own accord before its answer has begun (`empty`), or with the answer among its thinking, would do
    so with any budget.
    """
    assert task.max_tokens is not None, "it was asked here"
    max_tokens, num_replies = task.max_tokens, task.num_items - task.num_failed
    num_without_answer = task.truncated_by.get("empty", 0) + task.truncated_by.get("reasoning_only", 0)
    num_cut = task.num_truncated - num_without_answer
    longest = max((item.output_tokens for item in task.items if item.output_tokens is not None), default=None)
    share = clopper_pearson(num_cut, num_replies) if num_replies else None
    if share is None:
        detail = f"no reply to judge by: {task.note or 'every request failed'}"
    else:
        name = interval_name(share.level, share.coverage)
        detail = f"{num_cut} of {num_replies} cut off ({name}: {100 * share.low:.1f} to {100 * share.high:.1f} %)"
        detail += "" if longest is None else f", longest reply {longest} of {max_tokens} tokens"
        if task.num_thinking_cut:
            detail += f", thinking ended at {task.thinking_budget_tokens} tokens in {task.num_thinking_cut}"
        if num_without_answer:
            detail += f", {num_without_answer} ended without an answer, which no budget changes"
        if share.value > max_truncated:
            is_context = task.truncated_by.get("context", 0) > num_cut / 2
            remedy = "the context is too short: raise max-model-len" if is_context else "raise max_tokens"
            detail += f": too small, at most {percent_plain(max_truncated)} may be; {remedy}"
        else:
            is_close = longest is not None and longest >= CLOSE * max_tokens
            detail += f": {'suffices, but only just' if is_close else 'suffices'}"
    return TaskBudget(
        task=task.task,
        max_tokens=max_tokens,
        thinking_budget_tokens=task.thinking_budget_tokens,
        num_replies=num_replies,
        num_truncated=task.num_truncated,
        truncated_by=task.truncated_by,
        num_thinking_cut=task.num_thinking_cut,
        truncated_share=share,
        max_truncated_share=max_truncated,
        longest_reply_tokens=longest,
        suffices=share is not None and share.value <= max_truncated,
        is_required=is_required,
        detail=detail,
    )


# ------------------------------------------------------------------------------------------------ a few items
def first_items(suite: SuiteRecipe, num_items: int) -> SuiteRecipe:
    """The suite with at least `num_items` items of every task, where it has so many; scores only. A trajectory is no reply."""
    tasks: list[Task] = []
    for task in suite.tasks:
        if isinstance(task, LmEvalTask):
            each = math.ceil(num_items / max(1, len(configs_of(task))))
            tasks.append(task.model_copy(update={"limit": min(each, task.most_items or each)}))
        elif not isinstance(task, SweTask):
            each = math.ceil(num_items / num_cells(task))
            tasks.append(task.model_copy(update={"num_items": min(each, task.num_made)}))
    return suite.model_copy(update={"tasks": tuple(tasks), "divergence": None, "acceptance": False})
