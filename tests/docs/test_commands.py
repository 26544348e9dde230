"""Every command of every page: there is such a command, it takes such options, and what can be run here is run.

Commands of the tutorial, and those that need its run, are run in test_tutorial.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_commands import Block, blocks_of, commands_of, inline_commands, pages, programs
from page_runner import clone, run_block
from typer.core import TyperGroup
from typer.main import get_command

from assay.errors import AssayError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay_cli.root import app

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [block for page in pages() for block in blocks_of(page)]
COMMANDS = [(block, command) for block in BLOCKS if block.language in {"sh", "bash"} for command in commands_of(block)]
GROUP = get_command(app)
RECIPES = {
    "precision": PrecisionRecipe,
    "precisions": PrecisionRecipe,
    "suite": SuiteRecipe,
    "profile": ProfileRecipe,
    "gates": GateRecipe,
}
OTHER_PROGRAMS = {
    "cat", "cd", "cp", "curl", "docker", "export", "git", "grep", "head", "hf", "ls", "mkdir", "pip", "python", "sbatch",
    "source", "torchrun", "vllm",
}  # fmt: skip
"""Programs of others, of which nothing is checked in a block that is not run."""


def check_assay(words: list[str]) -> None:
    """typer's own parser takes them, and recipes that they name are there; AssertionError says what is wrong."""
    try:
        context = GROUP.make_context("assay", list(words))
        while isinstance(context.command, TyperGroup):
            name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None
            context = command.make_context(name, list(rest), parent=context)
        values = context.params
        for option, recipe in RECIPES.items():
            given = values.get(option) or ()
            for value in ",".join([given] if isinstance(given, str) else [str(one) for one in given]).split(","):
                if value and "/" not in value and not value.endswith(".yaml"):
                    load_recipe(recipe, value)
    except Exception as error:
        if type(error).__name__ == "Exit":  # --help, --version
            return
        if isinstance(error, AssayError) and re.search(r"\.yaml", str(error)):
            return  # a recipe of the reader's own
        raise AssertionError(f"assay {' '.join(words)}: {error}") from error


def check_make(words: list[str]) -> None:
    """Goals and variables that the Makefile has."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    goals = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    variables = re.search(r"^variables := (.*)$", makefile, re.MULTILINE)
    assert goals is not None and variables is not None
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert name in (variables if is_variable else goals)[1].split(), f"make {' '.join(words)}: {name}"


def check(command: str) -> None:
    for words in programs(command):
        assay = next((at for at, word in enumerate(words) if word == "assay" or word.endswith("/assay")), None)
        if words[0] == "make":
            check_make(words[1:])
        elif Path(words[0]).name not in OTHER_PROGRAMS:
            assert assay is not None, f"{words[0]}: what is that?"
            check_assay([re.sub(r"\$\w+", "1", word) for word in words[assay + 1 :]])


def test_every_block_of_commands_can_be_read() -> None:
    assert len({block.page for block, _ in COMMANDS}) > 15 and len(COMMANDS) > 80
    assert {block.needs for block, _ in COMMANDS} >= {None, "gpu", "hub", "run", "slurm"}


@pytest.mark.parametrize(("block", "command"), [pytest.param(*one, id=f"{one[0].where} {one[1][:40]}") for one in COMMANDS])
def test_a_command_parses(block: Block, command: str) -> None:
    if block.language == "sh" or "assay " in command or command.startswith("make "):
        check(command)


@pytest.mark.parametrize("page", pages())
def test_commands_in_running_text_have_their_options(page: str) -> None:
    for command in inline_commands(page):
        _, *words = command.split()
        if not words[0].isalpha():
            continue  # `assay ...`, `assay --help`
        target, named = GROUP, iter(words)
        while isinstance(target, TyperGroup) and (name := next(named, None)) is not None:
            assert name in target.commands, f"{page}: {command}: no such command"
            target = target.commands[name]
        known = {name for param in target.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
        used = {word.rstrip(",.").partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, f"{page}: {command}: {used - known}"


def test_the_page_of_commands_has_every_command_in_its_panel() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?m)^## (.+)\n((?:(?!## ).*\n)*)", page))
    listed = {title: re.findall(r"(?m)(?<=`)assay ([a-z -]+?)(?= [^a-z -]|`)", text) for title, text in sections.items()}
    panels: dict[str, list[str]] = {"make": []}
    for name, command in GROUP.commands.items():
        if not command.hidden:
            names = [f"{name} {sub}" for sub in command.commands] if isinstance(command, TyperGroup) else [name]
            panels.setdefault(command.rich_help_panel or "Commands", []).extend(names)
    assert {title: set(names) for title, names in listed.items()} == {title: set(names) for title, names in panels.items()}


RUN_HERE = [block for block in BLOCKS if block.language == "sh" and block.needs is None and block.page != "docs/tutorial.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in RUN_HERE}))
def test_commands_that_need_nothing_run(page: str, tmp_path: Path) -> None:
    """In a checkout of their own, a page's in order; what they print is what the page shows."""
    clone(tmp_path)
    for block in BLOCKS:
        if block.page == page and block.needs is None:
            run_block(block, tmp_path)


# ------------------------------------------------------------------------------------------------ the reader of pages
def test_how_a_page_is_read() -> None:
    text = """
<!-- file: my/x.yaml -->
```yaml
a: 1
```
Text.

<!-- exit: 1 -->
```sh
assay gate tiny-glm  # again
assay plan x \\
  --precision w4a16
```
```text
FAIL
```
```text
more
```
"""
    first, second, third = blocks_of("x.md", text)
    assert (first.file, first.text, first.output) == ("my/x.yaml", "a: 1", None)
    assert commands_of(second) == ["assay gate tiny-glm", "assay plan x --precision w4a16"]
    assert (second.exit_code, second.output, second.line, third.text) == (1, "FAIL", 10, "more")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nassay\n```", "x.md:2: a block of no language; known: "),
        ("<!-- needs: luck -->\n```sh\nassay\n```", "x.md:3: needs luck; known: "),
        ("```bash\nassay\n```", "x.md:2: a script is not run, so it says what it needs"),
    ],
)
def test_a_block_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        blocks_of("x.md", text)


@pytest.mark.parametrize(
    "command",
    [
        "assay plan x --precison w4a16", "assay plna x", "assay diagnose prob x", "assay diagnose probe x --request 3",
        "assay plan x --precision w4a61", "assay plan", "make quantise",
        "make quantize MODLE=x", "srun x -- assay quantize", "frobnicate",
    ],
)  # fmt: skip
def test_a_command_that_is_not_there_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)
