"""Where two greedy replies to one prompt part, and whether the token there was a near tie or a decision.

Batch-size-dependent reductions make greedy replies part on GPUs (Thinking Machines: 1000 runs, 80 distinct replies); they do so
at near ties. A fault parts them where the model was sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay.records.probe import ProbeResult, Value, Witness
from assay_evaluate.client.client import Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.generated_logprobs import Token, TokenRow
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness
from assay_evaluate.diagnosis.probes.ranking import DECIDED_NATS, NOISE_FACTOR


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


def part(baseline: Exchange, other: Exchange) -> ReplyParting:
    """Compare two replies to the same greedy request."""
    ours, theirs = tokens_of(baseline), tokens_of(other)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    rows = list(zip(baseline.rows[:same], other.rows[:same], strict=False))
    deltas = tuple(abs(a.logprob - b.logprob) for a, b in rows if math.isfinite(a.logprob - b.logprob))
    if same == len(ours) == len(theirs):
        return ReplyParting(baseline, other, None, None, deltas)
    lead = None
    if same < len(baseline.rows) and same < len(theirs):
        lead = _lead(baseline.rows[same], theirs[same])
    return ReplyParting(baseline, other, same, lead, deltas)


def _lead(row: TokenRow, token: Token) -> float | None:
    """Of the row's own token over another; over one that is not listed, at least that over the last listed."""
    if not row.top or not math.isfinite(row.logprob):
        return None
    listed = dict(row.top)
    return row.logprob - listed.get(token, row.top[-1][1])


@dataclass(frozen=True)
class Arm:
    """All pairs of one way of asking."""

    name: str
    partings: tuple[ReplyParting, ...]

    @property
    def num_parted(self) -> int:
        return sum(one.position is not None for one in self.partings)

    @property
    def first(self) -> int | None:
        """The earliest parting, in tokens."""
        return min((one.position for one in self.partings if one.position is not None), default=None)

    @property
    def mean_delta_nats(self) -> float | None:
        deltas = [delta for one in self.partings for delta in one.deltas]
        return float(np.mean(deltas)) if deltas else None

    def decided(self, limit_nats: float) -> list[ReplyParting]:
        """Partings at a token of which the baseline was sure."""
        return [one for one in self.partings if one.lead_nats is not None and one.lead_nats > limit_nats]

    def figures(self, limit_nats: float) -> dict[str, Value]:
        return {
            "num_prompts": len(self.partings), "num_parted": self.num_parted, "first_parting": self.first,
            "num_decided": len(self.decided(limit_nats)), "mean_delta_nats": self.mean_delta_nats,
        }  # fmt: skip


def arm(name: str, baseline: Sequence[Exchange], others: Sequence[Exchange]) -> Arm:
    """Pair replies in order; pairs of which one has no reply are left out."""
    pairs = [(a, b) for a, b in zip(baseline, others, strict=True) if a.is_answered and b.is_answered]
    return Arm(name, tuple(part(a, b) for a, b in pairs))


def decision_limit(arms: Sequence[Arm]) -> float:
    """Nats from which a lead is a decision on this server: ten times its own median noise, and a quarter at least."""
    deltas = [delta for one in arms for parting in one.partings for delta in parting.deltas]
    return max(DECIDED_NATS, NOISE_FACTOR * float(np.median(deltas))) if deltas else DECIDED_NATS


def witnesses(arms: Sequence[Arm], limit_nats: float) -> list[Witness]:
    """Of decided partings, arm by arm."""
    found = []
    for one in arms:
        for parting in one.decided(limit_nats):
            at = parting.position or 0
            ours, theirs = tokens_of(parting.baseline), tokens_of(parting.other)
            what = f"{one.name}: another token than alone, where that led by {parting.lead_nats:.3g} nats"
            found.append(witness(parting.other, what, at, str(ours[at]), str(theirs[at])))
    return found


# ------------------------------------------------------------------------------------------------ the map
def probe_determinism(session: ProbeSession) -> ProbeResult:
    """Alarm: a reply parts where the reply alone had decided (see `decision_limit`). Needs log-probabilities to judge."""
    baseline = session.alone
    if not any(one.is_answered for one in baseline):
        return not_run("determinism", "prompt", "no request alone had a reply")
    asked = [one.ask for one in baseline]
    in_batch = {one.ask.id: one for one in session.greedy}
    arms = [
        arm("alone again", baseline, session.alone_again),
        arm("full batch", baseline, [in_batch[ask.id.removeprefix("alone/")] for ask in asked]),
    ]
    if session.endpoint.offer.cache_salt:
        salted = [replace(ask, body={**ask.body, "cache_salt": f"{session.settings.seed}-{session.nonce}"}) for ask in asked]
        arms.append(arm("cold prefix", baseline, session.client.ask_together(_renamed(salted, "cold"), 1)))
        arms.append(arm("warm prefix", baseline, session.client.ask_together(_renamed(salted, "warm"), 1)))
    for what, num_tokens in (("short", session.settings.short_tokens), ("long", session.settings.long_tokens)):
        some = baseline[: session.settings.num_neighbours]
        arms.append(arm(f"{what} neighbours", some, _among(session, [one.ask for one in some], what, num_tokens)))
    return _judge(session, arms)


def _renamed(asks: Sequence[Ask], what: str) -> list[Ask]:
    return [replace(ask, id=f"{what}/{ask.id}") for ask in asks]


def _among(session: ProbeSession, asks: Sequence[Ask], what: str, num_tokens: int) -> list[Exchange]:
    """Each request in the middle of a full wave of others."""
    found = []
    for number, ask in enumerate(asks):
        prompts = session.prompts(f"neighbour-{what}-{number}", session.settings.concurrency - 1, num_tokens)
        others = [session.ask("neighbour", prompt) for prompt in prompts]
        middle = len(others) // 2
        wave = [*others[:middle], *_renamed([ask], what), *others[middle:]]
        found.append(session.client.ask_together(wave, len(wave), in_waves=True)[middle])
    return found


def _judge(session: ProbeSession, arms: Sequence[Arm]) -> ProbeResult:
    limit = decision_limit(arms)
    events = witnesses(arms, limit)
    trials = sum(len(one.partings) for one in arms)
    parted = [one for one in arms if one.num_parted]
    alarm = reason = None
    if events:
        where = ", ".join(f"{one.name} {len(one.decided(limit))} of {len(one.partings)}" for one in arms if one.decided(limit))
        alarm = f"replies part from those alone at tokens that led by more than {limit:.3g} nats: {where}"
    elif parted:
        told = session.top_k is not None
        seen = ", ".join(f"{one.name} {one.num_parted} of {len(one.partings)}" for one in parted)
        reason = f"replies part ({seen}), " + (
            "at near ties" if told else "not judged: the endpoint returns no log-probabilities"
        )
    return session.result(
        "determinism",
        events=len(events),
        trials=trials,
        unit="prompt",
        alarm=alarm,
        reason=reason,
        num_requests=len({parting.baseline.id for one in arms for parting in one.partings}),
        requests_hit=len({parting.baseline.id for one in arms for parting in one.decided(limit)}),
        witnesses=events,
        details={
            "decided_nats": limit,
            **{one.name.replace(" ", "_"): one.figures(limit) for one in arms},
        },
    )


# ------------------------------------------------------------------------------------------------ speculation
WHY_NO_PAIR = "no second server without speculation to compare with (--without-speculation URL)"


def probe_speculation(session: ProbeSession) -> ProbeResult:
    """The greedy requests on both servers, in the same waves. Alarm: replies part where the one without drafts had decided."""
    if not session.endpoint.offer.speculation:
        return not_run("speculation", "prompt", "the endpoint drafts nothing, or does not say so")
    if session.without_speculation is None:
        return not_run("speculation", "prompt", WHY_NO_PAIR)
    return pair_with(session, session.without_speculation)


def pair_with(session: ProbeSession, other: ProbedEndpoint) -> ProbeResult:
    """`session`'s greedy replies, made with drafts, against those of `other`, which drafts nothing."""
    if other.offer.speculation:
        return not_run("speculation", "prompt", f"{other.base_url} drafts, too: the pair needs one server without speculation")
    with_drafts = [one for one in session.greedy if one.is_answered]
    asks = [replace(one.ask, id=f"undrafted/{one.ask.id}") for one in with_drafts]
    with Client(other, timeout_s=session.settings.timeout_s) as client:
        without = client.ask_together(asks, session.settings.concurrency, in_waves=True)
    pair = arm("speculation", without, with_drafts)
    limit = decision_limit([pair])
    events = witnesses([pair], limit)
    alarm = reason = None
    if events:
        alarm = f"{len(events)} of {len(pair.partings)} greedy replies change with speculation at tokens that were decided"
    elif pair.num_parted:
        told = session.top_k is not None
        why = "at near ties" if told else "not judged: the endpoint returns no log-probabilities"
        reason = f"{pair.num_parted} of {len(pair.partings)} replies part, {why}"
    return session.result(
        "speculation",
        events=len(events),
        trials=len(pair.partings),
        unit="prompt",
        alarm=alarm,
        reason=reason,
        num_requests=len(pair.partings),
        requests_hit=len(events),
        witnesses=events,
        details={
            "decided_nats": limit,
            **pair.figures(limit),
        },
    )
