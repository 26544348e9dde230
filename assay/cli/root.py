"""The `assay` command. Thin: resolves TARGET, calls one stage, prints its record.

Exit codes: 0 = done and passed, 1 = done and failed (a verdict, a verification), 2 = could not (usage, input, machine).
Results go to stdout, progress and notes to stderr; with `--json` stdout holds the record and nothing else. Stages are imported
inside the commands, so that `assay --help` needs neither torch nor lm-eval.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from assay import __version__
from assay.cli.commands.about.doctor import doctor
from assay.cli.commands.about.recipes import list_recipes
from assay.cli.commands.diagnose.lever import lever
from assay.cli.commands.diagnose.locate import locate
from assay.cli.commands.diagnose.probe import probe
from assay.cli.commands.make.calibrate import calibrate
from assay.cli.commands.make.plan import plan
from assay.cli.commands.make.quantize import quantize
from assay.cli.commands.make.verify import verify
from assay.cli.commands.measure.evaluate import evaluate
from assay.cli.commands.measure.run import run
from assay.cli.commands.measure.serve import serve
from assay.cli.commands.results.card import card
from assay.cli.commands.results.compare import compare
from assay.cli.commands.results.gate import gate
from assay.cli.commands.results.report import report
from assay.cli.commands.results.status import status
from assay.cli.interrupted import Commands, Interrupted
from assay.cli.terminal import say, say_error
from assay.errors import AssayError
from assay.foreign_text import one_line

app = typer.Typer(
    name="assay",
    cls=Commands,
    help="Quantize a mixture-of-experts checkpoint for vLLM, and measure what was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point: user errors become one line and exit 2, never a traceback."""
    try:
        app(prog_name="assay")
    except AssayError as error:
        say_error(str(error))
        sys.exit(2)
    except Interrupted as stopped:
        say(f"interrupted; {stopped}" if str(stopped) else "interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno is None:
            raise
        say_error(f"{one_line(str(error.filename or 'system'))}: {error.strerror}")
        sys.exit(2)


def _version(value: bool) -> None:
    if value:
        print(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command()(run)
app.command()(plan)
app.command()(quantize)
app.command()(verify)
app.command()(calibrate)
app.command()(serve)
app.command()(evaluate)
app.command()(probe)
app.command()(lever)
app.command()(locate)
app.command()(status)
app.command()(compare)
app.command()(gate)
app.command()(report)
app.command()(card)
app.command()(doctor)
app.command("recipes")(list_recipes)
