"""The same questions put to a native server and to its emulated twin: greedy replies, scores of given texts, drafts, speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.errors import MeasureError
from assay.records.preflight.gpu_check import ExactIds, Speed
from assay_evaluate.asking.acceptance import AcceptanceTally
from assay_evaluate.asking.dialect import COMPLETIONS, sampling
from assay_evaluate.client.client import Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.serving.server import Server
from assay_evaluate.tasks.items import LANGUAGES, arithmetic_item, writing_item

GENERATE = "/inference/v1/generate"
SEED = "eval-gpu-check"
NUM_ITEMS = 4
"""Stories and lists of each language, of each kind."""
TOP_K = 20
OF_LIKELIEST: dict[str, Any] = {"prompt_logprobs": TOP_K, "flat_logprobs": True}
TIMEOUT_S = 120.0
EXACT_IDS_BOUND = 0.02
"""Nats. Both numbers are the same server's, of the same prompt asked alone; a row or an id that is off by one costs nats."""

Text = tuple[int, ...]


@dataclass(frozen=True)
class Length:
    """Tokens of a greedy reply, and of a reply whose speed is taken; how many replies are under way at once."""

    reply_tokens: int = 96
    speed_tokens: int = 128
    num_together: int = 16


@dataclass(frozen=True, eq=False)
class GreedyReplies:
    """Greedy replies to the prompts, in their order, and what was drafted for them."""

    replies: tuple[tuple[TokenRow, ...], ...]
    num_drafted: int
    num_accepted: int

    def texts(self, prompts: Sequence[Text]) -> tuple[Text, ...]:
        """Prompts with the replies behind them."""
        return tuple((*prompt, *(int(row.token) for row in reply)) for prompt, reply in zip(prompts, self.replies, strict=True))


def make_prompts(client: Client) -> tuple[Text, ...]:
    """Token ids of fixed questions of a trained small model, as its chat template puts them."""
    items = [
        make
        for language in LANGUAGES
        for number in range(NUM_ITEMS)
        for make in (writing_item(SEED, number, language), arithmetic_item(SEED, number, language, 2 + number % 4))
    ]
    prompts = []
    for item in items:
        reply = client.post("/tokenize", {"messages": [{"role": "user", "content": item.prompt}]})
        if not reply.tokens:
            raise MeasureError(f"/tokenize: no tokens: HTTP {reply.status}: {reply.message}")
        prompts.append(reply.tokens)
    return tuple(prompts)


def answer_greedily(client: Client, prompts: Sequence[Text], length: Length) -> GreedyReplies:
    """All prompts at once. MeasureError: one is not answered."""
    asks = [_generation(f"greedy/{number}", prompt, length.reply_tokens, TOP_K) for number, prompt in enumerate(prompts)]
    answered = _ask(client, asks, length.num_together)
    drafts = AcceptanceTally()
    drafts.add([exchange.reply for exchange in answered])
    return GreedyReplies(
        tuple(exchange.rows for exchange in answered),
        drafts.totals["num_draft_tokens"],
        drafts.totals["num_accepted_tokens"],
    )


def score(client: Client, texts: Sequence[Text], length: Length) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of every token of each text but the first, and of the likeliest ids beside them."""
    asks = [_scoring(f"score/{number}", text, OF_LIKELIEST) for number, text in enumerate(texts)]
    return tuple(map(_scored, _ask(client, asks, length.num_together)))


def exact_ids(client: Client, text: Text) -> ExactIds:
    """`prompt_logprob_token_ids` of the likeliest ids of one text, asked alone, as divergence does. MeasureError: refused."""
    top = _scored(_ask(client, [_scoring("top", text, OF_LIKELIEST)], 1)[0])
    options = {"prompt_logprobs": 1, "prompt_logprob_token_ids": top.ids_PK.tolist(), "prompt_logprob_start": 0}
    exact_PK = _scored(_ask(client, [_scoring("exact", text, options)], 1)[0]).logprobs_PK
    if exact_PK.shape[1] != TOP_K + 1:
        raise MeasureError("prompt_logprob_token_ids was taken, but no log-probabilities of those ids came back")
    # the server's own first choice stands in front, and not once more among the ids that were asked for
    exact_PK = np.where(np.isnan(exact_PK[:, 1:]), exact_PK[:, :1], exact_PK[:, 1:])
    apart_PK = np.abs(exact_PK - top.logprobs_PK)
    largest = float(np.where(np.isnan(apart_PK), np.inf, apart_PK).max(initial=0.0))  # what cannot be compared is not alike
    return ExactIds(num_values=int(apart_PK.size), max_difference=largest, bound=EXACT_IDS_BOUND)


def take_speed(client: Client, prompts: Sequence[Text], length: Length) -> Speed:
    """Wall-clock tokens per second of one reply, and of several at once. The server was warmed by what was asked before."""
    seconds = []
    for number in (1, length.num_together):
        asks = [_generation(f"speed/{number}/{i}", prompts[i % len(prompts)], length.speed_tokens, None) for i in range(number)]
        began = time.monotonic()
        _ask(client, asks, number)
        seconds.append(time.monotonic() - began)
    return Speed(
        alone=length.speed_tokens / seconds[0],
        together=length.num_together * length.speed_tokens / seconds[1],
        num_together=length.num_together,
        num_tokens=length.speed_tokens,
    )


def client_of(server: Server) -> Client:
    return Client(server, timeout_s=TIMEOUT_S, max_attempts=1)


# ------------------------------------------------------------------------------------------------ requests and replies
def _generation(name: str, prompt: Text, num_tokens: int, top_k: int | None) -> Ask:
    body: dict[str, Any] = {
        "prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "return_tokens_as_token_ids": True,
        **sampling(0.0, None),
    }  # fmt: skip
    return Ask(name, COMPLETIONS, body if top_k is None else {**body, "logprobs": top_k})


def _scoring(name: str, text: Text, options: dict[str, Any]) -> Ask:
    settings = {"max_tokens": 1, "detokenize": False, **sampling(0.0, None), **options}
    return Ask(name, GENERATE, {"token_ids": list(text), "sampling_params": settings}, logprobs_from=1)


def _ask(client: Client, asks: Sequence[Ask], at_once: int) -> list[Exchange]:
    answered = client.ask_together(asks, at_once)
    for exchange in answered:
        if not exchange.is_answered:
            raise MeasureError(f"{exchange.ask.path}: {exchange.reply.error}")
    return answered


def _scored(exchange: Exchange) -> TokenLogprobs:
    if exchange.reply.logprobs is None:
        raise MeasureError(f"{exchange.ask.path}: no log-probabilities of the prompt came back")
    return exchange.reply.logprobs
