#!/usr/bin/env python3
"""Ask a server the requests of a failure again and say which of them fail: python reproduce.py [URL] [--passes N]

Needs Python 3.10 and nothing else. requests.json beside it holds the requests and, of each, what was expected and what was
seen; server.sh starts the server they failed on. Exit 1: it failed again. 0: it did not. 2: the server could not be asked.
A server with a key: export it as VLLM_API_KEY, which vLLM reads too, or name its variable with --api-key-env.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIE_NATS = 1e-5
RECOMPUTED_NATS = 0.5
STAGGER_S = 0.002
MOST_REPLY_BYTES = 2**28
WRONG_SHAPE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


class CannotBeAsked(Exception):
    """The server wants a key, or another one."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another server must not get the key."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Server:
    def __init__(self, url: str, key: str) -> None:
        """key: sent as a bearer token; empty: none is. It is in no message."""
        self.url, self.key = url.rstrip("/").removesuffix("/v1"), key
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply as JSON; {"error": ...} of one that is none. OSError: nobody answers."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)
        try:
            with opener.open(request, timeout=600) as response:
                answer = json.loads(response.read(MOST_REPLY_BYTES))
                return answer if isinstance(answer, dict) else {"error": "the reply is no JSON object"}
        except urllib.error.HTTPError as error:
            message = self.hide(error.read(300).decode(errors="replace"))
            if error.code in {401, 403}:
                raise CannotBeAsked(f"HTTP {error.code}: {message}; its key belongs into VLLM_API_KEY") from None
            return {"error": f"HTTP {error.code}: {message}"}
        except (ValueError, RecursionError, http.client.HTTPException) as error:
            return {"error": self.hide(f"{type(error).__name__}: {str(error)[:300]}")}

    def hide(self, text: str) -> str:
        return text.replace(self.key, "[hidden]") if self.key else text


def rows_of(choice: dict[str, Any]) -> list[tuple[str, float, str, float]]:
    """Of every generated token: (token, log-probability, most likely token, its log-probability)."""
    logprobs = choice.get("logprobs") or {}
    rows = []
    for row in logprobs.get("content") or []:
        best = max(row["top_logprobs"], key=lambda candidate: candidate["logprob"], default=row)
        rows.append((row["token"], number(row["logprob"]), best["token"], number(best["logprob"])))
    if rows:
        return rows
    columns = (logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=False):
        best = max(top, key=top.get) if top else token
        rows.append((token, number(logprob), best, number(top[best] if top else logprob)))
    return rows


def number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def tokens_of(choice: dict[str, Any]) -> list[Any]:
    """Ids if the server tells them, else its tokens, else its text."""
    message = choice.get("message") or {}
    text = (message.get("reasoning") or "") + (message.get("content") or "") + (choice.get("text") or "")
    return choice.get("token_ids") or [row[0] for row in rows_of(choice)] or list(text)


def recomputed(server: Server, model: str, answer: dict[str, Any]) -> list[float]:
    """Log-probabilities of the reply's tokens from one pass over prompt and reply (vLLM); empty: not to be had."""
    choice = answer["choices"][0]
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    reply = choice.get("token_ids")
    if not prompt or not reply:
        return []
    body = {"model": model, "prompt": prompt + reply, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    scored = server.post("/v1/completions", body)
    if "choices" not in scored:
        return []
    rows = scored["choices"][0].get("prompt_logprobs") or []
    return [row[str(token)]["logprob"] for row, token in zip(rows[len(prompt) :], reply, strict=False)]


def judge(server: Server, model: str, request: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """What is wrong with a reply; None: nothing."""
    try:
        return wrong_in(server, model, request, answer)
    except WRONG_SHAPE as error:
        return f"the reply is not what the API promises: {type(error).__name__}: {str(error)[:300]}"


def wrong_in(server: Server, model: str, request: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if "choices" not in answer:
        return f"no reply: {answer.get('error')}"
    choice = answer["choices"][0]
    expected = request.get("expected")
    if expected is not None:
        tokens = tokens_of(choice)
        at = next(
            (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected))
        )
        if at < len(expected):
            return f"token {at} is {tokens[at] if at < len(tokens) else 'missing'}, expected {expected[at]}"
    scores = recomputed(server, model, answer)
    for at, (token, logprob, best, best_logprob) in enumerate(rows_of(choice)):
        if math.isnan(logprob):
            return f"log-probability of token {at} is not a number"
        if token != best and best_logprob - logprob > TIE_NATS:
            return f"token {at} is {token!r}, the most likely is {best!r}"
        if at < len(scores) and abs(scores[at] - logprob) > RECOMPUTED_NATS:
            return f"token {at} has log-probability {logprob:.3f}, recomputed {scores[at]:.3f}"
    return None


def ask_all(server: Server, bundle: dict[str, Any], model: str) -> list[str | None]:
    """All requests at once, in order, as they were sent when they failed."""
    requests, concurrency = bundle["requests"], bundle["concurrency"]
    answers: list[dict[str, Any]] = [{} for _ in requests]
    turn = threading.Semaphore(concurrency)

    def ask(index: int) -> None:
        with turn:
            answers[index] = server.post(requests[index]["path"], {"model": model, **requests[index]["body"]})

    with ThreadPoolExecutor(concurrency) as pool:
        jobs = []
        for index in range(len(requests)):
            jobs.append(pool.submit(ask, index))
            time.sleep(STAGGER_S)
        for job in jobs:
            job.result()
    return [judge(server, model, request, answer) for request, answer in zip(requests, answers, strict=True)]


def visible(text: str) -> str:
    """One line without control codes: replies, error messages and requests.json are somebody else's words."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def main() -> int:
    folder = Path(__file__).resolve().parent
    bundle = json.loads((folder / "requests.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Ask the requests of a failure again; exit 1 if it fails again.")
    parser.add_argument("url", nargs="?", default=bundle["base_url"], help="without /v1 (default: that in requests.json)")
    parser.add_argument("--model", default=bundle["model"], help="its name there (default: that in requests.json)")
    parser.add_argument(
        "--passes", type=int, default=bundle["passes"], help="how often to ask at most, until it fails (default: %(default)s)"
    )
    parser.add_argument("--api-key-env", default="VLLM_API_KEY", help="variable with its key (default: %(default)s)")
    arguments = parser.parse_args()
    server = Server(arguments.url, os.environ.get(arguments.api_key_env, ""))
    failed = asked = 0
    try:
        for number_of_pass in range(arguments.passes):
            asked += len(bundle["requests"])
            for request, wrong in zip(bundle["requests"], ask_all(server, bundle, arguments.model), strict=True):
                if wrong is not None:
                    failed += 1
                    print(visible(f"pass {number_of_pass + 1}: {request['id']}: {wrong} (seen before: {request['seen']})"))
            if failed:  # one that fails now and then, in batches that a busy machine seldom makes, gets more chances
                break
    except (CannotBeAsked, OSError) as error:
        print(visible(f"{server.url}: cannot be asked ({error}); start the server with server.sh"), file=sys.stderr)
        return 2
    print(f"{failed} of {asked} requests failed: {'reproduced' if failed else 'not reproduced'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
