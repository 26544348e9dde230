"""What one trajectory cost and how it went, read from mini-swe-agent's own file (format mini-swe-agent-1.1)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST_CYCLE = 4
"""Steps that a loop's cycle may have."""
NUM_CYCLES = 3
"""Times a cycle must come, to be a loop."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def measure(trajectory: Mapping[str, Any], *, native_tool_calls: bool) -> dict[str, Any]:
    """Fields of a `Trajectory` that come from its file alone. None where no reply says anything."""
    messages = trajectory.get("messages") or []
    replies = list(_replies(messages))
    patch = str((trajectory.get("info") or {}).get("submission") or "")
    calls = [call for reply in replies for call in _tool_calls(reply)]
    speculation = [found for reply in replies if (found := (reply.get("metrics") or {}).get("speculative_decoding"))]
    loop = longest_loop(list(_steps(messages)))
    return {
        "num_steps": len(replies),
        "prompt_tokens": _tokens(replies, "prompt_tokens"),
        "output_tokens": _tokens(replies, "completion_tokens"),
        "num_cut_off": sum(_choice(reply).get("finish_reason") == "length" for reply in replies),
        "num_format_errors": sum(_extra(message).get("interrupt_type") == "FormatError" for message in messages),
        "num_tool_calls": len(calls) if native_tool_calls else None,
        "num_valid_tool_calls": sum(map(is_valid_call, calls)) if native_tool_calls else None,
        "longest_loop_steps": loop,
        "looped": loop > 0,
        "patch_bytes": len(patch.encode()),
        "patch_sha256": hashlib.sha256(patch.encode()).hexdigest() if patch else None,
        "accepted_tokens": sum(one["num_accepted_draft_tokens"] for one in speculation) if speculation else None,
        "drafted_tokens": sum(one["num_draft_tokens"] for one in speculation) if speculation else None,
    }


def is_valid_call(call: Mapping[str, Any]) -> bool:
    """The one tool there is, `bash`, with an object of arguments that is exactly {"command": text}."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, json.JSONDecodeError):
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
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        if "response" not in _extra(message):
            continue
        said = _extra(message).get("actions")
        commands = (
            tuple(action.get("command") for action in said) if said else (_choice(_extra(message)["response"]).get("message"),)
        )
        seen = _extra(following)
        output = _NUMBER.sub("0", str(seen.get("raw_output", "")))
        yield json.dumps(commands, sort_keys=True, default=str), seen.get("returncode"), output


def _extra(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return message.get("extra") or {}


def _replies(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The server's own answers; those without a command hang on the message that complains about them."""
    for message in messages:
        response = _extra(message).get("response")
        if isinstance(response, dict):
            yield response


def _choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = reply.get("choices") or [{}]
    return choices[0] or {}


def _tool_calls(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((_choice(reply).get("message") or {}).get("tool_calls") or [])


def _tokens(replies: Sequence[Mapping[str, Any]], key: str) -> int | None:
    counts = [usage[key] for reply in replies if (usage := reply.get("usage") or {}).get(key) is not None]
    return sum(counts) if counts else None
