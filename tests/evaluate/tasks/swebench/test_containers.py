"""SWE-bench on a real Docker: images without a registry, agents in containers, the official harness, verdict, report.

Uses the Docker that answers, or starts a `dockerd` of its own (Debian: docker.io, as root); skipped with the reason where
neither is possible.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import swe_suite  # puts examples/tiny_swe on the path
from build_suite import build_dataset, build_images
from demo import run_demo
from own_docker import NoDocker, docker_daemon
from scripted_model import CAREFUL, ScriptedModel, load_scripts
from swe_suite import FAST, REFERENCE, rows_of

from assay.errors import MeasureError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SweTask
from assay.records.measurement import Measurement
from assay_evaluate.serving.server import ServerSpec, serve
from assay_evaluate.tasks.swebench.container_runtime import LABEL, find_runtime
from assay_evaluate.tasks.swebench.grading import Grade, grade
from assay_evaluate.tasks.swebench.task import prepare, run_swe

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small suite with its images, in a Docker that answers."""
    folder = tmp_path_factory.mktemp("tiny-swe")
    with tempfile.TemporaryDirectory(prefix="dk", ignore_cleanup_errors=True) as own:  # a socket's path must be short
        try:
            with docker_daemon(Path(own)):
                result = build_dataset(folder)
                swe_suite.EXAMPLE_REPOSITORIES = folder / "repositories"
                build_images(result)
                yield result
        except NoDocker as error:
            pytest.skip(f"SWE-bench in containers: {error}")


def options(dataset: Path, **more: object) -> SweTask:
    small = {"max_tokens": 512, "step_limit": 8, "num_agents": 2, "num_graders": 2, "min_free_disk_gb": 0.1}
    return SweTask(kind="swe", name="swe", dataset=str(dataset), **(small | more))


def left_behind() -> list[str]:
    return find_runtime("docker").call("ps", "-aq", "--filter", f"label={LABEL}").stdout.split()


def test_from_agents_to_the_report(dataset: Path, tmp_path: Path) -> None:
    gates = run_demo(tmp_path, dataset)
    run_dir = tmp_path / "tiny-swe"
    careful, repeat, hasty = (
        Measurement.load(run_dir / "measurements" / f"{name}.json").tasks[0] for name in ("careful", "careful-repeat", "hasty")
    )
    assert {item.item: item.correct for item in careful.items} == {name: how == "solve" for name, how in CAREFUL.items()}
    assert [item.correct for item in repeat.items] == [item.correct for item in careful.items]
    assert {item.item for item in hasty.items if item.correct} == {
        "tiny__wordwrap-3", "tiny__ranges-7", "tiny__roman-2", "tiny__slug-8",
    }  # fmt: skip
    assert hasty.swe is not None
    assert hasty.swe.outcomes == {"empty_patch": 3, "resolved": 4, "unresolved": 1}
    assert hasty.swe.versions["container_runtime"].startswith("docker ")
    (floor, verdict) = gates.verdicts
    assert (floor.status, floor.discordant) == ("UNDERPOWERED", (0, 0))
    assert (verdict.status, verdict.discordant) == ("UNDERPOWERED", (2, 0))
    assert verdict.observed is not None and (verdict.observed.value, verdict.observed.n) == (0.25, 8)
    assert (
        "with 6 repositories as clusters" in verdict.detail
        and "One run of 8 instances resolves about ±34.6 points" in verdict.detail
    )
    for page in ("report.md", "index.html"):
        text = (run_dir / "report" / page).read_text(encoding="utf-8")
        assert "one run of 8 instances resolves about ±34.6 points" in text
        assert "1 ContextWindowExceededError, 1 LimitsExceeded, 1 RepeatedFormatError, 5 Submitted" in text
    assert left_behind() == []
    assert run_demo(tmp_path, dataset) == gates  # everything was there: nothing is asked again


def test_a_container_that_is_taken_away_is_the_machinerys_fault(dataset: Path, tmp_path: Path) -> None:
    task = options(dataset, filter="tiny__(slug|lru)", num_agents=1)
    server = ScriptedModel(load_scripts(CAREFUL))

    def take_away(number: int) -> None:
        if number == 3:
            subprocess.run(["docker", "rm", "-f", *left_behind()], capture_output=True, check=True)

    server.before_reply = take_away
    with server:
        result = run_swe(prepare(task), server, REFERENCE, tmp_path, on_progress=lambda line: None, pacing=FAST)
    assert {item.item: item.correct for item in result.items} == {"tiny__lru-6": False, "tiny__slug-8": True}
    assert result.swe is not None and [trajectory.num_attempts for trajectory in result.swe.trajectories] == [2, 1]
    (failed,) = tmp_path.glob("swe/*/*/repeat-0/*/*.failed-0.traj.json")
    assert json.loads(failed.read_text())["info"]["exit_status"] == "ContainerGone"
    assert left_behind() == []


def test_patches_that_do_not_apply_or_never_end_are_the_models(dataset: Path, tmp_path: Path) -> None:
    rows = {row["instance_id"]: row for row in rows_of(dataset)}
    endless = rows["tiny__slug-8"]["patch"].replace("+import re\n", "+import re\n+import time\n+time.sleep(600)\n")
    endless = endless.replace("@@ -1,6 +1,8 @@", "@@ -1,6 +1,10 @@")
    nowhere = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -9 +9 @@\n-a\n+b\n"
    patches = {"tiny__roman-2": nowhere, "tiny__slug-8": endless, "tiny__lru-6": ""}
    task, runtime = options(dataset, grading_timeout_s=15), find_runtime("docker")
    result = grade(task, list(rows.values()), patches, tmp_path, "m", runtime=runtime, on_progress=lambda line: None)
    assert result == {
        "tiny__roman-2": Grade("patch_does_not_apply", "the patch does not apply"),
        "tiny__slug-8": Grade("tests_timed_out", "the tests ran into their time limit"),
        "tiny__lru-6": Grade("empty_patch"),
    }
    assert left_behind() == []


@pytest.mark.serve
def test_tiny_glm_on_vllm_fails_properly(dataset: Path, tmp_path: Path) -> None:
    """A real server, a model that cannot call tools: every end is the model's own, and nothing is resolved."""
    serving = Serving(reasoning_parser="glm45", tool_call_parser="glm45", num_speculative_tokens=1)
    spec = ServerSpec(
        checkpoint=Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint",
        profile=load_recipe(ProfileRecipe, "cpu-emulated"), serving=serving, speculate=True, log_path=tmp_path / "vllm.log",
    )  # fmt: skip
    prepared = prepare(options(dataset, max_tokens=64, temperature=1.0, num_agents=2, filter="tiny__(roman|slug)"))
    with serve(spec) as server:
        result = run_swe(prepared, server, REFERENCE, tmp_path, on_progress=lambda line: None, pacing=FAST)
    assert [item.correct for item in result.items] == [False, False]
    figures = result.swe
    assert figures is not None and (figures.num_resolved, figures.num_infrastructure, figures.num_retried) == (0, 0, 0)
    assert figures.exit_statuses.keys() <= {"RepeatedFormatError", "ContextWindowExceededError"}
    assert figures.outcomes == {"empty_patch": 2}
    assert left_behind() == []


def test_no_room_and_no_image_are_one_line_each(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"GB free, the suite wants 1e\+09 for images and containers \(min_free_disk_gb\)"):
        prepare(options(dataset, min_free_disk_gb=1e9))
    rows = rows_of(dataset)
    rows[2]["image"] = "tiny-swe/nobody-made-this:latest"
    other = tmp_path / "test.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(MeasureError, match=r"image tiny-swe/nobody-made-this:latest is neither here nor in its registry \("):
        prepare(options(other, pull_timeout_s=20))


def test_a_docker_that_does_not_answer_is_named(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(MeasureError, match=r"docker is installed, but does not answer .* the same command goes on"):
        prepare(options(dataset))
