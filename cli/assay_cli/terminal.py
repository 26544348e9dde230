"""What commands print: results to stdout, progress and notes to stderr; with `--json` stdout holds the record alone.

What a file or a server said goes through `escape`, `say` or `emit`: it is text there, without markup or control codes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from assay.errors import AssayError
from assay.foreign_text import in_rich, one_line
from assay.records.base import Record
from assay.records.verification import Verification


class Output(Console):
    """A console whose reader may go away, as `head` does: an error for `main`, where rich would exit 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = Output(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Progress and notes; `--quiet` silences it."""
_errors = Output(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class _Log(logging.Handler):
    """What libraries log, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        _errors.print(escape(f"{record.name}: {record.getMessage()}"))


_LOG = _Log()


def set_verbosity(*, quiet: bool, verbose: bool) -> None:
    """AssayError: both."""
    if quiet and verbose:
        raise AssayError("--quiet and --verbose contradict each other; give one of them")
    console.quiet = quiet
    root = logging.getLogger()
    if verbose and not is_verbose():
        root.addHandler(_LOG)
        root.setLevel(logging.INFO)
    elif not verbose and is_verbose():
        root.removeHandler(_LOG)
        root.setLevel(logging.WARNING)


def is_quiet() -> bool:
    return console.quiet


def is_verbose() -> bool:
    return _LOG in logging.getLogger().handlers


LOG_WIDTH = 1000
"""Columns of a file or a pipe: none of our tables is wider, so none is folded."""


def escape(text: str) -> str:
    """One line for rich to print as it is: neither markup nor control codes."""
    return in_rich(text)


def say(line: str) -> None:
    """A line of progress."""
    console.print(escape(line))


_LONG_WORD = re.compile(r"\S{1000,}")


def say_error(text: str) -> None:
    """An error's own further lines (a server's last words of its log) are indented; other line breaks, in a path or in somebody
    else's words, begin none. Of a word of thousands of letters, which somebody gave as a name, only its ends are repeated."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:100]}…{word[0][-100:]}", text)
    _errors.print("[bold red]error:[/] " + "\n".join(map(escape, re.split(r"\n(?=  )", text))))


def results(*, as_json: bool = False) -> Console:
    """For a command's result; with --json stderr, for stdout is the record's. In a file or a pipe no line is ever folded."""
    if as_json:
        return console
    out = Output(highlight=False, emoji=False)
    return out if out.is_terminal else Output(highlight=False, emoji=False, soft_wrap=True, width=LOG_WIDTH)


def emit(record: Record | dict[str, Any] | list[Any]) -> None:
    data = record.model_dump(mode="json") if isinstance(record, Record) else record
    print("\n".join(map(one_line, json.dumps(data, indent=1, ensure_ascii=False).split("\n"))), flush=True)


def print_verification(result: Verification, out: Console, indent: str = "") -> None:
    """indent: before the lines that follow the line of the checkpoint that was made."""
    looked = sum(result.checks.values())
    if result.passed:
        errors = ", ".join(f"{role} {error:.4f}" for role, error in sorted(result.mean_relative_error.items()))
        out.print(f"{indent}verified: {looked:,} checks passed; mean weight error: {errors or 'not measured'}")
    for damage in result.damages[:20]:
        out.print(f"[bold red]wrong[/] {escape(damage.where)}: {escape(damage.what)} ({damage.check})")
    if len(result.damages) > 20:
        out.print(f"... and {len(result.damages) - 20} more; --json lists all")
    for skipped in result.not_checked:
        out.print(f"{indent}not checked: {escape(skipped)}")
    if not result.passed:
        count = "1 thing is" if len(result.damages) == 1 else f"{len(result.damages)} things are"
        out.print(f"[bold red]verification failed[/]: {count} wrong in {escape(result.checkpoint)}")


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], out: Console) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line each, in columns. Cells are rich's markup."""
    from rich.table import Column, Table
    from rich.text import Text

    if out.is_terminal:
        table = Table(*(Column(name, overflow="fold") for name in columns))  # a narrow terminal hides no letter
        for row in rows:
            table.add_row(*row)
        out.print(table)
        return
    lines = [columns, *rows]
    widths = [max(Text.from_markup(line[at]).cell_len for line in lines) for at in range(len(columns))]
    for line in lines:
        cells = (cell + " " * (width - Text.from_markup(cell).cell_len) for cell, width in zip(line, widths, strict=True))
        out.print("  ".join(cells).rstrip())
