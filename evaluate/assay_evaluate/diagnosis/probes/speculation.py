"""Speculation on and off as a pair: greedy replies of two servers of one checkpoint, one of which drafts.

Greedy speculation is lossless on paper; a release scored 1 % on GSM8K with it and 95 % without (vLLM #46834).
"""

from __future__ import annotations

from dataclasses import replace

from assay.records.probe import ProbeResult
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.diagnosis.probes.divergences import arm, decision_limit, witnesses
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run

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
