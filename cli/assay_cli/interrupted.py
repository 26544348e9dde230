"""The group of all commands: Ctrl-C, and words that are empty."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from typer.core import TyperGroup

from assay.errors import AssayError
from assay.foreign_text import shown
from assay_pipeline.interrupted import Interrupted


class Commands(TyperGroup):
    """The group of all commands; an interrupt reaches `main` as `Interrupted`, and no word may be empty."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as when the shell completes
            refuse_empty(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """A C extension interrupted while it imports prints the interrupt and raises ImportError (numpy's `import_array`)."""
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
        except ImportError:
            if printed:
                raise Interrupted("") from None
            raise
        finally:
            sys.excepthook = print_error


def refuse_empty(words: Sequence[str]) -> None:
    """AssayError for an empty word, which an unset shell variable leaves: as a path it would be the working directory."""
    for before, word in pairwise(["assay", *words]):
        if word == "" or re.fullmatch(r"--[\w-]+=", word):
            after = before if word == "" else word
            raise AssayError(f"nothing stands after {shown(after)}: give a value, or leave it out (is a shell variable empty?)")
