"""The `assay` command. Thin: resolves TARGET, calls one stage, prints its record.

Exit codes: 0 = done and passed, 1 = done and failed (a verdict, a verification, a preflight), 2 = could not (usage, input,
machine). Results go to stdout, progress and notes to stderr; with `--json` stdout holds the record and nothing else. Stages are
imported inside the commands, so that `assay --help` needs neither torch nor lm-eval.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer import Abort
from typer._click.exceptions import NoArgsIsHelpError, NoSuchOption, UsageError  # typer has no public name for them

from assay import __version__
from assay.errors import AssayError, nearest
from assay.foreign_text import one_line, shown
from assay.quantities import and_more
from assay_cli.commands.about.doctor import doctor
from assay_cli.commands.about.family import family
from assay_cli.commands.about.recipes import list_recipes
from assay_cli.commands.about.setup import setup
from assay_cli.commands.diagnose.blame import blame
from assay_cli.commands.diagnose.gpu_check import gpu_check
from assay_cli.commands.diagnose.inspect import inspect as inspect_checkpoint
from assay_cli.commands.diagnose.lever import lever
from assay_cli.commands.diagnose.locate import locate
from assay_cli.commands.diagnose.probe import probe
from assay_cli.commands.diagnose.sensitivity import sensitivity
from assay_cli.commands.make.calibrate import calibrate
from assay_cli.commands.make.init import init
from assay_cli.commands.make.plan import plan
from assay_cli.commands.make.power import power
from assay_cli.commands.make.preflight import preflight
from assay_cli.commands.make.quantize import quantize
from assay_cli.commands.make.recipe import recipe
from assay_cli.commands.make.verify import verify
from assay_cli.commands.measure.deployment import deployment
from assay_cli.commands.measure.evaluate import evaluate
from assay_cli.commands.measure.judge import judge
from assay_cli.commands.measure.pack import pack
from assay_cli.commands.measure.run import run
from assay_cli.commands.measure.screen import screen
from assay_cli.commands.measure.serve import serve
from assay_cli.commands.measure.speed import speed
from assay_cli.commands.measure.upgrade_check import upgrade_check
from assay_cli.commands.results.card import card
from assay_cli.commands.results.choose import choose
from assay_cli.commands.results.compare import compare
from assay_cli.commands.results.gate import gate
from assay_cli.commands.results.publish import publish
from assay_cli.commands.results.report import report
from assay_cli.commands.results.status import status
from assay_cli.options import QuietOption, VerboseOption
from assay_cli.terminal import is_verbose, say, say_error, set_verbosity
from assay_cli.typer_commands import Command, Commands
from assay_pipeline.interrupted import Interrupted

app = typer.Typer(
    name="assay",
    cls=Commands,
    help="Quantize a mixture-of-experts checkpoint for vLLM, and measure what was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


diagnosis = typer.Typer(
    cls=Commands,
    help="Failures that are not in the weights: probe a server, find the setting or the layer they depend on.",
    no_args_is_help=True,
)


@functools.cache
def all_commands() -> Any:
    """The command line that typer builds of the functions below, which takes 50 ms: once in a process."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point: user errors become one line and exit 2, never a traceback."""
    # A plan is a million small objects that stay: looking through them all after every 700 new ones costs a fifth of the time.
    gc.set_threshold(50_000, 20, 100)
    try:
        code = all_commands()(prog_name="assay", standalone_mode=False)  # else typer draws a box around wrong usage
        sys.stdout.flush()  # at exit it would be too late for an error of ours
        sys.exit(code if isinstance(code, int) else 0)
    except UsageError as error:
        if not isinstance(error, NoArgsIsHelpError):  # which has shown the help
            say_error(wrong_usage(error))
        sys.exit(2)
    except AssayError as error:
        if is_verbose():
            traceback.print_exc()
        say_error(str(error))
        sys.exit(2)
    except Interrupted as stopped:
        say(f"interrupted; {stopped}" if str(stopped) else "interrupted")
        sys.exit(130)
    except (KeyboardInterrupt, Abort):  # while the command line was read
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno is None:
            raise
        where = str(error.filename) if error.filename else "standard output" if _output_is_stuck() else "a file that is open"
        say_error(f"{one_line(where)}: {error.strerror}")
        sys.exit(2)


def _output_is_stuck() -> bool:
    """Whether what is printed cannot be written: the error of a full disk behind `>` names no file.

    A line end is written to find out: with PYTHONUNBUFFERED nothing is left to flush.
    """
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be tried again at exit
        return True
    return False


def wrong_usage(error: UsageError) -> str:
    """One line: the command, what is wrong with its words, where the right ones are listed."""
    command = error.ctx.command_path if error.ctx else "assay"
    what = one_line(error.format_message()).rstrip(".")
    if isinstance(error, NoSuchOption) and error.ctx is not None:
        what = f"no such option: {shown(error.option_name)}{_instead_of_option(error.option_name, error.ctx)}"
    elif isinstance(error.__cause__, ValidationError):
        fault = error.__cause__.errors()[0]
        if (wrong := NUMBER_FAULTS.get(fault["type"])) is not None:
            said = f"'{shown(fault['input'], 40)}' {wrong.format(**fault.get('ctx', {}))}"
            what = what.replace(one_line(fault["msg"]), said)
    end = "" if what.endswith("?") else ";"
    return f"{command}: {what[:1].lower()}{what[1:]}{end} `{command} --help` lists what it takes"


NUMBER_FAULTS = {
    "int_parsing": "is not a whole number", "float_parsing": "is not a number",
    "greater_than_equal": "is below {ge:g}", "less_than_equal": "is above {le:g}",
}  # fmt: skip
"""What pydantic calls a number that an option does not take -> what is wrong with it."""


def _instead_of_option(wrong: str, ctx: Any) -> str:
    """What to give instead of an option that the command has not: its argument, an option of like name, another command."""
    names = [parameter.name or "" for parameter in ctx.command.params if parameter.param_type_name == "argument"]
    usage = " ".join(ctx.command.collect_usage_pieces(ctx)[1:])
    if usage and (wrong == "--model" or any(name.startswith(wrong.lstrip("-")) for name in names)):
        return f"; give {usage} without an option"
    near = nearest(wrong, option_names(ctx.command, ctx))
    if near is not None and (near.startswith(wrong) or wrong.startswith(near)):
        return f"; did you mean {near}?"
    others = [name for name, command in _visible_commands(all_commands()) if wrong in option_names(command, ctx)]
    if others:
        listed = " and ".join(filter(None, (", ".join(others[:-1]), others[-1])))
        return f", which is an option of {and_more(others) if len(others) > 3 else listed}"
    return "" if near is None else f"; did you mean {near}?"


def option_names(command: Any, ctx: Any) -> list[str]:
    return [name for parameter in command.get_params(ctx) if parameter.param_type_name == "option" for name in parameter.opts]


def _visible_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that --help lists, under the name that it has behind `assay`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _visible_commands(command, f"{name} ")
        elif not command.hidden:
            yield before + name, command


def _version(value: bool) -> None:
    if value:
        print(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    set_verbosity(quiet=quiet, verbose=verbose)


VERBS, WHOLE, BEFORE, CHECKPOINTS, RUNS = "Commands", "Step by step", "Beforehand", "Checkpoints and servers", "Runs"
"""Panels of `assay --help`."""


def _add(panel: str, *functions: Callable[..., None], to: typer.Typer = app) -> None:
    for function in functions:
        to.command(function.__name__.replace("_", "-"), cls=Command, rich_help_panel=panel)(function)


_add(VERBS, inspect_checkpoint, quantize, judge, choose, publish)
app.add_typer(diagnosis, name="diagnose", rich_help_panel=VERBS)
_add(VERBS, run)
_add(BEFORE, init, preflight, plan, power, sensitivity, recipe, calibrate)
_add(WHOLE, evaluate, upgrade_check, deployment, speed, gate, report, card)
_add(CHECKPOINTS, screen, blame, pack, verify, serve, family)
_add(RUNS, status, compare)
_add("This installation", setup, doctor)
app.command("recipes", cls=Command, rich_help_panel="This installation")(list_recipes)
for command in (probe, lever, locate, gpu_check):
    name = command.__name__.replace("_", "-")
    diagnosis.command(name, cls=Command)(command)
    app.command(name, cls=Command, hidden=True)(command)
