"""`assay deployment`: which candidates, which profile, and what is refused before a server is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run
from deployments import make_deployment, seen
from probe_reports import ALARM, probed
from synthetic_run import checkpoint_sha256, make_run

from assay.records.measurement import Measurement
from assay_evaluate.run import deployment
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.serving.hardware import Gpu

H200 = Gpu("NVIDIA H200", 150_754_820_096, "")
ON_CPU = ("--profile", "cpu-emulated")


@pytest.fixture
def run_dir(run: Run) -> Path:
    """Of tiny-glm: w4a16 and bf16 have passed, nvfp4a16 is underpowered."""
    return make_run(Path("runs"))


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Path]]:
    """(candidate, profile, folder) of all that would be served; those on a profile called `broken` fail."""
    found: list[tuple[str, str, Path]] = []

    def deploy(measured: Measurement, checkpoint: Path, judged: Any, *, profile: Any, **_: Any) -> Any:
        found.append((measured.label, profile.name, checkpoint))
        broken = {"probes": probed(measured.label, *ALARM)} if profile.name == "broken" else {}
        return make_deployment(seen(measured=measured, profile=profile.name, **broken))

    monkeypatch.setattr(deployment, "deploy", deploy)
    monkeypatch.setattr(deployment, "check_deployable", lambda *_: None)
    monkeypatch.setattr("assay_reports.report.write_report", lambda run_dir: None)
    return found


def profile_file(name: str) -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(f"schema: 1\nname: {name}\nhardware: {{device: cpu}}\nemulate: true\n")
    return path


@pytest.mark.slow
def test_candidates_that_passed_or_those_that_are_named(run: Run, run_dir: Path, deployed: list[tuple[str, str, Path]]) -> None:
    assert one_error(run("deployment", "tiny-glm", *ON_CPU)) == (
        f"bf16: its checkpoint is neither at {run_dir}/bf16/checkpoint nor at /data/models/tiny-glm, where it was measured; "
        "copy it into the run"
    )
    code, out, err = run("deployment", "tiny-glm", *ON_CPU, "--precisions", "w4a16,nvfp4a16")
    assert (code, deployed) == (
        0, [(label, "cpu-emulated", run_dir / label / "checkpoint") for label in ("w4a16", "nvfp4a16")],
    )  # fmt: skip
    assert out.splitlines()[0] == (
        "w4a16: the verdict PASS also holds on cpu-emulated: 5 checks passed (divergence kl_mean; divergence kl_mean, by span; "
        "divergence top1_agreement; acceptance; probes)"
    )
    assert f"record: {run_dir}/deployment/cpu-emulated/w4a16.json" in err
    assert run("deployment", run_dir, "--profile", profile_file("broken"), "--precisions", "w4a16")[0] == 1
    assert one_error(run("deployment", "tiny-glm", *ON_CPU, "--precisions", "w4a61")) == (
        f"--precisions w4a61: did you mean w4a16? candidates of {run_dir}: bf16, nvfp4a16, w4a16"
    )


def test_the_profile_is_the_models_first_whose_gpus_are_here(
    run: Run, run_dir: Path, deployed: list[tuple[str, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ("deployment", "tiny-glm", "--precisions", "w4a16")
    assert one_error(run(*one)).startswith("tiny-glm: its model recipe names no `deployment_profiles` for this machine (")
    for path in (run_dir / "measurements").glob("*.json"):
        Measurement.load(path).model_copy(update={"model": "glm-5"}).save(path)
    assert one_error(run(*one)).startswith("glm-5: none of 4xb200, 4xh200, 8xrtx-pro-6000 fits this machine (")
    monkeypatch.setattr("assay_evaluate.serving.hardware.find_gpus", lambda: (H200,) * 4)
    monkeypatch.setattr("assay_pipeline.deployment.check_folder_served", lambda *_: None)
    assert run(*one)[0] == 0
    assert deployed[-1][:2] == ("w4a16", "4xh200")


def test_nothing_is_deployed_without_a_verdict(run: Run, run_dir: Path, deployed: list[tuple[str, str, Path]]) -> None:
    (run_dir / "gates.json").unlink()
    assert one_error(run("deployment", "tiny-glm", *ON_CPU)) == (
        f"{run_dir}: nothing was judged yet, so no verdict can travel; run `assay gate {run_dir}` first"
    )
    for path in (run_dir / "measurements").glob("*.json"):
        if (one := Measurement.load(path)).label in {"w4a16", "bf16"}:
            path.unlink()
    assert run("gate", "tiny-glm")[0] == 1
    assert one_error(run("deployment", "tiny-glm", *ON_CPU)) == (
        f"{run_dir}: no candidate has passed (nvfp4a16 UNDERPOWERED); name with --precisions what is to be served all the same"
    )
    assert deployed == [] and one is not None


def test_another_checkpoint_is_refused_before_a_server_is_started(
    run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tiny_glm: Path
) -> None:
    """The folder of the run holds other files than were measured; nothing is served and nothing written."""
    monkeypatch.setattr(deployment, "serve", None)
    folder = run_dir / "w4a16" / "checkpoint"
    for path in tiny_glm.iterdir():
        shutil.copy(path, folder)
    message = one_error(run("deployment", "tiny-glm", "--profile", profile_file("elsewhere"), "--precisions", "w4a16"))
    assert message.startswith(f"{folder}: is not the checkpoint that was measured as w4a16 (")
    assert f", measured {checkpoint_sha256('w4a16')[:12]}); copy that one here" in message
    assert not (run_dir / "deployment").exists()


@pytest.mark.parametrize(
    ("options", "wanted"), [((), None), (("--own-texts",), True), (("--no-own-texts",), False)]
)  # fmt: skip
def test_evaluate_says_whether_candidates_write_texts_of_their_own(
    run: Run, tiny_glm: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], wanted: bool | None
) -> None:
    """By default where the model's recipe names deployment profiles; a folder has no recipe, so none."""
    told: list[bool] = []

    def measures(model: str, candidates: list[Candidate], *, own_texts: bool, **_: Any) -> None:
        told.append(own_texts)

    monkeypatch.setattr("assay_evaluate.run.evaluate.evaluate", measures)
    other = Path("other")
    shutil.copytree(tiny_glm, other)
    code, _, err = run("evaluate", "--reference", tiny_glm, "--candidate", other, "--suite", "quick", *options)
    assert code == 2 and "nothing was measured yet" in err
    assert told == [bool(wanted)]
