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

OF_THE_PROMPT = ("messages", "prompt", "tools")


def probe_swapped(session: ProbeSession) -> ProbeResult:
    """Everything that was asked in this run. Alarm: one single reply that belongs to another request."""
    _ = session.greedy
    kept = [one for one in session.client.tally.exchanges.values() if one.is_answered or one.is_of_another]
    named = [one for one in kept if one.is_of_another]
    told = [one for one in kept if one.is_answered and one.reply.prompt_token_ids is not None]
    expected = _Tokenized(session) if session.endpoint.offer.tokenize else None
    compared = [(one, ids) for one in told if expected is not None and (ids := expected.ids(one.ask))]
    other = [one for one, ids in compared if one.reply.prompt_token_ids != ids]
    is_comparable = 2 * len(other) <= len(compared)
    if not named and (not compared or not is_comparable):
        why = "the endpoint does not tell the ids of a prompt, in replies and by /tokenize"
        if compared:
            why = f"/tokenize gives other ids than {len(other)} of {len(compared)} replies: they cannot be compared"
        return not_run("swapped", "request", why, len(kept))
    wrong = [*named, *(other if is_comparable else [])]
    wrong.sort(key=kept.index)
    trials = len(compared) + len(named)
    return session.result(
        "swapped",
        events=len(wrong),
        trials=trials,
        unit="request",
        alarm=f"{len(wrong)} of {trials} replies answer another request's prompt" if wrong else None,
        num_requests=len(kept),
        witnesses=[witness(one, one.reply.error or "its prompt's ids are those of another prompt") for one in wrong],
        first_event_at=kept.index(wrong[0]) + 1 if wrong else None,
    )


class _Tokenized:
    """Ids of prompts as the server's own tokenizer and chat template make them; each is asked for once."""

    def __init__(self, session: ProbeSession) -> None:
        self._client = session.client
        self._known: dict[str, tuple[int, ...]] = {}

    def ids(self, ask: Ask) -> tuple[int, ...]:
        """Of the request's prompt; () if the server does not say."""
        body: dict[str, Any] = {name: ask.body[name] for name in OF_THE_PROMPT if name in ask.body}
        if isinstance(body.get("prompt"), list):
            return tuple(body["prompt"])
        key = json.dumps(body)
        if key not in self._known:
            self._known[key] = self._client.post("/tokenize", body).tokens
        return self._known[key]
