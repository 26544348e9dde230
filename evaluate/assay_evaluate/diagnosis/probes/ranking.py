"""Greedy token = arg max: at temperature 0 the chosen token must have the highest of the returned log-probabilities.

Ranking at one precision and reporting at another, or an approximate top-k, drops the best token now and then (Anthropic,
post-mortem of 2025-09-17); scores hardly move, because the model recovers. Equal log-probabilities are a tie, not an event.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.diagnosis.probes.recompute import why_not
from assay_evaluate.statistics.rates import lower_bound

TIE = 1e-5
"""Nats within which two log-probabilities are equal: float32 rounding of values up to about 20."""


def probe_argmax(session: ProbeSession) -> ProbeResult:
    """Every greedy token against the returned top k. Alarm: one single event."""
    if session.top_k is None:
        return not_run("argmax", "token", session.endpoint.offer.no_logprobs or "the endpoint returns no log-probabilities")
    events, trials, first, looked = [], 0, None, 0
    largest = 0.0
    for exchange in session.greedy:
        looked += exchange.is_answered
        for position, row in enumerate(exchange.rows):
            if not row.top or math.isnan(row.logprob):
                continue
            trials += 1
            best, logprob = row.top[0]
            if row.token != best and logprob - row.logprob > TIE:
                events.append(witness(exchange, "chosen is not the most likely", position, str(best), str(row.token)))
                largest = max(largest, logprob - row.logprob)
                first = first or looked
    alarm = f"{len(events)} of {trials} greedy tokens were not the most likely; the server ranks otherwise than it reports"
    return session.result(
        "argmax",
        events=len(events),
        trials=trials,
        unit="token",
        alarm=alarm if events else None,
        num_requests=looked,
        requests_hit=len({one.request for one in events}),
        witnesses=events,
        first_event_at=first,
        details={
            "largest_gap_nats": largest if events else None,
        },
    )


# ------------------------------------------------------------------------------------------------ decoding against prefill
DECIDED_NATS = 0.25
"""A lead of at least this (odds of 1.28) is a decision and no near tie ..."""
NOISE_FACTOR = 10.0
"""... and of at least this many times the median difference between the two paths, where they differ more."""
MISSING_NATS = 1.0
"""How far above the last of the other's top k a token must lie to be missing there: four times a decision."""
SWAP_RATE = 1e-3
"""Swaps alarm when they are surely more frequent: expert routing that flips in BF16 makes a few."""
TIE_SHARE = 0.05
TIE_P_VALUE = 1e-6


@dataclass
class ConsensusTally:
    """Sums over positions."""

    positions: int = 0
    same_best: int = 0
    overlap: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    ties: Counter[str] = field(default_factory=Counter)
    witnesses: list[Witness] = field(default_factory=list)
    first_event_at: int | None = None


@dataclass(frozen=True)
class Ranks:
    """One position: both paths' tokens with log-probabilities, best first, cut to the same k."""

    decode: dict[int, float]
    prefill: dict[int, float]


def probe_consensus(session: ProbeSession) -> ProbeResult:
    """Greedy and sampled replies at full concurrency. Alarm: a missing token, surely too many swaps, or ties of one side."""
    missing = why_not(session)
    if missing is not None:
        return not_run("consensus", "token", missing)
    every = [*session.greedy_scored, *session.sampled_scored]
    scored = [one for one in every if one.prefill is not None and one.exchange.rows]
    ranked = [(one, positions_of(one)) for one in scored]
    noise = _noise([ranks for _, positions in ranked for ranks in positions.values()])
    decided = max(DECIDED_NATS, NOISE_FACTOR * noise)
    tally = ConsensusTally()
    for number, (one, positions) in enumerate(ranked):
        before = tally.kinds.total()
        for position, ranks in positions.items():
            _look(one, position, ranks, decided, tally)
        if tally.kinds.total() > before and tally.first_event_at is None:
            tally.first_event_at = number + 1
    return session.result(
        "consensus",
        events=tally.kinds.total(),
        trials=tally.positions,
        unit="token",
        alarm="; ".join(_alarms(tally)) or None,
        num_requests=len(scored),
        requests_hit=len({one.request for one in tally.witnesses}),
        stands_without_events=_tie_alarm(tally) is not None,
        witnesses=tally.witnesses,
        first_event_at=tally.first_event_at,
        details={
            "num_missing": tally.kinds["missing"],
            "num_swaps": tally.kinds["swap"],
            "ties_decode_only": tally.ties["decode"],
            "ties_prefill_only": tally.ties["prefill"],
            "top1_agreement": tally.same_best / tally.positions if tally.positions else None,
            "mean_overlap": tally.overlap / tally.positions if tally.positions else None,
            "median_delta_nats": noise,
            "decided_nats": decided,
        },
    )


def positions_of(scored: RescoredReply) -> dict[int, Ranks]:
    """Positions of the reply at which both paths name at least two tokens."""
    prefill, found = scored.prefill, {}
    assert prefill is not None, "the caller looked"
    for position, (row, ids, logprobs) in enumerate(
        zip(scored.exchange.rows, prefill.ids_PK, prefill.logprobs_PK, strict=False)
    ):
        decode = [(token, value) for token, value in row.top if isinstance(token, int) and math.isfinite(value)]
        if decode and decode[-1][0] == row.token:  # vLLM lists the token that was drawn, in the place of the last of the top k
            decode.pop()
        other = [(int(i), float(v)) for i, v in zip(ids, logprobs, strict=True) if i >= 0 and math.isfinite(v)]
        k = min(len(decode), len(other))
        if k >= 2:
            found[position] = Ranks(dict(decode[:k]), dict(other[:k]))
    return found


def _noise(all_ranks: list[Ranks]) -> float:
    """Median |difference| of a token that both paths name; 0 when there is none."""
    deltas = [abs(r.decode[token] - r.prefill[token]) for r in all_ranks for token in r.decode.keys() & r.prefill.keys()]
    return float(np.median(deltas)) if deltas else 0.0


def _look(scored: RescoredReply, position: int, ranks: Ranks, decided: float, tally: ConsensusTally) -> None:
    decode, prefill = ranks.decode, ranks.prefill
    tally.positions += 1
    tally.overlap += len(decode.keys() & prefill.keys()) / len(decode)
    ours, theirs = next(iter(decode)), next(iter(prefill))
    tally.same_best += ours == theirs
    has_ties = [len(set(side.values())) < len(side) for side in (decode, prefill)]
    if has_ties[0] != has_ties[1]:
        tally.ties["decode" if has_ties[0] else "prefill"] += 1
    far = max(MISSING_NATS, 4 * decided)
    for side, other, name in ((prefill, decode, "decoding"), (decode, prefill, "prefill")):
        last = min(other.values())
        lost = next((token for token, value in side.items() if token not in other and value > last + far), None)
        if lost is not None:
            tally.kinds["missing"] += 1
            what = f"{name} does not list a token that the other path ranks {list(side).index(lost) + 1}"
            tally.witnesses.append(witness(scored.exchange, what, position, lost, None))
            return
    if ours != theirs and _lead(decode, ours, theirs) > decided and _lead(prefill, theirs, ours) > decided:
        tally.kinds["swap"] += 1
        tally.witnesses.append(
            witness(scored.exchange, "decoding and prefill are sure of different tokens", position, theirs, ours)
        )


def _lead(side: dict[int, float], best: int, other: int) -> float:
    """How far `best` is ahead of `other`; of one that is not listed, of the last listed."""
    return side[best] - side.get(other, min(side.values()))


def _alarms(tally: ConsensusTally) -> list[str]:
    found = []
    if tally.kinds["missing"]:
        found.append(
            f"{tally.kinds['missing']} of {tally.positions} positions: a likely token is missing from one path's top k"
        )
    swaps = tally.kinds["swap"]
    if tally.positions and lower_bound(swaps, tally.positions) > SWAP_RATE:
        found.append(
            f"{swaps} of {tally.positions} positions: both paths are sure of different tokens (allowed {SWAP_RATE:.1%})"
        )
    ties = _tie_alarm(tally)
    return [*found, ties] if ties is not None else found


def _tie_alarm(tally: ConsensusTally) -> str | None:
    one_sided = (tally.ties["decode"], tally.ties["prefill"])
    if not sum(one_sided):
        return None
    p_value = float(stats.binomtest(max(one_sided), sum(one_sided)).pvalue)
    if p_value >= TIE_P_VALUE or abs(one_sided[0] - one_sided[1]) <= TIE_SHARE * tally.positions:
        return None
    side = "decoding" if one_sided[0] > one_sided[1] else "prefill"
    return f"only {side} has equal log-probabilities ({max(one_sided)} positions): it ranks at a lower precision"
