"""The small SWE suite of examples/tiny_swe for tests: built once per session, asked by a scripted model, graded from logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_swe"
sys.path.insert(0, str(EXAMPLE))

from assay.recipes.suite import SweTask  # noqa: E402
from assay_evaluate.client.journal import Identity  # noqa: E402
from assay_evaluate.tasks.swebench.agents import Pacing  # noqa: E402
from assay_evaluate.tasks.swebench.worker_process import run_name  # noqa: E402

FAST = Pacing(request_backoff_s=0.01, num_request_attempts=2, attempt_backoff_s=0.01, probe_every_s=0.05)
REFERENCE, CANDIDATE = Identity("a" * 64, "f" * 64), Identity("b" * 64, "f" * 64)


def rows_of(dataset: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]


def local_task(dataset: Path, **more: Any) -> SweTask:
    """Agents without containers, on copies of the repositories."""
    options: dict[str, Any] = {
        "environment": "local", "allow_local_execution": True, "local_repositories": str(dataset.parent / "repositories"),
        "dataset": str(dataset), "max_tokens": 512, "step_limit": 8, "num_agents": 4, "server_patience_s": 60,
    }  # fmt: skip
    return SweTask(kind="swe", name="swe", **(options | more))


def write_log(row: dict[str, Any], patch: str, folder: Path, model_name: str) -> Path:
    """What the harness leaves behind for one patch, made by its own eval script in a clone beside it: the test log's path."""
    log_folder = folder / run_name(str(folder.resolve()), model_name) / model_name / row["instance_id"]
    log_folder.mkdir(parents=True, exist_ok=True)
    testbed = log_folder / "testbed"
    shutil.copytree(EXAMPLE_REPOSITORIES / row["instance_id"], testbed)
    (log_folder / "patch.diff").write_text(patch, encoding="utf-8")
    if patch:
        subprocess.run(["git", "apply", str(log_folder / "patch.diff")], cwd=testbed, check=True)
    script = row["eval_script"].replace("/testbed", str(testbed))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugins of this environment
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        ["bash", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    log = log_folder / "test_output.txt"
    log.write_text(done.stdout, encoding="utf-8")
    shutil.rmtree(testbed)
    return log


EXAMPLE_REPOSITORIES = Path()
"""Set by the fixture that builds them."""
