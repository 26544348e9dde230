"""Is the temperature that was asked for the one that was used? A gateway may force it, a server may take 0 for "not given".

What a model draws at temperature 1 without any cut has a known likelihood at every other temperature, token by token, from the
model's own likeliest tokens (`statistics/sampled_temperature.py`). More likely tokens than expected: a lower temperature, top_p
or top_k; less likely ones: a higher temperature. (At temperature 0 `argmax` looks at every token.) Where no log-probabilities
are told, only the ends show: texts that come twice the same at temperature 1, or hardly ever at temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.diagnosis.probes.determinism import count_equal, tokens_of
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, renamed, witness
from assay_evaluate.statistics.sampled_temperature import DrawnTokens, drawn_tokens, together

LIMIT_Z = 4.0
"""Standard errors (3 in 100,000 healthy servers each way, in one look)."""
DOUBTFUL_Z = 2.0
"""From here on as many replies again are drawn, and all are judged together. A healthy server comes here in 4.5 % of its runs,
and alarms in 1 of 8,600 in place of 1 of 15,800."""
LEAST_NATS = 0.01
"""... and of log-probability for each token: what rounding makes of 100,000 tokens is no other temperature."""
LEAST_TOKENS = 200
STRANGER_Z = 7.0
MOST_STRANGERS = 0.25
"""Replies so far off by themselves, if they are no more than this share, are other faults (swapped, say), and left out."""
LEAST_LISTED = 5
"""Likeliest tokens from which on the temperature itself is estimated: the tokens that are not listed are lumped."""
LONG_TEXT = 160
"""Characters from which on two equal texts drawn at temperature 1 are no coincidence."""
LEAST_PAIRS = 3
Pair = tuple[Exchange, Exchange]


def without_strangers(replies: Sequence[DrawnTokens]) -> DrawnTokens:
    """The tokens of all replies; of those that are far off by themselves not, where they are few."""
    usual = [reply for reply in replies if abs(reply.standard_errors) <= STRANGER_Z]
    are_few = len(replies) - len(usual) <= MOST_STRANGERS * len(replies)
    return together(usual if are_few else replies)


def probe_temperature(session: ProbeSession) -> ProbeResult:
    """Sampled replies. Alarm: what was drawn is surely too likely, or surely too unlikely."""
    if session.top_k is None:
        return _by_repeats(session)
    replies = _drawn_replies(session, session.sampled, session.long_replies)
    tokens = without_strangers(replies)
    if DOUBTFUL_Z < abs(tokens.standard_errors) <= LIMIT_Z:
        replies += _drawn_replies(session, (), session.more_long_replies)
        tokens = without_strangers(replies)
    count, z = tokens.num_tokens, tokens.standard_errors
    if count < LEAST_TOKENS:
        return not_run("temperature", "token", f"only {count} sampled tokens tell how likely they were")
    mean, expected = tokens.nats / count, tokens.expected_nats / count
    is_estimated = tokens.num_listed >= LEAST_LISTED
    estimate = f"drawn as at temperature {tokens.describe_temperature(session.settings.level)}"
    alarms = []
    if abs(z) > LIMIT_Z and abs(mean - expected) > LEAST_NATS:
        cause = "a lower temperature, top_p or top_k" if z > 0 else "a higher temperature"
        how_far = f"{abs(z):.1f} standard errors" + (f"; {estimate}" if is_estimated else "")
        alarms.append(
            f"at temperature 1 the {count:,} drawn tokens have a mean log-probability of {mean:.3f}, and "
            f"{expected:.3f} is expected ({how_far}): {cause} was used"
        )
    result = session.result(
        "temperature",
        events=len(alarms),
        trials=1,
        unit="server",
        alarms=alarms,
        num_requests=len(replies),
        first_event_at=1 if alarms else None,
        stands_without_events=True,
        details={
            "num_tokens": count,
            "mean_nats": mean,
            "expected_nats": expected,
            "standard_errors": z,
            **(
                {"temperature": tokens.temperature, "temperature_interval": tokens.temperature_interval(session.settings.level)}
                if is_estimated
                else {}
            ),
        },
    )
    sentence = (
        f"{count:,} tokens {estimate}; 1 was asked for"
        if is_estimated
        else f"{count:,} tokens, {abs(z):.1f} standard errors from temperature 1"
    )
    return result.model_copy(update={"sentence": sentence})


def _drawn_replies(session: ProbeSession, sampled: Sequence[Exchange], long_replies: Sequence[Exchange]) -> list[DrawnTokens]:
    """The tokens of each of these replies that tells how likely they were; from prefill where it can be asked.

    Prefill's values are the model's own, whatever a server does to those that it reports (vLLM's `--logprobs-mode`).
    """
    if session.reason_unscorable is None:
        scored = [*(session.sampled_scored if sampled else ()), *session.score(long_replies, session.settings.concurrency)]
        drawn = [
            drawn_tokens(prefill.chosen_P.astype(np.float64), prefill.logprobs_PK.astype(np.float64))
            for prefill in (reply.prefill for reply in scored)
            if prefill is not None and len(prefill.chosen_P)
        ]
    else:
        replies = [reply.rows for reply in [*sampled, *long_replies] if reply.is_answered]
        drawn = [_drawn_by_rows(rows) for rows in replies if any(row.top for row in rows)]
    return [tokens for tokens in drawn if tokens.num_tokens]


def _drawn_by_rows(rows: Sequence[TokenRow]) -> DrawnTokens:
    """Without the last listed one: it may be the drawn token in the place of a likelier one (vLLM)."""
    most = max(max(len(row.top) - 1, 1) for row in rows)
    top_PK = np.full((len(rows), most), np.nan)
    for at, row in enumerate(rows):
        values = [value for _, value in row.top[: max(len(row.top) - 1, 1)]]
        top_PK[at, : len(values)] = values
    return drawn_tokens(np.array([row.logprob for row in rows]), top_PK)


# ------------------------------------------------------------------------------------------------ without log-probabilities
def _by_repeats(session: ProbeSession) -> ProbeResult:
    """The same requests twice: at temperature 1 long texts must not be equal, at temperature 0 most must begin alike."""
    writing = [reply for reply in session.long_replies if reply.is_answered][: session.settings.num_alone]
    asks = renamed([reply.ask for reply in writing], "twice")
    sampled = _long_pairs(writing, session.client.ask_together(asks, session.settings.concurrency))
    greedy = _long_pairs(session.alone, session.alone_again)
    if len(sampled) < LEAST_PAIRS and len(greedy) < LEAST_PAIRS:
        return not_run("temperature", "pair", "no log-probabilities, and too few long replies to compare")
    equal = [pair for pair in sampled if pair[0].text == pair[1].text]
    early = [pair for pair in greedy if _parts_early(*pair)]
    events: list[Pair] = []
    alarms = []
    if len(sampled) >= LEAST_PAIRS and 2 * len(equal) > len(sampled):
        cause = "temperature 0 was used, or a cache answers"
        alarms.append(f"{len(equal)} of {len(sampled)} long texts come twice the same at temperature 1: {cause}")
        events += equal
    if len(greedy) >= LEAST_PAIRS and 4 * len(early) > 3 * len(greedy):
        cause = "another temperature was used"
        alarms.append(f"{len(early)} of {len(greedy)} replies alone at temperature 0 part early when asked again: {cause}")
        events += early
    return session.result(
        "temperature",
        trials=len(sampled) + len(greedy),
        unit="pair",
        alarms=alarms,
        reason="no log-probabilities are told: only repeats were compared",
        requests_hit=len(events),
        stands_without_events=True,
        witnesses=[witness(b, "the same text twice" if a.text == b.text else "other text at once") for a, b in events],
        details={"num_equal_sampled": len(equal), "num_parting_early": len(early)},
    )


def _long_pairs(replies: Sequence[Exchange], again: Sequence[Exchange]) -> list[Pair]:
    pairs = zip(replies, again, strict=True)
    return [(a, b) for a, b in pairs if a.is_answered and b.is_answered and len(a.text) >= LONG_TEXT]


def _parts_early(reply: Exchange, again: Exchange) -> bool:
    """Whether two replies differ within their first quarter."""
    a, b = tokens_of(reply), tokens_of(again)
    return 4 * count_equal(a, b) < min(len(a), len(b))
