"""A language model of 64 tokens behind a real HTTP server, with vLLM's extras or without any; faults can be planted.

    with StubServer() as server: ...                    # everything vLLM tells
    with StubServer(extras=False) as server: ...        # chat and text, as the plainest OpenAI-compatible server has them
    server.fault = Fault(decode=..., reply=...)

The next token is a fixed function of language, last token and position, so decoding and scoring the same ids agree exactly.
Replies end after 40 to 150 tokens, never loop, and are written in the prompt's script.
"""

from __future__ import annotations

import base64
import heapq
import io
import itertools
import json
import math
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import numpy as np

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ZERO, END, BEGIN, OTHER = 0, 1, 2, 3
LATIN = "abcdefghijklmnopqrstuvwxyz, "
HAN = "的一是不了人我在有他这为之大来以个中上们猫狗鸟马山河树花"
LETTERS = {4 + i: letter for i, letter in enumerate(LATIN + HAN)} | {ZERO: "!", OTHER: "ж"}
VOCABULARY = 4 + len(LATIN) + len(HAN)
IDS = {letter: token for token, letter in LETTERS.items()}
DRAFTED = {
    "vllm:spec_decode_num_drafts_total": "num_spec_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
}
ROWS = 997
GATHER_S = 0.4
_TABLE = np.random.default_rng(7).normal(0, 2, (ROWS, VOCABULARY))


@dataclass
class Call:
    """One generation: what a fault may look at."""

    number: int
    """Of generations, 0 first."""
    slot: int
    """The least number free among those in flight."""
    in_flight: int
    """With this one, when it came."""
    prompt_ids: list[int]
    greedy: bool


@dataclass
class Fault:
    """Changes to a healthy server."""

    decode: Callable[[Call, int, np.ndarray], np.ndarray] = lambda call, position, logits: logits
    """Logits of a decoding step, in place of the true ones; what is reported and chosen comes from them."""
    choose: Callable[[Call, int, int, np.ndarray], int] = lambda call, position, token, logits: token
    """The token that is taken, whatever is reported."""
    report: Callable[[Call, int, np.ndarray], np.ndarray] = lambda call, position, logprobs: logprobs
    """The log-probabilities that are reported."""
    accepted: Callable[[Call, int], int] = lambda call, drafts: round(drafts * 0.7)
    experts: Callable[[Call, np.ndarray], np.ndarray] = lambda call, experts: experts
    called: Callable[[Call, int], bool] = lambda call, num_tools: True
    """Whether a reply to a request with so many tools is a well-formed call."""


class Text:
    """What the next token depends on, of ids that hold one BEGIN after the prompt."""

    def __init__(self, ids: list[int], least_tokens: int) -> None:
        self.begin = ids.index(BEGIN) if BEGIN in ids else len(ids)
        is_han = any(token >= 4 + len(LATIN) for token in ids[: self.begin])
        self.mask = np.full(VOCABULARY, -30.0)
        self.mask[4 + len(LATIN) if is_han else 4 : VOCABULARY if is_han else 4 + len(LATIN)] = 0
        self.limit = least_tokens + sum(ids[: max(self.begin, 1)]) % 111

    def logits(self, last: int, length: int) -> np.ndarray:
        """[VOCABULARY], after `length` ids of which `last` is the last."""
        logits = np.asarray(_TABLE[(last * 31 + length * 17) % ROWS] + self.mask)
        logits[END] = 40.0 if length - 1 - self.begin >= self.limit else -40.0
        return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max()
    return logits - (top + math.log(np.exp(logits - top).sum()))


def encode(text: str) -> list[int]:
    """Letters of the vocabulary; others count as commas, so that lengths stay lengths."""
    return [IDS.get(letter.lower(), IDS[","]) for letter in text]


def experts_of(ids: list[int]) -> np.ndarray:
    """[tokens - 1, 2 layers, 2 experts of 8]."""
    return np.array([[[(t + layer) % 8, (t + layer + 3) % 8] for layer in range(2)] for t in ids[:-1]], np.uint8)


@dataclass
class Generated:
    ids: list[int]
    rows: list[tuple[int, np.ndarray]] = field(default_factory=list)
    finish_reason: str = "stop"


class StubServer:
    """Use as a context manager. `generations` counts replies that were begun."""

    def __init__(
        self,
        *,
        extras: bool = True,
        logprobs: bool = True,
        fault: Fault | None = None,
        drafts: bool = True,
        gather: int = 1,
        least_tokens: int = 40,
    ) -> None:
        """gather: a reply waits until so many are in flight, or nobody came for GATHER_S; least_tokens: of a reply."""
        self.gather, self.least_tokens = gather, least_tokens
        self.extras, self.logprobs, self.fault, self.drafts = extras, extras or logprobs, fault or Fault(), drafts
        self.generations = 0
        self.hung_up = 0
        self.corrupted = 0
        self.model, self.version, self.system_fingerprint = "stub", "0.32.0", "vllm-stub"
        self.key: str | None = None
        """Without it in the Authorization header everything is refused."""
        self.gateway: Callable[[dict[str, Any], tuple[int, Any]], tuple[int, Any]] = lambda body, answered: answered
        """What stands in front of it makes this of a reply."""
        self.asked: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
        """What stands in front of it makes this of a request."""
        self.breaks_off: Callable[[bytes], tuple[bytes, int]] | None = None
        """What is sent of the body of a chat reply, and the length that is announced."""
        self.detokenizes = True
        """Offers /detokenize."""
        self.detokenized: Callable[[str], str] = lambda text: text
        """What it makes of a text there."""
        self.temperature = 1.0
        """Of replies that are not greedy, whatever they ask for."""
        self.tells_drafts = True
        """With every reply; else only the counters do."""
        self.drafted: Counter[str] = Counter()
        self._free = list(range(256))
        self._in_flight = 0
        self._came = 0.0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # ------------------------------------------------------------------------------------------------ answering
    def tell(self, path: str) -> tuple[int, Any]:
        model = {"id": self.model} | ({"max_model_len": 1024} if self.extras else {})
        known: dict[str, Any] = {"/v1/models": {"data": [model]}, "/health": {}}
        if self.extras:
            known |= {"/version": {"version": self.version}}
            counted = {name: self.drafted[key] for name, key in DRAFTED.items()} if self.drafts else {}
            counted["vllm:corrupted_requests_total"] = self.corrupted
            known["/metrics"] = "".join(f'{name}{{engine="0"}} {value}\n' for name, value in counted.items())
        return (200, known[path]) if path in known else (404, {"error": {"message": "Not Found"}})

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and self.extras:
            ids = self._prompt_ids(body)
            return 200, {"count": len(ids), "tokens": ids}
        if path == "/detokenize" and self.extras and self.detokenizes:
            return 200, {"prompt": self.detokenized("".join(LETTERS.get(token, "<end>") for token in body["tokens"]))}
        if path not in (CHAT, COMPLETIONS) or (path == COMPLETIONS and not self.extras):
            return 404, {"error": {"message": "Not Found"}}
        if not self.extras and {"return_token_ids", "top_k"} & body.keys():
            return 400, {"error": {"message": "Unrecognized request argument supplied"}}
        body = self.asked(body)
        ids = self._prompt_ids(body)
        if "prompt_logprobs" in body:
            return self.gateway(body, (200, self._scored(ids, body)))
        return self.gateway(body, self._generated(path, body, ids))

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body["prompt"] if "prompt" in body else [*encode(body["messages"][-1]["content"]), BEGIN]
        ids = list(prompt) if isinstance(prompt, list) else [*encode(prompt), BEGIN]
        return [*encode("tools " * len(body["tools"])), *ids] if body.get("tools") else ids

    def _scored(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        rows: list[Any] = [None]
        text = Text(ids, self.least_tokens)
        for at, token in enumerate(ids[1:], 1):
            logprobs = log_softmax(text.logits(ids[at - 1], at))
            best = np.argsort(-logprobs, kind="stable")[: body["prompt_logprobs"]].tolist()
            rows.append({str(t): {"logprob": float(logprobs[t]), "rank": 1} for t in dict.fromkeys([token, *best])})
        choice = {"text": "", "finish_reason": "length", "prompt_logprobs": rows, "token_ids": [4], "prompt_token_ids": ids}
        return {"choices": [choice | self._experts_choice(None, [*ids, 4])]}

    def _generated(self, path: str, body: dict[str, Any], ids: list[int]) -> tuple[int, Any]:
        with self._lock:
            slot = heapq.heappop(self._free)
            self._in_flight += 1
            call = Call(self.generations, slot, self._in_flight, ids, body.get("temperature", 1) == 0)
            self.generations += 1
            self._came = time.monotonic()
        try:
            while call.in_flight + self._in_flight_since(call) < self.gather and time.monotonic() < self._came + GATHER_S:
                time.sleep(0.005)
            made = self._generate(call, body)
        finally:
            with self._lock:
                heapq.heappush(self._free, slot)
                self._in_flight -= 1
        wanted = body.get("top_logprobs") if path == CHAT else body.get("logprobs")
        if wanted and any(math.isnan(float(row[1][row[0]])) for row in made.rows):
            return 400, {"error": {"message": "Out of range float values are not JSON compliant: nan"}}
        return 200, self._reply(call, path, body, made, wanted if self.logprobs else None)

    def _in_flight_since(self, call: Call) -> int:
        """Generations begun after this one."""
        return self.generations - call.number - 1

    def _generate(self, call: Call, body: dict[str, Any]) -> Generated:
        draw = np.random.default_rng(zlib.crc32(json.dumps(call.prompt_ids).encode()))
        made, text, last = Generated([]), Text(call.prompt_ids, self.least_tokens), call.prompt_ids[-1]
        for position in range(body.get("max_tokens", 16)):
            logits = self.fault.decode(call, position, text.logits(last, len(call.prompt_ids) + position))
            if np.isnan(logits).any():
                self.corrupted += position == 0
                token, logprobs = ZERO, np.full(VOCABULARY, math.nan)
            else:
                logprobs = log_softmax(logits)
                noise = 0 if call.greedy else self.temperature * draw.gumbel(size=VOCABULARY)
                token = self.fault.choose(call, position, int(np.argmax(logits + noise)), logits)
            made.ids.append(token)
            made.rows.append((token, self.fault.report(call, position, logprobs)))
            last = token
            if token == END:
                return made
        made.finish_reason = "length"
        return made

    def _experts_choice(self, call: Call | None, ids: list[int]) -> dict[str, Any]:
        data = io.BytesIO()
        experts = experts_of(ids)
        np.save(data, experts if call is None else self.fault.experts(call, experts))
        return {"routed_experts": base64.b64encode(data.getvalue()).decode()}

    def _reply(self, call: Call, path: str, body: dict[str, Any], made: Generated, wanted: int | None) -> dict[str, Any]:
        text = "".join(LETTERS.get(token, "") for token in made.ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": made.finish_reason}
        as_ids = body.get("return_tokens_as_token_ids")

        def name(token: int) -> str:
            return f"token_id:{token}" if as_ids else LETTERS.get(token, "<end>")

        if wanted:
            rows = [(token, logprobs, np.argsort(-logprobs, kind="stable")[:wanted].tolist()) for token, logprobs in made.rows]
            if path == CHAT:
                content = []
                for t, p, top in rows:
                    others = [{"token": name(o), "logprob": float(p[o])} for o in top]
                    content.append({"token": name(t), "logprob": float(p[t]), "top_logprobs": others})
                choice["logprobs"] = {"content": content}
            else:
                choice["logprobs"] = {
                    "tokens": [name(t) for t, _, _ in rows], "token_logprobs": [float(p[t]) for t, p, _ in rows],
                    "top_logprobs": [{name(o): float(p[o]) for o in {*top, t}} for t, p, top in rows],
                }  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if tools := body.get("tools"):
            message |= self._call(call, tools)
        if path == CHAT:
            choice["message"] = message
        else:
            choice["text"] = text
        usage = {"prompt_tokens": len(call.prompt_ids), "completion_tokens": len(made.ids)}
        data: dict[str, Any] = {"choices": [choice], "usage": usage}
        if self.extras:
            if body.get("return_token_ids"):
                choice["token_ids"] = made.ids
                (data if path == CHAT else choice)["prompt_token_ids"] = call.prompt_ids
            choice |= self._experts_choice(call, [*call.prompt_ids, *made.ids])
            data["system_fingerprint"] = self.system_fingerprint
            if self.drafts:
                drafts = self._drafts(call, len(made.ids))
                with self._lock:
                    self.drafted.update(drafts)
                if self.tells_drafts:
                    data["metrics"] = {"speculative_decoding": drafts}
        return data

    def _drafts(self, call: Call, num_tokens: int) -> dict[str, int]:
        accepted = self.fault.accepted(call, max(1, num_tokens // 2))
        drafts = max(1, num_tokens - accepted)
        return {"num_spec_steps": drafts, "num_draft_tokens": drafts, "num_accepted_draft_tokens": min(accepted, drafts)}

    def _call(self, call: Call, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The first tool with the least arguments that its schema allows, or half a call in the text."""
        tool = tools[0]["function"]
        if not self.fault.called(call, len(tools)):
            return {"content": f'<tool_call>{{"name": "{tool["name"]}", "argu'}
        schema = tool["parameters"]
        arguments = {name: _example(schema["properties"][name]) for name in schema.get("required", [])}
        function = {"name": tool["name"], "arguments": json.dumps(arguments)}
        return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _example(schema: dict[str, Any]) -> Any:
    """A value of a JSON schema of the catalogue's kinds."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "array":
            return [_example(schema["items"])] * schema.get("minItems", 1)
        case "object":
            names = schema.get("required") or list(schema["properties"])[: schema.get("minProperties", 0)]
            return {name: _example(schema["properties"][name]) for name in names}
        case _:
            return _text_of(schema.get("pattern", ""))


def _text_of(pattern: str) -> str:
    """Text that matches a pattern of the catalogue's kinds."""
    known = {r"^\d{4}-\d{2}-\d{2}$": "2026-01-01", r"^\d{2}:\d{2}$": "12:00", r"^[^@\s]+@[^@\s]+$": "a@b.c", "": "x"}
    return known[pattern] if pattern in known else re.sub(r"^\^(\w+)-.*$", r"\1-0001", pattern)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _handler_of(server: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def is_let_in(self) -> bool:
            if server.key is None or self.headers.get("Authorization") == f"Bearer {server.key}":
                return True
            self.send(401, {"error": {"message": "Incorrect API key provided"}})
            return False

        def do_GET(self) -> None:
            if self.is_let_in():
                self.send(*server.tell(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.is_let_in():
                return
            status, data = server.answer(self.path, body)
            if body.get("stream") and status == 200:
                self.stream(data)
            else:
                self.send(status, data)

        def stream(self, data: dict[str, Any]) -> None:
            """One event per letter; a client that hangs up is counted."""
            choice = data["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for letter in itertools.islice(itertools.cycle(text), 100_000):  # more than buffers hold
                    self.wfile.write(f"data: {json.dumps({'text': letter})}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                server.hung_up += 1

        def send(self, status: int, data: Any) -> None:
            payload = data.encode() if isinstance(data, str) else json.dumps(data).encode()
            sent, num_announced = payload, len(payload)
            if server.breaks_off is not None and self.path == CHAT:
                sent, num_announced = server.breaks_off(payload)
                self.close_connection = len(sent) < num_announced
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(num_announced))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
