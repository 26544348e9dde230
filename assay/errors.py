"""The errors a user can cause. Each says what, where, what is allowed and what to do, in one line (a recipe's: one a problem).

The command line prints `str(error)` and exits 2; a traceback is for our own mistakes (`assert`, `KeyError`...).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AssayError(ValueError):
    """Anything the user can mend: base of every error below. Exit code 2."""


class RecipeError(AssayError):
    """A recipe file cannot be read, or says something it must not."""


class CheckpointError(AssayError):
    """A checkpoint folder is missing, incomplete, or of a kind that is not supported."""


class PlanError(AssayError):
    """Recipe and checkpoint do not fit: unknown tensor, group that does not divide."""


class QuantizeError(AssayError):
    """A planned shard could not be written: disk full, source changed, resume with another recipe."""


class ServeError(AssayError):
    """vLLM could not be started or died; the message carries the tail of its log."""


class UnreachableError(ServeError):
    """A server that was not started here does not answer: it may come back."""


class MeasureError(AssayError):
    """A measurement could not be taken or must not be compared: unlike fingerprints, no reference, endpoint gone."""


def nearest(wrong: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is most like `wrong`; None: none is like it."""
    return next(iter(difflib.get_close_matches(wrong, list(allowed), 1)), None)


def did_you_mean(wrong: str, allowed: Iterable[str]) -> str:
    """`did you mean NAME? `, for the middle of a message; empty: no allowed name is like `wrong`."""
    near = nearest(wrong, allowed)
    return "" if near is None else f"did you mean {near}? "
