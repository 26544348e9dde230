"""Patches -> outcomes, by the official harness; the gold patches first, on the same host.

What the harness reports is checked before it is believed, and containers it leaves behind are removed. An instance whose gold
patch does not pass here says nothing about a model: it is left out on both sides, and named.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.installation import install_command
from assay.recipes.suite import SweTask
from assay.records.swe import Outcome
from assay_evaluate.tasks.swebench.container_runtime import LABEL, ContainerRuntime
from assay_evaluate.tasks.swebench.dataset import DatasetRow, tests_of
from assay_evaluate.tasks.swebench.settings import package_folder
from assay_evaluate.tasks.swebench.worker_process import last_line, run_name, worker

GOLD = "gold"
HARNESS_MAJOR = "5"
KEYS = ("patch_is_None", "patch_exists", "patch_successfully_applied", "resolved")
BACKOFF_S = 5.0


@dataclass(frozen=True)
class Grade:
    """Of one patch. `reason`: of what is neither resolved nor simply unresolved."""

    outcome: Outcome
    reason: str = ""
    from_log: bool = False


def grade(
    task: SweTask,
    rows: Sequence[DatasetRow],
    patches: Mapping[str, str],
    folder: Path,
    model_name: str,
    *,
    runtime: ContainerRuntime | None,
    on_progress: Callable[[str], None],
) -> dict[str, Grade]:
    """Instance -> grade, for every patch. folder: of the harness's logs; what lies there is used again for the same patch.

    An empty patch resolves nothing, and the harness is not asked. MeasureError: the harness is missing, of another major
    version, finds no Docker API where it needs one, or reports in another schema.
    """
    check_harness()
    grades = {instance: Grade("empty_patch") for instance, patch in patches.items() if not patch}
    rows = [row for row in rows if patches.get(row["instance_id"])]
    if not rows:
        return grades
    run = run_name(str(folder.resolve()), model_name)
    spec: dict[str, Any] = {
        "rows": rows,
        "predictions": [
            {"instance_id": instance, "model_name_or_path": model_name, "model_patch": patch}
            for instance, patch in patches.items()
            if patch
        ],
        "model_name": model_name,
        "run": run,
        "label": LABEL,
        "log_folder": str(folder.resolve()),
        "timeout_s": task.grading_timeout_s,
        "network": task.grading_network,
        "num_graders": min(task.num_graders, len(rows)),
        "num_attempts": task.num_attempts,
        "backoff_s": BACKOFF_S,
    }
    try:
        graded = _run_grader(spec, folder / f"{model_name}.log", {row["instance_id"]: row for row in rows}, task.name)
    finally:
        if runtime is not None:
            runtime.remove_leftovers(run)
    num_resolved = sum(grade.outcome == "resolved" for grade in graded.values())
    from_log = sum(grade.from_log for grade in graded.values())
    on_progress(
        f"{task.name}: {num_resolved} of {len(graded)} "
        + ("gold patches pass" if model_name == GOLD else "patches resolve their instance")
        + (f" ({from_log} graded from logs)" if from_log else "")
    )
    return grades | graded


def _run_grader(spec: dict[str, Any], log: Path, rows: Mapping[str, DatasetRow], label: str) -> dict[str, Grade]:
    grades: dict[str, Grade] = {}
    with worker("grading_worker", spec, log) as (process, lines):
        while (line := lines.get()) is not None:
            event = json.loads(line)
            match event["event"]:
                case "graded":
                    instance = event["instance"]
                    grades[instance] = read_report(event["report"], rows[instance], event["from_log"])
                case "failed":
                    grades[event["instance"]] = Grade(event["outcome"], event["why"])
                case "no api":
                    raise MeasureError(
                        f"{label}: the swebench harness finds no Docker API ({event['why']}); start dockerd, or for Podman "
                        "`podman system service` with DOCKER_HOST=unix://SOCKET; trajectories are kept: run it again"
                    )
        status = process.wait()
    if status != 0 or grades.keys() != rows.keys():
        raise MeasureError(f"{label}: the grading process ended with status {status}: {last_line(log)} (all of it: {log})")
    return grades


def read_report(report: Mapping[str, Any], row: DatasetRow, from_log: bool = False) -> Grade:
    """A harness report of one instance. MeasureError if it does not have the form of swebench 5, or contradicts itself.

    `resolved` must follow from its own lists of tests; without a test that was mended it is not believed.
    """
    instance = row["instance_id"]
    own = report.get(instance)
    if not isinstance(own, dict) or not all(isinstance(own.get(key), bool) for key in KEYS):
        raise MeasureError(
            f"{instance}: the harness reports in another form than swebench {HARNESS_MAJOR} (wanted {', '.join(KEYS)}); "
            "install the version of constraints/work.txt"
        )
    if not own["patch_successfully_applied"]:
        return Grade("unresolved", "the log shows no test results", from_log)
    status = own.get("tests_status")
    try:
        lists = {key: (status[key]["success"], status[key]["failure"]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}  # type: ignore[index]
    except (KeyError, TypeError):
        raise MeasureError(
            f"{instance}: the harness's report has no tests_status; install the version of constraints/work.txt"
        ) from None
    mended = bool(lists["FAIL_TO_PASS"][0]) or not tests_of(row, "FAIL_TO_PASS")
    passed = mended and not any(failure for _, failure in lists.values())
    if passed != own["resolved"]:
        raise MeasureError(
            f"{instance}: the harness says resolved={own['resolved']}, its own lists of tests say {passed}; not believed"
        )
    return Grade("resolved" if passed else "unresolved", "", from_log)


@functools.cache
def check_harness() -> str:
    """Version of the installed harness. MeasureError if there is none, or one with other reports."""
    package_folder("swebench", "swebench")
    version = importlib.metadata.version("swebench")
    if version.split(".")[0] != HARNESS_MAJOR:
        raise MeasureError(f"swebench {version} is installed, version {HARNESS_MAJOR} is needed: {install_command('swe')}")
    return version


def versions() -> dict[str, str]:
    """Of everything that could change a trajectory or a grade, but for the container runtime."""
    return {name: importlib.metadata.version(name) for name in ("mini-swe-agent", "swebench")}
