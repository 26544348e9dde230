"""Trajectories and preds.json as mini-swe-agent keeps them (format 1.1): which count, which are made again, what each cost.

FOLDER/preds.json                            {instance: {model_name_or_path, instance_id, model_patch}}
FOLDER/INSTANCE/INSTANCE.traj.json           a trajectory that counts
FOLDER/INSTANCE/INSTANCE.failed-N.traj.json  one that the machinery ended; kept to look at, never read again

mini-swe-agent writes an empty patch for whatever went wrong and never looks at the instance again. Here an end counts only if
the model brought it about; everything else is the machinery's: tried again, and never scored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from assay.errors import MeasureError
from assay.records.base import write_text_atomically
from assay.records.swe import Fault
from assay_evaluate.transport.foreign_json import NotJson, count_in, object_in, objects_in, read_json, text_in

# ------------------------------------------------------------------------------------------------ whose fault an end was
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


# ------------------------------------------------------------------------------------------------ predictions


def trajectory_path(folder: Path, instance: str) -> Path:
    """Where a trajectory that counts lies."""
    return folder / instance / f"{instance}.traj.json"


def failed_path(folder: Path, instance: str) -> Path:
    """The next free name for a trajectory that the machinery ended."""
    paths = (folder / instance / f"{instance}.failed-{number}.traj.json" for number in itertools.count())
    return next(path for path in paths if not path.exists())


def read_trajectory(path: Path) -> dict[str, Any] | None:
    """A trajectory's JSON; None if it is missing, was cut short while being written, or is none that can be read."""
    try:
        data = read_json(path.read_bytes())
    except (FileNotFoundError, NotJson):
        return None
    return data if isinstance(data, dict) else None


def exit_of(trajectory: Mapping[str, Any]) -> Exit:
    """How a trajectory ended, whoever wrote the file (mini-swe-agent's own runs of a batch included)."""
    info = object_in(trajectory, "info")
    return classify(text_in(info, "exit_status") or None, text_in(info, "exception_str"))


def read_predictions(folder: Path) -> dict[str, dict[str, Any]]:
    """preds.json, or {} if there is none. MeasureError if it is something else."""
    path = folder / "preds.json"
    if not path.is_file():
        return {}
    try:
        data = read_json(path.read_bytes())
    except NotJson as error:
        raise MeasureError(f"{path}: not JSON ({error}); move it away, it is written again from the trajectories") from None
    if not isinstance(data, dict) or not all(
        isinstance(prediction, dict) and "model_patch" in prediction for prediction in data.values()
    ):
        raise MeasureError(f"{path}: not a preds.json (an object of predictions by instance); move it away")
    return data


def settle(folder: Path, model_name: str) -> dict[str, dict[str, Any]]:
    """Make preds.json hold exactly the trajectories that count, and return them.

    An interrupted run is picked up so, and so is a folder that mini-swe-agent itself has filled: an empty patch without a
    trajectory, or with one that the machinery ended, is taken out, its trajectory is put aside, and the instance is done again.
    """
    before = read_predictions(folder)
    predictions: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.traj.json")):
        instance = path.parent.name
        if path != trajectory_path(folder, instance):
            continue
        trajectory = read_trajectory(path)
        if trajectory is None or exit_of(trajectory).fault != "model":
            path.rename(failed_path(folder, instance))
            continue
        predictions[instance] = {
            "model_name_or_path": model_name,
            "instance_id": instance,
            "model_patch": text_in(object_in(trajectory, "info"), "submission"),
        }
    if predictions != before:
        write_text_atomically(folder / "preds.json", json.dumps(predictions, indent=2, sort_keys=True) + "\n")
    return predictions


# ------------------------------------------------------------------------------------------------ figures
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
    # the server's own answers; those without a command hang on the message that complains about them
    replies = [reply for message in messages if isinstance(reply := _extra(message).get("response"), dict)]
    patch = text_in(object_in(trajectory, "info"), "submission")
    calls = [call for reply in replies for call in objects_in(object_in(_choice(reply), "message"), "tool_calls")]
    drafts = [object_in(object_in(reply, "metrics"), "speculative_decoding") for reply in replies]
    usages = [object_in(reply, "usage") for reply in replies]
    loop = longest_loop(list(_steps(messages)))
    return {
        "num_steps": len(replies),
        "prompt_tokens": _sum_of(usages, "prompt_tokens"),
        "output_tokens": _sum_of(usages, "completion_tokens"),
        "num_cut_off": sum(_choice(reply).get("finish_reason") == "length" for reply in replies),
        "num_format_errors": sum(_extra(message).get("interrupt_type") == "FormatError" for message in messages),
        "num_tool_calls": len(calls) if native_tool_calls else None,
        "num_valid_tool_calls": sum(map(is_valid_call, calls)) if native_tool_calls else None,
        "longest_loop_steps": loop,
        "looped": loop > 0,
        "patch_bytes": len(patch.encode()),
        "patch_sha256": hashlib.sha256(patch.encode()).hexdigest() if patch else None,
        "accepted_tokens": _sum_of(drafts, "num_accepted_draft_tokens"),
        "drafted_tokens": _sum_of(drafts, "num_draft_tokens"),
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
        commands = [action.get("command") for action in objects_in(_extra(message), "actions")]
        result = _extra(following)
        output = _NUMBER.sub("0", text_in(result, "raw_output"))
        action = commands or _choice(_extra(message)["response"]).get("message")
        yield _comparable(action), _comparable(result.get("returncode")), output


def _comparable(value: Any) -> str:
    """Equal for what is equal. What is nested without end is all alike."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except RecursionError:
        return "nested without end"


def _extra(message: Mapping[str, Any]) -> dict[str, Any]:
    return object_in(message, "extra")


def _choice(reply: Any) -> dict[str, Any]:
    return next(iter(objects_in(reply, "choices")), {})


def _sum_of(rows: Sequence[Mapping[str, Any]], name: str) -> int | None:
    counts = [count for row in rows if (count := count_in(row, name)) is not None]
    return sum(counts) if counts else None
