"""Where greedy replies to one prompt part, and whether the token there was a near tie or a decision.

Batch-size-dependent reductions make greedy replies part on GPUs (Thinking Machines: 1000 runs, 80 distinct replies); they do so
at near ties. A fault parts them where the model was sure. Two probes ask for such replies:

determinism  the same greedy requests alone, alone again, in a full batch, cold, warm, between short and long neighbours
speculation  on two servers of one checkpoint, one of which drafts. Greedy speculation is lossless on paper; a release scored
             1 % on GSM8K with it and 95 % without (vLLM #46834).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay.records.probe import ProbeResult, Value, Witness
from assay_evaluate.client.client import Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.logprobs import Token
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, renamed, witness
from assay_evaluate.diagnosis.probes.ranking import DECIDED_NATS, NOISE_FACTOR

NO_PAIR = "no second server without speculation to compare with (--without-speculation URL)"


@dataclass(frozen=True)
class ReplyParting:
    """Two replies to one prompt. `position`: the first token that differs; None: they are the same."""

    baseline: Exchange
    other: Exchange
    position: int | None
    lead_nats: float | None
    """How far the baseline's token was ahead of the other's, by its own log-probabilities. None: not told."""
    deltas: tuple[float, ...]
    """|difference of log-probability| of the tokens before the parting."""


def tokens_of(exchange: Exchange) -> tuple[Token, ...]:
    """Ids where the server tells them, else tokens of the log-probabilities, else characters."""
    return exchange.reply.token_ids or tuple(row.token for row in exchange.rows) or tuple(exchange.text)


def count_equal(a: Sequence[Token], b: Sequence[Token]) -> int:
    """How many tokens two replies have in common before they part."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compare_replies(baseline: Exchange, other: Exchange) -> ReplyParting:
    """Two replies to the same greedy request."""
    tokens, other_tokens = tokens_of(baseline), tokens_of(other)
    at = count_equal(tokens, other_tokens)
    rows = zip(baseline.rows[:at], other.rows[:at], strict=False)
    deltas = tuple(abs(a.logprob - b.logprob) for a, b in rows if math.isfinite(a.logprob - b.logprob))
    if at == len(tokens) == len(other_tokens):
        return ReplyParting(baseline, other, None, None, deltas)
    lead = None
    if at < len(baseline.rows) and at < len(other_tokens):
        row = baseline.rows[at]
        if row.top and math.isfinite(row.logprob):  # over a token that is not listed, at least the lead over the last listed
            lead = row.logprob - dict(row.top).get(other_tokens[at], row.top[-1][1])
    return ReplyParting(baseline, other, at, lead, deltas)


@dataclass(frozen=True)
class Arm:
    """All pairs of one way of asking."""

    name: str
    partings: tuple[ReplyParting, ...]

    @property
    def num_parted(self) -> int:
        return sum(parting.position is not None for parting in self.partings)

    def decided(self, limit_nats: float) -> list[ReplyParting]:
        """Partings at a token of which the baseline was sure."""
        return [parting for parting in self.partings if parting.lead_nats is not None and parting.lead_nats > limit_nats]

    def figures(self, limit_nats: float) -> dict[str, Value]:
        deltas = [delta for parting in self.partings for delta in parting.deltas]
        return {
            "num_prompts": len(self.partings), "num_parted": self.num_parted,
            "first_parting": min((part.position for part in self.partings if part.position is not None), default=None),
            "num_decided": len(self.decided(limit_nats)), "mean_delta_nats": float(np.mean(deltas)) if deltas else None,
        }  # fmt: skip


def pair_replies(name: str, baseline: Sequence[Exchange], others: Sequence[Exchange]) -> Arm:
    """In order; pairs of which one has no reply are left out."""
    pairs = [(a, b) for a, b in zip(baseline, others, strict=True) if a.is_answered and b.is_answered]
    return Arm(name, tuple(compare_replies(a, b) for a, b in pairs))


def decision_limit(arms: Sequence[Arm]) -> float:
    """Nats from which a lead is a decision on this server: ten times its own median noise, and a quarter at least."""
    deltas = [delta for arm in arms for parting in arm.partings for delta in parting.deltas]
    return max(DECIDED_NATS, NOISE_FACTOR * float(np.median(deltas))) if deltas else DECIDED_NATS


def witnesses_of(arms: Sequence[Arm], limit_nats: float) -> list[Witness]:
    """Of decided partings, arm by arm."""
    witnesses = []
    for arm in arms:
        for parting in arm.decided(limit_nats):
            at = parting.position or 0
            what = f"{arm.name}: another token than alone, where that led by {parting.lead_nats:.3g} nats"
            expected, actual = str(tokens_of(parting.baseline)[at]), str(tokens_of(parting.other)[at])
            witnesses.append(witness(parting.other, what, at, expected, actual))
    return witnesses


def _parted_where(session: ProbeSession) -> str:
    """Of replies that part, none of them where one was sure."""
    return "at near ties" if session.top_k is not None else "not judged: the endpoint returns no log-probabilities"


# ------------------------------------------------------------------------------------------------ one server
def probe_determinism(session: ProbeSession) -> ProbeResult:
    """Alarm: a reply parts where the reply alone had decided (see `decision_limit`). Needs log-probabilities to judge."""
    baseline, client = session.alone, session.client
    if not any(reply.is_answered for reply in baseline):
        return not_run("determinism", "prompt", "no request alone had a reply")
    asks = [reply.ask for reply in baseline]
    in_batch = {reply.ask.id: reply for reply in session.greedy}
    arms = [
        pair_replies("alone again", baseline, session.alone_again),
        pair_replies("full batch", baseline, [in_batch[ask.id.removeprefix("alone/")] for ask in asks]),
    ]
    if session.endpoint.offer.cache_salt:
        salt = f"{session.settings.seed}-{secrets.token_hex(4)}"  # new to a prefix cache that knows the prompts of earlier runs
        salted = [replace(ask, body={**ask.body, "cache_salt": salt}) for ask in asks]
        for what in ("cold", "warm"):
            arms.append(pair_replies(f"{what} prefix", baseline, client.ask_together(renamed(salted, what), 1)))
    for what, num_tokens in (("short", session.settings.short_tokens), ("long", session.settings.long_tokens)):
        again = baseline[: session.settings.num_neighbours]
        among = _ask_among(session, [reply.ask for reply in again], what, num_tokens)
        arms.append(pair_replies(f"{what} neighbours", again, among))
    limit = decision_limit(arms)
    alarms, reason = [], None
    if events := witnesses_of(arms, limit):
        where = ", ".join(f"{arm.name} {len(arm.decided(limit))} of {len(arm.partings)}" for arm in arms if arm.decided(limit))
        alarms.append(f"replies part from those alone at tokens that led by more than {limit:.3g} nats: {where}")
    elif parted := ", ".join(f"{arm.name} {arm.num_parted} of {len(arm.partings)}" for arm in arms if arm.num_parted):
        reason = f"replies part ({parted}), {_parted_where(session)}"
    return session.result(
        "determinism",
        trials=sum(len(arm.partings) for arm in arms),
        unit="prompt",
        alarms=alarms,
        reason=reason,
        num_requests=len({parting.baseline.id for arm in arms for parting in arm.partings}),
        requests_hit=len({parting.baseline.id for arm in arms for parting in arm.decided(limit)}),
        witnesses=events,
        details={"decided_nats": limit, **{arm.name.replace(" ", "_"): arm.figures(limit) for arm in arms}},
    )


def _ask_among(session: ProbeSession, asks: Sequence[Ask], what: str, num_tokens: int) -> list[Exchange]:
    """Each request in the middle of a full wave of others."""
    replies = []
    for number, ask in enumerate(asks):
        prompts = session.prompts(f"neighbour-{what}-{number}", session.settings.concurrency - 1, num_tokens)
        others = [session.ask("neighbour", prompt) for prompt in prompts]
        middle = len(others) // 2
        wave = [*others[:middle], *renamed([ask], what), *others[middle:]]
        replies.append(session.client.ask_together(wave, len(wave), in_waves=True)[middle])
    return replies


# ------------------------------------------------------------------------------------------------ with and without drafts
def probe_speculation(session: ProbeSession) -> ProbeResult:
    """The greedy requests on both servers, in the same waves. Alarm: replies part where the one without drafts had decided."""
    if not session.endpoint.offer.speculation:
        return not_run("speculation", "prompt", "the endpoint drafts nothing, or does not say so")
    if session.without_speculation is None:
        return not_run("speculation", "prompt", NO_PAIR)
    return compare_with_undrafted(session, session.without_speculation)


def compare_with_undrafted(session: ProbeSession, undrafted: ProbedEndpoint) -> ProbeResult:
    """`session`'s greedy replies, made with drafts, against those of a server that drafts nothing."""
    if undrafted.offer.speculation:
        drafts = f"{undrafted.base_url} drafts, too: the pair needs one server without speculation"
        return not_run("speculation", "prompt", drafts)
    with_drafts = [reply for reply in session.greedy if reply.is_answered]
    asks = renamed([reply.ask for reply in with_drafts], "undrafted")
    with Client(undrafted, timeout_s=session.settings.timeout_s) as client:
        without = client.ask_together(asks, session.settings.concurrency, in_waves=True)
    pair = pair_replies("speculation", without, with_drafts)
    count, limit = len(pair.partings), decision_limit([pair])
    alarms, reason = [], None
    if events := witnesses_of([pair], limit):
        alarms.append(f"{len(events)} of {count} greedy replies change with speculation at tokens that were decided")
    elif pair.num_parted:
        reason = f"{pair.num_parted} of {count} replies part, {_parted_where(session)}"
    return session.result(
        "speculation",
        trials=count,
        unit="prompt",
        alarms=alarms,
        reason=reason,
        requests_hit=len(events),
        witnesses=events,
        details={"decided_nats": limit, **pair.figures(limit)},
    )
