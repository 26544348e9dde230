"""Is the temperature that was asked for the one that was used? A gateway may force it, a server may take 0 for "not given".

What a model draws at temperature 1 without any cut has, token by token, an expected log-probability and a variance that its own
likeliest tokens tell. Over the tokens of all sampled replies the difference is a martingale, whatever the model writes: its
standard error is known. More likely tokens than expected: a lower temperature, top_p or top_k; less likely ones: a higher
temperature. It is the score test of the temperature, so that no other sees less. Tokens outside of those that are listed count
alike, as one nat below the last listed one. (At temperature 0 `argmax` looks at every token.) Where no log-probabilities are
told, only the ends show: texts that come twice the same at temperature 1, or hardly ever at temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.diagnosis.probes.determinism import count_equal, tokens_of
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, renamed, witness

LIMIT_Z = 4.0
"""Standard errors (3 in 100,000 healthy servers each way)."""
LEAST_NATS = 0.01
"""... and of log-probability for each token: what rounding makes of 100,000 tokens is no other temperature."""
LEAST_TOKENS = 200
OUTSIDE_NATS = 1.0
"""Tokens that are not listed count as so much below the last one that is: whatever is chosen here, the expectation is exact."""
LONG_REPLY_TOP = 5
"""Log-probabilities of prefill for each token of the long replies, which nobody else has scored."""
STRANGER_Z = 5.0
MOST_STRANGERS = 0.25
"""Replies so far off by themselves, if they are no more than this share, are other faults (swapped, say), and left out."""
LONG_TEXT = 160
"""Characters from which on two equal texts drawn at temperature 1 are no coincidence."""
LEAST_PAIRS = 3
Pair = tuple[Exchange, Exchange]


@dataclass(frozen=True)
class Drawn:
    """Tokens of some replies: log-probability of what was drawn and what was to be expected, summed, and the variance of it."""

    num_tokens: int
    nats: float
    expected_nats: float
    variance: float

    @property
    def standard_errors(self) -> float:
        return (self.nats - self.expected_nats) / math.sqrt(self.variance) if self.variance else 0.0


def drawn_of(chosen_P: npt.NDArray[np.float64], top_PK: npt.NDArray[np.float64]) -> Drawn:
    """Of P drawn tokens with the K likeliest log-probabilities at each place, best first; NaN where there are fewer."""
    known_P = np.isfinite(chosen_P) & np.isfinite(top_PK[:, 0])
    chosen_P, top_PK = chosen_P[known_P], np.minimum(top_PK[known_P], 0.0)
    last_P = (np.nanmin(top_PK, axis=1) if len(top_PK) else chosen_P) - OUTSIDE_NATS
    p_PK = np.nan_to_num(np.exp(top_PK))
    rest_P = np.clip(1 - p_PK.sum(axis=1), 0.0, 1.0)
    value_PK = np.nan_to_num(top_PK)
    mean_P = (p_PK * value_PK).sum(axis=1) + rest_P * last_P
    square_P = (p_PK * value_PK**2).sum(axis=1) + rest_P * last_P**2
    is_listed_P = chosen_P >= last_P + OUTSIDE_NATS
    nats_P = np.where(is_listed_P, np.minimum(chosen_P, 0.0), last_P)
    return Drawn(len(chosen_P), float(nats_P.sum()), float(mean_P.sum()), float(np.maximum(square_P - mean_P**2, 0).sum()))


def total_of(replies: Sequence[Drawn]) -> Drawn:
    """The sum; replies that are far off by themselves left out where they are few."""
    strangers = [reply for reply in replies if abs(reply.standard_errors) > STRANGER_Z]
    if len(strangers) <= MOST_STRANGERS * len(replies):
        replies = [reply for reply in replies if reply not in strangers]
    return Drawn(
        sum(reply.num_tokens for reply in replies), math.fsum(reply.nats for reply in replies),
        math.fsum(reply.expected_nats for reply in replies), math.fsum(reply.variance for reply in replies),
    )  # fmt: skip


def probe_temperature(session: ProbeSession) -> ProbeResult:
    """Sampled replies. Alarm: what was drawn is surely too likely, or surely too unlikely."""
    if session.top_k is None:
        return _by_repeats(session)
    replies = _drawn_replies(session)
    total = total_of(replies)
    count, z = total.num_tokens, total.standard_errors
    if count < LEAST_TOKENS:
        return not_run("temperature", "token", f"only {count} sampled tokens tell how likely they were")
    mean, expected = total.nats / count, total.expected_nats / count
    alarms = []
    if abs(z) > LIMIT_Z and abs(total.nats - total.expected_nats) > LEAST_NATS * count:
        cause = "a lower temperature, top_p or top_k" if z > 0 else "a higher temperature"
        alarms.append(
            f"at temperature 1 the {count:,} drawn tokens have a mean log-probability of {mean:.3f}, and "
            f"{expected:.3f} is expected ({abs(z):.1f} standard errors): {cause} was used"
        )
    return session.result(
        "temperature",
        events=len(alarms),
        trials=1,
        unit="server",
        alarms=alarms,
        num_requests=len(replies),
        first_event_at=1 if alarms else None,
        stands_without_events=True,
        details={"num_tokens": count, "mean_nats": mean, "expected_nats": expected, "standard_errors": z},
    )


def _drawn_replies(session: ProbeSession) -> list[Drawn]:
    """Of every sampled reply that tells it; from prefill where it can be asked.

    Prefill's values are the model's own, whatever a server does to those that it reports (vLLM's `--logprobs-mode`).
    """
    if session.reason_unscorable is None:
        sampled = session.sampled_scored
        long = session.score(session.long_replies, session.settings.concurrency, top_k=LONG_REPLY_TOP)
        drawn = [
            drawn_of(prefill.chosen_P.astype(np.float64), prefill.logprobs_PK.astype(np.float64))
            for prefill in (reply.prefill for reply in [*sampled, *long])
            if prefill is not None and len(prefill.chosen_P)
        ]
    else:
        replies = [reply.rows for reply in [*session.sampled, *session.long_replies] if reply.is_answered]
        drawn = [_drawn_by_rows(rows) for rows in replies if any(row.top for row in rows)]
    return [reply for reply in drawn if reply.num_tokens]


def _drawn_by_rows(rows: Sequence[TokenRow]) -> Drawn:
    """Without the last listed one: it may be the drawn token in the place of a likelier one (vLLM)."""
    most = max(max(len(row.top) - 1, 1) for row in rows)
    top_PK = np.full((len(rows), most), np.nan)
    for at, row in enumerate(rows):
        values = [value for _, value in row.top[: max(len(row.top) - 1, 1)]]
        top_PK[at, : len(values)] = values
    return drawn_of(np.array([row.logprob for row in rows]), top_PK)


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
