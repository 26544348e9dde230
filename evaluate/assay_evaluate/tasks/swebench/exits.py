"""Whose fault the end of a trajectory was.

mini-swe-agent writes an empty patch for whatever went wrong and never looks at the instance again. Here an end counts only if
the model brought it about; everything else is the machinery's: tried again, and never scored.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from assay.records.swe import Fault

CONTEXT = "ContextWindowExceededError"
MODEL_EXITS = frozenset({"Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError", CONTEXT})
"""Exit statuses of mini-swe-agent 2.4 that say something about the model: it handed in, ran out of its limits, filled the
context, or would not write commands."""
_TOO_LONG = re.compile(
    r"maximum context length|longer than the maximum model length|exceeds? the (?:maximum )?(?:model|context) length"
    r"|context window|(?:input|prompt) (?:is )?too long",
    re.IGNORECASE,
)


class Exit(NamedTuple):
    """`status` under mini-swe-agent's name. `detail`: one line, empty if there is nothing to say."""

    status: str
    fault: Fault
    detail: str = ""


def classify(status: str | None, detail: str = "") -> Exit:
    """An exit status and the text of the exception behind it -> whose fault it was.

    A refused request whose text says that the context is full is the model's, whoever names it; an unknown status is
    the machinery's, for a wrong answer must not come from an error nobody has thought of.
    """
    line = " ".join(detail.split())[:300]
    if status in MODEL_EXITS:
        return Exit(str(status), "model", line)
    if status in {"RequestRefused", "BadRequestError", "UnprocessableEntityError"} and _TOO_LONG.search(detail):
        return Exit(CONTEXT, "model", line)
    return Exit(status or "unknown", "infrastructure", line or "the trajectory has no exit status: it was cut short")
