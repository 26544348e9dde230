"""A command and a group of commands, as typer makes them, with what all of ours share.

Its --help, --quiet and --verbose behind any name, earlier names of options, numbers that no option means, extras that are not
installed, Ctrl-C, and words that are empty.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from assay.errors import AssayError
from assay.foreign_text import shown
from assay.installation import missing
from assay.safe_files import MAX_INTEGER
from assay_cli.terminal import is_quiet, is_verbose, set_verbosity
from assay_pipeline.interrupted import Interrupted

VALUES = {bool: "", int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
"""What --help shows for the value of an option that names none. A flag takes no value."""


SINGLE_LINE_END = re.compile(r"(?<!\n)\n(?!\n)")


EARLIER_NAMES = {
    "recipe": {"--hardware": "--profile"},
    "probe": {"--model": "--served-model-name"},
    "lever": {"--model": "--served-model-name"},
    "locate": {"--tensor-parallel": "--tensor-parallel-size", "--prompts": "--num-prompts"},
}
"""Command -> earlier name of an option, which still works -> its name."""


class Command(TyperCommand):
    """A command whose --help shows `TARGET` and `--json`, where typer would show `{TARGET}` and `--json <bool>`."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        """help: a docstring; its paragraphs are set to the width of the terminal, not broken where the source is."""
        super().__init__(*args, help=help and SINGLE_LINE_END.sub(" ", help), **options)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}...", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> Any:
        """With --quiet and --verbose of the root, which every command takes behind its name too, before --help."""
        shared = [param for param in ctx.find_root().command.params if param.name in ("quiet", "verbose")]
        *own, help_option = super().get_params(ctx)
        return named_values([*own, *shared, help_option])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """AssayError: a number that no option means, though it is within its limits."""
        names = EARLIER_NAMES.get(str(self.name), {})
        words = [word.partition("=") for word in args]
        left = super().parse_args(ctx, [names.get(name, name) + equals + value for name, equals, value in words])
        quiet, verbose = ctx.params.pop("quiet", False), ctx.params.pop("verbose", False)
        if ctx.resilient_parsing:  # as when the shell completes
            return left
        if quiet or verbose:
            set_verbosity(quiet=quiet or is_quiet(), verbose=verbose or is_verbose())
        for param in self.params:
            if isinstance(value := ctx.params.get(param.name), float) and not math.isfinite(value):
                raise AssayError(f"{param.opts[0]} {value}: is no number; give a finite one")
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise AssayError(f"{param.opts[0]} {shown(value, 24)}: beyond 64 bits; give a smaller number")
        return left


class Commands(TyperGroup):
    """A group of commands; an interrupt reaches `main` as `Interrupted`, and no word may be empty."""

    def get_params(self, ctx: Any) -> Any:
        return named_values(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as when the shell completes
            refuse_empty(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """AssayError: a package that an extra installs is not here.

        A C extension interrupted while it imports prints the interrupt and raises ImportError (numpy's `import_array`).
        """
        printed: list[type[BaseException]] = []
        print_error = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if issubclass(kind, KeyboardInterrupt):
                printed.append(kind)
            else:
                print_error(kind, error, trace)

        sys.excepthook = hook
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("") from None
        except BrokenPipeError:  # with its number typer would exit 1
            raise BrokenPipeError from None
        except ImportError as error:
            if printed:
                raise Interrupted("") from None
            command = f"{ctx.command_path} {ctx.invoked_subcommand}"
            if not isinstance(error, ModuleNotFoundError) or (line := missing(error, command)) is None:
                raise
            raise AssayError(line) from error
        finally:
            sys.excepthook = print_error


def named_values(params: Any) -> Any:
    """The parameters of a command; an option without a metavar takes it from VALUES."""
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None:
            param.metavar = VALUES.get(param.type_descriptor.annotation)
    return params


def refuse_empty(words: Sequence[str]) -> None:
    """AssayError for an empty word, which an unset shell variable leaves: as a path it would be the working directory."""
    for before, word in pairwise(["assay", *words]):
        if word == "" or re.fullmatch(r"--[\w-]+=", word):
            after = before if word == "" else word
            raise AssayError(f"nothing stands after {shown(after)}: give a value, or leave it out (is a shell variable empty?)")
