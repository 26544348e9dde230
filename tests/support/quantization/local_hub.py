"""A hub on loopback: real HTTP servers with what `huggingface_hub` asks; it can be busy, cut connections, send wrong bytes.

Shards come from another address, as the real hub's storage is another host: 127.0.0.2, because `huggingface_hub` takes another
port of the same host for the same party.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from huggingface_hub import close_session, constants, file_download
from huggingface_hub.utils import _http

from assay_quantize.checkpoint import hub
from assay_quantize.remote import hub_download

FIRST_BYTES = hub.FIRST_BYTES
ADDRESSES = {"hub": "127.0.0.1", "storage": "127.0.0.2"}
TOKEN = "hf_the_right_one"


class Asked(NamedTuple):
    """A request. host: `hub` or `storage`. token: what was sent as Authorization."""

    host: str
    method: str
    path: str
    token: str | None


class Hub:
    """Serves `folder` as the model org/model, and as the data set of that name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = "a" * 40
        self.asked: list[Asked] = []
        self.bytes_of: Counter[str] = Counter()
        """Bytes sent of each file."""
        self.answers_503 = 0
        self.cuts: list[int] = []
        """After how many bytes the next answers with a shard's data break off."""
        self.spoil = 0
        """How many answers with a shard's data carry a wrong byte."""
        self.replaced: dict[str, bytes] = {}
        """What is sent instead of a file; what is stated of it stays."""
        self.on_data: Any = None
        """Called with (file, begin) before a shard's data is sent."""
        self.states_hashes = True
        self.is_hollow = False
        """Shards of gigabytes that are not there: some hash is stated, nobody computes it."""
        self.is_gated = False
        self.honours_ranges = True
        self.listing: bytes | None = None
        """Sent as the list of files, if not the true one."""
        self.etag: str | None = None
        """Stated of small files, if not the true one."""
        self.commit_of_files: str | None = None
        """Stated with small files, if not the true one."""
        self.endless_pages = False
        """The list of a whole download says that there is one more page, each time."""
        self.drips_s: float | None = None
        """Seconds between two letters of the list of files."""
        self.xet_hashes: dict[str, str] = {}
        """File -> its hash in Xet's storage at `xet_endpoint`."""
        self.xet_endpoint = ""
        self._lock = threading.Lock()
        self._servers = {host: self._start(host) for host in ADDRESSES}
        self.url, self.storage_url = (f"http://{ADDRESSES[host]}:{self._servers[host].server_port}" for host in ADDRESSES)

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Have `huggingface_hub` take this hub, here and in child processes, with `home` as its HF_HOME; nobody waits.

        It reads its environment once, when it is imported.
        """
        monkeypatch.setenv("HF_ENDPOINT", self.url)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setenv("NO_PROXY", ",".join(ADDRESSES.values()))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        no_waiting = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
        monkeypatch.setattr(_http, "time", no_waiting)
        monkeypatch.setattr(file_download, "time", no_waiting)
        monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.001)
        monkeypatch.setattr(hub_download, "ROUND_WAIT_S", 0.001)

    def tokens(self) -> dict[str, set[str | None]]:
        """Host -> all that was sent to it as Authorization."""
        return {host: {asked.token for asked in self.asked if asked.host == host} for host in ADDRESSES}

    def close(self) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()
        close_session()

    # -------------------------------------------------------------------------------------------- what is stated
    def list_of_files(self, *, with_blobs: bool = True) -> bytes:
        siblings = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            one: dict[str, Any] = {"rfilename": path.relative_to(self.folder).as_posix()}
            if with_blobs:
                one |= {"size": path.stat().st_size, "blobId": self._blob(path)}
                if self._is_large(path) and self.states_hashes:
                    one["lfs"] = {"sha256": self.sha256_of(path), "size": path.stat().st_size, "pointerSize": 134}
            siblings.append(one)
        siblings.append({"rfilename": "onnx/model.onnx"})
        return json.dumps({"id": "org/model", "sha": self.commit, "siblings": siblings}).encode()

    def _tree(self) -> bytes:
        """The same as a whole download asks for it."""
        entries = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            one: dict[str, Any] = {"type": "file", "path": name, "size": path.stat().st_size, "oid": self._blob(path)}
            if self._is_large(path):
                one["lfs"] = {"oid": self.sha256_of(path), "size": path.stat().st_size, "pointerSize": 134}
            entries.append(one)
        return json.dumps(entries).encode()

    def _is_large(self, path: Path) -> bool:
        return path.suffix == ".safetensors"

    def sha256_of(self, path: Path) -> str:
        """What the hub states of a shard."""
        return hashlib.sha256(path.name.encode()).hexdigest() if self.is_hollow else _hashes(path, path.stat().st_mtime_ns)[0]

    def _blob(self, path: Path) -> str:
        """The hash git gives a file; of a large one the hash of what stands for it in git."""
        if self._is_large(path) and self.states_hashes:
            return hashlib.sha1(self.sha256_of(path).encode()).hexdigest()
        return _hashes(path, path.stat().st_mtime_ns)[1]

    # -------------------------------------------------------------------------------------------- servers
    def _start(self, host: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                with hub._lock:
                    hub.asked.append(Asked(host, self.command, self.path, self.headers["authorization"]))
                    fail = hub.answers_503 > 0
                    hub.answers_503 -= fail
                if fail:
                    self._send(503, b"busy")
                elif host == "storage":
                    self._send_shard(hub.folder / self.path.removeprefix("/blobs/"))
                else:
                    self._answer_as_hub(*self.path.partition("?")[::2])

            def _answer_as_hub(self, path: str, query: str) -> None:
                path = path.replace("/datasets/org/", "/org/", 1).replace("/api/org/", "/api/models/org/", 1)
                resolved = re.fullmatch(r"/org/model/resolve/(\w+)/([\w.-]+(?:/[\w.-]+)*)", path)
                if not path.startswith(("/org/model/", "/api/models/org/model/")):
                    self._send(404, b"", x_error_code="RepoNotFound", x_error_message="\x1b[31mRepository\x1b[0m not found")
                elif path in ("/api/models/org/model/revision/main", f"/api/models/org/model/revision/{hub.commit}"):
                    listing = hub.list_of_files(with_blobs=query == "blobs=true")
                    self._send(200, listing if hub.listing is None else hub.listing)
                elif path == f"/api/models/org/model/tree/{hub.commit}":
                    more = {"link": f'<{hub.url}{path}?cursor=x>; rel="next"'} if hub.endless_pages else {}
                    self._send(200, hub._tree(), **more)
                elif path == f"/api/models/org/model/xet-read-token/{hub.commit}":
                    expiry = str(int(time.time()) + 3600)
                    xet = {"x_xet_cas_url": hub.xet_endpoint, "x_xet_access_token": "xet", "x_xet_token_expiration": expiry}
                    self._send(200, b"{}", **xet)
                elif resolved is None or resolved[1] != hub.commit:
                    self._send(404, b"", x_error_code="RevisionNotFound")
                elif hub.is_gated and self.headers["authorization"] != f"Bearer {TOKEN}":
                    self._send(403, b"", x_error_code="GatedRepo", x_error_message="Access to model org/model is restricted")
                elif not (hub.folder / resolved[2]).is_file():
                    self._send(404, b"", x_error_code="EntryNotFound")
                else:
                    self._send_resolved(hub.folder / resolved[2])

            def _send_resolved(self, path: Path) -> None:
                if not hub._is_large(path):
                    data = hub.replaced.get(path.name, path.read_bytes())
                    etag, commit = hub.etag or hub._blob(path), hub.commit_of_files or hub.commit
                    self._send(200, data, x_repo_commit=commit, etag=f'"{etag}"')
                    return
                num_bytes = len(hub.replaced[path.name]) if path.name in hub.replaced else path.stat().st_size
                linked = {"x_linked_size": str(num_bytes), "x_linked_etag": f'"{hub.sha256_of(path)}"'}
                if path.name in hub.xet_hashes:
                    linked["x_xet_hash"] = hub.xet_hashes[path.name]
                    linked["x_xet_refresh_route"] = f"{hub.url}/api/models/org/model/xet-read-token/{hub.commit}"
                location = f"{hub.storage_url}/blobs/{path.relative_to(hub.folder).as_posix()}?signature=secret"
                self._send(302, b"", x_repo_commit=hub.commit, location=location, **linked)

            def _send_shard(self, path: Path) -> None:
                path = path.with_name(path.name.partition("?")[0])
                size = len(hub.replaced[path.name]) if path.name in hub.replaced else path.stat().st_size
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
                if not hub.honours_ranges:
                    self._send(200, bytes(1000), length=size)
                    return
                begin = int(wanted[1]) if wanted else 0
                end = min(size, int(wanted[2]) + 1) if wanted and wanted[2] else size
                is_data = begin > 0 or end - begin > FIRST_BYTES or not wanted
                if is_data and hub.on_data is not None:
                    hub.on_data(path.name, begin)
                if path.name in hub.replaced:
                    data = hub.replaced[path.name][begin:end]
                else:
                    with path.open("rb") as file:
                        file.seek(begin)
                        data = file.read(end - begin)
                with hub._lock:
                    if is_data and hub.spoil:
                        hub.spoil -= 1
                        data = bytes([data[0] ^ 1]) + data[1:]
                    cut = hub.cuts.pop() if is_data and hub.cuts else None
                    hub.bytes_of[path.name] += len(data) if cut is None else min(cut, len(data))
                span = {"content_range": f"bytes {begin}-{end - 1}/{size}"} if wanted else {}
                self._send(206 if wanted else 200, data, cut=cut, **span)

            def _send(
                self, status: int, data: bytes, *, cut: int | None = None, length: int | None = None, **headers: str
            ) -> None:
                """cut: break off after so many bytes. length: what is said of the data's length, if not the truth."""
                self.send_response(status)
                self.send_header("content-length", str(len(data) if length is None else length))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if host == "hub":
                    with hub._lock:
                        hub.bytes_of[self.path.rpartition("/")[2]] += len(data)
                if hub.drips_s is not None and b'"siblings"' in data:
                    for letter in data:
                        self.wfile.write(bytes([letter]))
                        time.sleep(hub.drips_s)
                    return
                self.wfile.write(data if cut is None else data[:cut])
                self.close_connection = self.close_connection or cut is not None or length is not None

            def log_message(self, *args: Any) -> None: ...

        server = Server((ADDRESSES[host], 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that are killed, or heard enough
            super().handle_error(request, client_address)


@functools.lru_cache
def _hashes(path: Path, time_ns: int) -> tuple[str, str]:
    """(SHA-256, git's hash) of a file as it is at `time_ns`."""
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
