"""What all probes of one run share: the endpoint, its requests, and replies that several probes look at.

Replies are asked for once and kept: `session.greedy`, `session.sampled` and their recomputed scores feed five probes.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from assay.records.probe import Detail, ProbeResult, ProbeSettings, ProbeStatus, Witness
from assay_evaluate.asking.dialect import CHAT, COMPLETIONS, sampling
from assay_evaluate.client.checks.decoded_text import Compared
from assay_evaluate.client.client import Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.statistics import clopper_pearson
from assay_evaluate.statistics.rates import sentence, upper_bound
from assay_evaluate.tasks.items import LANGUAGES, Language, arithmetic_item, filler_sentence, haystack, writing_item

MOST_WITNESSES = 20
EXCERPT_CHARACTERS = 160
TOP_OF_TWO = 2
"""Log-probabilities of replies that are not examined token by token: the drawn token and the likeliest (vLLM lists the drawn
one first), which is what tells a row of another token and an unlike temperature."""
MORE_LONG_REPLIES = 2
"""Times as many as `long_replies`."""
FIRST_TRY_CHARACTERS = 400
LEAST_NOTES = 2
"""Of 4,096 kinds each: with them no two prompts are the same, though there are only 24 texts to ask for."""


@dataclass(frozen=True)
class ProbePrompt:
    """One user message; `num_tokens` is about right."""

    id: str
    language: Language
    text: str
    num_tokens: int


@dataclass(frozen=True, eq=False)
class RescoredReply:
    """A reply and its tokens scored again from the prompt on (prefill). None: it could not be scored."""

    exchange: Exchange
    prefill: TokenLogprobs | None
    error: str | None = None


@dataclass
class ProbeSession:
    """One run of probes against one endpoint."""

    endpoint: ProbedEndpoint
    settings: ProbeSettings
    client: Client
    without_speculation: ProbedEndpoint | None = None
    """Another server of the same checkpoint that drafts nothing, for the pair."""
    on_progress: Callable[[str], None] = lambda line: None
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    """Of this run: makes a prompt new to a prefix cache that knows those of the run before."""
    compared: dict[str, Compared] = field(default_factory=dict)
    """By id of a reply: its text against what its ids decode to, as far as that was asked."""
    read_alike: dict[str, bool] = field(default_factory=dict)
    """By id of a reply without ids: whether the tokens of its log-probabilities read as its text."""

    # ------------------------------------------------------------------------------------------------ prompts
    def prompts(self, what: str, count: int, num_tokens: int, *, writing_only: bool = False) -> list[ProbePrompt]:
        """`count` different prompts of about `num_tokens`, half English, half Chinese; the same for the same seed.

        Half ask for a text, half for a calculation with a short answer; all for a text if writing_only.
        """
        room = self.room(num_tokens)
        return [self._prompt(what, i, LANGUAGES[i % len(LANGUAGES)], room, writing_only) for i in range(count)]

    def room(self, num_tokens: int) -> int:
        """`num_tokens`, or what the model's longest text leaves beside a reply."""
        longest = self.endpoint.max_model_len
        return num_tokens if longest is None else max(1, min(num_tokens, longest - self.settings.max_tokens - 8))

    def _prompt(self, what: str, index: int, language: Language, num_tokens: int, writing_only: bool) -> ProbePrompt:
        seed = f"{self.settings.seed}:{what}"
        is_writing = writing_only or index % 4 < 2
        asked = writing_item(seed, index, language) if is_writing else arithmetic_item(seed, index, language, 3 + index % 3)
        draw = random.Random(f"{seed}:{index}:{language}:notes")
        wanted = max(0, num_tokens - self._tokens_of(asked.prompt, language))
        notes = [filler_sentence(draw, language) for _ in range(LEAST_NOTES)]
        while (length := self._tokens_of("".join(notes), language)) < wanted:
            notes += [filler_sentence(draw, language) for _ in range(max(1, (wanted - length) // 16))]
        text = f"{haystack(notes, language)}\n{asked.prompt}"
        return ProbePrompt(f"{what}/{language}/{index}", language, text, num_tokens)

    def _tokens_of(self, text: str, language: Language) -> int:
        return round(len(text) * self._tokens_per_character[language])

    @cached_property
    def _tokens_per_character(self) -> dict[Language, float]:
        """Measured: what the server bills for a text, over its length."""
        found: dict[Language, float] = {}
        for language in LANGUAGES:
            draw = random.Random(f"{self.settings.seed}:{language}")
            text = ""
            while len(text) < FIRST_TRY_CHARACTERS:
                text += filler_sentence(draw, language) + " "
            exchange = self.client.exchange(self.ask("tokens", ProbePrompt("tokens", language, text, 0), max_tokens=1))
            found[language] = (exchange.reply.prompt_tokens or len(text)) / len(text)
        return found

    # ------------------------------------------------------------------------------------------------ requests
    def ask(
        self,
        what: str,
        prompt: ProbePrompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        with_logprobs: bool = False,
        logprobs_wanted: int | None = None,
    ) -> Ask:
        """A request for one reply to `prompt`, sampling pinned as far as the server lets it be.

        with_logprobs: of as many tokens as the settings say; logprobs_wanted: of so many, where the server gives any.
        """
        offer = self.endpoint.offer
        body: dict[str, Any] = {"max_tokens": max_tokens or self.settings.max_tokens}
        if offer.extended_sampling:
            body |= sampling(temperature, None)
        else:
            body |= {"temperature": temperature, "top_p": 1.0}
        if offer.token_ids:
            body["return_token_ids"] = True
        top_k = self.top_k if with_logprobs else logprobs_wanted if self.top_k else None
        if top_k:
            body |= {"logprobs": True, "top_logprobs": top_k} if offer.chat else {"logprobs": top_k}
            if offer.token_ids:
                body["return_tokens_as_token_ids"] = True
        if offer.chat:
            return Ask(
                f"{what}/{prompt.id}", CHAT, {"messages": [{"role": "user", "content": prompt.text}], **body}, prompt.text
            )
        return Ask(f"{what}/{prompt.id}", COMPLETIONS, {"prompt": prompt.text + "\n", **body}, prompt.text)

    @property
    def top_k(self) -> int | None:
        """Log-probabilities per token: what was asked for, or what the server gives. None: it gives none."""
        most = self.endpoint.offer.logprobs
        return None if most is None else min(self.settings.top_k, most)

    @cached_property
    def greedy(self) -> list[Exchange]:
        """Greedy replies with log-probabilities, in full waves: half to short prompts, half to long ones."""
        return self._replies("greedy", 0.0)

    @cached_property
    def sampled(self) -> list[Exchange]:
        """The same, sampled at T=1 without any cut: every token's probability is the model's own."""
        return self._replies("sampled", 1.0)

    def _replies(self, what: str, temperature: float) -> list[Exchange]:
        count = max(1, self.settings.num_requests // 2)
        short = self.prompts(f"{what}-short", count - count // 2, self.settings.short_tokens)
        long = self.prompts(f"{what}-long", count // 2, self.settings.long_tokens)
        mixed = [prompt for pair in zip(short, long, strict=False) for prompt in pair] + short[len(long) :]
        asks = [self.ask(what, prompt, temperature=temperature, with_logprobs=True) for prompt in mixed]
        return self.client.ask_together(asks, self.settings.concurrency, in_waves=True)

    @cached_property
    def greedy_scored(self) -> list[RescoredReply]:
        return self.score(self.greedy, self.settings.concurrency)

    @cached_property
    def sampled_scored(self) -> list[RescoredReply]:
        return self.score(self.sampled, self.settings.concurrency)

    @cached_property
    def long_replies(self) -> list[Exchange]:
        """Texts of a hundred tokens and more, sampled at T=1."""
        return self._long_replies("long-reply", self.settings.num_requests // 2)

    @cached_property
    def more_long_replies(self) -> list[Exchange]:
        """To other prompts, as many as were sampled in all: where those left a doubt."""
        return self._long_replies("more-long-reply", MORE_LONG_REPLIES * (self.settings.num_requests // 2))

    def _long_replies(self, what: str, count: int) -> list[Exchange]:
        """Their tokens' likeliest alternatives come from prefill, where it can be asked."""
        top_k = TOP_OF_TWO if self.endpoint.offer.prompt_logprobs else self.top_k
        prompts = self.prompts(what, count, self.settings.short_tokens, writing_only=True)
        asks = [self.ask(what, prompt, temperature=1.0, logprobs_wanted=top_k) for prompt in prompts]
        return self.client.ask_together(asks, self.settings.concurrency)

    @cached_property
    def alone(self) -> list[Exchange]:
        """Some of the greedy requests again, one at a time."""
        return self.client.ask_together(self.again(self.greedy, "alone"), 1)

    @cached_property
    def alone_again(self) -> list[Exchange]:
        """The same as `alone`, once more."""
        asks = [replace(one.ask, id=f"again/{one.ask.id}") for one in self.alone]
        return self.client.ask_together(asks, 1)

    def generated(self) -> list[Exchange]:
        """Every answered request of this run, so far, for a reply that a user would read: none that scores, none hung up on."""
        return [one for one in self.client.tally.exchanges.values() if one.is_answered and is_for_a_reader(one.ask)]

    @cached_property
    def alone_scored(self) -> list[RescoredReply]:
        """Decoded alone and scored alone."""
        return self.score(self.alone, 1)

    def again(self, exchanges: Sequence[Exchange], what: str, **more: Any) -> list[Ask]:
        """The first `num_alone` answered requests once more, under another id."""
        able = [one.ask for one in exchanges if one.is_answered][: self.settings.num_alone]
        return [replace(ask, id=f"{what}/{ask.id}", body={**ask.body, **more}) for ask in able]

    def score(self, exchanges: Sequence[Exchange], concurrency: int, top_k: int | None = None) -> list[RescoredReply]:
        """The tokens of every answered reply, scored again by one pass over prompt and reply (vLLM's prompt_logprobs)."""
        able = [one for one in exchanges if one.is_answered and one.reply.token_ids and one.reply.prompt_token_ids]
        top_k = top_k or min(self.top_k or self.settings.top_k, self.endpoint.offer.prompt_logprobs or 1)
        asks = [self._score_ask(one, top_k) for one in able]
        scored = self.client.ask_together([replace(ask, id=f"score/{ask.id}") for ask in asks], concurrency)
        return [RescoredReply(one, back.reply.logprobs, back.reply.error) for one, back in zip(able, scored, strict=True)]

    def _score_ask(self, exchange: Exchange, top_k: int) -> Ask:
        prompt, reply = exchange.reply.prompt_token_ids or (), exchange.reply.token_ids or ()
        longest = self.endpoint.max_model_len
        ids = [*prompt, *reply][: None if longest is None else longest - 1]  # one position is for the token it must generate
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": top_k, **sampling(0.0, None)}
        return Ask(exchange.id, COMPLETIONS, body, logprobs_from=len(prompt))

    # ------------------------------------------------------------------------------------------------ counters
    def __post_init__(self) -> None:
        self._metrics_before = self.endpoint.metrics() if self.endpoint.offer.metrics else {}

    def counted(self, name: str) -> float | None:
        """How far a counter of the server has gone up since this session began. None: it has no such counter."""
        now = self.endpoint.metrics()
        return now[name] - self._metrics_before.get(name, 0.0) if name in now else None

    # ------------------------------------------------------------------------------------------------ results
    def result(
        self,
        name: str,
        *,
        events: int,
        trials: int,
        unit: str,
        alarm: str | None,
        num_requests: int,
        witnesses: Sequence[Witness] = (),
        first_event_at: int | None = None,
        reason: str | None = None,
        details: dict[str, Detail] | None = None,
        requests_hit: int | None = None,
        stands_without_events: bool = False,
        undecided: Sequence[Witness] = (),
    ) -> ProbeResult:
        """A probe that ran. alarm: why, or None; reason: what to know about a result that is no alarm. requests_hit: where it
        is not `events`."""
        if trials == 0:
            return not_run(name, unit, reason or "no reply that could be looked at", num_requests)
        status: ProbeStatus = "ok" if alarm is None else "alarm"
        return ProbeResult(
            name=name,
            status=status,
            events=events,
            trials=trials,
            unit=unit,
            rate=clopper_pearson(events, trials, self.settings.level),
            upper=upper_bound(events, trials, self.settings.level),
            sentence=sentence(events, trials, unit, self.settings.level),
            reason=alarm or reason,
            details=details or {},
            witnesses=tuple(witnesses[:MOST_WITNESSES]),
            undecided=tuple(undecided[:MOST_WITNESSES]),
            requests_hit=events if requests_hit is None and unit == "request" else requests_hit,
            stands_without_events=alarm is not None and stands_without_events,
            first_event_at=first_event_at,
            num_requests=num_requests,
        )


def is_for_a_reader(ask: Ask) -> bool:
    """Whether its reply is a text that a user would read: it does not score, and does not count tokens."""
    is_text = bool(ask.prompt) and ask.path in (CHAT, COMPLETIONS)
    return is_text and ask.body["max_tokens"] > 1 and "prompt_logprobs" not in ask.body


def not_run(name: str, unit: str, reason: str, num_requests: int = 0) -> ProbeResult:
    """A probe that could not look, and why."""
    return ProbeResult(
        name=name, status="not_run", events=None, trials=None, unit=unit, rate=None, upper=None,
        sentence=f"not run: {reason}", reason=reason, num_requests=num_requests,
    )  # fmt: skip


def witness(
    exchange: Exchange,
    what: str,
    position: int | None = None,
    expected: Any = None,
    seen: Any = None,
    *,
    excerpt_at: int | None = None,
) -> Witness:
    """An event in one exchange. excerpt_at: character of the reply around which some of its text is kept with it."""
    text = None
    if excerpt_at is not None:
        start = max(0, min(excerpt_at - EXCERPT_CHARACTERS // 2, len(exchange.text) - EXCERPT_CHARACTERS))
        text = exchange.text[start : start + EXCERPT_CHARACTERS]
    return Witness(
        request=exchange.id, what=what, position=position, expected=expected, seen=seen, slot=exchange.slot,
        concurrency=exchange.concurrency, text=text,
    )  # fmt: skip
