"""A hub on loopback that takes uploads: a real HTTP server with what `huggingface_hub` asks of the Hugging Face hub to make a
repository, send large files (git-LFS, in one piece or in parts), commit, list, and download.

What is stored is bytes: `Hub.files()` is what a reader of the repository would get. It can refuse, break off, forget, or keep
other bytes than it was sent. Repositories live in memory; `Hub.stored` survives whoever is killed meanwhile, as the real
storage does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import _http

TOKEN = "hf_" + "t" * 34
LFS_FROM_BYTES = 10_000
"""Files of this size go to the storage; the real hub begins at 10 MB, and with what .gitattributes names."""
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class Stored(NamedTuple):
    """A file of a commit. large: it lies in the storage, under `sha256`."""

    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob(self) -> str:
        """Git's hash: of a large file that of its pointer."""
        shown = f"version lfs\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode() if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(shown) + shown).hexdigest()


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        first = {".gitattributes": Stored(ATTRIBUTES, False)}
        self.commits: dict[str, dict[str, Stored]] = {"0" * 40: first}
        self.branches = {"main": "0" * 40}

    def at(self, revision: str) -> dict[str, Stored] | None:
        return self.commits.get(self.branches.get(revision, revision))


class Hub:
    """One account, `me`, which may write to me/*."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        """The storage of large files: SHA-256 -> bytes."""
        self.part_bytes: int | None = None
        """Larger files are asked for in parts of this size. None: always in one piece."""
        self.parts: dict[tuple[str, int], bytes] = {}
        self.asked: list[tuple[str, str]] = []
        """(method, path) of every request."""
        self.tokens: set[str | None] = set()
        """What was sent to the hub as Authorization."""
        self.storage_tokens: set[str | None] = set()
        """The same, to the storage, which is somebody else's."""
        self.put: Counter[str] = Counter()
        """SHA-256 -> how often bytes of it arrived whole."""
        self.refuse: dict[str, int] = {}
        """Pattern of a path -> status that it is answered with."""
        self.before_put: Callable[[str, int], None] = lambda sha256, number: None
        """Called with (SHA-256, how many came whole before) when bytes begin to arrive."""
        self.num_arriving = 0
        """Uploads to the storage that are being read, also of clients that are gone."""
        self.num_puts = 0
        """Uploads to the storage that were begun."""
        self.spoil: Callable[[str, bytes], bytes] = lambda path, content: content
        """What is sent of a file, instead of it, to whoever downloads."""
        self.metadata_error: str | None = None
        """What is wrong with the metadata of every card. None: nothing."""
        self.lose: set[str] = set()
        """Paths that a commit silently leaves out."""
        self.lock = threading.Lock()
        self._cut_from: int | None = None
        self._server = self._start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def cut_from(self, number: int | None) -> None:
        """Cut off every upload from the one of this number on, in the middle. None: none."""
        self._cut_from = number

    def files(self, repository: str = "me/model", revision: str = "main") -> dict[str, bytes]:
        """What the repository holds, without what the hub itself put there."""
        found = self.repositories[repository].at(revision)
        assert found is not None
        return {path: stored.content for path, stored in found.items() if path != ".gitattributes"}

    def environment(self, home: Path) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0",
        }  # fmt: skip

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Have `huggingface_hub` take this hub, here and in child processes; nobody waits. It reads its environment once."""
        for name, value in self.environment(home).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        close_session()

    # -------------------------------------------------------------------------------------------- storage
    def batch(self, repository: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Where each object goes; no action for what is stored already."""
        objects = []
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.stored:
                href = f"{self.url}/storage/{oid}"
                upload: dict[str, Any] = {"href": href}
                if self.part_bytes is not None and size > self.part_bytes:
                    count = -(-size // self.part_bytes)
                    parts = {str(number + 1): f"{href}/part/{number}?signature=secret" for number in range(count)}
                    upload = {"href": f"{href}/complete", "header": {"chunk_size": str(self.part_bytes), **parts}}
                answer["actions"] = {
                    "upload": upload,
                    "verify": {"href": f"{self.url}/{repository}.git/info/lfs/objects/verify"},
                }
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def commit(self, repository: Repository, branch: str, lines: bytes) -> str | None:
        """The new commit; None: it names what is not stored."""
        new = dict(repository.commits[repository.branches[branch]])
        for line in map(json.loads, lines.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                new[value["path"]] = Stored(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.stored:
                    return None
                new[value["path"]] = Stored(self.stored[value["oid"]], True)
        for path in self.lose:
            new.pop(path, None)
        oid = hashlib.sha1(lines + str(len(repository.commits)).encode()).hexdigest()
        repository.commits[oid] = new
        repository.branches[branch] = oid
        return oid

    # -------------------------------------------------------------------------------------------- server
    def _start(self) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                self._answer()

            def _answer(self) -> None:
                path, _, query = self.path.partition("?")
                with hub.lock:
                    hub.asked.append((self.command, path))
                    to = hub.storage_tokens if path.startswith("/storage/") else hub.tokens
                    to.add(self.headers["authorization"])
                refused = next((status for pattern, status in hub.refuse.items() if re.search(pattern, path)), None)
                if path.startswith("/storage/") and self.command == "PUT" and refused is None:
                    with hub.lock:
                        hub.num_arriving += 1
                    try:
                        self._take(path)
                    finally:
                        with hub.lock:
                            hub.num_arriving -= 1
                    return
                body = self._read()
                if refused is not None:
                    self._send(refused, {"error": f"no; you sent {self.headers['authorization']}"})
                elif path.startswith("/storage/"):
                    self._complete(path, json.loads(body))
                elif self.headers["authorization"] != f"Bearer {TOKEN}":
                    self._send(401, {"error": "Invalid credentials"})
                else:
                    self._as_hub(path, query, body)

            def _read(self) -> bytes:
                if "chunked" in self.headers.get("transfer-encoding", ""):
                    found = b""
                    while size := int(self.rfile.readline().strip() or b"0", 16):
                        found += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return found
                return self.rfile.read(int(self.headers.get("content-length", 0)))

            def _take(self, path: str) -> None:
                """Bytes for the storage: a whole object, or /part/N of one."""
                oid, _, part = path.removeprefix("/storage/").partition("/part/")
                with hub.lock:
                    is_cut = hub._cut_from is not None and hub.num_puts >= hub._cut_from
                    hub.num_puts += 1
                hub.before_put(oid, sum(hub.put.values()))
                if is_cut:
                    self.rfile.read(max(1, int(self.headers.get("content-length", 2)) // 2))
                    self.close_connection = True
                    self.connection.close()
                    return
                content = self._read()
                with hub.lock:
                    if part:
                        hub.parts[oid, int(part)] = content
                    elif hashlib.sha256(content).hexdigest() != oid:
                        self._send(400, {"error": "not the bytes that were announced"})
                        return
                    else:
                        hub.stored[oid] = content
                        hub.put[oid] += 1
                self._send(200, {}, etag=f'"{hashlib.md5(content).hexdigest()}"')

            def _complete(self, path: str, asked: dict[str, Any]) -> None:
                oid = path.removeprefix("/storage/").removesuffix("/complete")
                content = b"".join(hub.parts.pop((oid, number)) for number in range(len(asked["parts"])))
                if hashlib.sha256(content).hexdigest() != oid:
                    self._send(400, {"error": "parts do not make the object"})
                    return
                with hub.lock:
                    hub.stored[oid] = content
                    hub.put[oid] += 1
                self._send(200, {})

            def _as_hub(self, path: str, query: str, body: bytes) -> None:
                if path == "/api/repos/create":
                    self._create(json.loads(body))
                elif path == "/api/validate-yaml":
                    errors = [] if hub.metadata_error is None else [{"message": hub.metadata_error}]
                    self._send(400 if errors else 200, {"errors": errors, "warnings": []})
                elif found := re.fullmatch(r"/((?:datasets/)?\w+/[\w.-]+)\.git/info/lfs/objects/(batch|verify)", path):
                    asked = json.loads(body)
                    done = hub.batch(found[1], asked) if found[2] == "batch" else {}
                    self._send(200, done, kind="application/vnd.git-lfs+json")
                elif found := re.fullmatch(r"/((?:datasets/)?\w+/[\w.-]+)/resolve/(\w+)/(.+)", path):
                    self._resolve(hub.repositories.get(found[1]), found[2], unquote(found[3]))
                elif found := re.fullmatch(r"/api/(models|datasets)/(\w+/[\w.-]+)(?:/(\w+)(?:/([^/]+)(/.*)?)?)?", path):
                    name = found[2] if found[1] == "models" else f"datasets/{found[2]}"
                    self._about(name, found[3], unquote(found[4] or ""), body, parse_qs(query))
                else:
                    self._send(404, {"error": path})

            def _create(self, asked: dict[str, Any]) -> None:
                name = f"{asked['organization'] or 'me'}/{asked['name']}"
                if not name.startswith("me/"):
                    self._send(403, {"error": "You don't have the rights to create a model under this namespace"})
                    return
                name = f"datasets/{name}" if asked.get("type") == "dataset" else name
                status = 409 if name in hub.repositories else 200
                hub.repositories.setdefault(
                    name, Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
                )
                self._send(status, {"url": f"{hub.url}/{name}"})

            def _about(self, name: str, what: str | None, revision: str, body: bytes, query: dict[str, list[str]]) -> None:
                repository = hub.repositories.get(name)
                if repository is None:
                    self._send(404, {"error": "Repository not found"}, x_error_code="RepoNotFound")
                elif what in (None, "revision"):
                    sha = repository.branches.get(revision or "main", revision)
                    self._send(200, {"id": name, "private": repository.private, "sha": sha, "siblings": []})
                elif what == "branch":
                    status = 409 if revision in repository.branches else 200
                    repository.branches.setdefault(revision, repository.branches["main"])
                    self._send(status, {})
                elif repository.at(revision) is None:
                    self._send(404, {"error": "Invalid rev id"}, x_error_code="RevisionNotFound")
                elif what == "preupload":
                    self._send(200, {"files": [self._mode(repository, revision, one) for one in json.loads(body)["files"]]})
                elif what == "tree":
                    self._send(200, [self._entry(path, one) for path, one in sorted((repository.at(revision) or {}).items())])
                elif what == "commit":
                    oid = hub.commit(repository, revision, body)
                    if oid is None:
                        self._send(400, {"error": "a large file is not stored"})
                    else:
                        self._send(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})
                else:
                    self._send(404, {"error": what})

            def _mode(self, repository: Repository, revision: str, one: dict[str, Any]) -> dict[str, Any]:
                large = one["size"] >= LFS_FROM_BYTES or one["path"].endswith(".safetensors")
                there = (repository.at(revision) or {}).get(one["path"])
                mode = {"path": one["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                return mode | ({"oid": there.sha256 if there.large else there.blob} if there else {})

            def _entry(self, path: str, one: Stored) -> dict[str, Any]:
                found: dict[str, Any] = {"type": "file", "path": path, "size": len(one.content), "oid": one.blob}
                if one.large:
                    found["lfs"] = {"oid": one.sha256, "size": len(one.content), "pointerSize": 134}
                return found

            def _resolve(self, repository: Repository | None, revision: str, path: str) -> None:
                there = (repository.at(revision) or {}).get(path) if repository is not None else None
                if there is None:
                    self._send(404, {"error": "Entry not found"}, x_error_code="EntryNotFound")
                    return
                content = hub.spoil(path, there.content)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
                if wanted:
                    content = content[int(wanted[1]) : int(wanted[2]) + 1]
                self._send(206 if wanted else 200, content)

            def _send(self, status: int, data: Any, *, kind: str = "application/json", **headers: str) -> None:
                content = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None: ...

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | ValueError | OSError):  # clients that are killed, or cut off
            super().handle_error(request, client_address)
