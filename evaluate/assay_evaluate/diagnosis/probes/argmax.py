"""Greedy token = arg max: at temperature 0 the chosen token must have the highest of the returned log-probabilities.

Ranking at one precision and reporting at another, or an approximate top-k, drops the best token now and then (Anthropic,
post-mortem of 2025-09-17); scores hardly move, because the model recovers. Equal log-probabilities are a tie, not an event.
"""

from __future__ import annotations

import math

from assay.records.probe import ProbeResult
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness

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
