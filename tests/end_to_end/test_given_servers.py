"""Two vLLM servers that somebody else started, with an API key that is checked, given to `assay evaluate` as URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from warm import WarmVllm

from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_evaluate.serving.server import _usable_port, interpreter_for
from assay_evaluate.serving.vllm_command import vllm_command
from assay_pipeline.targets import resolve_target

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1500)]

KEY = "sk-only-for-this-test"
SUITE = """\
schema: 1
name: short
seed: eval-short
tasks: [{kind: arithmetic, name: sums, languages: [en], num_items: 12, num_steps: [2], max_tokens: 96}]
divergence: {num_documents: 4, max_tokens: 48, top_k: 20}
"""


def assay(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, working in `folder`."""
    command = [sys.executable, "-c", "from assay_cli import main; main()", *map(str, words)]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@contextmanager
def server_with_key(checkpoint: Path, log_path: Path, warm_vllm: WarmVllm) -> Iterator[str]:
    """vLLM as `assay serve` would start it, but for the key; its URL."""
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    profile = profile.model_copy(update={"vllm": {**profile.vllm, "api-key": KEY, "max-model-len": 1024}})
    serving, port = resolve_target(str(checkpoint)).recipe.serving, _usable_port(None)
    command = vllm_command(checkpoint, profile, serving, speculate=True, port=port, served_model_name="model")
    process = warm_vllm.process((str(interpreter_for(profile)), *command.arguments), command.environment, log_path)
    try:
        while True:
            assert process.exit_status() is None, "\n".join(process.log_lines()[-20:])
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_vllm: WarmVllm) -> Path:
    """A working directory with a suite and the checkpoints of tiny-glm."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "short.yaml").write_text(SUITE)
    warm_vllm.link(folder)
    profile = load_recipe(ProfileRecipe, "cpu-emulated").model_dump(
        mode="json", exclude_defaults=True, exclude={"schema_version"}
    )
    profile = {**profile, "schema": 1, "name": "short-context", "vllm": {**profile["vllm"], "max-model-len": 1024}}
    (folder / "short-context.yaml").write_text(json.dumps(profile))
    done = assay(folder, "quantize", "tiny-glm", "--precisions", "w4a16")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def urls(place: Path, warm_vllm: WarmVllm) -> Iterator[dict[str, str]]:
    """fp8 and w4a16, and fp8 once more."""
    made = place / "runs" / "tiny-glm"
    with (
        server_with_key(made / "fp8" / "checkpoint", place / "fp8.log", warm_vllm) as fp8,
        server_with_key(made / "w4a16" / "checkpoint", place / "w4a16.log", warm_vllm) as w4a16,
        server_with_key(made / "fp8" / "checkpoint", place / "again.log", warm_vllm) as again,
    ):
        yield {"fp8": fp8, "w4a16": w4a16, "again": again}


def evaluate(place: Path, runs: str, reference: str, candidate: str, *more: str, key: str = KEY) -> tuple[int, str]:
    words = ("evaluate", "--reference", reference, "--candidate", candidate, "--suite", "short.yaml", "--runs", runs, *more)
    done = assay(place, *words, **({"KEY_OF_SERVERS": key} if "--api-key-env" in more else {}))
    return done.returncode, done.stderr


def verdicts(place: Path, runs: str) -> dict[str, str]:
    [path] = (place / runs).glob("*/gates.json")
    return dict(GateReport.load(path).overall)


WITH_KEY = ("--api-key-env", "KEY_OF_SERVERS")


def test_measured_as_if_assay_had_started_them(place: Path, urls: dict[str, str]) -> None:
    folders = {label: f"runs/tiny-glm/{label}/checkpoint" for label in ("fp8", "w4a16")}
    code, err = evaluate(
        place, "given", f"{urls['fp8']},{folders['fp8']}", f"{urls['w4a16']}/v1/,{folders['w4a16']}", *WITH_KEY
    )  # fmt: skip
    assert code == 0, err
    code, err = evaluate(place, "started", folders["fp8"], folders["w4a16"], "--profile", "short-context.yaml")
    assert code == 0, err
    assert verdicts(place, "given") == verdicts(place, "started")
    for runs in ("given", "started"):
        [path] = (place / runs).glob("*/gates.json")
        report = GateReport.load(path)
        assert (report.serving, report.not_looked_at) == ((), {}), "vLLM with MTP raises no rule on who answered what"
    for label in ("fp8", "fp8-repeat", "w4a16"):
        ours, theirs = (
            Measurement.load(next((place / runs).glob(f"*/measurements/{label}.json"))) for runs in ("given", "started")
        )
        assert (ours.fingerprint.server, ours.checkpoint_sha256) == ("external", theirs.checkpoint_sha256)
        assert [item.answer for item in ours.tasks[0].items] == [item.answer for item in theirs.tasks[0].items]
        assert ours.signature is not None and theirs.signature is not None
        assert ours.signature.agrees_with(theirs.signature)  # bits differ: another process, another number of threads
    assert nothing_holds_the_key(place)


def test_servers_alone_are_enough(place: Path, urls: dict[str, str]) -> None:
    """No folder is named: labels and the model are what the servers say they loaded."""
    code, err = evaluate(place, "alone", urls["fp8"], urls["w4a16"], *WITH_KEY)
    assert code == 0, err
    [path] = (place / "alone").glob("*/measurements/w4a16.json")
    measured = Measurement.load(path)
    assert (measured.checkpoint, measured.checkpoint_bytes) == (urls["w4a16"], None)
    assert any(note.startswith("no folder of it was named; its server says that it loaded /") for note in measured.notes)
    code, err = evaluate(place, "alone", urls["fp8"], urls["w4a16"], *WITH_KEY)
    assert code == 0 and "w4a16: measured already" in err, err
    assert nothing_holds_the_key(place)


@pytest.mark.parametrize(
    ("reference", "candidate", "key", "message"),
    [
        ("fp8={fp8}", "w4a16={fp8}/v1", KEY, "error: fp8 and w4a16 are one server ("),
        ("fp8={fp8}", "w4a16={again}", KEY, "error: fp8 at http://127.0.0.1:{} and w4a16 at {} answer with the same w"),
        ("fp8={fp8}", "w4a16={w4a16}", "sk-another", "error: the server of fp8 answers 401 at http://127.0.0.1:{}/v1/models: "),
        ("{fp8},runs/tiny-glm/w4a16/checkpoint", "w4a16={w4a16}", KEY, "error: w4a16: http://{} says that it serves /"),
    ],
    ids=["one server", "the same weights", "a wrong key", "another folder"],
)  # fmt: skip
def test_refused(place: Path, urls: dict[str, str], reference: str, candidate: str, key: str, message: str) -> None:
    code, err = evaluate(place, "refused", reference.format(**urls), candidate.format(**urls), *WITH_KEY, key=key)
    last = err.strip().splitlines()[-1]
    assert code == 2, err
    before, *rest = message.split("{}")
    assert last.startswith(before) and all(part in last for part in rest), err
    assert not list(place.glob("refused/*/measurements/*.json"))
    assert nothing_holds_the_key(place) and key not in err


def test_the_same_weights_if_that_is_meant(place: Path, urls: dict[str, str]) -> None:
    code, err = evaluate(place, "same", f"fp8={urls['fp8']}", f"again={urls['again']}", *WITH_KEY, "--same-weights")
    assert code == 0, err
    [path] = (place / "same").glob("*/measurements/again.json")
    assert any(note.endswith("which --same-weights allows") for note in Measurement.load(path).notes)


def nothing_holds_the_key(place: Path) -> bool:
    """In whatever assay wrote; vLLM logs the arguments it was started with."""
    written = [path for path in place.rglob("*") if path.is_file() and path.parent != place]
    assert written
    return not any(KEY.encode() in path.read_bytes() for path in written)
