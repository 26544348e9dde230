"""What a suite sends and gets back: requests, prompt tokens and output tokens of each part of a run.

Counted where the suite says it, else from the assumptions of `known_tasks`. Nothing is tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from assay.recipes.gate import Stopping
from assay.recipes.model import Serving
from assay.recipes.suite import (
    ArithmeticTask,
    DivergenceSpec,
    GeneratedTask,
    LmEvalTask,
    NeedleTask,
    RulerTask,
    SuiteRecipe,
    SweTask,
    TaskBase,
    ToolsTask,
)
from assay.records.probe import ProbeSettings
from assay_evaluate.diagnosis.probes.planned import Load
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.preflight.known_tasks import (
    ARITHMETIC_PROMPT_TOKENS,
    GENERATED_REPLY,
    LONGEST_TOKENS,
    PLAIN_SHARE,
    STEP_PLAIN_TOKENS,
    STEP_PROMPT_TOKENS,
    STEP_THINKING_TOKENS,
    THINKING_SHARE,
    TOOL_TOKENS,
    TRAJECTORY_STEPS,
    UNKNOWN_PROMPT_TOKENS,
    mean_of_known,
    num_items,
    replies_each,
)
from assay_evaluate.tasks.looks import Look, has_second_replies, planned_looks, task_at_look

T = TypeVar("T", bound=TaskBase)


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
    own: Load = field(default_factory=Load)
    """Texts that a candidate writes itself and scores twice, for `assay deployment`."""

    @property
    def candidate(self) -> Load:
        return self.tasks + self.scoring + self.probes + self.own

    @property
    def reference(self) -> Load:
        """With its repeat, on the same server."""
        return self.tasks + self.again + self.scoring.times(2) + self.probes + self.writing


def workload_of(
    suite: SuiteRecipe,
    serving: Serving,
    *,
    own_texts: bool = False,
    stopping: Stopping = Stopping(),  # noqa: B008  frozen
    stops: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Workload:
    """Of a suite as the model asks (`as_model_asks`). A model with a reasoning parser is taken to think first.

    own_texts: candidates write texts of their own. stopping: of the gates. stops: task -> chances that its last look is the
    first, the second, ...; the mean over them takes the place of round one.
    """
    thinks = serving.reasoning_parser is not None
    candidate_loads, reference_loads, most, again = (
        list[Load | None](),
        list[Load | None](),
        list[Load | None](),
        list[Load | None](),
    )
    for task in suite.tasks:
        looks = planned_looks(task, stopping)
        chances = stops.get(task.name, (1.0,))
        candidate = [_of_task(_at(task, look, look.candidate_samples), thinks) for look in looks]
        candidate_loads.append(_mean(candidate, chances))
        reference = [_of_task(_at(task, look, look.reference_samples), thinks) for look in looks]
        ahead = isinstance(task, GeneratedTask) and looks[-1].limit is not None  # `Rounds.ahead`
        reference_loads.append(reference[-1] if ahead else _mean(reference, chances))
        most.append(candidate[-1])
        again += [] if has_second_replies(task) else [candidate[0]]
    once = _known(candidate_loads)
    own = Load()
    if own_texts and (texts := own_suite(suite)) is not None and texts.divergence is not None:
        written, scored = _divergence(texts, texts.divergence, thinks)
        own = written + scored.times(2)
    writing, scoring = (Load(), Load()) if suite.divergence is None else _divergence(suite, suite.divergence, thinks)
    return Workload(
        tasks=once,
        again=_known(reference_loads) + _known(again) + once.times(-1),
        most=_known(most),
        writing=writing,
        scoring=scoring,
        probes=Load() if suite.probes is None else _probes(suite.probes),
        unknown=tuple(task.name for task, load in zip(suite.tasks, candidate_loads, strict=True) if load is None),
        own=own,
    )


def _mean(loads: Sequence[Load | None], chances: Sequence[float]) -> Load | None:
    """Over the looks, each the last one with its chance. None: not known."""
    sums = [0.0, 0.0, 0.0]
    for load, chance in zip(loads, chances, strict=False):
        if load is None:
            return None
        for at, number in enumerate((load.num_requests, load.prompt_tokens, load.output_tokens)):
            sums[at] += chance * number
    return Load(*map(round, sums))


def _known(loads: Sequence[Load | None]) -> Load:
    return sum((load for load in loads if load is not None), Load())


def _at(task: T, look: Look, num_samples: int) -> T:
    """The task with the numbers of one look."""
    return task_at_look(task, num_samples, look.limit) if task.is_adaptive else task


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
        case NeedleTask():
            return sum(task.lengths_tokens) / len(task.lengths_tokens)
        case RulerTask():
            # `longest` counts as the longest stated one where nobody says how long the context is, and it is still a word
            stated = task.stated_tokens
            unsettled = (len(task.lengths_tokens) - len(stated)) * max(stated, default=LONGEST_TOKENS)
            return (sum(stated) + unsettled) / len(task.lengths_tokens)
        case ToolsTask():
            shapes = [max(tokens, number * TOOL_TOKENS) for tokens in task.prompt_tokens for number in task.num_tools]
            return sum(shapes) / len(shapes)
        case LmEvalTask():
            known = mean_of_known(task.tasks, "prompt_tokens")
            return UNKNOWN_PROMPT_TOKENS if known is None else known
        case ArithmeticTask():
            return ARITHMETIC_PROMPT_TOKENS
        case _:
            return STEP_PROMPT_TOKENS


def reply_tokens(task: TaskBase, thinks: bool) -> float:
    """Mean over the items; never more than the budget."""
    if isinstance(task, SweTask):
        count: float = STEP_THINKING_TOKENS if thinks else STEP_PLAIN_TOKENS
    elif not isinstance(task, LmEvalTask):
        thinking, plain = GENERATED_REPLY[str(getattr(task, "kind"))]  # noqa: B009  each kind of task has one
        count = thinking if thinks else plain
    elif (known := mean_of_known(task.tasks, "thinking_tokens" if thinks else "plain_tokens")) is not None:
        count = known
    else:
        count = task.max_tokens * (THINKING_SHARE if thinks else PLAIN_SHARE)
    return min(count, task.max_tokens)


def _divergence(suite: SuiteRecipe, spec: DivergenceSpec, thinks: bool) -> tuple[Load, Load]:
    """(what the reference writes, what each checkpoint scores). A text of its own takes half of its budget."""
    own = len(spec.languages) * spec.num_documents
    writing = Load(own, own * ARITHMETIC_PROMPT_TOKENS, own * spec.max_tokens // 2)
    for task in suite.tasks:
        if not isinstance(task, SweTask) and spec.suite_documents:
            count = spec.suite_documents
            writing += Load(count, round(count * prompt_tokens(task)), round(count * reply_tokens(task, thinks)))
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
