"""Trajectories and preds.json in mini-swe-agent's layout: what is done, what must be done again.

FOLDER/preds.json                            {instance: {model_name_or_path, instance_id, model_patch}}
FOLDER/INSTANCE/INSTANCE.traj.json           a trajectory that counts
FOLDER/INSTANCE/INSTANCE.failed-N.traj.json  one that the machinery ended; kept to look at, never read again
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.records.base import write_text_atomically
from assay_evaluate.tasks.swebench.exits import Exit, classify
from assay_evaluate.transport.foreign_json import NotJson, object_in, read_json, text_in

PREDS = "preds.json"


def trajectory_path(folder: Path, instance: str) -> Path:
    """Where a trajectory that counts lies."""
    return folder / instance / f"{instance}.traj.json"


def failed_path(folder: Path, instance: str) -> Path:
    """The next free name for a trajectory that the machinery ended."""
    number = 0
    while (path := folder / instance / f"{instance}.failed-{number}.traj.json").exists():
        number += 1
    return path


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
    path = folder / PREDS
    if not path.is_file():
        return {}
    try:
        data = read_json(path.read_bytes())
    except NotJson as error:
        raise MeasureError(f"{path}: not JSON ({error}); move it away, it is written again from the trajectories") from None
    if not isinstance(data, dict) or not all(isinstance(one, dict) and "model_patch" in one for one in data.values()):
        raise MeasureError(f"{path}: not a preds.json (an object of predictions by instance); move it away")
    return data


def settle(folder: Path, model_name: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Make preds.json hold exactly the trajectories that count: (predictions, ids that were purged).

    An interrupted run is picked up so, and so is a folder that mini-swe-agent itself has filled: an empty patch without a
    trajectory, or with one that the machinery ended, is taken out, its trajectory is put aside, and the instance is done again.
    """
    before = read_predictions(folder)
    kept: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.traj.json")):
        instance = path.parent.name
        if path != trajectory_path(folder, instance):
            continue
        trajectory = read_trajectory(path)
        if trajectory is None or exit_of(trajectory).fault != "model":
            path.rename(failed_path(folder, instance))
            continue
        kept[instance] = {
            "model_name_or_path": model_name,
            "instance_id": instance,
            "model_patch": text_in(object_in(trajectory, "info"), "submission"),
        }
    if kept != before:
        write_text_atomically(folder / PREDS, json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return kept, sorted(before.keys() - kept.keys())
