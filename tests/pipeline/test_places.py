"""Where serve, probe, lever and locate write: as they were told, into a checkpoint's run, else into a temporary folder."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run
from fake_server import FakeServer
from probe_stub import StubServer
from raw_server import RawServer

from assay.records.run import folder_name

Words = tuple[object, ...]


class Started(Exception):
    """Instead of a server; what was to be started."""


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Logs of the servers that would have been started: each command ends there."""
    found: list[Path] = []

    @contextmanager
    def start(spec: Any, on_progress: Any = None, **more: Any) -> Iterator[None]:
        found.append(spec.log_path.with_stem(spec.log_path.stem.removesuffix("-1")))  # levers number their servers
        raise Started
        yield

    monkeypatch.setattr("assay_evaluate.serving.server.serve", start)
    monkeypatch.setattr("assay_evaluate.diagnosis.locate.locate.serve", start)
    monkeypatch.setattr("assay_evaluate.diagnosis.levers.settings.serve", start)
    monkeypatch.setattr(
        "assay_evaluate.diagnosis.probes.run_probes.probe_checkpoint", lambda spec, *a, **k: start(spec).__enter__()
    )
    return found


def attempt(run: Run, *words: object) -> None:
    with pytest.raises(Started):
        run(*words)


def temporary() -> list[str]:
    """What lies under the temporary directory, the random part of names left out."""
    place = Path(tempfile.gettempdir())
    return sorted(re.sub(r"^(assay-[a-z]+)-\w+", r"\1", str(path.relative_to(place))) for path in place.rglob("*"))


@pytest.fixture
def in_run(run: Run, tiny_glm: Path) -> Path:
    """RUN/PRECISION/checkpoint, as far as its place goes; RUN is elsewhere/mine."""
    folder = Path("elsewhere/mine/w4a16")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    shutil.copytree(tiny_glm, folder / "checkpoint")
    return folder / "checkpoint"


# ------------------------------------------------------------------------------------------------ nothing beside the user
def test_a_url_is_probed_in_an_empty_folder(run: Run) -> None:
    few = ("--probes", "argmax", "--requests", 24)
    with StubServer(extras=False) as server:
        code, _, err = run("probe", server.base_url.removeprefix("http://"), *few)
        assert code == 0, err
        assert temporary() == ["assay-probe", "assay-probe/stub.json", "assay-probe/stub.requests.jsonl"]
        assert re.search(rf"^writing to {tempfile.gettempdir()}/assay-probe-\w+ \(--out DIR to change\)$", err, re.M)
        assert list(Path().iterdir()) == []
        code, _, _ = run("probe", server.base_url, *few, "--label", "mine", "--run", "there")
    assert code == 0 and sorted(map(str, Path().rglob("*.json*"))) == [
        "there/probes/mine.json", "there/probes/mine.requests.jsonl",
    ]  # fmt: skip


def test_levers_of_a_url_in_an_empty_folder(run: Run) -> None:
    with FakeServer() as server:
        words = ("lever", server.base_url, "--levers", "concurrency", "--requests", 2, "--max-tokens", 8)
        code, out, err = run(*words)
        assert code == 0 and "nothing failed" in out, err
        assert temporary() == ["assay-lever", "assay-lever/levers.json"] and list(Path().iterdir()) == []
        assert run(*words, "--label", "mine", "--run", "there")[0] == 0
    assert [str(path) for path in Path().rglob("*.json")] == ["there/levers/mine/levers.json"]


@pytest.mark.parametrize("command", ["serve", "probe", "lever"])
def test_a_checkpoint_in_an_empty_folder(run: Run, tiny_glm: Path, logs: list[Path], command: str) -> None:
    attempt(run, command, tiny_glm, "--profile", "cpu-emulated")
    assert temporary() == [f"assay-{command}"] and list(Path().iterdir()) == []
    assert (logs[0].parent.parent, logs[0].name) == (Path(tempfile.gettempdir()), f"vllm-{command}-tiny-glm4-moe.log")
    attempt(run, command, tiny_glm, "--profile", "cpu-emulated", "--out", "there")
    assert logs[1] == Path(f"there/vllm-{command}-tiny-glm4-moe.log") and temporary() == [f"assay-{command}"]


def test_locate_in_an_empty_folder(run: Run, tiny_glm: Path, logs: list[Path]) -> None:
    attempt(run, "locate", tiny_glm, tiny_glm, "--profile", "cpu-emulated")
    assert temporary() == ["assay-locate"] and list(Path().iterdir()) == [] and logs[0].name == "vllm-locate-a.log"
    attempt(run, "locate", tiny_glm, "--ranks", "--profile", "cpu-emulated", "--out", "there")
    assert logs[1] == Path("there/vllm-locate-a.log") and temporary() == ["assay-locate"]


# ------------------------------------------------------------------------------------------------ the run of a checkpoint
@pytest.mark.parametrize("command", ["serve", "probe", "lever"])
def test_a_checkpoint_of_a_run(run: Run, in_run: Path, logs: list[Path], command: str) -> None:
    for where in (in_run, in_run.resolve()):
        attempt(run, command, where, "--profile", "cpu-emulated")
    log = Path(f"elsewhere/mine/logs/vllm-{command}-w4a16.log")
    assert logs == [log, log.resolve()] and temporary() == [] and not Path("runs").exists()


def test_checkpoints_of_two_runs_do_not_share_a_place(run: Run, in_run: Path, logs: list[Path]) -> None:
    shutil.copytree("elsewhere/mine", "elsewhere/other")
    other = Path("elsewhere/other/w4a16/checkpoint")
    for folder in (in_run, other):
        attempt(run, "lever", folder, "--profile", "cpu-emulated")
    attempt(run, "locate", in_run, other, "--profile", "cpu-emulated")
    assert logs == [
        Path("elsewhere/mine/logs/vllm-lever-w4a16.log"),
        Path("elsewhere/other/logs/vllm-lever-w4a16.log"),
        Path("elsewhere/other/logs/vllm-locate-a.log"),
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("GLM-4.5-Air", "GLM-4.5-Air"),
        ("runs/tiny-glm/w4a16/checkpoint", "w4a16"),
        ("examples/tiny_glm/checkpoint", "tiny_glm"),
        ("hub/models--zai-org--GLM-4.5-Air/snapshots/0a1b2c", "GLM-4.5-Air"),
        ("checkpoint-1000", "checkpoint-1000"),
    ],
)
def test_what_a_folder_is_called(tmp_path: Path, path: str, name: str) -> None:
    assert folder_name(tmp_path / path) == name


# ------------------------------------------------------------------------------------------------ keys
def test_locate_sends_the_key_with_every_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SERVER", "sk-1234567890")
    body = '{"data": [{"id": "m"}]}'  # what the workers answer is another matter
    with RawServer(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()) as server:
        said = one_error(run("locate", server.base_url, server.base_url, "--api-key-env", "OF_THE_SERVER"))
    assert "the answer of watch_activations is not what this version of assay gives" in said
    assert [head.split()[1] for head in server.heads][:2] == ["/v1/models", "/collective_rpc"]
    assert all("Authorization: Bearer sk-1234567890" in head for head in server.heads) and "sk-" not in said
    said = one_error(run("locate", URL, "--ranks", "--api-key-env", "NOT_THERE"))
    assert said.startswith("--api-key-env NOT_THERE: no such environment variable")


# ------------------------------------------------------------------------------------------------ options of other forms
URL, HERE = "http://127.0.0.1:9", "glm"
BY_URL = "not used with a URL, whose server runs already; leave"
BY_FOLDER = "not used with a checkpoint, which is served here"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("probe", URL, "--profile", "8xh200"), f"--profile is {BY_URL} it out"),
        (("probe", URL, "--profile", "8xh200", "--runs", "runs"), f"--profile and --runs are {BY_URL} them out"),
        (("probe", HERE, "--model", "m"), f"--served-model-name is {BY_FOLDER}, with drafts and without; leave it out"),
        (
            ("probe", HERE, "--api-key-env", "K", "--without-speculation", URL),
            f"--without-speculation and --api-key-env are {BY_FOLDER}, with drafts and without; leave them out",
        ),
        (
            ("probe", URL, "--run", "a", "--out", "b"),
            "--run puts what is found into a run, --out into any folder: say one of them",
        ),
        (("probe", HERE, "--run", "a", "--runs", "b"), "--runs is not used with --run or --out; leave it out"),
        (
            ("probe", URL, "--probes", "argmax", "--garble", "9", "--temperature", "1"),
            "--garble and --temperature are not used without the probe garble, which --probes leaves out; leave them out",
        ),
        (
            ("probe", URL, "--probes", "garble", "--expected-acceptance", "2"),
            "--expected-acceptance is not used without the probe acceptance, which --probes leaves out; leave it out",
        ),
        (
            ("probe", URL, "--probes", "garble,tools", "--garble", "5", "--requests", "9"),
            "--requests is not used by the probes garble and tools, which ask requests of their own; leave it out",
        ),
        (
            ("probe", URL, "--lever", "all"),
            "--lever: levers are a command of their own: assay diagnose lever URL|TARGET [--levers NAME,...]",
        ),
        (("lever", URL, "--profile", "8xh200"), f"--profile is {BY_URL} it out"),
        (("lever", HERE, "--model", "m"), f"--served-model-name is {BY_FOLDER}; leave it out"),
        (
            ("lever", URL, "--levers", "n,eager,kv_cache"),
            "--levers eager,kv_cache: the server would have to be started with other settings; give its checkpoint folder "
            "instead of the URL, and it is served here",
        ),
        (
            ("lever", URL, "--run", "r"),
            "--run with a URL: say --label as well; what a server calls itself must not speak for a checkpoint of a run",
        ),
        (
            ("locate", URL, URL, "--profile", "8xh200", "--tensor-parallel", "2"),
            f"--tensor-parallel-size and --profile are {BY_URL} them out",
        ),
        (("locate", HERE, "--ranks", "--api-key-env", "K"), f"--api-key-env is {BY_FOLDER}; leave it out"),
        (
            ("locate", HERE, "--ranks", "--remedy", "x"),
            "--remedy is not used unless B is a checkpoint folder, whose precision could be changed; leave it out",
        ),
    ],
)
def test_options_that_a_form_does_not_use(run: Run, words: Words, said: str) -> None:
    assert one_error(run(*words)) == said
    assert list(Path().iterdir()) == [] and temporary() == []
