"""Is the temperature that was asked for the one that was used? A gateway may force it, a server may take 0 for "not given".

At temperature 1 without any cut the likeliest token is drawn exactly as often as its probability says. Over the tokens of all
sampled replies, the number of times that it was drawn, less the sum of its probabilities, is a martingale: its standard error
is known, whatever the model writes. Drawn more often: a lower temperature, top_p or top_k; less often: a higher one. (At
temperature 0 `argmax` looks at every token.) Where no log-probabilities are told, only the ends show: texts that come twice the
same at temperature 1, or hardly ever at temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.diagnosis.probes.divergences import tokens_of
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.diagnosis.probes.recompute import why_not

LIMIT_Z = 5.0
"""Standard errors (3 in 10 million each way)."""
LEAST_SHARE = 0.01
"""... and of the drawn tokens: what rounding makes of 100,000 tokens is no other temperature."""
LEAST_TOKENS = 200
TIE = 1e-5
"""Nats within which the drawn token is as likely as the likeliest."""
MOST_STRANGERS = 0.25
"""Replies so far off by themselves, if they are no more than this share, are other faults (swapped, say), and left out."""
LONG_TEXT = 160
"""Characters from which on two equal texts drawn at temperature 1 are no coincidence."""
LEAST_PAIRS = 3
Pair = tuple[Exchange, Exchange]


@dataclass(frozen=True)
class Drawn:
    """Tokens of some replies: how often the likeliest was drawn, how often it was to be expected, and the variance of that."""

    num_tokens: int
    drawn: int
    expected: float
    variance: float

    @property
    def standard_errors(self) -> float:
        return (self.drawn - self.expected) / math.sqrt(self.variance) if self.variance else 0.0


def drawn_of(chances: Iterable[tuple[float, float]]) -> Drawn:
    """Of (log-probability of the drawn token, of the likeliest one) of each token."""
    known = [(own, best) for own, best in chances if math.isfinite(own) and math.isfinite(best)]
    probabilities = [math.exp(min(0.0, best)) for _, best in known]
    drawn = sum(own >= best - TIE for own, best in known)
    return Drawn(len(known), drawn, math.fsum(probabilities), math.fsum(p * (1 - p) for p in probabilities))


def together(some: Sequence[Drawn]) -> Drawn:
    """The sum; replies that are far off by themselves left out where they are few."""
    strangers = [one for one in some if abs(one.standard_errors) > LIMIT_Z]
    kept = some if len(strangers) > MOST_STRANGERS * len(some) else [one for one in some if one not in strangers]
    return Drawn(
        sum(one.num_tokens for one in kept), sum(one.drawn for one in kept), math.fsum(one.expected for one in kept),
        math.fsum(one.variance for one in kept),
    )  # fmt: skip


def probe_temperature(session: ProbeSession) -> ProbeResult:
    """Sampled replies. Alarm: the likeliest token was drawn surely too often, or surely too rarely."""
    if session.top_k is None:
        return _by_repeats(session)
    told = _of_replies(session)
    every = together(told)
    count, z = every.num_tokens, every.standard_errors
    if count < LEAST_TOKENS:
        return not_run("temperature", "token", f"only {count} sampled tokens tell how likely they were")
    alarm = None
    if abs(z) > LIMIT_Z and abs(every.drawn - every.expected) > LEAST_SHARE * count:
        why = "a lower temperature, top_p or top_k" if z > 0 else "a higher temperature"
        alarm = (
            f"at temperature 1 the likeliest token was drawn at {every.drawn / count:.1%} of {count:,} places, and "
            f"{every.expected / count:.1%} are expected ({abs(z):.1f} standard errors): {why} was used"
        )
    return session.result(
        "temperature",
        events=int(alarm is not None),
        trials=1,
        unit="server",
        alarm=alarm,
        num_requests=len(told),
        first_event_at=1 if alarm else None,
        stands_without_events=True,
        details={"num_tokens": count, "drawn": every.drawn, "expected": every.expected, "standard_errors": z},
    )


def _of_replies(session: ProbeSession) -> list[Drawn]:
    """Of every sampled reply that tells it; from prefill where it can be asked.

    Prefill's values are the model's own, whatever a server does to those that it reports (vLLM's `--logprobs-mode`).
    """
    if why_not(session) is None:
        scored = [*session.sampled_scored, *session.score(session.long_replies, session.settings.concurrency, top_k=1)]
        told = [drawn_of(_chances(one)) for one in scored]
    else:
        rows = [one.rows for one in [*session.sampled, *session.long_replies] if one.is_answered]
        told = [drawn_of((row.logprob, row.top[0][1]) for row in of_reply if row.top) for of_reply in rows]
    return [one for one in told if one.num_tokens]


def _chances(scored: RescoredReply) -> list[tuple[float, float]]:
    if scored.prefill is None or not len(scored.prefill.chosen_P):
        return []
    best_P = scored.prefill.logprobs_PK.max(axis=1)
    return list(zip(map(float, scored.prefill.chosen_P), map(float, best_P), strict=True))


# ------------------------------------------------------------------------------------------------ without log-probabilities
def _by_repeats(session: ProbeSession) -> ProbeResult:
    """The same requests twice: at temperature 1 long texts must not be equal, at temperature 0 most must begin alike."""
    writing = [one for one in session.long_replies if one.is_answered][: session.settings.num_alone]
    asks = [replace(one.ask, id=f"twice/{one.id}") for one in writing]
    sampled = _long_pairs(writing, session.client.ask_together(asks, session.settings.concurrency))
    greedy = _long_pairs(session.alone, session.alone_again)
    if len(sampled) < LEAST_PAIRS and len(greedy) < LEAST_PAIRS:
        return not_run("temperature", "pair", "no log-probabilities, and too few long replies to compare")
    equal = [pair for pair in sampled if pair[0].text == pair[1].text]
    early = [pair for pair in greedy if _parts_early(*pair)]
    events: list[Pair] = []
    alarms = []
    if len(sampled) >= LEAST_PAIRS and 2 * len(equal) > len(sampled):
        what = "temperature 0 was used, or a cache answers"
        alarms.append(f"{len(equal)} of {len(sampled)} long texts come twice the same at temperature 1: {what}")
        events += equal
    if len(greedy) >= LEAST_PAIRS and 4 * len(early) > 3 * len(greedy):
        what = "another temperature was used"
        alarms.append(f"{len(early)} of {len(greedy)} replies alone at temperature 0 part early when asked again: {what}")
        events += early
    return session.result(
        "temperature",
        events=len(events),
        trials=len(sampled) + len(greedy),
        unit="pair",
        alarm="; ".join(alarms) or None,
        reason="no log-probabilities are told: only repeats were compared",
        num_requests=len(sampled) + len(greedy),
        requests_hit=len(events),
        stands_without_events=True,
        witnesses=[witness(b, "the same text twice" if a.text == b.text else "other text at once") for a, b in events],
        details={"num_equal_sampled": len(equal), "num_parting_early": len(early)},
    )


def _long_pairs(some: Sequence[Exchange], again: Sequence[Exchange]) -> list[Pair]:
    pairs = zip(some, again, strict=True)
    return [(a, b) for a, b in pairs if a.is_answered and b.is_answered and len(a.text) >= LONG_TEXT]


def _parts_early(one: Exchange, other: Exchange) -> bool:
    """Whether two replies differ within their first quarter."""
    ours, theirs = tokens_of(one), tokens_of(other)
    same = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return 4 * same < min(len(ours), len(theirs))
