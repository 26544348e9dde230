"""What a run of probes will send, before it sends anything; and settings that keep it within a number of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from assay.errors import MeasureError
from assay.quantities import percent_plain
from assay.records.probe import Offer, ProbeSettings
from assay_evaluate.diagnosis.endpoint import MOST_DISCOVERY_REQUESTS
from assay_evaluate.diagnosis.probes.probe_session import MORE_LONG_REPLIES
from assay_evaluate.diagnosis.probes.replies.habits import MOST_ASKED_AGAIN

EVERYTHING = Offer(
    is_vllm=True, version=None, chat=True, completions=True, logprobs=20, prompt_logprobs=20, token_ids=True,
    extended_sampling=True, tokenize=True, detokenize=True, metrics=True, counts_nans=True, speculation=True,
    routed_experts=True, cache_salt=True, streams=True,
)  # fmt: skip
"""Of an endpoint that was not asked yet: with nothing less are more requests sent, but a few without log-probabilities."""
TOOL_TOKENS = 120
"""Of the description of one tool, about."""


@dataclass(frozen=True)
class Group:
    """Requests of one kind. Tokens are of all of them together, about for prompts and at most for replies."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Group) -> Group:
        return Group(
            self.num_requests + other.num_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True)
class Planned:
    """At most so many. generated: replies that are looked at. scored: read again. odd: for replies that will look odd,
    and for a temperature in doubt."""

    generated: Group
    scored: Group
    aborted: Group
    odd: Group

    @property
    def total(self) -> Group:
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


class _Counting:
    """Sizes of the groups of requests under some settings."""

    def __init__(self, settings: ProbeSettings, offer: Offer, max_model_len: int | None) -> None:
        self.settings, self.offer = settings, offer
        longest = settings.long_tokens
        if max_model_len is not None:
            longest = max(1, min(longest, max_model_len - settings.max_tokens - 8))
        self.long, self.short = longest, settings.short_tokens
        self.mixed = (self.short + self.long) / 2
        self.half = max(1, settings.num_requests // 2)
        self.alone = min(settings.num_alone, self.half)
        self.can_score = bool(offer.logprobs and offer.token_ids and offer.prompt_logprobs)

    def replies(self, count: int, prompt: float | None = None) -> Group:
        return Group(count, round(count * (self.mixed if prompt is None else prompt)), count * self.settings.max_tokens)

    def scores(self, count: int, prompt: float | None = None) -> Group:
        each = (self.mixed if prompt is None else prompt) + self.settings.max_tokens
        return Group(count, round(count * each), count)


def plan_requests(
    settings: ProbeSettings,
    names: Sequence[str],
    offer: Offer = EVERYTHING,
    max_model_len: int | None = None,
    *,
    has_pair: bool = False,
) -> Planned:
    """What the probes called `names` send. has_pair: a server without speculation is there as well."""
    of = _Counting(settings, offer, max_model_len)
    wanted = {group for name in names for group in _groups_of(name, of)}
    generated, scored, aborted, odd = Group(), Group(), Group(), Group()
    for group in sorted(wanted):
        generated += _GENERATED[group](of) if group in _GENERATED else Group()
        scored += _SCORED[group](of) if group in _SCORED else Group()
    if wanted:
        generated += Group(2, 800, 2)  # tokens per character of the two languages
    if has_pair and "speculation" in names and offer.speculation:
        generated += of.replies(of.half)
    if "garble" in names:
        aborts = round(settings.num_garble_requests * settings.abort_share) if offer.streams else 0
        aborted = of.replies(aborts)
        looked = generated.num_requests if settings.most_suspects is None else settings.most_suspects
        again = of.replies(min(MOST_ASKED_AGAIN, looked))
        odd = again + of.scores(looked) if of.can_score else again
    if "temperature" in names and offer.logprobs:  # where the first replies leave a doubt
        more = MORE_LONG_REPLIES * (settings.num_requests // 2)
        odd += of.replies(more, of.short) + (of.scores(more, of.short) if of.can_score else Group())
    return Planned(generated, scored, aborted, odd)


def _groups_of(name: str, of: _Counting) -> set[str]:
    examined = {"greedy", "sampled", "scored greedy", "scored sampled"}
    offer = of.offer
    match name:
        case "argmax":
            return {"greedy"} if offer.logprobs else set()
        case "recompute":
            return examined | {"alone", "scored alone"} if of.can_score else set()
        case "consensus":
            return examined if of.can_score else set()
        case "routing":
            return examined if offer.routed_experts else set()
        case "determinism":
            return {"greedy", "alone", "alone again", "neighbours"} | ({"salted"} if offer.cache_salt else set())
        case "speculation":
            return {"greedy"} if offer.speculation else set()
        case "acceptance":
            return {"sampled", "long replies"} if offer.speculation else set()
        case "temperature" if not offer.logprobs:
            return {"greedy", "long replies", "long again", "alone", "alone again"}
        case "temperature":
            return {"sampled", "long replies"} | ({"scored sampled", "scored long"} if of.can_score else set())
        case "tools":
            return {"tools"} if offer.chat else set()
        case "garble":
            return {"scan"} | ({"scored scan"} if of.can_score and not of.settings.temperature else set())
        case "nonfinite":
            is_scored = offer.prompt_logprobs and offer.token_ids
            return {"greedy", "sampled"} | ({"scored greedy"} if is_scored else set())
    return {"greedy"}  # text, swapped


def _tools(of: _Counting) -> Group:
    settings = of.settings
    counts = settings.num_tools
    described = 2 * settings.num_tool_requests * TOOL_TOKENS * sum(counts)
    replies = of.replies(2 * len(counts) * settings.num_tool_requests)
    return replies + Group(2, described + TOOL_TOKENS, 2)


_GENERATED: dict[str, Callable[[_Counting], Group]] = {
    "greedy": lambda of: of.replies(of.half),
    "sampled": lambda of: of.replies(of.half),
    "long replies": lambda of: of.replies(of.settings.num_requests // 2, of.short),
    "long again": lambda of: of.replies(min(of.settings.num_alone, of.settings.num_requests // 2), of.short),
    "alone": lambda of: of.replies(of.alone),
    "alone again": lambda of: of.replies(of.alone),
    "salted": lambda of: of.replies(2 * of.alone),
    "neighbours": lambda of: of.replies(2 * min(of.settings.num_neighbours, of.alone) * of.settings.concurrency),
    "tools": _tools,
    "scan": lambda of: of.replies(of.settings.num_garble_requests),
}
_SCORED: dict[str, Callable[[_Counting], Group]] = {
    "scored greedy": lambda of: of.scores(of.half),
    "scored sampled": lambda of: of.scores(of.half),
    "scored long": lambda of: of.scores(of.settings.num_requests // 2, of.short),
    "scored alone": lambda of: of.scores(of.alone),
    "scored scan": lambda of: of.scores(min(of.settings.num_scored, of.settings.num_garble_requests)),
}


# ------------------------------------------------------------------------------------------------ within a limit
def fit_settings(
    settings: ProbeSettings,
    most: int,
    names: Sequence[str],
    offer: Offer = EVERYTHING,
    max_model_len: int | None = None,
    *,
    has_pair: bool = False,
) -> ProbeSettings:
    """Settings of which everything together, the questions that find out what is offered among them, is `most` at most.

    All numbers are made smaller by one factor. MeasureError: even the least of everything is more.
    """

    def total(tried: ProbeSettings) -> int:
        planned = plan_requests(tried, names, offer, max_model_len, has_pair=has_pair).total.num_requests
        return planned + MOST_DISCOVERY_REQUESTS

    least = total(_scaled(settings, 0.0, most))
    if least > most:
        raise MeasureError(f"--requests {most}: these probes send {least} at least; name fewer of them with --probes")
    low, high = 0.0, 1.0
    if total(_scaled(settings, high, most)) <= most:
        low = high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if total(_scaled(settings, middle, most)) <= most else (low, middle)
    return _scaled(settings, low, most)


def _scaled(settings: ProbeSettings, factor: float, most: int) -> ProbeSettings:
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


def seen_from(num_replies: int, level: float) -> float:
    """The rate of a fault that so many replies show at least once with probability `level`."""
    return float(1 - (1 - level) ** (1 / max(1, num_replies)))


def cost_of_limit(limited: ProbeSettings, planned: Planned, unlimited: Planned) -> str:
    """What a limit takes away, in words."""

    def sees(group: Group) -> str:
        return f"1 in {1 / seen_from(group.num_requests, limited.level):,.0f}"

    few, all_ = planned.generated, unlimited.generated
    if few.num_requests >= all_.num_requests:
        return f"--requests {limited.most_requests} leaves everything that is sent without it"
    return (
        f"--requests {limited.most_requests} leaves {few.num_requests:,} replies, which show a fault of {sees(few)} with "
        f"{percent_plain(limited.level)}; the {all_.num_requests:,} without it show {sees(all_)}"
    )
