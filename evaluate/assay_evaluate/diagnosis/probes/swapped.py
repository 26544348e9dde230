"""Replies that answer another request's prompt, wherever they came in this run: a gateway, or a server, mixed them up.

Three ways to know: the reply's own `id` names another request of ours (vLLM repeats X-Request-Id), log-probabilities are of
other tokens than those of the prompt, or `prompt_token_ids` are not what the server's /tokenize makes of the prompt.
"""

from __future__ import annotations

import json
from typing import Any

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Ask
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness


def probe_swapped(session: ProbeSession) -> ProbeResult:
    """Everything that was asked in this run. Alarm: one single reply that belongs to another request."""
    _ = session.greedy  # asked, if they were not yet
    replies = [
        exchange for exchange in session.client.tally.exchanges.values() if exchange.is_answered or exchange.is_of_another
    ]
    named = [exchange for exchange in replies if exchange.is_of_another]
    known_ids: dict[str, tuple[int, ...]] = {}

    def ids_by_server(ask: Ask) -> tuple[int, ...]:
        """Of the request's prompt, by the server's own tokenizer and chat template; () if it does not say."""
        body: dict[str, Any] = {name: ask.body[name] for name in ("messages", "prompt", "tools") if name in ask.body}
        if isinstance(body.get("prompt"), list):
            return tuple(body["prompt"])
        key = json.dumps(body)
        if key not in known_ids:
            known_ids[key] = session.client.post("/tokenize", body).tokens
        return known_ids[key]

    compared = [
        (exchange, ids)
        for exchange in replies
        if exchange.is_answered
        and exchange.reply.prompt_token_ids is not None
        and session.endpoint.offer.tokenize
        and (ids := ids_by_server(exchange.ask))
    ]
    unlike = [exchange for exchange, ids in compared if exchange.reply.prompt_token_ids != ids]
    is_comparable = 2 * len(unlike) <= len(compared)
    if not named and (not compared or not is_comparable):
        reason = "the endpoint does not tell the ids of a prompt, in replies and by /tokenize"
        if compared:
            reason = f"/tokenize gives other ids than {len(unlike)} of {len(compared)} replies: they cannot be compared"
        return not_run("swapped", "request", reason, len(replies))
    swapped = sorted([*named, *(unlike if is_comparable else [])], key=replies.index)
    trials = len(compared) + len(named)
    return session.result(
        "swapped",
        trials=trials,
        unit="request",
        alarms=[f"{len(swapped)} of {trials} replies answer another request's prompt"] if swapped else [],
        num_requests=len(replies),
        witnesses=[
            witness(exchange, exchange.reply.error or "its prompt's ids are those of another prompt") for exchange in swapped
        ],
        first_event_at=replies.index(swapped[0]) + 1 if swapped else None,
    )
