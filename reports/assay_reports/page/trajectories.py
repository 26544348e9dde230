"""Trajectories of SWE-bench for the browser of items: steps of both sides, where they part, patches, how they ended.

They are read from `RUN/swe/TASK-SHA/CHECKPOINT-SERVED/repeat-N/INSTANCE/INSTANCE.traj.json` (mini-swe-agent-1.1), which agents,
tests and repositories have written: whatever is not of the expected shape is not there, and everything is bounded. A file
counts only if its steps, tokens and patch are those of the record.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import CheckpointError
from assay.foreign_text import one_line
from assay.records.measurement import Measurement
from assay.records.swe import Trajectory
from assay.safe_files import open_inside
from assay.secret_text import hide_secrets

FOLDER = "swe"
MOST_FILE_BYTES = 100_000_000
"""Of a trajectory that is read; one of 250 steps has about a megabyte."""
MOST_CHARACTERS = 60_000
"""Of the steps of one trajectory in the page; each text is cut to the first of `LIMITS` with which they fit."""
LIMITS = (4000, 2000, 1000, 500, 250, 100, 50)
FIRST_STEPS, LAST_STEPS = 30, 8
AROUND = (-1, 4)
"""Steps that are kept around the first that differs."""
MOST_PATCH = 12_000
MOST_COUNT = 2**53
"""Above which no number of tokens lies: as the record was counted."""
_PROBLEM = re.compile(r"<pr_description>\s*(.*)</pr_description>", re.DOTALL)
"""Where mini-swe-agent's prompts put the problem statement; the rest is the same for all instances."""


@dataclass(frozen=True)
class Step:
    """One reply of the model: its words, the commands in it, what they printed (or the complaint that there were none)."""

    words: str
    commands: str
    output: str


@dataclass(frozen=True)
class Steps:
    """One trajectory that was read. prompt: the problem statement."""

    prompt: str
    steps: tuple[Step, ...]
    patch: str
    record: Trajectory


Key = tuple[str, str, int]
"""Task, instance, repeat: as `items.Key`."""


class Finder:
    """The trajectories of one measurement."""

    def __init__(self, run_dir: Path, measurement: Measurement) -> None:
        self._root = run_dir / FOLDER
        self._records = {
            (task.task, record.instance, record.repeat): record
            for task in measurement.tasks if task.swe is not None for record in task.swe.trajectories
        }  # fmt: skip
        tasks = {task for task, _, _ in self._records}
        self._folders = {task: _folders(self._root, task, measurement.checkpoint_sha256) for task in tasks}

    def find(self, key: Key) -> Steps | None:
        """None: there is no file of it, or none of the trajectory that was graded."""
        if (record := self._records.get(key)) is None:
            return None
        for folder in self._folders[key[0]]:
            path = folder / f"repeat-{record.repeat}" / record.instance / f"{record.instance}.traj.json"
            data = _read(self._root, path)
            if data is not None and (steps := _steps_of(data, record)) is not None:
                return steps
        return None


def _folders(root: Path, task: str, checkpoint_sha256: str) -> list[Path]:
    """TASK-SHA/CHECKPOINT-SERVED of a task and a checkpoint; not those of its repeat, which is another measurement."""
    of_task = re.compile(rf"{re.escape(task)}-[0-9a-f]{{12}}")
    served = re.compile(rf"{re.escape(checkpoint_sha256[:12])}-[0-9a-f]{{8}}")
    return [
        folder
        for place in _listed(root) if of_task.fullmatch(place.name)
        for folder in _listed(place) if served.fullmatch(folder.name)
    ]  # fmt: skip


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(root: Path, path: Path) -> dict[str, Any] | None:
    """The object in a file that stays in `root`. None: there is none that can be read."""
    try:
        with open_inside(root, str(path.relative_to(root))) as file:
            if os.fstat(file.fileno()).st_size > MOST_FILE_BYTES:
                return None
            data = json.loads(file.read(MOST_FILE_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointError):  # ValueError: also what is no path or no UTF-8
        return None
    return data if isinstance(data, dict) else None


# ------------------------------------------------------------------------------------------------ what it says
def _steps_of(data: Mapping[str, Any], record: Trajectory) -> Steps | None:
    """None: it is another trajectory than the one that was graded."""
    messages = _objects(data.get("messages"))
    replies = [reply for message in messages if (reply := _reply(message)) is not None]
    patch = _text(_object(data, "info").get("submission"))
    counts = [_object(reply, "usage").get("completion_tokens") for reply in replies]
    tokens = [count for count in counts if type(count) is int and 0 <= count < MOST_COUNT]
    sha256 = hashlib.sha256(patch.encode()).hexdigest() if patch else None
    if (len(replies), sha256, sum(tokens) if tokens else None) != (record.num_steps, record.patch_sha256, record.output_tokens):
        return None
    return Steps(_prompt(messages), tuple(_steps(messages)), patch, record)


def _steps(messages: Sequence[dict[str, Any]]) -> Iterator[Step]:
    places = [place for place, message in enumerate(messages) if _reply(message) is not None]
    for place, end in zip(places, [*places[1:], len(messages)], strict=True):
        message = messages[place]
        answers = messages[place + 1 : end]
        extra = _object(message, "extra")
        commands = filter(None, (_text(action.get("command")) for action in _objects(extra.get("actions"))))
        if message.get("role") != "assistant":  # a complaint, on which the reply without a command hangs
            answers = [message, *answers]
        outputs = [_output(answer) for answer in answers if answer.get("role") in ("tool", "user")]
        yield Step(_words(message), "\n".join(f"$ {command}" for command in commands), "\n".join(filter(None, outputs)))


def _words(message: Mapping[str, Any]) -> str:
    """Thinking and words of a reply."""
    choices = _objects((_reply(message) or {}).get("choices"))
    answer = _object(choices[0], "message") if choices else {}
    thinking = _text(answer.get("reasoning_content")) or _text(answer.get("reasoning"))
    words = _text(message.get("content")) if message.get("role") == "assistant" else _text(answer.get("content"))
    return "\n\n".join(filter(None, (thinking.strip(), words.strip())))


def _output(message: Mapping[str, Any]) -> str:
    """What a command printed, with how it ended if not with 0; or the message itself, if it is a complaint."""
    extra = _object(message, "extra")
    output = extra.get("raw_output")
    text = _text(output if isinstance(output, str) else message.get("content"))
    code = extra.get("returncode")
    return f"[exit {code}]\n{text}" if type(code) is int and code else text


def _prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The problem statement; the whole first message of the user where it is not marked."""
    first = next((_text(message.get("content")) for message in messages if message.get("role") == "user"), "")
    problem = _PROBLEM.search(first)
    return problem[1].strip() if problem else first


def _reply(message: Mapping[str, Any]) -> dict[str, Any] | None:
    reply = _object(message, "extra").get("response")
    return reply if isinstance(reply, dict) else None


def _object(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _objects(data: Any) -> list[dict[str, Any]]:
    return [value if isinstance(value, dict) else {} for value in data] if isinstance(data, list) else []


def _text(data: Any) -> str:
    """Text as Unicode, or the texts of the parts that a message may have."""
    if isinstance(data, list):
        return "\n".join(_text(part.get("text")) for part in data if isinstance(part, dict))
    if not isinstance(data, str):
        return ""
    return data if data.isascii() else data.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ------------------------------------------------------------------------------------------------ what the page gets
def side_by_side(sides: Mapping[str, Steps], reference: str) -> dict[str, dict[str, Any]]:
    """Label -> what the page shows of it: `steps` [[number from 0, words, commands, output], ...], `num_steps`, `patch`,
    `ended`, `outcome`; and against the reference's: `first`, the first step that differs in words or commands, and `output`, an
    earlier one whose commands printed something else. All sides keep the same steps, so that they stand side by side.
    """
    of_reference = sides.get(reference)
    differences = {
        label: (None, None) if of_reference is None else _first_difference(of_reference.steps, side.steps)
        for label, side in sides.items()
    }
    kept = set(range(FIRST_STEPS))
    for label, side in sides.items():
        kept |= set(range(len(side.steps) - LAST_STEPS, len(side.steps)))
        if (first := differences[label][0]) is not None:
            kept |= set(range(first + AROUND[0], first + AROUND[1]))
    return {label: _side(side, kept, *differences[label]) for label, side in sides.items()}


def _first_difference(reference: Sequence[Step], candidate: Sequence[Step]) -> tuple[int | None, int | None]:
    """Number of the first step that differs, None: none; and of an earlier one whose output does."""
    output = None
    for number, (before, after) in enumerate(zip(reference, candidate, strict=False)):
        if (before.words, before.commands) != (after.words, after.commands):
            return number, output
        if output is None and before.output != after.output:
            output = number
    return (None if len(reference) == len(candidate) else min(len(reference), len(candidate))), output


def _side(side: Steps, kept: set[int], first: int | None, output: int | None) -> dict[str, Any]:
    for limit in LIMITS:
        steps = [
            [number, *(clipped(text, limit) for text in (step.words, step.commands, step.output))]
            for number, step in enumerate(side.steps) if number in kept
        ]  # fmt: skip
        if num_characters({"steps": steps, "patch": ""}) <= MOST_CHARACTERS:
            break
    return {
        "steps": steps,
        "num_steps": len(side.steps),
        "patch": clipped(side.patch, MOST_PATCH),
        "ended": one_line(side.record.exit_status),
        "outcome": side.record.outcome.replace("_", " "),
        "first": first,
        "output": output,
    }


def num_characters(side: Mapping[str, Any]) -> int:
    """Of the texts of one side, as `side_by_side` gives it."""
    return len(side["patch"]) + sum(len(text) for step in side["steps"] for text in step[1:])


def clipped(text: str, most: int) -> str:
    """Without secrets, and without the middle of what is too long."""
    # what no limit lets through is not looked at for secrets: a command may have printed gigabytes
    far = 20 * MOST_PATCH
    gone = max(0, len(text) - 2 * far)
    safe = hide_secrets(f"{text[:far]}{text[far + gone :]}")
    if len(safe) + gone <= most:
        return safe
    half = most // 2
    return f"{safe[:half]}\n[... {len(safe) + gone - 2 * half:,} characters left out ...]\n{safe[len(safe) - half :]}"
