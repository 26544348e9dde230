"""What a run costs before it is begun: requests, tokens, hours and GPU-hours of every checkpoint, and of all of them.

Requests and tokens are counted where the suite says them, else from the assumptions of `known_tasks`; nothing is tokenized.
Every number of hours is a range: lengths of replies and speeds are assumptions. A run FAILs here only if its requests cannot
end: a reply that takes longer than its deadline is asked for again and again.

Tokens a second are those of a roofline. Writing is bound by memory: each step reads the weights that its tokens touch, once.
With e of E experts for each token, t tokens in a step touch 1 - (1 - e / E)^t of them. Reading prompts is bound by arithmetic:
two operations for each weight that a token multiplies with. Real servers reach a share of either; the results carry its range.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from assay.recipes.gate import Stopping
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
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
from assay.records.preflight.report import Check
from assay.records.probe import ProbeSettings
from assay_evaluate.client.sending import REQUEST_S, SLOWEST_S_PER_TOKEN
from assay_evaluate.diagnosis.probes.planned import Load
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.preflight.known_tasks import (
    ARITHMETIC_PROMPT_TOKENS,
    GENERATED_REPLY,
    LENGTH_RANGE,
    LONGEST_TOKENS,
    PLAIN_SHARE,
    STEP_PLAIN_TOKENS,
    STEP_PROMPT_TOKENS,
    STEP_THINKING_TOKENS,
    THINKING_SHARE,
    TOOL_TOKENS,
    TRAJECTORY_STEPS,
    UNKNOWN_COUNT,
    UNKNOWN_PROMPT_TOKENS,
    mean_of_known,
    num_items,
)
from assay_evaluate.roofline.devices import Device, device_named
from assay_evaluate.roofline.rows import ACCEPTED_SHARE, WRITING_SHARE, Range
from assay_evaluate.roofline.weights import ServedWeights
from assay_evaluate.tasks.looks import Look, has_second_replies, planned_looks, task_at_look


# ------------------------------------------------------------------------------------------------ requests and tokens
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
    candidate_loads: list[Load | None] = []
    reference_loads: list[Load | None] = []
    most: list[Load | None] = []
    again: list[Load | None] = []
    for task in suite.tasks:
        looks = planned_looks(task, stopping)
        chances = stops.get(task.name, (1.0,))
        candidate = [_of_task(_at(task, look, look.candidate_samples), thinks) for look in looks]
        reference = [_of_task(_at(task, look, look.reference_samples), thinks) for look in looks]
        candidate_loads.append(_mean(candidate, chances))
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


def _at(task: TaskBase, look: Look, num_samples: int) -> TaskBase:
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
    replies = count * task.most_samples
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


# ------------------------------------------------------------------------------------------------ rates
CPU_CORE = Device(8e9, 50e9)
"""One core of a server with AVX2: its part of memory bandwidth, and FP32 operations."""

READING_SHARE: Range = (0.10, 0.40)
"""Of the arithmetic roofline. Assumption: GPUs reach up to 40 % on long prompts; many of a suite's are short."""
CPU_SHARE: Range = (0.3, 2.0)
CPU_STEP_S: Range = (0.01, 0.05)
"""Of a step on a CPU beside the model: scheduling, sampling, Python."""
LOADING_BYTES_S: Range = (1e9, 6e9)
"""From disk or page cache to GPUs. Assumption."""
START_S: dict[str, Range] = {"cuda": (120.0, 900.0), "cpu": (25.0, 70.0)}
"""Of a start beside loading: imports, compiling, CUDA graphs. Assumption for GPUs; measured on two cores of a CPU."""


def held_by(profile: ProfileRecipe) -> int | None:
    """Bytes in which emulation holds every weight, dequantized. None: as it is stored."""
    if not profile.emulate:
        return None
    return 4 if profile.flags.get("dtype") == "float32" else 2


@dataclass(frozen=True)
class Rates:
    """Tokens a second of all requests together, and seconds of a start."""

    prompt_tokens_s: Range
    output_tokens_s: Range
    start_s: Range


def rates_on(profile: ProfileRecipe, weights: ServedWeights, serving: Serving) -> Rates | None:
    """None: a GPU that is not in the table, or a profile that does not say how many there are."""
    hardware = profile.hardware
    drafted = serving.num_speculative_tokens or 0
    written = [profile.concurrency * (1 + accepted * drafted) for accepted in ACCEPTED_SHARE]
    touched = weights.touched_bytes(profile.concurrency * (1 + drafted))
    loading = (weights.num_bytes / LOADING_BYTES_S[1], weights.num_bytes / LOADING_BYTES_S[0])
    start = START_S[hardware.device]
    if hardware.device == "cpu":
        cores = os.cpu_count() or 1
        own = zip(CPU_SHARE, reversed(CPU_STEP_S), strict=True)
        step = [touched / (CPU_CORE.bytes_s * cores * share) + beside for share, beside in own]
        reading = [CPU_CORE.operations_s * cores * share / (2 * weights.active_params) for share in CPU_SHARE]
        writing = [tokens / seconds for tokens, seconds in zip(written, step, strict=True)]
    else:
        device = device_named(hardware.gpu)
        if device is None or hardware.num_gpus == 0:
            return None
        step_s = touched / (device.bytes_s * hardware.num_gpus)
        reading = [device.operations_s * hardware.num_gpus * share / (2 * weights.active_params) for share in READING_SHARE]
        writing = [share * tokens / step_s for share, tokens in zip(WRITING_SHARE, written, strict=True)]
    return Rates((reading[0], reading[1]), (writing[0], writing[1]), (start[0] + loading[0], start[1] + loading[1]))


# ------------------------------------------------------------------------------------------------ costs
@dataclass(frozen=True)
class CheckpointCost:
    """One checkpoint: what is asked of it, and how long that takes. gpu_hours: None on a machine without GPUs."""

    label: str
    load: Load
    hours: Range
    gpu_hours: Range | None


def cost_of(
    label: str, load: Load, weights: ServedWeights | None, profile: ProfileRecipe, serving: Serving
) -> CheckpointCost | None:  # fmt: skip
    """None: its weights, or the speed of the profile, are not known."""
    rates = None if weights is None else rates_on(profile, weights, serving)
    if rates is None:
        return None

    def seconds(length: float, at: int) -> float:
        """Prompts are read and replies written by the same GPUs, one after the other at worst and at best."""
        writing = length * load.output_tokens / rates.output_tokens_s[at]
        return writing + load.prompt_tokens / rates.prompt_tokens_s[at] + rates.start_s[1 - at]

    hours = (seconds(LENGTH_RANGE[0], 1) / 3600, seconds(LENGTH_RANGE[1], 0) / 3600)
    gpus = profile.hardware.num_gpus
    return CheckpointCost(label, load, hours, (gpus * hours[0], gpus * hours[1]) if gpus else None)


# ------------------------------------------------------------------------------------------------ the checks
def check_cost(
    suite: SuiteRecipe,
    profile: ProfileRecipe,
    serving: Serving,
    *,
    reference: str,
    weights: Mapping[str, ServedWeights | None],
    own_texts: bool = False,
) -> list[Check]:
    """One line for each checkpoint, and one for the run.

    suite: as the model asks. weights: label -> what is served, in order, the reference's too; None: not known.
    own_texts: candidates write texts of their own.
    """
    work = workload_of(suite, serving, own_texts=own_texts)
    loads = {label: work.reference if label == reference else work.candidate for label in weights}
    costs = [cost_of(label, loads[label], weights[label], profile, serving) for label in loads]
    known = [cost for cost in costs if cost is not None]
    if profile.endpoints or len(known) < len(costs):
        return [_without_speed(profile, loads, weights, work)]
    late = [check for label, held in weights.items() if held and (check := _never_ends(suite, profile, serving, held, label))]
    each = [_line(cost, work, is_reference=cost.label == reference) for cost in known]
    return late or [*each, _together(known, profile, work)]


def _line(cost: CheckpointCost, work: Workload, *, is_reference: bool) -> Check:
    what = "asked twice (its repeat is the noise floor), and writes the texts" if is_reference else "asked once"
    if not is_reference and work.own.num_requests:
        what += ", and writes texts of its own, for deployment profiles"
    detail = f"{what}: {tokens(cost.load)}, {_time(cost.hours, cost.gpu_hours)}"
    if work.most != work.tasks:
        further = work.most.num_requests - work.tasks.num_requests
        detail += f"; up to {further:,} requests more where the gates cannot decide"
    return Check(check="cost", subject=cost.label, outcome="PASS", detail=detail)


def _together(costs: list[CheckpointCost], profile: ProfileRecipe, work: Workload) -> Check:
    hours = (sum(cost.hours[0] for cost in costs), sum(cost.hours[1] for cost in costs))
    gpus = profile.hardware.num_gpus
    time = _time(hours, (gpus * hours[0], gpus * hours[1]) if gpus else None)
    load = sum((cost.load for cost in costs), Load())
    detail = (
        f"measuring on {profile.name}, {len(costs)} server{'s' if len(costs) > 1 else ''} started one after the other: "
        f"{tokens(load)}, {time}; estimated from assumed lengths of replies and a roofline"
    )
    return _with_unknown(detail, work)


def _without_speed(
    profile: ProfileRecipe, loads: Mapping[str, Load], weights: Mapping[str, ServedWeights | None], work: Workload
) -> Check:
    load = sum(loads.values(), Load())
    reason = f"no rate is known for GPUs called {profile.hardware.gpu}"
    if unplanned := [label for label, held in weights.items() if held is None]:
        reason = f"the weights of {', '.join(unplanned)} are not known"
    if profile.endpoints:
        reason = "servers that run already have a speed of their own"
    detail = f"measuring on {profile.name}: {tokens(load)}; hours unknown: {reason}"
    return _with_unknown(detail, work, outcome_known=False)


def _with_unknown(detail: str, work: Workload, *, outcome_known: bool = True) -> Check:
    if work.unknown:
        detail += f"; without {', '.join(work.unknown)}: {UNKNOWN_COUNT}"
    return Check(check="cost", subject=None, outcome="PASS" if outcome_known and not work.unknown else "UNKNOWN", detail=detail)


def _never_ends(
    suite: SuiteRecipe, profile: ProfileRecipe, serving: Serving, weights: ServedWeights, label: str
) -> Check | None:  # fmt: skip
    """FAIL if not even the fastest server that is assumed writes a task's longest reply before its request is given up."""
    rates = rates_on(profile, weights, serving)
    assert rates is not None, "the caller has its cost"
    task = max(suite.tasks, key=lambda task: task.max_tokens, default=None)
    if task is None:
        return None
    rate = rates.output_tokens_s[1] / profile.concurrency
    needed, given = task.max_tokens / rate, REQUEST_S + SLOWEST_S_PER_TOKEN * task.max_tokens
    if needed <= given:
        return None
    return Check(
        check="cost",
        subject=label,
        outcome="FAIL",
        detail=(
            f"a reply of {task.max_tokens:,} tokens, which task {task.name} allows, takes {needed / 3600:,.1f} h or more at "
            f"{rate:.2g} tokens a second for each of {profile.concurrency} requests on {profile.name}, and a request is "
            f"given up after {given / 3600:,.1f} h"
        ),
        remedy="lower max_tokens in the suite, or `concurrency` in the profile, or take a faster profile",
    )


# ------------------------------------------------------------------------------------------------ in words
def tokens(load: Load) -> str:
    """1,234 requests, 65 M prompt tokens, 12 M to 42 M output tokens."""
    low, high = (factor * load.output_tokens for factor in LENGTH_RANGE)
    written = f"{_short(low)} to {_short(high)} output tokens"
    return f"{load.num_requests:,} requests, {_short(load.prompt_tokens)} prompt tokens, {written}"


def _short(number: float) -> str:
    """65200000 -> 65 M."""
    for unit, scale in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= scale:
            return f"{float(f'{number / scale:.2g}'):g}{unit}"
    return f"{number:.0f}"


def _time(hours: Range, gpu_hours: Range | None) -> str:
    text = f"{span(hours)} h" if hours[1] >= 2 else f"{span((60 * hours[0], 60 * hours[1]))} minutes"
    return text if gpu_hours is None else f"{text}, {span(gpu_hours)} GPU-hours"


def span(ends: Range) -> str:
    """3.1 to 24."""
    low, high = (f"{float(f'{end:.2g}'):,g}" for end in ends)
    return f"{low} to {high}"
