"""What a suite sends and gets back: requests, prompt tokens and output tokens of each part of a run.

Counted where the suite says it, else from the assumptions of `known_tasks`. Nothing is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from assay.recipes.gate import Stopping
from assay.recipes.model import Serving
from assay.recipes.suite import (
    ArithmeticTask,
    DivergenceSpec,
    LmEvalTask,
    NeedleTask,
    RulerTask,
    SuiteRecipe,
    SweTask,
    TaskBase,
    ToolsTask,
)
from assay.records.probe import ProbeSettings
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.preflight.known_tasks import (
    ARITHMETIC_PROMPT_TOKENS,
    GENERATED_REPLY,
    LM_EVAL,
    PLAIN_SHARE,
    STEP_PLAIN_TOKENS,
    STEP_PROMPT_TOKENS,
    STEP_THINKING_TOKENS,
    THINKING_SHARE,
    TOOL_TOKENS,
    TRAJECTORY_STEPS,
    UNKNOWN_PROMPT_TOKENS,
)
from assay_evaluate.preflight.suite_items import num_items, replies_each
from assay_evaluate.tasks.looks import Look, asked_for, has_second_replies, planned_looks

T = TypeVar("T", bound=TaskBase)


@dataclass(frozen=True)
class Load:
    """Requests, and the tokens of their prompts and replies together."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.num_requests + other.num_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )

    def times(self, count: int) -> Load:
        return Load(self.num_requests * count, self.prompt_tokens * count, self.output_tokens * count)


@dataclass(frozen=True)
class Workload:
    """Parts of a run. tasks: of a candidate, in round one where a range of samples or items is asked in rounds. again: what the
    reference is asked beyond that for the noise floor: everything once more, or second replies. most: tasks at their last look.
    writing: its texts for divergence. scoring: of these texts, by every checkpoint. probes: of every checkpoint, but not of the
    reference's repeat. unknown: tasks whose number of items is not known, in no sum."""

    tasks: Load
    again: Load
    most: Load
    writing: Load
    scoring: Load
    probes: Load
    unknown: tuple[str, ...]
    own: Load = Load()
    """Texts that a candidate writes itself and scores twice, for `assay deployment`."""

    @property
    def candidate(self) -> Load:
        return self.tasks + self.scoring + self.probes + self.own

    @property
    def reference(self) -> Load:
        """With its repeat, on the same server."""
        return self.tasks + self.again + self.scoring.times(2) + self.probes + self.writing


def workload_of(suite: SuiteRecipe, serving: Serving, *, own_texts: bool = False) -> Workload:
    """Of a suite as the model asks (`as_model_asks`). A model with a reasoning parser is taken to think first.

    own_texts: candidates write texts of their own.
    """
    thinks = serving.reasoning_parser is not None
    first, last = ([planned_looks(task, Stopping())[place] for task in suite.tasks] for place in (0, -1))
    theirs = {
        task.name: _of_task(_at(task, look, look.candidate_samples), thinks)
        for task, look in zip(suite.tasks, first, strict=True)
    }
    ours = [_of_task(_at(task, look, look.reference_samples), thinks) for task, look in zip(suite.tasks, first, strict=True)]
    most = [_of_task(_at(task, look, look.candidate_samples), thinks) for task, look in zip(suite.tasks, last, strict=True)]
    once = _known(list(theirs.values()))
    again = [load for task, load in zip(suite.tasks, theirs.values(), strict=True) if not has_second_replies(task)]
    writing, scoring = (Load(), Load()) if suite.divergence is None else _divergence(suite, suite.divergence, thinks)
    return Workload(
        tasks=once,
        again=_known(ours) + _known(again) + once.times(-1),
        most=_known(most),
        writing=writing,
        scoring=scoring,
        probes=Load() if suite.probes is None else _probes(suite.probes),
        unknown=tuple(name for name, load in theirs.items() if load is None),
        own=_own(suite, thinks) if own_texts else Load(),
    )


def _known(loads: Sequence[Load | None]) -> Load:
    return sum((load for load in loads if load is not None), Load())


def _at(task: T, look: Look, num_samples: int) -> T:
    """The task with the numbers of one look."""
    return asked_for(task, num_samples, look.limit) if task.is_adaptive else task


def _own(suite: SuiteRecipe, thinks: bool) -> Load:
    own = own_suite(suite)
    if own is None or own.divergence is None:
        return Load()
    writing, scoring = _divergence(own, own.divergence, thinks)
    return writing + scoring.times(2)


def _of_task(task: TaskBase, thinks: bool) -> Load | None:
    """None: how many items it has is not known."""
    count = num_items(task)
    if count is None:
        return None
    if isinstance(task, SweTask):
        steps = count * task.num_repeats * min(task.step_limit, TRAJECTORY_STEPS)
        reply = STEP_THINKING_TOKENS if thinks else STEP_PLAIN_TOKENS
        return Load(steps, steps * STEP_PROMPT_TOKENS, steps * min(reply, task.max_tokens))
    replies = count * replies_each(task)
    return Load(replies, round(replies * prompt_tokens(task)), round(replies * reply_tokens(task, thinks)))


def prompt_tokens(task: TaskBase) -> float:
    """Mean over the items."""
    match task:
        case NeedleTask() | RulerTask():
            return sum(task.lengths_tokens) / len(task.lengths_tokens)
        case ToolsTask():
            shapes = [max(tokens, number * TOOL_TOKENS) for tokens in task.prompt_tokens for number in task.num_tools]
            return sum(shapes) / len(shapes)
        case LmEvalTask():
            known = [LM_EVAL[name] for name in task.tasks if name in LM_EVAL]
            total = sum(sum(one.sizes) for one in known)
            return sum(sum(one.sizes) * one.prompt_tokens for one in known) / total if total else UNKNOWN_PROMPT_TOKENS
        case ArithmeticTask():
            return ARITHMETIC_PROMPT_TOKENS
        case _:
            return STEP_PROMPT_TOKENS


def reply_tokens(task: TaskBase, thinks: bool) -> float:
    """Mean over the items; never more than the budget."""
    if isinstance(task, SweTask):
        found: float = STEP_THINKING_TOKENS if thinks else STEP_PLAIN_TOKENS
    elif not isinstance(task, LmEvalTask):
        thinking, plain = GENERATED_REPLY[str(getattr(task, "kind"))]  # noqa: B009  each kind of task has one
        found = thinking if thinks else plain
    elif known := [LM_EVAL[name] for name in task.tasks if name in LM_EVAL]:
        total = sum(sum(one.sizes) for one in known)
        found = sum(sum(one.sizes) * (one.thinking_tokens if thinks else one.plain_tokens) for one in known) / total
    else:
        found = task.max_tokens * (THINKING_SHARE if thinks else PLAIN_SHARE)
    return min(found, task.max_tokens)


def _divergence(suite: SuiteRecipe, spec: DivergenceSpec, thinks: bool) -> tuple[Load, Load]:
    """(what the reference writes, what each checkpoint scores). A text of its own takes half of its budget."""
    own = len(spec.languages) * spec.num_documents
    writing = Load(own, own * ARITHMETIC_PROMPT_TOKENS, own * spec.max_tokens // 2)
    for task in suite.tasks:
        if not isinstance(task, SweTask) and spec.suite_documents:
            some = spec.suite_documents
            writing += Load(some, round(some * prompt_tokens(task)), round(some * reply_tokens(task, thinks)))
    held_out = spec.held_out_documents * (1 if spec.held_out is not None else len(spec.languages))
    texts = writing.prompt_tokens + writing.output_tokens + held_out * spec.held_out_tokens
    return writing, Load(writing.num_requests + held_out, texts, writing.num_requests + held_out)


def _probes(settings: ProbeSettings) -> Load:
    """Greedy and sampled replies, recomputed, a part alone; the garble scan; the ladder of tools. Half the prompts are long."""
    prompt = (settings.short_tokens + settings.long_tokens) // 2
    examined = 3 * settings.num_requests + 3 * settings.num_alone
    tools = len(settings.num_tools) * settings.num_tool_requests
    replies = examined + settings.num_garble_requests + tools
    described = settings.num_tool_requests * TOOL_TOKENS * sum(settings.num_tools)
    in_prompts = (examined + settings.num_garble_requests) * prompt + described
    return Load(replies, in_prompts, replies * settings.max_tokens)
