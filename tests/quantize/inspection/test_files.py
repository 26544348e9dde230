"""The same inspection of a folder, of the hub and of a URL; from the last two headers and small files only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from local_hub import Hub
from published import is_expert, modelopt_nvfp4, of_model, publish, put

from assay.errors import CheckpointError
from assay.records.inspection import Inspection
from assay_pipeline.comparison.inspecting import inspect

EXCLUDE = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
EXPERT = "model.layers.2.mlp.experts.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a router in a list, and with one global scale of its own."""
    published = modelopt_nvfp4(*of_model("qwen3-30b-a3b"), is_expert, EXCLUDE[:1] + EXCLUDE[2:])
    made = publish(tmp_path / "model", published)
    put(made, f"{EXPERT}.up_proj.weight_scale_2", np.array([0.1], np.float32))
    return made


class Ranges(BaseHTTPRequestHandler):
    """Ranges of the files in `root`."""

    root: Path
    honours = True
    sent = 0

    def do_GET(self) -> None:
        path = self.root / self.path.rpartition("/")[2]
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if not path.is_file() or match is None:
            self.send_error(404)
            return
        size = path.stat().st_size
        begin, end = int(match[1]), min(int(match[2]) + 1, size)
        self.send_response(206 if self.honours else 200)
        self.send_header("content-range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("content-length", str(end - begin))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(begin)
            self.wfile.write(file.read(end - begin))
        type(self).sent += end - begin

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    Ranges.root, Ranges.honours, Ranges.sent = folder, True, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/org/model"
    server.shutdown()
    server.server_close()


def defects(result: Inspection) -> list[str]:
    return [finding.defect for finding in result.findings]


def test_a_folder_is_read_with_its_scales(folder: Path) -> None:
    result = inspect(str(folder))
    assert defects(result) == ["plain_not_listed", "global_scales_differ"]
    assert [(f.severity, f.num_places) for f in result.findings] == [("fails", 4), ("wrong", 1)]
    (place,) = result.findings[1].places
    assert (place.where, place.what) == (f"{EXPERT}.gate_up_proj", "weight_scale_2: gate_proj 1, up_proj 0.1, 10 times")
    assert defects(inspect(str(folder), headers_only=True)) == ["plain_not_listed"]


def test_of_a_url_headers_come_first_and_weights_only_if_asked(url: str, folder: Path) -> None:
    result = inspect(url)
    assert defects(result) == ["plain_not_listed"]
    assert result.facts == inspect(str(folder)).facts
    assert "files that the index does not name: the server lists none" in result.not_checked
    assert Ranges.sent < 13_000_000 < sum(path.stat().st_size for path in folder.iterdir())  # the tokenizer is most of it
    Ranges.honours = False
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        inspect(url)


def test_of_the_hub_headers_come_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(folder)
    server.is_hollow = True
    server.use(monkeypatch, tmp_path / "home")
    try:
        result = inspect("org/model")
    finally:
        server.close()
    assert (result.checkpoint, result.revision) == ("org/model", "a" * 40)
    assert defects(result) == ["plain_not_listed"]
    assert max(server.bytes_of[shard] for shard in server.bytes_of if shard.endswith(".safetensors")) <= 200_000


def test_words_that_name_no_checkpoint(tmp_path: Path) -> None:
    for words in (str(tmp_path / "nothing"), "no-such-model", str(Path(__file__))):
        with pytest.raises(CheckpointError):
            inspect(words)
    with pytest.raises(CheckpointError, match="--deep and --headers-only"):
        inspect(str(tmp_path), deep=True, headers_only=True)
