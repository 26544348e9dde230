"""Is the ranking that the server reports the one by which it chose? Within one path, and of decoding against prefill.

Greedy token = arg max: at temperature 0 the chosen token must have the highest of the returned log-probabilities. Ranking at
one precision and reporting at another, or an approximate top-k, drops the best token now and then (Anthropic, post-mortem of
2025-09-17); scores hardly move, because the model recovers. Equal log-probabilities are a tie, not an event.

Rank consensus: the top k of decoding against the top k of prefill, position by position of the same text. Three events:
missing  a token that one path ranks clearly inside its top k is not in the other's at all: an approximate top-k, two precisions
swap     both paths are sure of another best token
ties     one path has equal log-probabilities in its top k where the other has none: it ranks at a lower precision
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy import stats

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.statistics.rates import lower_bound

TIE = 1e-5
"""Nats within which two log-probabilities are equal: float32 rounding of values up to about 20."""
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


def probe_argmax(session: ProbeSession) -> ProbeResult:
    """Every greedy token against the returned top k. Alarm: one single event."""
    if session.top_k is None:
        return not_run("argmax", "token", session.endpoint.offer.no_logprobs or "the endpoint returns no log-probabilities")
    events, trials, first, num_replies = [], 0, None, 0
    largest = 0.0
    for exchange in session.greedy:
        num_replies += exchange.is_answered
        for position, row in enumerate(exchange.rows):
            if not row.top or math.isnan(row.logprob):
                continue
            trials += 1
            best, logprob = row.top[0]
            if row.token != best and logprob - row.logprob > TIE:
                events.append(witness(exchange, "chosen is not the most likely", position, str(best), str(row.token)))
                largest = max(largest, logprob - row.logprob)
                first = first or num_replies
    alarm = f"{len(events)} of {trials} greedy tokens were not the most likely; the server ranks otherwise than it reports"
    return session.result(
        "argmax",
        trials=trials,
        unit="token",
        alarms=[alarm] if events else [],
        num_requests=num_replies,
        requests_hit=len({event.request for event in events}),
        witnesses=events,
        first_event_at=first,
        details={"largest_gap_nats": largest if events else None},
    )


# ------------------------------------------------------------------------------------------------ decoding against prefill
@dataclass(frozen=True)
class Ranks:
    """One position: both paths' tokens with log-probabilities, best first, cut to the same k."""

    decode: dict[int, float]
    prefill: dict[int, float]


def probe_consensus(session: ProbeSession) -> ProbeResult:
    """Greedy and sampled replies at full concurrency. Alarm: a missing token, surely too many swaps, or ties of one side."""
    if (reason := session.reason_unscorable) is not None:
        return not_run("consensus", "token", reason)
    scored = [
        reply
        for reply in [*session.greedy_scored, *session.sampled_scored]
        if reply.prefill is not None and reply.exchange.rows
    ]
    ranked = [(reply, positions_of(reply)) for reply in scored]
    deltas = [
        abs(ranks.decode[token] - ranks.prefill[token])
        for _, positions in ranked
        for ranks in positions.values()
        for token in ranks.decode.keys() & ranks.prefill.keys()
    ]
    noise = float(np.median(deltas)) if deltas else 0.0
    decided = max(DECIDED_NATS, NOISE_FACTOR * noise)
    num_positions, same_best, overlap = 0, 0, 0.0
    kinds, ties = Counter[str](), Counter[str]()
    events: list[Witness] = []
    first = None
    for number, (reply, positions) in enumerate(ranked, 1):
        for position, ranks in positions.items():
            num_positions += 1
            overlap += len(ranks.decode.keys() & ranks.prefill.keys()) / len(ranks.decode)
            same_best += next(iter(ranks.decode)) == next(iter(ranks.prefill))
            has_ties = [len(set(path.values())) < len(path) for path in (ranks.decode, ranks.prefill)]
            if has_ties[0] != has_ties[1]:
                ties["decode" if has_ties[0] else "prefill"] += 1
            if (event := _find_event(ranks, decided)) is not None:
                kind, what, expected, actual = event
                kinds[kind] += 1
                events.append(witness(reply.exchange, what, position, expected, actual))
                first = first or number
    alarms = []
    if kinds["missing"]:
        alarms.append(f"{kinds['missing']} of {num_positions} positions: a likely token is missing from one path's top k")
    if num_positions and lower_bound(kinds["swap"], num_positions) > SWAP_RATE:
        alarms.append(
            f"{kinds['swap']} of {num_positions} positions: both paths are sure of different tokens (allowed {SWAP_RATE:.1%})"
        )
    tie_alarm = _tie_alarm(ties, num_positions)
    if tie_alarm is not None:
        alarms.append(tie_alarm)
    return session.result(
        "consensus",
        trials=num_positions,
        unit="token",
        alarms=alarms,
        num_requests=len(scored),
        requests_hit=len({event.request for event in events}),
        stands_without_events=tie_alarm is not None,
        witnesses=events,
        first_event_at=first,
        details={
            "num_missing": kinds["missing"],
            "num_swaps": kinds["swap"],
            "ties_decode_only": ties["decode"],
            "ties_prefill_only": ties["prefill"],
            "top1_agreement": same_best / num_positions if num_positions else None,
            "mean_overlap": overlap / num_positions if num_positions else None,
            "median_delta_nats": noise,
            "decided_nats": decided,
        },
    )


def positions_of(scored: RescoredReply) -> dict[int, Ranks]:
    """Positions of the reply at which both paths name at least two tokens."""
    prefill, positions = scored.prefill, {}
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
            positions[position] = Ranks(dict(decode[:k]), dict(other[:k]))
    return positions


def _find_event(ranks: Ranks, decided: float) -> tuple[str, str, int, int | None] | None:
    """(kind, what, expected token, actual token) of one position. None: the paths agree, or differ at a near tie."""
    decode, prefill = ranks.decode, ranks.prefill
    far = max(MISSING_NATS, 4 * decided)
    for path, other, other_name in ((prefill, decode, "decoding"), (decode, prefill, "prefill")):
        last = min(other.values())
        missing = next((token for token, value in path.items() if token not in other and value > last + far), None)
        if missing is not None:
            rank = list(path).index(missing) + 1
            return "missing", f"{other_name} does not list a token that the other path ranks {rank}", missing, None
    decode_best, prefill_best = next(iter(decode)), next(iter(prefill))
    if (
        decode_best != prefill_best
        and _lead(decode, decode_best, prefill_best) > decided
        and _lead(prefill, prefill_best, decode_best) > decided
    ):
        return "swap", "decoding and prefill are sure of different tokens", prefill_best, decode_best
    return None


def _lead(path: dict[int, float], best: int, other: int) -> float:
    """How far `best` is ahead of `other`; of one that is not listed, of the last listed."""
    return path[best] - path.get(other, min(path.values()))


def _tie_alarm(ties: Counter[str], num_positions: int) -> str | None:
    if not ties.total():
        return None
    most = max(ties["decode"], ties["prefill"])
    p_value = float(stats.binomtest(most, ties.total()).pvalue)
    if p_value >= TIE_P_VALUE or abs(ties["decode"] - ties["prefill"]) <= TIE_SHARE * num_positions:
        return None
    path = "decoding" if ties["decode"] > ties["prefill"] else "prefill"
    return f"only {path} has equal log-probabilities ({most} positions): it ranks at a lower precision"
