"""What all probes of one run share: the endpoint, its requests, and replies that several probes look at.

Replies are asked for once and kept: `session.greedy`, `session.sampled` and their recomputed scores feed five probes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from assay.records.probe import Detail, ProbeResult, ProbeSettings, Witness
from assay_evaluate.asking.dialect import CHAT, COMPLETIONS, sampling
from assay_evaluate.client.client import Client
from assay_evaluate.client.decoded_text import TextComparison
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.statistics.proportions import clopper_pearson
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
    """One user message."""

    id: str
    text: str


@dataclass(frozen=True, eq=False)
class RescoredReply:
    """A reply and its tokens scored again from the prompt on (prefill). None: it could not be scored."""

    exchange: Exchange
    prefill: TokenLogprobs | None


@dataclass
class ProbeSession:
    """One run of probes against one endpoint."""

    endpoint: ProbedEndpoint
    settings: ProbeSettings
    client: Client
    without_speculation: ProbedEndpoint | None = None
    """Another server of the same checkpoint that drafts nothing, for the pair."""
    on_progress: Callable[[str], None] = lambda line: None
    compared: dict[str, TextComparison] = field(default_factory=dict)
    """By id of a reply: its text against what its ids decode to, as far as that was asked."""
    is_text_of_rows: dict[str, bool] = field(default_factory=dict)
    """By id of a reply without ids: whether the tokens of its log-probabilities read as its text."""

    # ------------------------------------------------------------------------------------------------ prompts
    def prompts(self, what: str, count: int, num_tokens: int, *, writing_only: bool = False) -> list[ProbePrompt]:
        """`count` different prompts of about `num_tokens`, half English, half Chinese; the same for the same seed.

        Half ask for a text, half for a calculation with a short answer; all for a text if writing_only.
        """
        room = self.room(num_tokens)
        return [self._prompt(what, i, LANGUAGES[i % len(LANGUAGES)], room, writing_only) for i in range(count)]

    def mixed_prompts(self, what: str, count: int) -> list[ProbePrompt]:
        """Short and long prompts in turn."""
        short = self.prompts(f"{what}-short", count - count // 2, self.settings.short_tokens)
        long = self.prompts(f"{what}-long", count // 2, self.settings.long_tokens)
        return [prompt for pair in zip(short, long, strict=False) for prompt in pair] + short[len(long) :]

    def room(self, num_tokens: int) -> int:
        """`num_tokens`, or what the model's longest text leaves beside a reply."""
        longest = self.endpoint.max_model_len
        return num_tokens if longest is None else max(1, min(num_tokens, longest - self.settings.max_tokens - 8))

    def _prompt(self, what: str, index: int, language: Language, num_tokens: int, writing_only: bool) -> ProbePrompt:
        seed = f"{self.settings.seed}:{what}"
        is_writing = writing_only or index % 4 < 2
        question = writing_item(seed, index, language) if is_writing else arithmetic_item(seed, index, language, 3 + index % 3)
        draw = random.Random(f"{seed}:{index}:{language}:notes")
        notes_tokens = max(0, num_tokens - self._tokens_of(question.prompt, language))
        notes = [filler_sentence(draw, language) for _ in range(LEAST_NOTES)]
        while (length := self._tokens_of("".join(notes), language)) < notes_tokens:
            notes += [filler_sentence(draw, language) for _ in range(max(1, (notes_tokens - length) // 16))]
        text = f"{haystack(notes, language)}\n{question.prompt}"
        return ProbePrompt(f"{what}/{language}/{index}", text)

    def _tokens_of(self, text: str, language: Language) -> int:
        return round(len(text) * self._tokens_per_character[language])

    @cached_property
    def _tokens_per_character(self) -> dict[Language, float]:
        """Measured: what the server bills for a text, over its length."""
        per_character: dict[Language, float] = {}
        for language in LANGUAGES:
            draw = random.Random(f"{self.settings.seed}:{language}")
            text = ""
            while len(text) < FIRST_TRY_CHARACTERS:
                text += filler_sentence(draw, language) + " "
            exchange = self.client.exchange(self.ask("tokens", ProbePrompt("tokens", text), max_tokens=1))
            per_character[language] = (exchange.reply.prompt_tokens or len(text)) / len(text)
        return per_character

    # ------------------------------------------------------------------------------------------------ requests
    def ask(
        self,
        what: str,
        prompt: ProbePrompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        with_logprobs: bool = False,
        num_logprobs: int | None = None,
    ) -> Ask:
        """A request for one reply to `prompt`, sampling pinned as far as the server lets it be.

        with_logprobs: of as many tokens as the settings say; num_logprobs: of so many, where the server gives any.
        """
        offer = self.endpoint.offer
        body: dict[str, Any] = {"max_tokens": max_tokens or self.settings.max_tokens}
        if offer.extended_sampling:
            body |= sampling(temperature, None)
        else:
            body |= {"temperature": temperature, "top_p": 1.0}
        if offer.token_ids:
            body["return_token_ids"] = True
        top_k = self.top_k if with_logprobs else num_logprobs if self.top_k else None
        if top_k:
            body |= {"logprobs": True, "top_logprobs": top_k} if offer.chat else {"logprobs": top_k}
            if offer.token_ids:
                body["return_tokens_as_token_ids"] = True
        if offer.chat:
            body = {"messages": [{"role": "user", "content": prompt.text}], **body}
        else:
            body = {"prompt": prompt.text + "\n", **body}
        return Ask(f"{what}/{prompt.id}", CHAT if offer.chat else COMPLETIONS, body, prompt.text)

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
        prompts = self.mixed_prompts(what, max(1, self.settings.num_requests // 2))
        asks = [self.ask(what, prompt, temperature=temperature, with_logprobs=True) for prompt in prompts]
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
        asks = [self.ask(what, prompt, temperature=1.0, num_logprobs=top_k) for prompt in prompts]
        return self.client.ask_together(asks, self.settings.concurrency)

    @cached_property
    def alone(self) -> list[Exchange]:
        """The first `num_alone` answered greedy requests again, one at a time."""
        asks = [reply.ask for reply in self.greedy if reply.is_answered][: self.settings.num_alone]
        return self.client.ask_together(renamed(asks, "alone"), 1)

    @cached_property
    def alone_again(self) -> list[Exchange]:
        """The same as `alone`, once more."""
        return self.client.ask_together(renamed([reply.ask for reply in self.alone], "again"), 1)

    def generated(self) -> list[Exchange]:
        """Every answered request of this run, so far, for a reply that a user would read: none that scores, none hung up on."""
        exchanges = self.client.tally.exchanges.values()
        return [exchange for exchange in exchanges if exchange.is_answered and is_for_a_reader(exchange.ask)]

    @property
    def reason_unscorable(self) -> str | None:
        """What the endpoint lacks for scoring a reply again; None: nothing."""
        offer = self.endpoint.offer
        if offer.no_logprobs is not None:
            return offer.no_logprobs
        offers = {"log-probabilities": offer.logprobs, "token ids": offer.token_ids, "prompt_logprobs": offer.prompt_logprobs}
        lacking = [name for name, is_offered in offers.items() if not is_offered]
        return f"the endpoint returns no {' and no '.join(lacking)}" if lacking else None

    def score(self, exchanges: Sequence[Exchange], concurrency: int, top_k: int | None = None) -> list[RescoredReply]:
        """The tokens of every answered reply, scored again by one pass over prompt and reply (vLLM's prompt_logprobs)."""
        top_k = top_k or min(self.top_k or self.settings.top_k, self.endpoint.offer.prompt_logprobs or 1)
        longest = self.endpoint.max_model_len
        scorable, asks = [], []
        for exchange in exchanges:
            prompt, reply = exchange.reply.prompt_token_ids, exchange.reply.token_ids
            if exchange.is_answered and prompt and reply:
                ids = [*prompt, *reply][: None if longest is None else longest - 1]  # the last is the token it must generate
                body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": top_k, **sampling(0.0, None)}
                scorable.append(exchange)
                asks.append(Ask(f"score/{exchange.id}", COMPLETIONS, body, logprobs_from=len(prompt)))
        scored = self.client.ask_together(asks, concurrency)
        return [RescoredReply(exchange, score.reply.logprobs) for exchange, score in zip(scorable, scored, strict=True)]

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
        trials: int,
        unit: str,
        alarms: Sequence[str],
        events: int | None = None,
        num_requests: int | None = None,
        witnesses: Sequence[Witness] = (),
        first_event_at: int | None = None,
        reason: str | None = None,
        details: dict[str, Detail] | None = None,
        requests_hit: int | None = None,
        stands_without_events: bool = False,
        undecided: Sequence[Witness] = (),
    ) -> ProbeResult:
        """A probe that ran. reason: what to know about a result that is no alarm. events: None: as many as witnesses.

        num_requests: None: `trials`. requests_hit: where it is not `events`.
        """
        events = len(witnesses) if events is None else events
        num_requests = trials if num_requests is None else num_requests
        if trials == 0:
            return not_run(name, unit, reason or "no reply that could be looked at", num_requests)
        return ProbeResult(
            name=name,
            status="alarm" if alarms else "ok",
            events=events,
            trials=trials,
            unit=unit,
            rate=clopper_pearson(events, trials, self.settings.level),
            upper=upper_bound(events, trials, self.settings.level),
            sentence=sentence(events, trials, unit, self.settings.level),
            reason="; ".join(alarms) or reason,
            details=details or {},
            witnesses=tuple(witnesses[:MOST_WITNESSES]),
            undecided=tuple(undecided[:MOST_WITNESSES]),
            requests_hit=events if requests_hit is None and unit == "request" else requests_hit,
            stands_without_events=bool(alarms) and stands_without_events,
            first_event_at=first_event_at,
            num_requests=num_requests,
        )


def renamed(asks: Sequence[Ask], prefix: str) -> list[Ask]:
    """The same requests under other ids, so that both replies are kept."""
    return [replace(ask, id=f"{prefix}/{ask.id}") for ask in asks]


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
    actual: Any = None,
    *,
    excerpt_at: int | None = None,
) -> Witness:
    """An event in one exchange. excerpt_at: character of the reply around which some of its text is kept with it."""
    text = None
    if excerpt_at is not None:
        start = max(0, min(excerpt_at - EXCERPT_CHARACTERS // 2, len(exchange.text) - EXCERPT_CHARACTERS))
        text = exchange.text[start : start + EXCERPT_CHARACTERS]
    return Witness(
        request=exchange.id, what=what, position=position, expected=expected, seen=actual, slot=exchange.slot,
        concurrency=exchange.concurrency, text=text,
    )  # fmt: skip
