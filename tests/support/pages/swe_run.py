"""SWE-bench in a synthetic run: trajectories as mini-swe-agent writes them, and the records that are measured from them.

run_dir = make_swe_run(tmp_path, {"fp8": {"a__a-1": (steps, patch)}, "w4a16": {...}})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synthetic_run import make_run, task_of

from assay.records.measurement import ItemResult, Measurement
from assay.records.swe import SweFigures, Trajectory
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.tasks.swebench.trajectories import measure, trajectory_path

TASK = "swe-tiny"
Told = tuple[Sequence[tuple[str, str, str]], str]
"""Steps of (said, command, output), and the patch."""


def messages_of(steps: Sequence[tuple[str, str, str]], problem: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"<pr_description>\n{problem}\n</pr_description>\n\n<instructions>Work.</instructions>"},
    ]
    for said, command, output in steps:
        calls = [{"id": "1", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}]
        response = {"choices": [{"message": {"content": said, "tool_calls": calls}}], "usage": {"completion_tokens": 10}}
        made += [
            {"role": "assistant", "content": said, "extra": {"response": response, "actions": [{"command": command}]}},
            {"role": "tool", "content": output[:100], "extra": {"raw_output": output, "returncode": 0}},
        ]
    return [*made, {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}}]


def place_of(run_dir: Path, measurement: Measurement) -> Path:
    """Folder of its first repeat, named as `run_swe` names it."""
    served = measurement.fingerprint.comparable_sha256[:8]
    return run_dir / "swe" / f"{TASK}-{'a' * 12}" / f"{measurement.checkpoint_sha256[:12]}-{served}" / "repeat-0"


def make_swe_run(folder: Path, told: Mapping[str, Mapping[str, Told]], problem: str = "It is broken.") -> Path:
    """A run whose labels in `told` have a SWE-bench task too; an instance counts as resolved if it has a patch."""
    run_dir = folder / "tiny-glm"

    def change(measurement: Measurement) -> Measurement:
        worked = told.get(measurement.label, {})
        records = [_written(run_dir, measurement, name, *one, problem) for name, one in worked.items()]
        if not records:
            return measurement
        items = [
            ItemResult(
                item=one.instance, language="en", correct=one.outcome == "resolved", truncated=False, wrong_script=False,
                finish_reason=one.exit_status, prompt_tokens=None, output_tokens=one.output_tokens, answer=one.patch_sha256,
                cluster=one.repository,
            )
            for one in records
        ]  # fmt: skip
        task = task_of(TASK, "swe", items).model_copy(update={"swe": _figures(records)})
        return measurement.model_copy(update={"tasks": (*measurement.tasks, task)})

    return make_run(folder, change=change)


def _written(
    run_dir: Path, measurement: Measurement, instance: str, steps: Sequence[tuple[str, str, str]], patch: str, problem: str
) -> Trajectory:  # fmt: skip
    data = {"info": {"exit_status": "Submitted", "submission": patch}, "messages": messages_of(steps, problem)}
    path = trajectory_path(place_of(run_dir, measurement), instance)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return Trajectory(
        instance=instance, repository="a/a", repeat=0, exit_status="Submitted", fault="model",
        outcome="resolved" if patch else "empty_patch", num_attempts=1, **measure(data, native_tool_calls=True),
    )  # fmt: skip


def _figures(records: Sequence[Trajectory]) -> SweFigures:
    share = wilson(sum(one.outcome == "resolved" for one in records), len(records))
    return SweFigures(
        dataset="tiny/swe", dataset_sha256="d" * 64, num_instances=len(records), num_repeats=1, gold_failed=(),
        num_resolved=sum(one.outcome == "resolved" for one in records), num_infrastructure=0, num_retried=0,
        exit_statuses={"Submitted": len(records)}, outcomes={"resolved": len(records)}, mean_steps=None,
        mean_output_tokens=None, mean_prompt_tokens=None, num_format_errors=0, tool_call_validity=share,
        looped=share, context_overflow=share,
        patch_applies=share, draft_acceptance=None, versions={"mini-swe-agent": "2.4.6", "swebench": "5.0.2"},
        agent_config_sha256="e" * 64, trajectories=tuple(records),
    )  # fmt: skip
