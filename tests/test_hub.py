"""A checkpoint on the hub: the same headers as on disk, by range requests; its weights are never sent, its token only to it.

The hub is a local one that speaks the two endpoints that are used, and sends shards from another host, as the real one does.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hollow
import pytest

from assay.errors import CheckpointError
from assay_quantize import hub
from assay_quantize.checkpoint import open_checkpoint
from assay_quantize.hub import open_hub_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `folder` as org/model: lists files, redirects shards to a storage host on another port, honours Range there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        """(host: hub or storage, path, Authorization)."""
        self.bytes_sent = 0
        self.honour_range = True
        self.failures = 0
        """How many answers are to be HTTP 503 first."""
        self._lock = threading.Lock()
        self._servers = [self._start("hub"), self._start("storage")]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def _start(self, host: str) -> ThreadingHTTPServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with outer._lock:
                    outer.requests.append((host, self.path, self.headers.get("authorization")))
                    fail = outer.failures > 0
                    outer.failures -= fail
                if fail:
                    self.send_error(503)
                elif host == "storage":
                    self._send_file(outer.folder / self.path.rpartition("/")[2])
                elif self.path == "/api/models/org/model/revision/main?blobs=true":
                    names = sorted(path.name for path in outer.folder.iterdir())
                    self._send(json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode())
                elif found := re.fullmatch(rf"/org/model/resolve/{COMMIT}/([\w.-]+)", self.path):
                    if found[1].endswith(".safetensors"):
                        self.send_response(302)
                        self.send_header("location", f"{outer.storage_url}/blobs/{found[1]}")
                        self.send_header("content-length", "0")
                        self.end_headers()
                    else:
                        self._send((outer.folder / found[1]).read_bytes())
                else:
                    self.send_error(404)

            def _send_file(self, path: Path) -> None:
                size = path.stat().st_size
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
                begin, end = (int(wanted[1]), min(size, int(wanted[2]) + 1)) if wanted else (0, size)
                if not outer.honour_range:
                    self._send(b"\0" * 1000, total=size)
                    return
                with path.open("rb") as file:
                    file.seek(begin)
                    self._send(file.read(end - begin), content_range=f"bytes {begin}-{end - 1}/{size}")

            def _send(self, data: bytes, *, content_range: str | None = None, total: int | None = None) -> None:
                self.send_response(206 if content_range else 200)
                self.send_header("content-length", str(len(data) if total is None else total))
                if content_range:
                    self.send_header("content-range", content_range)
                self.end_headers()
                self.wfile.write(data)
                with outer._lock:
                    outer.bytes_sent += len(data)

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(hollow.hollow_model(tmp_path / "model", "glm-5.2", layers=4, experts=64, shards=5))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def test_headers_from_the_hub_are_those_on_disk_and_weights_stay_there(served: Hub) -> None:
    from_hub, from_disk = open_hub_checkpoint("org/model"), open_checkpoint(served.folder)
    assert from_hub.tensors == from_disk.tensors
    assert (from_hub.shards, from_hub.files, from_hub.config) == (from_disk.shards, from_disk.files, from_disk.config)
    assert from_hub.sha256 == from_disk.sha256
    assert (from_hub.location, from_hub.folder) == ("org/model", None)
    assert sum(from_hub.shards.values()) > 10_000_000_000
    small_files = sum(path.stat().st_size for path in served.folder.glob("*.json"))
    assert served.bytes_sent < small_files + 5 * hub.FIRST_BYTES + 1000
    assert len(served.requests) == 1 + 2 + 2 * 5
    with pytest.raises(CheckpointError, match="org/model: its weights are on the hub; download it first"):
        from_hub.read("model.norm.weight")


def test_a_header_longer_than_the_first_request_takes_a_second(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_BYTES", 100)
    assert open_hub_checkpoint("org/model").tensors == open_checkpoint(served.folder).tensors
    assert len(served.requests) == 1 + 2 + 4 * 5
    headers = sum(8 + _header_bytes(path) for path in served.folder.glob("*.safetensors"))
    small_files = sum(path.stat().st_size for path in served.folder.glob("*.json"))
    listing = served.bytes_sent - headers - small_files
    assert 0 < listing < 1000, "exactly the headers were sent, not one byte of weights"


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def test_the_token_goes_to_the_hub_only(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    open_hub_checkpoint("org/model")
    assert {host: token for host, _, token in served.requests} == {"hub": "Bearer hf_secret", "storage": None}
    with pytest.raises(CheckpointError) as caught:
        open_hub_checkpoint("org/other")
    assert "hf_secret" not in str(caught.value)


def test_a_passing_failure_is_tried_again(served: Hub) -> None:
    served.failures = 2
    assert len(open_hub_checkpoint("org/model").tensors) == len(open_checkpoint(served.folder).tensors)


def test_a_hub_that_ignores_ranges_sends_no_weights(served: Hub) -> None:
    served.honour_range = False
    with pytest.raises(CheckpointError, match=r"ignores range requests; download it and give the folder"):
        open_hub_checkpoint("org/model")


def test_no_such_model(served: Hub) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_hub_checkpoint("org/other")
    assert str(caught.value) == (
        f"org/other: no such model, revision or file on {served.url} (HTTP 404); if it is private or gated, set HF_TOKEN; "
        "a local folder works too"
    )


def test_a_quantized_model_costs_two_requests(served: Hub) -> None:
    config = json.loads((served.folder / "config.json").read_text())
    (served.folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError) as caught:
        open_hub_checkpoint("org/model")
    assert str(caught.value) == (
        "org/model: is quantized already (config.json says quant_method 'awq'); a BF16, FP16, FP32 or FP8 source is needed"
    )
    assert len(served.requests) == 2


def test_a_model_without_safetensors(served: Hub) -> None:
    for path in served.folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"^org/model: has no \*\.safetensors; take a release in safetensors$"):
        open_hub_checkpoint("org/model")


def test_a_shard_that_is_not_there(served: Hub) -> None:
    next(iter(sorted(served.folder.glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"names model-00001-of-00005.safetensors, not there; complete the download"):
        open_hub_checkpoint("org/model")


def test_offline(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    url = served.url
    served.close()
    with pytest.raises(CheckpointError) as caught:
        open_hub_checkpoint("org/model")
    assert str(caught.value).startswith(f"org/model: {url} does not answer: ")
    assert str(caught.value).endswith("; give a local folder, or try again")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set; give a local folder, or unset it"):
        open_hub_checkpoint("org/model")
    assert os.environ["HF_ENDPOINT"] == url
