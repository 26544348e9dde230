"""What one trajectory cost and how it went, read from mini-swe-agent's own file (format mini-swe-agent-1.1)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay_evaluate.transport.foreign_json import NotJson, count_in, object_in, objects_in, read_json, text_in

LONGEST_CYCLE = 4
"""Steps that a loop's cycle may have."""
NUM_CYCLES = 3
"""Times a cycle must come, to be a loop."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def measure(trajectory: Mapping[str, Any], *, native_tool_calls: bool) -> dict[str, Any]:
    """Fields of a `Trajectory` that come from its file alone. None where no reply says anything.

    Whatever lies in the file: what is not of the shape that it ought to have is not there.
    """
    messages = objects_in(trajectory, "messages")
    replies = list(_replies(messages))
    patch = text_in(object_in(trajectory, "info"), "submission")
    calls = [call for reply in replies for call in objects_in(object_in(_choice(reply), "message"), "tool_calls")]
    speculation = [found for reply in replies if (found := object_in(object_in(reply, "metrics"), "speculative_decoding"))]
    loop = longest_loop(list(_steps(messages)))
    return {
        "num_steps": len(replies),
        "prompt_tokens": _tokens([object_in(reply, "usage") for reply in replies], "prompt_tokens"),
        "output_tokens": _tokens([object_in(reply, "usage") for reply in replies], "completion_tokens"),
        "num_cut_off": sum(_choice(reply).get("finish_reason") == "length" for reply in replies),
        "num_format_errors": sum(_extra(message).get("interrupt_type") == "FormatError" for message in messages),
        "num_tool_calls": len(calls) if native_tool_calls else None,
        "num_valid_tool_calls": sum(map(is_valid_call, calls)) if native_tool_calls else None,
        "longest_loop_steps": loop,
        "looped": loop > 0,
        "patch_bytes": len(patch.encode()),
        "patch_sha256": hashlib.sha256(patch.encode()).hexdigest() if patch else None,
        "accepted_tokens": _tokens(speculation, "num_accepted_draft_tokens"),
        "drafted_tokens": _tokens(speculation, "num_draft_tokens"),
    }


def is_valid_call(call: Mapping[str, Any]) -> bool:
    """The one tool there is, `bash`, with an object of arguments that is exactly {"command": text}."""
    function = object_in(call, "function")
    try:
        arguments = read_json(text_in(function, "arguments").encode())
    except NotJson:
        return False
    return (
        function.get("name") == "bash"
        and isinstance(arguments, dict)
        and arguments.keys() == {"command"}
        and isinstance(arguments["command"], str)
    )


def longest_loop(steps: Sequence[object]) -> int:
    """Steps of the longest stretch that repeats a cycle of up to `LONGEST_CYCLE` steps at least `NUM_CYCLES` times; or 0."""
    longest = 0
    for period in range(1, LONGEST_CYCLE + 1):
        repeated = 0
        for before, after in zip(steps, steps[period:], strict=False):
            repeated = repeated + 1 if before == after else 0
            if repeated >= (NUM_CYCLES - 1) * period:
                longest = max(longest, repeated + period)
    return longest


def _steps(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """What was done and what came of it, numbers blotted out: the time a test took is no progress."""
    for message, following in itertools.pairwise([*messages, {}]):
        if "response" not in _extra(message):
            continue
        done = [action.get("command") for action in objects_in(_extra(message), "actions")]
        seen = _extra(following)
        output = _NUMBER.sub("0", text_in(seen, "raw_output"))
        yield _written(done or _choice(_extra(message)["response"]).get("message")), _written(seen.get("returncode")), output


def _written(told: Any) -> str:
    """Equal for what is equal. What is nested without end is all alike."""
    try:
        return json.dumps(told, sort_keys=True, default=str)
    except RecursionError:
        return "nested without end"


def _extra(message: Mapping[str, Any]) -> dict[str, Any]:
    return object_in(message, "extra")


def _replies(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The server's own answers; those without a command hang on the message that complains about them."""
    for message in messages:
        if isinstance(response := _extra(message).get("response"), dict):
            yield response


def _choice(reply: Any) -> dict[str, Any]:
    return next(iter(objects_in(reply, "choices")), {})


def _tokens(counted: Sequence[Mapping[str, Any]], name: str) -> int | None:
    counts = [count for one in counted if (count := count_in(one, name)) is not None]
    return sum(counts) if counts else None
