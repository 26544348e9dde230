"""Scripted servers as gateways that change what a healthy server would have answered, each in one way; for tests only.

with given("fp8=healthy", "w4a16=swapped") as servers: ...

What is changed follows from the question alone, so that every run changes the same replies.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fake_server import FakeServer, Scripted
from given_servers import GivenServers, scaled_logits

Data = dict[str, Any]
THINKING = "I read the text once more, from its beginning to its end."
PAGE = "The service is under maintenance. Please come back in an hour."


def share_of(*parts: object) -> float:
    """Between 0 and 1, the same for the same parts."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:6]) / 2**48


def question_of(body: Data) -> str:
    return str(body["messages"][-1]["content"])


def solve(question: str) -> int:
    """Of a sum or a lookup."""
    if (key := re.search(r"What is the code for the (\w+ \w+)\?", question)) is not None:
        found = re.search(rf"The code for the {key[1]} is (\d+)\.", question)
        assert found is not None
        return int(found[1])
    if (start := re.search(r"有(\d+)个", question)) is not None:
        steps = re.findall(r"然后([^。]*?)(\d+)个。", question)
        return int(start[1]) + sum(int(number) if "又" in words else -int(number) for words, number in steps)
    value = int(re.findall(r"has (\d+) ", question)[0])
    for verb, number in re.findall(r"(buys|finds|gets|gives|loses|sells) (\d+)", question):
        value += int(number) if verb in {"buys", "finds", "gets"} else -int(number)
    return value


class Gateway(FakeServer):
    """A server whose replies have ids and name its model, and what stands before it. mode: one of `CHANGES`, or `healthy`."""

    thinks = True

    def __init__(self, mode: str = "healthy", **options: Any) -> None:
        super().__init__(self._scripted, **options)
        self.mode, self._ids = mode, itertools.count()
        self._kept: dict[str, Data] = {}
        self._draws: Counter[str] = Counter()

    def _scripted(self, body: Data) -> Scripted:
        """Nine of ten are right, and always the same ones; above temperature 0 each reply is a new draw."""
        if "messages" not in body or "####" not in question_of(body):
            return Scripted("yes")  # to what is asked before a suite is
        question = question_of(body)
        is_sampled = body["temperature"] > 0 and self.mode != "cached"
        drawn = share_of("drawn", question, self._again(question) if is_sampled else "")
        right = solve(question)
        answer = right if drawn < 0.9 else right + 1 + int(20 * share_of("wrong", question, drawn))
        words = " and".join([" then I go on"] * int(1 + 12 * share_of("length", question, drawn)))
        return Scripted(f"First I look at what is asked,{words}.\n#### {answer}", reasoning=THINKING if self.thinks else None)

    def _again(self, question: str) -> int:
        """How often it was drawn before."""
        with self._lock:
            self._draws[question] += 1
            return self._draws[question]

    def _generated(self, scripted: Scripted, body: Data, ids: list[int], chat: bool) -> Data:
        if not chat or "####" not in question_of(body):
            return super()._generated(scripted, body, ids, chat)
        question = question_of(body)
        healthy = self._named(super()._generated(scripted, body, ids, chat), body)
        change = CHANGES.get(self.mode)
        return healthy if change is None else change(self, healthy, body, question)

    def _named(self, data: Data, body: Data) -> Data:
        number = next(self._ids)
        return {
            "id": f"chatcmpl-{hashlib.sha256(f'{id(self)} {number}'.encode()).hexdigest()[:32]}",
            "model": body["model"],
            **data,
        }

    def _scored(self, body: Data, ids: list[int]) -> Data:
        data = {"model": body["model"], **super()._scored(body, ids)}
        return data | {"system_fingerprint": "fp_a"} if self.mode == "configuration" else data


def _message(data: Data) -> Data:
    found: Data = data["choices"][0]["message"]
    return found


def _count(data: Data) -> None:
    """The usage of a text that was changed on purpose."""
    message, usage = _message(data), data["usage"]
    usage["completion_tokens"] = len(message["content"] or "") + len(message["reasoning"] or "")
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


# ------------------------------------------------------------------------------------------------ who answers
def _fallback(server: Gateway, data: Data, body: Data, question: str) -> Data:
    return data | {"model": "the-reference"}


def _split(server: Gateway, data: Data, body: Data, question: str) -> Data:
    return data | {"model": "the-reference"} if share_of("split", question) < 0.2 else data


def _configuration(server: Gateway, data: Data, body: Data, question: str) -> Data:
    return data | {"system_fingerprint": "fp_b"}


def _cached(server: Gateway, data: Data, body: Data, question: str) -> Data:
    return server._kept.setdefault(json.dumps(body, sort_keys=True), data)


def _forced(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """Temperature 0, whatever is asked, and an id of its own for each reply."""
    return server._kept.setdefault(question, data) | {"id": data["id"]}


def _falsy(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """`temperature or 1.0`: every reply is a draw."""
    body = {**body, "temperature": 1.0}
    return server._named(FakeServer._generated(server, server._scripted(body), body, server._prompt_ids(body), True), body)


# ------------------------------------------------------------------------------------------------ what is asked
def _trimmed(server: Gateway, data: Data, body: Data, question: str) -> Data:
    data["usage"]["prompt_tokens"] = min(data["usage"]["prompt_tokens"], 300)
    data["usage"]["total_tokens"] = data["usage"]["prompt_tokens"] + data["usage"]["completion_tokens"]
    return data


def _template(server: Gateway, data: Data, body: Data, question: str) -> Data:
    data["usage"]["prompt_tokens"] += 3
    data["usage"]["total_tokens"] += 3
    return data


def _swapped(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """Every tenth gets the whole reply to somebody else's question."""
    if share_of("swapped", question) >= 0.1:
        return data
    other = f"Tom has {len(question)} coins. Then Tom buys {ord(question[0])} more. Answer step by step, after ####."
    body = {**body, "messages": [{"role": "user", "content": other}]}
    return server._named(FakeServer._generated(server, server._scripted(body), body, server._prompt_ids(body), True), body)


# ------------------------------------------------------------------------------------------------ what comes back
def _swallowed(server: Gateway, data: Data, body: Data, question: str) -> Data:
    if share_of("swallowed", question) < 0.25:
        message = _message(data)
        message["reasoning"], message["content"] = f"{message['reasoning']}\n{message['content']}", None
    return data


def _capped(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """At 110 tokens, in half of the replies inside their thinking, with `stop`."""
    message = _message(data)
    if share_of("hard", question) < 0.5:
        message["reasoning"], message["content"] = (THINKING * 3)[:110], None
    _count(data)
    return data


def _lowered(server: Gateway, data: Data, body: Data, question: str) -> Data:
    if share_of("lowered", question) < 0.2:
        message = _message(data)
        message["reasoning"], message["content"] = message["reasoning"][:40], None
        data["choices"][0]["finish_reason"] = "length"
        _count(data)
    return data


def _stopped(server: Gateway, data: Data, body: Data, question: str) -> Data:
    if share_of("stopped", question) < 0.1:
        data["choices"][0]["stop_reason"] = "Question:"
    return data


def _miscounted(server: Gateway, data: Data, body: Data, question: str) -> Data:
    data["usage"]["completion_tokens"] = data["usage"]["total_tokens"]
    return data


def _thoughtless(server: Gateway, data: Data, body: Data, question: str) -> Data:
    _message(data)["reasoning"] = None
    _count(data)
    return data


def _page(server: Gateway, data: Data, body: Data, question: str) -> Data:
    if share_of("page", question) < 0.2:
        _message(data).update(content=PAGE, reasoning=None)
        _count(data)
    return data


def _lost(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """The last third of the answer, while its tokens are billed."""
    if share_of("lost", question) < 0.1:
        message = _message(data)
        message["content"] = message["content"][: len(message["content"]) // 3]
    return data


def _emptied(server: Gateway, data: Data, body: Data, question: str) -> Data:
    """The whole answer, while its tokens are billed."""
    if share_of("emptied", question) < 0.1:
        _message(data)["content"] = ""
    return data


CHANGES: dict[str, Callable[[Gateway, Data, Data, str], Data]] = {
    "fallback": _fallback, "split": _split, "configuration": _configuration, "cached": _cached, "forced": _forced,
    "falsy": _falsy, "trimmed": _trimmed, "template": _template, "swapped": _swapped, "swallowed": _swallowed,
    "capped": _capped, "lowered": _lowered, "stopped": _stopped, "miscounted": _miscounted, "thoughtless": _thoughtless,
    "page": _page, "lost": _lost, "emptied": _emptied,
}  # fmt: skip


@contextmanager
def given(**modes: str) -> Iterator[GivenServers]:
    """Label -> mode; no two have the same weights."""
    with ExitStack() as stack:
        made = {
            label: stack.enter_context(Gateway(mode, logits=functools.partial(scaled_logits, 1 + number / 10)))
            for number, (label, mode) in enumerate(modes.items())
        }
        yield GivenServers(dict(made))
