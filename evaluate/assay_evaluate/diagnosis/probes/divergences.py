"""Where two greedy replies to one prompt part, and whether the token there was a near tie or a decision.

Batch-size-dependent reductions make greedy replies part on GPUs (Thinking Machines: 1000 runs, 80 distinct replies); they do so
at near ties. A fault parts them where the model was sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.records.probe import Value, Witness
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.logprobs import Token, TokenRow
from assay_evaluate.diagnosis.probes.consensus import DECIDED_NATS, NOISE_FACTOR
from assay_evaluate.diagnosis.probes.probe_session import witness


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
