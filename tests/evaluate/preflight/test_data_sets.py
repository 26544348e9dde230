"""Data sets against a small hub on loopback: public, gated with and without a token, unknown, out of reach."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets.config
import pytest
from check_lines import check_lines
from huggingface_hub import close_session, constants

from assay.recipes.suite import SuiteRecipe
from assay_evaluate.preflight.data_sets import check_data_sets

TOKEN = "hf_the_right_one"
DATA_SETS = {"openai/gsm8k": False, "Idavidrein/gpqa": "auto"}
"""Id -> whether it is gated, as the hub says it."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/datasets/").removesuffix("/auth-check")
        known, token = DATA_SETS.get(name), self.headers["authorization"]
        if name not in DATA_SETS:
            self.answer(404, {}, "RepoNotFound")
        elif self.path.endswith("/auth-check") and known and token != f"Bearer {TOKEN}":
            self.answer(401 if token is None else 403, {}, "GatedRepo")
        else:
            self.answer(200, {"id": name, "gated": known})

    def answer(self, status: int, data: dict[str, Any], code: str | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if code is not None:
            self.send_header("x-error-code", code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    yield url
    server.shutdown()
    server.server_close()
    close_session()


@pytest.fixture
def suite(tmp_path: Path) -> SuiteRecipe:
    """Tasks of one's own, since the index of lm-eval's takes seconds; one reads a file and needs no data set of the hub."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    paths = {"ours_gsm8k": "openai/gsm8k", "ours_gpqa": "Idavidrein/gpqa", "ours_local": "json"}
    for name, path in paths.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: {path}\noutput_type: generate_until\n")
    tasks: list[dict[str, Any]] = [
        {"kind": "lm_eval", "name": name, "tasks": [name], "include_path": str(folder), "max_tokens": 64} for name in paths
    ]
    swe = {"kind": "swe", "name": "swe", "dataset": "verified", "max_tokens": 64}
    return SuiteRecipe.model_validate({"schema": 1, "name": "s", "description": "d", "seed": "eval-1", "tasks": [*tasks, swe]})


def lines(suite: SuiteRecipe) -> list[str]:
    return check_lines(check_data_sets(suite))


def test_a_gated_data_set_without_a_token(hub: str, suite: SuiteRecipe) -> None:
    assert lines(suite) == [
        "PASS data sets openai/gsm8k: needed by ours_gsm8k; public",
        "FAIL data sets Idavidrein/gpqa: needed by ours_gpqa, which could not be asked: gated, and no token is set "
        f"-> accept its terms at {hub}/datasets/Idavidrein/gpqa, then hf auth login (or set HF_TOKEN)",
        f"FAIL data sets SWE-bench/SWE-bench_Verified: needed by swe, which could not be asked: no such data set on {hub} "
        "-> if it is private, hf auth login (or set HF_TOKEN); else name another in the suite",
    ]


def test_a_token_that_is_let_in_and_one_that_is_not(
    hub: str, suite: SuiteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    gpqa = "data sets Idavidrein/gpqa: needed by ours_gpqa"
    assert lines(suite)[1] == f"PASS {gpqa}; gated, and open to the token that is set"
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    reported = lines(suite)[1]
    assert reported.startswith(f"FAIL {gpqa}, which could not be asked: gated, and the token that is set has not been let in")
    assert "hf_another" not in reported


def test_offline_only_the_cache_can_tell(hub: str, suite: SuiteRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "datasets--openai--gsm8k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = "HF_HUB_OFFLINE is set, and"
    assert lines(suite)[:2] == [
        f"PASS data sets openai/gsm8k: needed by ours_gsm8k; {offline} something of it is in {snapshot.parent}",
        f"UNKNOWN data sets Idavidrein/gpqa: needed by ours_gpqa; {offline} it is not in the cache "
        "-> look again with the hub in reach",
    ]


def test_a_hub_that_does_not_answer(hub: str, suite: SuiteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    checks = check_data_sets(suite)
    assert {check.outcome for check in checks} == {"UNKNOWN"}
    assert checks[0].detail.startswith("needed by ours_gsm8k; http://127.0.0.1:9 does not answer: ")
