"""Whether a server that runs already still answers as it did when its label was measured.

Its weights sign alike (`weights.py`), but a parser, a gateway or a template may have been repaired, or may have broken since.
A few questions of the journal are therefore asked again before a measurement is believed that was made earlier. Their replies
are compared and thrown away.

False alarms: at temperature 0 batches alone change words, seldom among the first ones, and hardly ever whether there is any
text; the limits below are for 1 in 10 such replies that begin with other words, and 1 in 100 of another form.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binom

from assay.errors import MeasureError
from assay_evaluate.client.client import Address, Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import Identity, Journal, Reply
from assay_evaluate.client.sending import TRY_AGAIN, wait_s
from assay_evaluate.serving.server import Server

MOST_QUESTIONS = 24
MOST_SUSPECT = 8
"""Of these, replies that had no text or did not end by themselves: what was repaired since shows there."""
DRAWN = 400
"""Replies of the journal that are read to choose from."""
FIRST_LETTERS = 64
"""At temperature 0 a reply that differs among so many is another reply."""
OTHER_WORDS_SHARE = 0.1
OTHER_FORM_SHARE = 0.01
"""Shares of replies of a server that has not changed that begin with other words, or have another form, at most."""
ALPHA = 0.001
MOST_ATTEMPTS, BACKOFF_S = 6, 0.5
"""As of any request of an evaluation."""


@dataclass(frozen=True)
class Question:
    """A request of the journal, and the reply that it got when the label was measured."""

    ask: Ask
    reply: Reply

    @property
    def is_greedy(self) -> bool:
        return self.ask.body.get("temperature") == 0

    @property
    def num_tokens(self) -> int:
        return self.reply.output_tokens or 0

    @property
    def is_suspect(self) -> bool:
        """The reply had no text, or did not end by itself."""
        is_empty = not self.reply.text.strip() and not self.reply.has_tool_calls
        return is_empty or self.reply.finish_reason not in {"stop", "tool_calls"}


def require_as_before(label: str, server: Server, journal: Journal, who: Identity, when: str, concurrency: int) -> int:
    """How many questions were asked again. MeasureError: the server answers otherwise than it did.

    when: what was done when they were asked first, for the message: `measured, on 2026-11-28`.
    """
    questions = _draw_questions(journal, who, label)
    if not questions:
        return 0
    exchanges = _ask(questions, server, concurrency)
    answered = [(question, exchange) for question, exchange in zip(questions, exchanges, strict=True) if exchange.is_answered]
    if 2 * len(answered) < len(questions):
        failed = next(exchange for exchange in exchanges if not exchange.is_answered)
        raise MeasureError(
            f"{label}: was {when}, but {len(questions) - len(answered)} of {len(questions)} of its questions, asked again, got "
            f"no reply ({failed.reply.error}); run again when {server.base_url} answers"
        )
    if difference := find_difference(answered):
        raise MeasureError(
            f"{label}: {server.base_url} does not answer as it did when {label} was {when}: of {len(answered)} questions asked "
            f"again, {difference}; `--again {label}` measures it anew"
        )
    return len(answered)


def _ask(questions: Sequence[Question], server: Server, concurrency: int) -> list[Exchange]:
    """What came of each, in their order; servers that share the label share them. A server that is just started again is
    waited for, as long as an evaluation waits for one."""
    urls = server.base_urls
    exchanges: dict[str, Exchange] = {}
    for number, url in enumerate(urls):
        asks = [question.ask for question in questions[number :: len(urls)]]
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                with Client(Address(url, server.model, server.headers), concurrency=concurrency) as client:
                    new = client.ask_together(asks, concurrency)
                exchanges |= {exchange.id: exchange for exchange in new}
                asks = [
                    exchange.ask
                    for exchange in new
                    if not exchange.is_answered and exchange.reply.http_status in {None, *TRY_AGAIN}
                ]
            except MeasureError:  # nobody is there
                if attempt == MOST_ATTEMPTS:
                    raise
            if not asks or attempt == MOST_ATTEMPTS:
                break
            time.sleep(wait_s(url, attempt, BACKOFF_S))
    return [exchanges[question.ask.id] for question in questions]


def _draw_questions(journal: Journal, who: Identity, label: str) -> list[Question]:
    """Suspect replies first, then others, none longer than half of them are; other ones each time.

    Texts of divergence are written and scored in forms of their own, and not asked again.
    """
    counter = f"asked again:{label}"
    times = int(journal.counters(counter).get("times", 0))
    journal.add_counters(counter, {"times": 1})
    draw = random.Random(f"asked again:{who.checkpoint_sha256}:{times}")
    keys = [
        key for task, items in journal.answered_items(who).items() if not task.startswith("divergence.") for _, key in items
    ]
    replies = journal.find_all(draw.sample(keys, min(len(keys), DRAWN)))
    questions = [
        Question(Ask(key, *journal.request_of(key)), reply) for key, reply in replies.items() if reply.status == "answered"
    ]
    if not questions:
        return []
    median = sorted(question.num_tokens for question in questions)[len(questions) // 2]
    suspects = [question for question in questions if question.is_suspect][:MOST_SUSPECT]
    others = [question for question in questions if question.num_tokens <= median and question not in suspects]
    return [*suspects, *others][:MOST_QUESTIONS]


def find_difference(answered: Sequence[tuple[Question, Exchange]]) -> str | None:
    """What differs, beyond what the same server does by itself, in one clause; None: nothing."""
    pairs = [(question.reply, exchange.reply) for question, exchange in answered]
    lengths = [
        (before.prompt_tokens, after.prompt_tokens)
        for before, after in pairs
        if None not in (before.prompt_tokens, after.prompt_tokens) and before.prompt_tokens != after.prompt_tokens
    ]
    if lengths:
        return f"{len(lengths)} have prompts of another length (the first: {lengths[0][0]} tokens then, {lengths[0][1]} now)"
    forms = [clause for before, after in pairs if (clause := _other_form(before, after)) is not None]
    if binom.sf(len(forms) - 1, len(pairs), OTHER_FORM_SHARE) < ALPHA:
        return f"{len(forms)} get replies of another form (the first: {forms[0]})"
    greedy = [(question.reply, exchange.reply) for question, exchange in answered if question.is_greedy]
    num_other = sum(_begins_otherwise(before, after) for before, after in greedy)
    if greedy and binom.sf(num_other - 1, len(greedy), OTHER_WORDS_SHARE) < ALPHA:
        return f"{num_other} of the {len(greedy)} at temperature 0 begin with other words"
    return None


def _other_form(before: Reply, after: Reply) -> str | None:
    """Text, thinking or a tool call where there was none, or the other way round."""
    for name, had, has in (
        ("a tool call", before.has_tool_calls, after.has_tool_calls),
        ("text", bool(before.text.strip()), bool(after.text.strip())),
        ("reasoning", bool(before.reasoning), bool(after.reasoning)),
    ):
        if had != has:
            return f"{name} then, none now" if had else f"no {name.removeprefix('a ')} then, but now"
    return None


def _begins_otherwise(before: Reply, after: Reply) -> bool:
    """Within the first letters, or all of the shorter one."""
    first, second = (((reply.reasoning or "") + reply.text)[:FIRST_LETTERS] for reply in (before, after))
    length = min(len(first), len(second))
    return first[:length] != second[:length]
