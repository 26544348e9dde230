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
from itertools import takewhile

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
"""At temperature 0 a reply that differs among so many is another one."""
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


def require_as_before(label: str, server: Server, journal: Journal, who: Identity, when: str, concurrency: int) -> int:
    """How many questions were asked again. MeasureError: the server answers otherwise than it did.

    when: what was done when they were asked first, for the message: `measured, on 2026-11-28`.
    """
    questions = draw_questions(journal, who, label)
    if not questions:
        return 0
    exchanges = _ask(questions, server, concurrency)
    answered = [pair for pair in zip(questions, exchanges, strict=True) if pair[1].is_answered]
    if 2 * len(answered) < len(questions):
        failed = next(exchange for exchange in exchanges if not exchange.is_answered)
        raise MeasureError(
            f"{label}: was {when}, but {len(questions) - len(answered)} of {len(questions)} of its questions, asked again, got "
            f"no reply ({failed.reply.error}); run again when {server.base_url} answers"
        )
    if difference := other_than_before(answered):
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
                    exchanges |= {exchange.id: exchange for exchange in client.ask_together(asks, concurrency)}
                asks = [ask for ask in asks if _may_come(exchanges[ask.id])]
            except MeasureError:  # nobody is there
                if attempt == MOST_ATTEMPTS:
                    raise
            if not asks or attempt == MOST_ATTEMPTS:
                break
            time.sleep(wait_s(url, attempt, BACKOFF_S))
    return [exchanges[question.ask.id] for question in questions]


def _may_come(exchange: Exchange) -> bool:
    """Whether a reply may come if it is asked for once more."""
    status = exchange.reply.http_status
    return not exchange.is_answered and (status is None or status in TRY_AGAIN)


def draw_questions(journal: Journal, who: Identity, label: str) -> list[Question]:
    """Suspect replies first, then others, none longer than half of them are; other ones each time."""
    counter = f"asked again:{label}"
    times = int(journal.counters(counter).get("times", 0))
    journal.add_counters(counter, {"times": 1})
    draw = random.Random(f"asked again:{who.checkpoint_sha256}:{times}")
    keys = [key for task, items in journal.answered_items(who).items() if not _is_text(task) for _, key in items]
    replies = journal.find_all(draw.sample(keys, min(len(keys), DRAWN)))
    questions = [_question(journal, key, reply) for key, reply in replies.items() if reply.status == "answered"]
    if not questions:
        return []
    lengths = sorted(question.reply.output_tokens or 0 for question in questions)
    short = [question for question in questions if (question.reply.output_tokens or 0) <= lengths[len(lengths) // 2]]
    suspect = [question for question in questions if _is_suspect(question.reply)][:MOST_SUSPECT]
    others = [question for question in short if question not in suspect]
    return [*suspect, *others][:MOST_QUESTIONS]


def _is_text(task: str) -> bool:
    """Texts of divergence are written and scored in forms of their own."""
    return task.startswith("divergence.")


def _question(journal: Journal, key: str, reply: Reply) -> Question:
    path, body = journal.request_of(key)
    return Question(Ask(key, path, body), reply)


def _is_suspect(reply: Reply) -> bool:
    return (not reply.text.strip() and not reply.has_tool_calls) or reply.finish_reason not in {"stop", "tool_calls"}


def other_than_before(answered: Sequence[tuple[Question, Exchange]]) -> str | None:
    """What differs, beyond what the same server does by itself, in one clause; None: nothing."""
    pairs = [(question, exchange.reply) for question, exchange in answered]
    prompts = [
        (question.reply.prompt_tokens, now.prompt_tokens)
        for question, now in pairs
        if None not in (question.reply.prompt_tokens, now.prompt_tokens)
        and question.reply.prompt_tokens != now.prompt_tokens
    ]  # fmt: skip
    if prompts:
        before, after = prompts[0]
        return f"{len(prompts)} have prompts of another length (the first: {before} tokens then, {after} now)"
    forms = [clause for question, now in pairs if (clause := _other_form(question.reply, now)) is not None]
    if binom.sf(len(forms) - 1, len(pairs), OTHER_FORM_SHARE) < ALPHA:
        return f"{len(forms)} get replies of another form (the first: {forms[0]})"
    greedy = [(question.reply, now) for question, now in pairs if question.is_greedy]
    num_other = sum(_begins_otherwise(before, now) for before, now in greedy)
    if greedy and binom.sf(num_other - 1, len(greedy), OTHER_WORDS_SHARE) < ALPHA:
        return f"{num_other} of the {len(greedy)} at temperature 0 begin with other words"
    return None


def _other_form(before: Reply, now: Reply) -> str | None:
    """Text, thinking or a tool call where there was none, or the other way round."""
    for name, had, has in (
        ("a tool call", before.has_tool_calls, now.has_tool_calls),
        ("text", bool(before.text.strip()), bool(now.text.strip())),
        ("reasoning", bool(before.reasoning), bool(now.reasoning)),
    ):
        if had != has:
            return f"{name} then, none now" if had else f"no {name.removeprefix('a ')} then, but now"
    return None


def _begins_otherwise(before: Reply, now: Reply) -> bool:
    texts = [((reply.reasoning or "") + reply.text)[:FIRST_LETTERS] for reply in (before, now)]
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    return num_same < min(map(len, texts))
