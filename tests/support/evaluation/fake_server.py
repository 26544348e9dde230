"""A small OpenAI-compatible server on the loopback, with scriptable replies; real HTTP, real threads, no model.

    with FakeServer(reply=lambda body: Scripted("#### 7")) as server:
        ...  server.base_url, server.requests, server.count(path)

"Tokens" are characters: prompt_tokens of a chat is its text's length plus 5 for a template. Log-probabilities come from
`logits(last_id)`, so that two servers with different functions diverge by a known amount.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import numpy as np

from assay.errors import ServeError
from assay.records.serving import Fingerprint

TEMPLATE_TOKENS = 5
KNOWN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize"})
VOCABULARY = 128


@dataclass(frozen=True)
class Scripted:
    """One reply. `status` other than 200 is an error with `text` as its message; `drop` closes the connection unanswered."""

    text: str | None = ""
    reasoning: str | None = None
    finish_reason: str = "stop"
    output_tokens: int | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    speculation: tuple[int, int, int] | None = None
    """(drafts, draft tokens, accepted tokens)."""
    status: int = 200
    drop: bool = False
    delay_s: float = 0.0


def plain_logits(last: int) -> list[float]:
    """Next-token logits: a fixed function of the id before."""
    return [math.sin(0.7 * token + 1.3 * last) * 2 for token in range(VOCABULARY)]


class FakeServer:
    """Satisfies `assay_evaluate.client.client.Endpoint`; `die()` makes it a dead server."""

    model = "model"
    version = "0"
    headers: Mapping[str, str] = {}
    """What every request must carry; 401 without it."""
    system_fingerprint: str | None = None
    fingerprint: Fingerprint | None = None
    """Set by tests that hand this out as a `serve.Server`."""

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Scripted] = lambda body: Scripted("#### 7"),
        *,
        logits: Callable[[int], list[float]] = plain_logits,
        max_model_len: int | None = 4096,
        chat_template: bool = True,
        tokenize: bool = True,
        token_ids: bool = True,
        generate: frozenset[str] = frozenset(),
        port: int = 0,
    ) -> None:
        """generate: what /inference/v1/generate offers: `plain`, `packed` (assay's plugin), `exact` (given ids); none: 403."""
        self.reply, self.logits, self.max_model_len = reply, logits, max_model_len
        self.chat_template, self.tokenize, self.token_ids = chat_template, tokenize, token_ids
        self.generate = generate
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self._predictions: dict[int, tuple[list[float], list[int]]] = {}
        self._at_once = 0
        self._lock = threading.Lock()
        self._dead = False
        self._server = _Server(("127.0.0.1", port), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def die(self) -> None:
        """From now on connections are closed unanswered and `check_alive` raises."""
        self._dead = True

    def check_alive(self) -> None:
        if self._dead:
            raise ServeError("vLLM ended with code -9; last lines of its log: | RuntimeError: Engine core died")

    def metrics(self) -> dict[str, float]:
        """Nothing is counted: acceptance comes with the replies."""
        return {}

    def count(self, path: str) -> int:
        """Requests received on `path`."""
        return sum(seen == path for seen, _ in self.requests)

    def wrote(self, path: str, body: dict[str, Any]) -> None:
        """A reply has been handed to the network; nothing to do here."""

    def tell(self, path: str) -> tuple[int, dict[str, Any]]:
        """What vLLM says of itself."""
        model = {"id": self.model, "max_model_len": self.max_model_len}
        known = {"/health": {}, "/version": {"version": self.version}, "/v1/models": {"data": [model]}}
        return (200, known[path]) if path in known else (404, {"error": {"message": "Not Found"}})

    # ---------------------------------------------------------------------------------------- answering
    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        with self._lock:
            self.requests.append((path, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return None if self._dead else self._answer(path, body)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        if path == "/pooling":
            return 200, self._hidden_states(body)
        if path == "/inference/v1/generate":
            return self._token_scores(body)
        chat = "messages" in body
        if path not in KNOWN_PATHS:
            return 404, {"error": {"message": "Not Found"}}
        if path == "/tokenize" and not self.tokenize:
            return 404, {"error": {"message": "Not Found"}}
        if chat and not self.chat_template:
            return 400, {"error": {"message": "default chat template is no longer allowed"}}
        ids = self._prompt_ids(body)
        if path == "/tokenize":
            return 200, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
        if self.max_model_len is not None and len(ids) >= self.max_model_len:
            return 400, {"error": {"message": f"maximum context length is {self.max_model_len} tokens"}}
        if "prompt_logprobs" in body:
            return 200, self._scored(body, ids)
        scripted = self.reply(body)
        time.sleep(scripted.delay_s)
        if scripted.drop or self._dead:
            return None
        if scripted.status != 200:
            return scripted.status, {"error": {"message": scripted.text, "code": scripted.status}}
        return 200, self._generated(scripted, body, ids, chat)

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        if isinstance(body.get("prompt"), list):
            return list(body["prompt"])
        text = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"])
        return [1] * (TEMPLATE_TOKENS if "messages" in body else 0) + [ord(letter) % VOCABULARY for letter in text]

    def _generated(self, scripted: Scripted, body: dict[str, Any], ids: list[int], chat: bool) -> dict[str, Any]:
        whole = (scripted.reasoning or "") + (scripted.text or "")
        num_tokens = len(whole) if scripted.output_tokens is None else scripted.output_tokens
        reply_ids = [ord(letter) % VOCABULARY for letter in whole]
        choice: dict[str, Any] = {"index": 0, "finish_reason": scripted.finish_reason}
        if chat:
            choice["message"] = {
                "role": "assistant", "content": scripted.text, "reasoning": scripted.reasoning,
                "tool_calls": list(scripted.tool_calls),
            }  # fmt: skip
        else:
            choice["text"] = scripted.text
        data: dict[str, Any] = {"choices": [choice]}
        if self.system_fingerprint is not None:
            data["system_fingerprint"] = self.system_fingerprint
        data["usage"] = {"prompt_tokens": len(ids), "completion_tokens": num_tokens, "total_tokens": len(ids) + num_tokens}
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"] = reply_ids
            (data if chat else choice)["prompt_token_ids"] = ids
        if scripted.speculation is not None:
            drafts, drafted, accepted = scripted.speculation
            data["metrics"] = {
                "speculative_decoding": {
                    "num_spec_steps": drafts, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
                }
            }  # fmt: skip
        return data

    def _predict(self, before: int) -> tuple[list[float], list[int]]:
        """Log-probabilities after `before`, and ids from most to least likely."""
        if before not in self._predictions:
            logits = self.logits(before)
            total = math.log(sum(math.exp(x) for x in logits))
            logprobs = [x - total for x in logits]
            self._predictions[before] = (logprobs, sorted(range(VOCABULARY), key=lambda token: -logits[token]))
        return self._predictions[before]

    def _scored(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        rows: list[dict[str, Any] | None] = [None]
        for before, token in itertools.pairwise(ids):
            logprobs, ranked = self._predict(before)
            kept = [other for other in ranked[: body["prompt_logprobs"]] if other != token]
            rows.append(
                {str(t): {"logprob": logprobs[t], "rank": ranked.index(t) + 1, "decoded_token": "x"} for t in (token, *kept)}
            )
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": rows}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}

    # ---------------------------------------------------------------------------------------- vLLM's own endpoints
    def _hidden_states(self, body: dict[str, Any]) -> bytes:
        """One-hot in the id: an output matrix with the logits after every id in its columns makes the same distributions."""
        assert (body["encoding_format"], body["embed_dtype"], body["use_activation"]) == ("bytes_only", "float32", False)
        return np.eye(VOCABULARY, dtype="<f4")[body["input"]].tobytes()

    def _token_scores(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """/inference/v1/generate as vLLM 0.32 has it, with assay's plugin or without."""
        ids, how = body["token_ids"], body["sampling_params"]
        if not self.generate:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        if "prompt_logprob_token_ids" in how and "exact" not in self.generate:
            return 400, {"error": {"message": "prompt_logprob_token_ids requires the V2 model runner"}}
        scored = self._scored({"prompt_logprobs": how["prompt_logprobs"]}, ids)
        data = {"choices": [{"index": 0, "finish_reason": "length", "token_ids": [1]}], "usage": scored["usage"]}
        rows = scored["choices"][0]["prompt_logprobs"]
        packed: np.ndarray | None = None
        if "prompt_logprob_token_ids" in how:
            wanted = np.asarray(how["prompt_logprob_token_ids"])
            first = how.get("prompt_logprob_start", 0)
            table = np.array([self._predict(before)[0] for before in ids[first:-1]], "<f4")
            packed = np.take_along_axis(table, wanted, axis=1)
        elif how.get("flat_logprobs") and "packed" in self.generate:
            packed = self._packed(ids, how["prompt_logprobs"])
            rows = None
        if packed is not None:
            with io.BytesIO() as buffer:
                np.save(buffer, packed)
                data["prompt_token_id_logprobs"] = base64.b64encode(buffer.getvalue()).decode()
        return 200, data | {"prompt_logprobs": rows}

    def _packed(self, ids: list[int], k: int) -> np.ndarray:
        """[tokens - 1, 2, k + 1]: the id that stands there first, then the k likeliest."""
        rows = []
        for before, token in itertools.pairwise(ids):
            logprobs, ranked = self._predict(before)
            which = [token, *ranked[:k]]
            rows.append([which, [logprobs[i] for i in which]])
        return np.array(rows, "<f4")


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # five, the default, makes the sixth of several connections at once wait for a second


def _handler_of(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the body waits 40 ms for the client to acknowledge the headers

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.has_key():
                return
            answered = server.answer(self.path, body)
            if answered is None:
                self.close_connection = True
                return
            self.send(*answered)
            server.wrote(self.path, body)

        def do_GET(self) -> None:
            if self.has_key():
                self.send(*server.tell(self.path))

        def has_key(self) -> bool:
            has = all(self.headers[name] == value for name, value in server.headers.items())
            if not has:
                self.send(401, {"error": "Unauthorized"})
            return has

        def send(self, status: int, data: dict[str, Any] | bytes) -> None:
            payload = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            kind = "application/octet-stream" if isinstance(data, bytes) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
