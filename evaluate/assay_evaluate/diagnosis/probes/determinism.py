"""Determinism map: the same greedy requests alone, alone again, in a full batch, cold, warm, between short and long neighbours.

For every way of asking: how many replies part from the one asked alone, where first, and whether at a near tie or at a token
of which the model was sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.probes.divergences import Arm, arm, decision_limit, witnesses
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run


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
