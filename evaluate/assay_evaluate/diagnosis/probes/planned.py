"""What a run of probes will send, before it sends anything; and settings that keep it within a number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from assay.errors import MeasureError
from assay.quantities import percent_plain
from assay.records.probe import Offer, ProbeSettings
from assay_evaluate.diagnosis.endpoint import MOST_DISCOVERY_REQUESTS
from assay_evaluate.diagnosis.probes.garble import MOST_ASKED_AGAIN
from assay_evaluate.diagnosis.probes.probe_session import MORE_LONG_REPLIES

EVERYTHING = Offer(
    is_vllm=True, version=None, chat=True, completions=True, logprobs=20, prompt_logprobs=20, token_ids=True,
    extended_sampling=True, tokenize=True, detokenize=True, metrics=True, counts_nans=True, speculation=True,
    routed_experts=True, cache_salt=True, streams=True,
)  # fmt: skip
"""Of an endpoint that was not asked yet: with nothing less are more requests sent, but a few without log-probabilities."""
COUNTED = {
    "chat": "chat", "logprobs": "log-probabilities", "prompt_logprobs": "log-probabilities of prompts",
    "token_ids": "token ids", "speculation": "drafts", "routed_experts": "routed experts", "cache_salt": "cache salts",
    "streams": "streaming",
}  # fmt: skip
"""Field of `Offer` on which the number of requests depends -> what the endpoint offers with it."""
TOOL_TOKENS = 120
"""Of the description of one tool, about."""


@dataclass(frozen=True)
class Load:
    """Requests, and the tokens of their prompts and replies together."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Load:
        return Load(*(count * number for number in astuple(self)))


@dataclass(frozen=True)
class Planned:
    """At most so many requests, with about so many tokens of prompts and at most so many of replies.

    generated: replies that are looked at. scored: read again. odd: for replies that will look odd,
    and for a temperature in doubt.
    """

    generated: Load
    scored: Load
    aborted: Load
    odd: Load

    @property
    def total(self) -> Load:
        return self.generated + self.scored + self.aborted + self.odd

    def sentence(self, settings: ProbeSettings) -> str:
        """For the line that comes before the first request."""
        total = self.total
        return (
            f"probes send at most {total.num_requests:,} requests ({self.generated.num_requests:,} replies of up to "
            f"{settings.max_tokens} tokens, {self.scored.num_requests:,} scored again, {self.aborted.num_requests:,} broken "
            f"off midway, {self.odd.num_requests:,} if replies look odd or leave a doubt) with about "
            f"{total.prompt_tokens:,} prompt tokens, for {total.output_tokens:,} tokens at most; "
            f"{settings.concurrency} in flight"
        )


def plan_requests(
    settings: ProbeSettings,
    names: Sequence[str],
    offer: Offer = EVERYTHING,
    max_model_len: int | None = None,
    *,
    has_pair: bool = False,
) -> Planned:
    """What the probes called `names` send. has_pair: a server without speculation is there as well."""
    short, long = settings.short_tokens, settings.long_tokens
    if max_model_len is not None:
        long = max(1, min(long, max_model_len - settings.max_tokens - 8))
    mixed = (short + long) / 2

    def replies(count: int, prompt: float = mixed) -> Load:
        return Load(count, round(count * prompt), count * settings.max_tokens)

    def scores(count: int, prompt: float = mixed) -> Load:
        return Load(count, round(count * (prompt + settings.max_tokens)), count)

    half = max(1, settings.num_requests // 2)
    num_alone, num_long = min(settings.num_alone, half), settings.num_requests // 2
    num_tool_replies = 2 * len(settings.num_tools) * settings.num_tool_requests
    tool_tokens = TOOL_TOKENS * (2 * settings.num_tool_requests * sum(settings.num_tools) + 1)
    generated = {
        "greedy": replies(half),
        "sampled": replies(half),
        "long replies": replies(num_long, short),
        "long again": replies(min(settings.num_alone, num_long), short),
        "alone": replies(num_alone),
        "alone again": replies(num_alone),
        "salted": replies(2 * num_alone),
        "neighbours": replies(2 * min(settings.num_neighbours, num_alone) * settings.concurrency),
        "tools": replies(num_tool_replies) + Load(2, tool_tokens, 2),
        "scan": replies(settings.num_garble_requests),
        "pair": replies(half),
        "sizes": Load(2, 800, 2),  # tokens per character of the two languages
    }
    scored = {
        "scored greedy": scores(half),
        "scored sampled": scores(half),
        "scored long": scores(num_long, short),
        "scored alone": scores(num_alone),
        "scored scan": scores(min(settings.num_scored, settings.num_garble_requests)),
    }
    groups = {group for name in names for group in _groups_of(name, settings, offer)}
    if groups:
        groups.add("sizes")
    if has_pair and "speculation" in names and offer.speculation:
        groups.add("pair")
    total_generated = sum((group for name, group in generated.items() if name in groups), Load())
    total_scored = sum((group for name, group in scored.items() if name in groups), Load())
    aborted = odd = Load()
    if "garble" in names:
        aborted = replies(round(settings.num_garble_requests * settings.abort_share) if offer.streams else 0)
        num_examined = total_generated.num_requests if settings.most_suspects is None else settings.most_suspects
        odd = replies(min(MOST_ASKED_AGAIN, num_examined))
        if _can_score(offer):
            odd += scores(num_examined)
    if "temperature" in names and offer.logprobs:  # where the first replies leave a doubt
        num_more = MORE_LONG_REPLIES * num_long
        odd += replies(num_more, short)
        if _can_score(offer):
            odd += scores(num_more, short)
    return Planned(total_generated, total_scored, aborted, odd)


def change_by_offer(
    settings: ProbeSettings,
    names: Sequence[str],
    offer: Offer,
    max_model_len: int | None = None,
    *,
    has_pair: bool = False,
) -> str | None:
    """What is sent otherwise than was announced before the endpoint's offer was known, and why; None: nothing."""

    def total(offer: Offer = EVERYTHING, max_model_len: int | None = None) -> Load:
        return plan_requests(settings, names, offer, max_model_len, has_pair=has_pair).total

    announced, planned = total(), total(offer, max_model_len)
    if planned == announced:
        return None
    missing = [
        f"no {what}"
        for field, what in COUNTED.items()
        if not getattr(offer, field) and total(EVERYTHING.model_copy(update={field: None})) != announced
    ]
    reasons = [f"offers {' and '.join(missing)}"] if missing else []
    if total(max_model_len=max_model_len) != announced:
        reasons.append(f"has a context of {max_model_len:,} tokens")
    return (
        f"the endpoint {', and '.join(reasons) or 'offers less'}: at most {planned.num_requests:,} requests with about "
        f"{planned.prompt_tokens:,} prompt tokens, not {announced.num_requests:,} with {announced.prompt_tokens:,}"
    )


def _can_score(offer: Offer) -> bool:
    return bool(offer.logprobs and offer.token_ids and offer.prompt_logprobs)


def _groups_of(name: str, settings: ProbeSettings, offer: Offer) -> set[str]:
    examined = {"greedy", "sampled", "scored greedy", "scored sampled"}
    can_score = _can_score(offer)
    is_prompt_scored = bool(offer.prompt_logprobs and offer.token_ids)
    by_repeats = {"greedy", "long replies", "long again", "alone", "alone again"}
    by_logprobs = {"sampled", "long replies"} | ({"scored sampled", "scored long"} if can_score else set())
    groups: dict[str, set[str]] = {
        "recompute": examined | {"alone", "scored alone"} if can_score else set(),
        "consensus": examined if can_score else set(),
        "routing": examined if offer.routed_experts else set(),
        "determinism": {"greedy", "alone", "alone again", "neighbours"} | ({"salted"} if offer.cache_salt else set()),
        "acceptance": {"sampled", "long replies"} if offer.speculation else set(),
        "argmax": {"greedy"} if offer.logprobs else set(),
        "speculation": {"greedy"} if offer.speculation else set(),
        "temperature": by_logprobs if offer.logprobs else by_repeats,
        "tools": {"tools"} if offer.chat else set(),
        "garble": {"scan"} | ({"scored scan"} if can_score and not settings.temperature else set()),
        "nonfinite": {"greedy", "sampled"} | ({"scored greedy"} if is_prompt_scored else set()),
    }
    return groups.get(name, {"greedy"})  # text, swapped


# ------------------------------------------------------------------------------------------------ within a limit
def fit_settings(settings: ProbeSettings, most: int, names: Sequence[str], *, has_pair: bool = False) -> ProbeSettings:
    """Settings of which everything together, the questions that find out what is offered among them, is `most` at most.

    All numbers are made smaller by one factor. MeasureError: even the least of everything is more.
    """

    def scaled(factor: float) -> ProbeSettings:
        def of(count: int, least: int) -> int:
            return max(least, round(factor * count))

        return settings.model_copy(
            update={
                "num_requests": of(settings.num_requests, 2), "num_garble_requests": of(settings.num_garble_requests, 1),
                "num_scored": of(settings.num_scored, 0), "num_alone": of(settings.num_alone, 1),
                "num_neighbours": of(settings.num_neighbours, 0), "num_tool_requests": of(settings.num_tool_requests, 1),
                "most_suspects": of(settings.num_garble_requests // 4, 0), "most_requests": most,
            }
        )  # fmt: skip

    def total(factor: float) -> int:
        planned = plan_requests(scaled(factor), names, has_pair=has_pair)
        return planned.total.num_requests + MOST_DISCOVERY_REQUESTS

    if total(0.0) > most:
        raise MeasureError(f"--requests {most}: these probes send {total(0.0)} at least; name fewer of them with --probes")
    low, high = 0.0, 1.0
    if total(high) <= most:
        low = high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) <= most else (low, middle)
    return scaled(low)


def cost_of_limit(limited: ProbeSettings, planned: Planned, unlimited: Planned) -> str:
    """What a limit takes away, in words."""

    def sees(group: Load) -> str:
        """The rate of a fault that so many replies show at least once with the settings' probability."""
        rate = float(1 - (1 - limited.level) ** (1 / max(1, group.num_requests)))
        return f"1 in {1 / rate:,.0f}"

    few, all_ = planned.generated, unlimited.generated
    if few.num_requests >= all_.num_requests:
        return f"--requests {limited.most_requests} leaves everything that is sent without it"
    return (
        f"--requests {limited.most_requests} leaves {few.num_requests:,} replies, which show a fault of {sees(few)} with "
        f"{percent_plain(limited.level)}; the {all_.num_requests:,} without it show {sees(all_)}"
    )
