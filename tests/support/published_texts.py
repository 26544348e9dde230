"""RULER's texts in the formats of the published files, small, with their pins; and a server on loopback that has them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

from assay_evaluate.tasks.published.pins import PINS, PinnedFile, SourceName

SQUAD = {
    "version": "v2.0",
    "data": [
        {"title": "Rivers", "paragraphs": [
            {"context": "The Elbe is long. It flows north.", "qas": [
                {"question": "Where to does the Elbe flow?", "id": "1", "is_impossible": False,
                 "answers": [{"text": "north", "answer_start": 27}, {"text": "north", "answer_start": 27}]},
                {"question": "Why?", "id": "2", "is_impossible": True, "answers": []},
            ]},
            {"context": "The Oder has many arms.", "qas": []},
        ]},
        {"title": "Hills", "paragraphs": [
            {"context": "Hills are low. Sheep like them.", "qas": [
                {"question": "How high are hills?", "id": "3", "is_impossible": False, "answers": [{"text": "low"}]}]},
        ]},
    ],
}  # fmt: skip
HOTPOTQA = [
    {
        "_id": "1", "question": "Which is older, Ash or Elm?", "answer": "Ash", "type": "comparison", "level": "hard",
        "supporting_facts": [["Ash", 0], ["Elm", 0]],
        "context": [["Oak", ["Oak is a tree."]], ["Ash", ["Ash is old.", " It is a town."]], ["Elm", ["Elm is new."]]],
    },
    {
        "_id": "2", "question": "Is Fir green?", "answer": "yes", "type": "bridge", "level": "easy",
        "supporting_facts": [["Fir", 0]], "context": [["Fir", ["Fir is green."]], ["Yew", ["Yew is dark."]]],
    },
]  # fmt: skip
ESSAYS = {"a.txt": "The harbour was quiet at dawn.\n\nBoats came in with the tide.", "b.txt": "  Nobody spoke of it.\n"}
FILES: dict[SourceName, dict[str, bytes]] = {
    "essays": {name: text.encode() for name, text in ESSAYS.items()},
    "squad": {"dev-v2.0.json": json.dumps(SQUAD).encode()},
    "hotpotqa": {"hotpot_dev_distractor_v1.json": json.dumps(HOTPOTQA).encode()},
}


class TextServer:
    """Has all FILES below `/`; says 404 for those in `gone`; `/moved/NAME` redirects."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.asked: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append(f"{self.command} {self.path}")
                if self.path.startswith("/moved/"):
                    self.answer(302, b"", {"location": self.path.removeprefix("/moved")})
                    return
                name = self.path.removeprefix("/")
                body = next((files[name] for files in FILES.values() if name in files), None)
                self.answer(404, b"no") if body is None or name in owner.gone else self.answer(200, body)

            do_HEAD = do_GET

            def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"content-length": str(len(body)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[TextServer]:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield self
        self._server.shutdown()
        self._server.server_close()


def pin(name: str, data: bytes, *urls: str) -> PinnedFile:
    return PinnedFile(name, len(data), hashlib.sha256(data).hexdigest(), urls)


def pin_small_texts(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The small files in the place of the published ones, at `url`."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for source, files in FILES.items():
        pins = tuple(pin(name, data, f"{url}/{name}") for name, data in files.items())
        monkeypatch.setitem(PINS, source, pins)  # type: ignore[arg-type]
