"""A process of its own that drives the `swebench` harness: python -m assay_evaluate.tasks.swebench.grading_worker < spec.json

Reads one line of JSON (`grading.py` writes it) and writes one JSON object per line to stdout:

    {"event": "graded", "instance": ..., "report": {...}, "from_log": false}
    {"event": "failed", "instance": ..., "why": ..., "outcome": "patch_does_not_apply" | "tests_timed_out" | "not_graded"}
    {"event": "no api", "why": ...}

`run_instance` does the work, as in `swebench eval`; what it lacks is done around it: logs under a folder that is named and not
below the working directory, a report that is only believed for the patch it is about, containers that carry a label and stop
at once, and several attempts where the machinery failed.
"""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import time
from pathlib import Path
from typing import Any

import docker
import swebench.harness.run_evaluation as harness
from swebench.harness.constants import APPLY_PATCH_FAIL, END_TEST_OUTPUT, LOG_INSTANCE, LOG_REPORT, LOG_TEST_OUTPUT
from swebench.harness.grading import get_eval_report
from swebench.harness.utils import make_test_spec

from assay_evaluate.tasks.swebench.worker_process import begin, tell


class _Containers:
    """`client.containers`, creating with our label, network, and a signal that ends `tail -f` at once instead of in 15 s."""

    def __init__(self, inner: Any, more: dict[str, Any]) -> None:
        self._inner, self._more = inner, more

    def create(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.create(*arguments, **options, **self._more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _LabellingClient:
    """A Docker client whose containers are created with more than the harness says."""

    def __init__(self, inner: Any, more: dict[str, Any]) -> None:
        self._inner, self.containers = inner, _Containers(inner.containers, more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def grade(spec: dict[str, Any], row: dict[str, Any], prediction: dict[str, Any], client: Any) -> None:
    """One prediction, with attempts; tells what came of it."""
    instance, folder = row["instance_id"], _folder(spec, row["instance_id"])
    reason, outcome = "", "not_graded"
    for attempt in range(spec["num_attempts"]):
        if attempt:
            time.sleep(spec["backoff_s"] * 2 ** (attempt - 1))
        shutil.rmtree(folder, ignore_errors=True)
        result = harness.run_instance(make_test_spec(row), prediction, client, spec["run"], timeout=spec["timeout_s"])
        if result is not None:
            report = result[1]
            if not report.get(instance, {}).get("infra_failure"):
                tell("graded", instance=instance, report=report, from_log=False)
                return
            reason = f"the log looks like a broken environment ({report[instance].get('infra_failure_reason')})"
            (folder / LOG_REPORT).unlink(missing_ok=True)
            continue
        reason, outcome = _read_failure(folder)
        if outcome != "not_graded":
            break
    tell("failed", instance=instance, why=reason, outcome=outcome)


def _folder(spec: dict[str, Any], instance: str) -> Path:
    """Where the harness writes its logs."""
    return Path(spec["log_folder"]) / str(spec["run"]) / str(spec["model_name"]) / instance


def _read_failure(folder: Path) -> tuple[str, str]:
    """The harness only logs why an instance has no report."""
    log = folder / LOG_INSTANCE
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if APPLY_PATCH_FAIL in text:
        return "the patch does not apply", "patch_does_not_apply"
    if "Test timed out after" in text:
        return "the tests ran into their time limit", "tests_timed_out"
    lines = [line for line in text.splitlines() if "Error" in line and not line.lstrip().startswith("File ")]
    return (" ".join(lines[-1].split())[:300] if lines else "the harness left no log"), "not_graded"


def grade_from_log(spec: dict[str, Any], row: dict[str, Any], prediction: dict[str, Any]) -> bool:
    """Use what an earlier run left behind, if it is about this very patch: a report or a complete log. Needs no containers."""
    folder = _folder(spec, row["instance_id"])
    patch, log, report_file = folder / "patch.diff", folder / LOG_TEST_OUTPUT, folder / LOG_REPORT
    if not (patch.is_file() and patch.read_text(encoding="utf-8") == prediction["model_patch"]):
        return False
    if not log.is_file():
        reason, outcome = _read_failure(folder)
        if outcome == "patch_does_not_apply":
            tell("failed", instance=row["instance_id"], why=reason, outcome=outcome)
        return outcome == "patch_does_not_apply"
    if END_TEST_OUTPUT not in log.read_text(encoding="utf-8", errors="replace"):
        return False
    report = get_eval_report(make_test_spec(row), prediction, str(log), include_tests_status=True)
    if report[row["instance_id"]].get("infra_failure"):
        return False
    report_file.write_text(json.dumps(report, indent=4), encoding="utf-8")
    tell("graded", instance=row["instance_id"], report=report, from_log=True)
    return True


def _connect(spec: dict[str, Any]) -> Any | None:
    """A client that answers; None after telling why there is none."""
    try:
        client = docker.from_env(timeout=harness.DOCKER_CLIENT_TIMEOUT, max_pool_size=harness.DOCKER_CLIENT_POOL_SIZE)
        client.ping()
    except docker.errors.DockerException as error:
        tell("no api", why=" ".join(str(error).split())[:200])
        return None
    return _LabellingClient(
        client, {"network_mode": spec["network"], "labels": {spec["label"]: spec["run"]}, "stop_signal": "SIGKILL"}
    )


def main() -> None:
    spec = begin()
    harness.RUN_EVALUATION_LOG_DIR = Path(spec["log_folder"])
    rows = {row["instance_id"]: row for row in spec["rows"]}
    pairs = [(rows[prediction["instance_id"]], prediction) for prediction in spec["predictions"]]
    pairs = [(row, prediction) for row, prediction in pairs if not grade_from_log(spec, row, prediction)]
    if not pairs or (client := _connect(spec)) is None:
        return
    with concurrent.futures.ThreadPoolExecutor(spec["num_graders"]) as pool:
        for job in [pool.submit(grade, spec, row, prediction, client) for row, prediction in pairs]:
            job.result()


if __name__ == "__main__":
    main()
