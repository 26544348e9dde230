"""Can a suite ask these checkpoints what it wants to: tokenizer, chat template and parsers, context, sampling.

Tokenizer and template: has a checkpoint what questions are asked with, and is all of it data, not programs? Of the checkpoints
that are made here the source is looked at: their small files are copies of its own. assay runs no code of a checkpoint, so a
tokenizer that is a program is FAIL. A missing chat template, or parser of tool calls, makes a task NOT MEASURED: FAIL if a
required gate judges it, which then cannot pass; else PASS, and said.

Context: do prompts and replies fit it, by the rules of the run itself (`tasks/cells.py`)? A budget that fills the context stops
the run, a prompt of a stated length that does not fit is left out. FAIL: the run is refused, or nothing is left of a task that
a required gate judges. Where some lengths are left out the task is measured on the others: PASS, and said. So it is where texts
of the divergence are cut (`divergence/documents.py`).

Sampling: against the model's card and generation_config.json. Requests pin every parameter (asking/dialect.py), so what is
asked is known before a server runs. Greedy decoding of a model that thinks is FAIL where replies may be long: it ends in
repetitions that say nothing about a quantization (decision 091). A budget below the card's is not: replies that are cut are
counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from assay.foreign_text import shown
from assay.recipes.model import ModelRecipe, Sampling, Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import DivergenceSpec, NeedleTask, RulerTask, SuiteRecipe, TaskBase, ToolsTask
from assay.records.preflight.replay import Outcome
from assay.records.preflight.report import Check
from assay_evaluate.serving.vllm_command import requested_flags
from assay_evaluate.tasks.cells import (
    needed_tokens,
    planned_style,
    ruler_cells,
    settle_longest,
    tasks_filling_context,
    tokens_with_reply,
)
from assay_evaluate.tasks.tools.task import NO_TOOLS

# ------------------------------------------------------------------------------------------------ tokenizer and template
TOKENIZERS: tuple[frozenset[str], ...] = (
    frozenset({"tokenizer.json"}),
    frozenset({"tokenizer.model"}),
    frozenset({"vocab.json", "merges.txt"}),
    frozenset({"tekken.json"}),
)
"""Files of which one set is enough for transformers and vLLM."""


@dataclass(frozen=True)
class SmallFiles:
    """What a checkpoint has beside its weights. tokenizer_config: {} if there is none. template: text of the chat template.
    damage: what is wrong with its tokenizer.json; None: nothing, or there is none."""

    label: str
    names: Collection[str]
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    template: str | None
    damage: str | None = None


class _Generation(Extension):
    """`{% generation %}`, with which templates mark the assistant's words (transformers' chat_template_utils.py)."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_tokenizer(
    files: SmallFiles, suite: SuiteRecipe, profile: ProfileRecipe, serving: Serving, required: Collection[str]
) -> Iterator[Check]:
    """What of `files` the suite needs. serving: of the model's recipe; the profile's flags are looked at too.

    required: tasks that a required gate judges.
    """
    remedy = "copy the tokenizer's files from the model's release into it"
    complete = next((file_set for file_set in TOKENIZERS if file_set <= set(files.names)), None)
    if files.damage is not None:
        yield _of_tokenizer(files, files.damage, remedy)
    elif complete is not None:
        yield _of_tokenizer(files, ", ".join(sorted(complete)))
    else:
        file_sets = ", or ".join(" and ".join(sorted(names, reverse=True)) for names in TOKENIZERS)
        yield _of_tokenizer(files, f"no tokenizer: there is no {file_sets}", remedy)
    yield from _remote_code(files)
    yield from _template(files, suite, requested_flags(profile, serving), required)


def _of_tokenizer(files: SmallFiles, detail: str, remedy: str | None = None, *, is_required: bool = True) -> Check:
    outcome: Outcome = "PASS" if remedy is None or not is_required else "FAIL"
    return Check(check="tokenizer", subject=files.label, outcome=outcome, detail=detail, remedy=remedy)


def _remote_code(files: SmallFiles) -> Iterator[Check]:
    """vLLM has classes of its own for the models that assay knows; `auto_map` in config.json does no harm."""
    program = (files.tokenizer_config.get("auto_map") or {}).get("AutoTokenizer")
    if program is None:
        return
    named = program[0] if isinstance(program, list) and program and program[0] else program
    detail = f"its tokenizer is a program that comes with the checkpoint ({shown(named, 80)}), and assay runs none"
    if "tokenizer.json" in files.names:
        detail += "; vLLM asks for --trust-remote-code though tokenizer.json is there"
    remedy = "take a release whose tokenizer is data (tokenizer.json, and no auto_map in tokenizer_config.json)"
    yield _of_tokenizer(files, detail, remedy)


def _template(
    files: SmallFiles, suite: SuiteRecipe, flags: Mapping[str, Any], required: Collection[str]
) -> Iterator[Check]:  # fmt: skip
    given = flags.get("chat-template")
    if given is None and files.template is not None and (wrong := _syntax_error(files.template)) is not None:
        remedy = "take chat_template.jinja from the model's release, or name one under `serving: {vllm: {chat-template: PATH}}`"
        yield _of_tokenizer(files, f"the chat template cannot be read: {wrong}; the server would refuse every question", remedy)
        return
    if given is not None or files.template is not None:
        yield _of_tokenizer(files, "chat template " + ("of the checkpoint" if given is None else shown(given, 200)))
        tools = [task.name for task in suite.tasks if isinstance(task, ToolsTask)]
        if tools:
            yield _tools(files, tools, flags, required)
        return
    detail = "no chat template: questions are asked as plain completions"
    needing = [
        task.name
        for task in suite.tasks
        if isinstance(task, ToolsTask) or (isinstance(task, RulerTask) and task.style in {"chat", "prefill"})
    ]
    if not needing:
        yield _of_tokenizer(files, detail)
        return
    remedy = "add chat_template.jinja, or name one under `serving: {vllm: {chat-template: PATH}}` in the model's recipe"
    yield _not_measured(files, needing, detail, remedy, required)


def _syntax_error(template: str) -> str | None:
    """Where a template is no Jinja. It is parsed as transformers does, and not run."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )  # fmt: skip
    try:
        environment.parse(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {shown(error.message or 'no Jinja', 200)}"
    except RecursionError:
        return "nested too deeply"
    return None


def _tools(files: SmallFiles, tasks: Sequence[str], flags: Mapping[str, Any], required: Collection[str]) -> Check:
    parser = flags.get("tool-call-parser")
    if "chat-template" not in flags and "tools" not in (files.template or ""):
        remedy = "name a chat template that shows tools under `serving: {vllm: {chat-template: PATH}}`, or drop the task"
        return _not_measured(files, tasks, "the chat template shows the model no tools", remedy, required)
    if parser is None or not flags.get("enable-auto-tool-choice"):
        return _not_measured(files, tasks, "the server is told no parser of tool calls", NO_TOOLS, required)
    detail = f"{', '.join(tasks)}: the chat template shows tools, calls are read by {shown(parser, 80)}"
    return _of_tokenizer(files, detail)


def _not_measured(files: SmallFiles, tasks: Sequence[str], reason: str, remedy: str, required: Collection[str]) -> Check:
    judged = [task for task in tasks if task in required]
    detail = f"{reason}, so {', '.join(tasks)} would be NOT MEASURED" + ("" if judged else "; no required gate judges that")
    return _of_tokenizer(files, detail, remedy, is_required=bool(judged))


# ------------------------------------------------------------------------------------------------ context
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
        yield _of_context(None, detail, remedy, outcome="UNKNOWN")
        return
    filling = {task.name for task in tasks_filling_context(suite, context)}
    for task in suite.tasks:
        if task.name in filling:
            detail = f"a reply may have {task.max_tokens:,} tokens, and prompt and reply together have {context:,}: "
            remedy = "lower max_tokens in the suite, or raise max-model-len if the model allows more"
            yield _of_context(task.name, f"{detail}the run is refused", remedy, outcome="FAIL")
        else:
            yield _fitting(task, context, task.name in required, is_chat)
    if suite.divergence is not None:
        yield _texts(suite.divergence, context)


def _of_context(subject: str | None, detail: str, remedy: str | None = None, *, outcome: Outcome = "PASS") -> Check:
    return Check(check="context", subject=subject, outcome=outcome, detail=detail, remedy=remedy)


def _fitting(task: TaskBase, context: int, is_required: bool, is_chat: bool) -> Check:
    note = None
    if isinstance(task, RulerTask):
        task, note = settle_longest(task, planned_style(task, is_chat=is_chat), context)
    lengths = _needed(task, is_chat)
    if not lengths:
        detail = f"{task.max_tokens:,} tokens of reply leave {context - task.max_tokens:,} of {context:,} for a prompt"
        return _of_context(task.name, detail)
    left_out = [length for length, needed in lengths.items() if needed > context]
    longest = max(lengths)
    detail = f"prompts to {longest:,} tokens need {lengths[longest]:,} of {context:,} with their reply"
    if note is not None:
        detail = f"{note}; {detail}"
    if not left_out:
        return _of_context(task.name, detail)
    remedy = f"for {longest:,} tokens lower max_tokens to {context - longest:,} in the suite, or raise max-model-len"
    if context <= longest:
        remedy = "raise max-model-len if the model allows more, or take the length out of the suite"
    if len(left_out) < len(lengths):
        detail += f": NOT MEASURED at {', '.join(f'{short:,}' for short in left_out)}, measured at the other lengths"
        return _of_context(task.name, detail, remedy)
    detail += ": the task is NOT MEASURED" + ("" if is_required else ", and no required gate judges it")
    return _of_context(task.name, detail, remedy, outcome="FAIL" if is_required else "PASS")


def _texts(spec: DivergenceSpec, context: int) -> Check:
    """Replies and held-out texts, of which the context leaves room for one more token. Replies to the tasks' own questions have
    the tasks' budgets."""
    lengths = {"replies": ("max_tokens", spec.max_tokens)}
    if spec.held_out_documents:
        lengths["held-out texts"] = ("held_out_tokens", spec.held_out_tokens)
    cut = {what: (key, num_tokens) for what, (key, num_tokens) in lengths.items() if num_tokens > context - 1}
    detail = " and ".join(f"{what} to {num_tokens:,} tokens" for what, (_, num_tokens) in lengths.items())
    if not cut:
        return _of_context("divergence", f"{detail} fit into {context:,}")
    detail += f": {' and '.join(cut)} are cut to {context - 1:,} of {context:,}, question included"
    if beyond := [first for first in spec.spans if first >= context - 1]:
        detail += f"; positions from {min(beyond):,} on, which the suite names as a span, do not exist"
    remedy = f"lower {' and '.join(key for key, _ in cut.values())} of `divergence:` in the suite, or raise max-model-len"
    return _of_context("divergence", detail, remedy)


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


# ------------------------------------------------------------------------------------------------ sampling
LONG_REPLY_TOKENS = 4096
"""Budget from which on a greedy reply of a thinking model is long enough to end in a loop."""


class Asked(NamedTuple):
    """Parameters of a request. top_k: -1: all tokens."""

    temperature: float
    top_p: float
    top_k: int

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}" + (f", top_k {self.top_k}" if self.top_k > 0 else "")


def check_sampling(suite: SuiteRecipe, recipe: ModelRecipe, generation_config: Mapping[str, Any] | None) -> Iterator[Check]:
    """One check for each way of asking. suite: as the model asks it (`as_model_asks`). generation_config: if there is one."""
    ways: dict[Asked, list[TaskBase]] = {}
    for task in suite.tasks:
        ways.setdefault(Asked(task.temperature, task.top_p, task.top_k), []).append(task)
    card, advised = recipe.sampling, _advice(recipe.sampling, generation_config)
    for way, tasks in ways.items():
        others = "".join(f"; {who}: {what}" for who, what in advised.items() if what != way)
        long = [task for task in tasks if task.max_tokens >= LONG_REPLY_TOKENS]
        if way.temperature == 0 and recipe.serving.reasoning_parser is not None and long:
            named, most = ", ".join(task.name for task in long), max(task.max_tokens for task in long)
            detail = f"{named}: greedy, up to {most:,} tokens of a model that thinks, which ends in repetitions{others}"
            yield Check(check="sampling", subject=None, outcome="FAIL", detail=detail, remedy=_remedy(recipe, advised))
            continue
        same = [who for who, what in advised.items() if what == way]
        detail = f"{', '.join(task.name for task in tasks)}: {way}" + (f", as in {' and '.join(same)}" if same else "") + others
        budget = None if card is None else card.max_tokens
        if budget is not None and (shorter := [task for task in tasks if task.max_tokens < budget]):
            cut = ", ".join(f"{task.name} {task.max_tokens:,}" for task in shorter)
            detail += f"; budgets below the card's {budget:,}, cut replies are counted: {cut}"
        yield Check(check="sampling", subject=None, outcome="PASS", detail=detail)


def _remedy(recipe: ModelRecipe, advised: Mapping[str, Asked]) -> str:
    if recipe.sampling is not None:
        return "write `sampling: model` into these tasks of the suite"
    if advised:
        way = next(iter(advised.values()))
        values = f"{{temperature: {way.temperature:g}, top_p: {way.top_p:g}, top_k: {way.top_k}}}"
        return f"write `sampling: {values}` into the model's recipe, and `sampling: model` into these tasks of the suite"
    return "write `sampling:` as its card says into the model's recipe, and `sampling: model` into these tasks of the suite"


def _advice(card: Sampling | None, generation_config: Mapping[str, Any] | None) -> dict[str, Asked]:
    """Who says how the model is to be asked. A generation_config.json without sampling says nothing."""
    advice = {}
    if card is not None:
        advice["the model's recipe"] = Asked(card.temperature, card.top_p, card.top_k)
    config = generation_config or {}
    numbers = {key: value for key in ("temperature", "top_p", "top_k") if isinstance(value := config.get(key), int | float)}
    if config.get("do_sample", True) is not False and numbers:
        top_k = int(numbers.get("top_k", -1))
        advice["generation_config.json"] = Asked(numbers.get("temperature", 1.0), numbers.get("top_p", 1.0), top_k or -1)
    return advice
