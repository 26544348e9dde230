"""Has a checkpoint what questions are asked with: tokenizer, chat template, parsers; and is all of it data, not programs?

Of the checkpoints that are made here the source is looked at: their small files are copies of its own. assay runs no code of
a checkpoint, so a tokenizer that is a program is FAIL. A missing chat template, or parser of tool calls, makes a task NOT
MEASURED: FAIL if a required gate judges it, which then cannot pass; else PASS, and said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from assay.foreign_text import shown
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import RulerTask, SuiteRecipe, ToolsTask
from assay.records.preflight.replay import Outcome
from assay.records.preflight.report import Check
from assay_evaluate.serving.vllm_command import requested_flags
from assay_evaluate.tasks.tools.task import NO_TOOLS

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
    """What of `one` the suite needs. serving: of the model's recipe; the profile's flags are looked at too.

    required: tasks that a required gate judges.
    """
    yield _tokenizer(files)
    yield from _remote_code(files)
    yield from _template(files, suite, requested_flags(profile, serving), required)


def _check(files: SmallFiles, detail: str, remedy: str | None = None, *, is_required: bool = True) -> Check:
    outcome: Outcome = "PASS" if remedy is None or not is_required else "FAIL"
    return Check(check="tokenizer", subject=files.label, outcome=outcome, detail=detail, remedy=remedy)


def _tokenizer(files: SmallFiles) -> Check:
    if files.damage is not None:
        return _check(files, files.damage, "copy the tokenizer's files from the model's release into it")
    complete = next((file_set for file_set in TOKENIZERS if file_set <= set(files.names)), None)
    if complete is not None:
        return _check(files, ", ".join(sorted(complete)))
    file_set = ", or ".join(" and ".join(sorted(names, reverse=True)) for names in TOKENIZERS)
    return _check(files, f"no tokenizer: there is no {file_set}", "copy the tokenizer's files from the model's release into it")


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
    yield _check(files, detail, remedy)


# ------------------------------------------------------------------------------------------------ what the suite asks for
def _template(
    files: SmallFiles, suite: SuiteRecipe, flags: Mapping[str, Any], required: Collection[str]
) -> Iterator[Check]:  # fmt: skip
    given = flags.get("chat-template")
    if given is None and files.template is not None and (wrong := _syntax_error(files.template)) is not None:
        remedy = "take chat_template.jinja from the model's release, or name one under `serving: {vllm: {chat-template: PATH}}`"
        yield _check(files, f"the chat template cannot be read: {wrong}; the server would refuse every question", remedy)
        return
    if given is not None or files.template is not None:
        yield _check(files, "chat template " + ("of the checkpoint" if given is None else shown(given, 200)))
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
        yield _check(files, detail)
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
    return _check(files, detail)


def _not_measured(files: SmallFiles, tasks: Sequence[str], reason: str, remedy: str, required: Collection[str]) -> Check:
    judged = [task for task in tasks if task in required]
    detail = f"{reason}, so {', '.join(tasks)} would be NOT MEASURED" + ("" if judged else "; no required gate judges that")
    return _check(files, detail, remedy, is_required=bool(judged))
