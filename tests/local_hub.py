"""A hub on loopback: a real HTTP server with the endpoints that are used; it can be busy, cut connections, send wrong bytes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from assay_quantize import hub_download


class Hub:
    """Serves `folder` as org/model; shards come from a second port, as the real hub's storage is another host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = "a" * 40
        self.bytes_of: Counter[str] = Counter()
        """Bytes sent of each file."""
        self.answers_503 = 0
        self.cuts: list[int] = []
        """After how many bytes the next answers with a shard's data break off."""
        self.spoil = 0
        """How many answers with a shard's data carry a wrong byte."""
        self.on_data: Any = None
        """Called with (file, begin) before a shard's data is sent."""
        self.states_hashes = True
        self._lock = threading.Lock()
        self._servers = [self._start(False), self._start(True)]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def listing(self, with_blobs: bool) -> bytes:
        siblings = []
        for path in sorted(self.folder.iterdir()):
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            one: dict[str, Any] = {"rfilename": path.name}
            if with_blobs:
                one |= {"size": path.stat().st_size, "blobId": sha256[:40]}
                if path.suffix == ".safetensors" and self.states_hashes:
                    one["lfs"] = {"sha256": sha256, "size": path.stat().st_size, "pointerSize": 134}
            siblings.append(one)
        siblings.append({"rfilename": "onnx/model.onnx"})
        return json.dumps({"sha": self.commit, "siblings": siblings}).encode()

    def _start(self, is_storage: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with hub._lock:
                    fail = hub.answers_503 > 0
                    hub.answers_503 -= fail
                path, _, query = self.path.partition("?")
                if fail:
                    self._send(503, b"busy")
                elif path in ("/api/models/org/model/revision/main", f"/api/models/org/model/revision/{hub.commit}"):
                    self._send(200, hub.listing(query == "blobs=true"))
                elif found := re.fullmatch(rf"/org/model/resolve/{hub.commit}/([\w.-]+)", path):
                    if found[1].endswith(".safetensors"):
                        self._send(302, b"", location=f"{hub.storage_url}/blobs/{found[1]}")
                    else:
                        self._send(200, (hub.folder / found[1]).read_bytes())
                elif is_storage:
                    self._send_shard(hub.folder / path.rpartition("/")[2])
                else:
                    self._send(404, b"")

            def _send_shard(self, path: Path) -> None:
                size = path.stat().st_size
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
                assert wanted is not None
                begin, end = int(wanted[1]), min(size, int(wanted[2]) + 1)
                data = path.read_bytes()[begin:end]
                is_data = begin > 0 or end - begin > hub_download.FIRST_BYTES
                if is_data and hub.on_data is not None:
                    hub.on_data(path.name, begin)
                with hub._lock:
                    if is_data and hub.spoil:
                        hub.spoil -= 1
                        data = bytes([data[0] ^ 1]) + data[1:]
                    cut = hub.cuts.pop() if is_data and hub.cuts else None
                    hub.bytes_of[path.name] += len(data) if cut is None else min(cut, len(data))
                self._send(206, data, cut=cut, content_range=f"bytes {begin}-{end - 1}/{size}")

            def _send(self, status: int, data: bytes, cut: int | None = None, **headers: str) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if cut is None:
                    self.wfile.write(data)
                else:
                    self.wfile.write(data[:cut])
                    self.close_connection = True

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
