"""Garble scan: many replies under load, long contexts among short ones, some users hanging up, and a search for odd text.

An odd reply may be the model's own habit. At temperature 0 that can be told: if prefill would have chosen the same tokens, or,
where nothing can be scored again, if the same request alone is odd too, it is a habit; else serving made it. Aborts are there
because caches recycled under an aborted request were the cause of 3 to 5 in 10,000 garbled replies (z.ai, "Scaling Pain").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.probes.detectors import SURPRISE_NATS, Sign, signs_in
from assay_evaluate.diagnosis.probes.nonfinite import nonfinite_sign
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.diagnosis.probes.recompute import why_not
from assay_evaluate.statistics.rates import lower_bound

FOREIGN_NATS = 2.0
"""A token this far below the best one of prefill is none that this model picks at temperature 0; eight times a decision."""
USUAL_LENGTH_SHARE = 0.2
"""When fewer replies than this run into their budget, one that does has missed its end."""
MOST_ASKED_AGAIN = 64
"""Suspects that are asked again alone; it takes as many replies one after the other."""
FAILED_SHARE = 0.01
ABORT_AFTER = (2, 6, 20)
"""Chunks of a streamed reply after which a request is hung up on, in turn."""


@dataclass(frozen=True)
class Suspect:
    """A reply with its signs. `number` counts answered replies from 1."""

    exchange: Exchange
    signs: tuple[Sign, ...]
    number: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({sign.kind for sign in self.signs}))


def probe_garble(session: ProbeSession) -> ProbeResult:
    """Alarm: one reply that serving has garbled; or more than 1 % of the requests, surely, without a reply."""
    exchanges = session.client.ask_together(_asks(session), session.settings.concurrency, slim=_slim)
    kept = [one for one in exchanges if one.ask.abort_after is None]
    answered = [one for one in kept if one.is_answered]
    failed = sum(one.status == "failed" for one in kept)
    if not answered:
        return not_run("garble", "request", "no request of the scan had a reply", len(kept))
    suspects = find_suspects(answered)
    garbled, habits, unknown = _sort_out(session, suspects)
    alarms = []
    if garbled:
        kinds = Counter(kind for one in garbled for kind in one.kinds)
        seen = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        alarms.append(f"{len(garbled)} of {len(answered)} replies are garbled, and not by the model's habit: {seen}")
    if lower_bound(failed, len(kept)) > FAILED_SHARE:
        alarms.append(f"{failed} of {len(kept)} requests had no reply")
    return session.result(
        "garble",
        events=len(garbled),
        trials=len(answered),
        unit="request",
        alarm="; ".join(alarms) or None,
        reason=f"{len(unknown)} odd replies could not be told from habits" if unknown else None,
        num_requests=len(kept),
        witnesses=[
            witness(one.exchange, f"{one.signs[0].kind}: {one.signs[0].detail}", one.signs[0].position) for one in garbled
        ],
        first_event_at=garbled[0].number if garbled else None,
        details={
            "num_habits": len(habits),
            "num_unknown": len(unknown),
            "habits": dict(Counter(kind for one in habits for kind in one.kinds)),
            "num_aborted": sum(one.status == "aborted" for one in exchanges),
            "num_failed": failed,
            "concurrency": session.settings.concurrency,
            "longest_prompt_tokens": max((one.reply.prompt_tokens or 0 for one in answered), default=0) or None,
        },
    )


def _asks(session: ProbeSession) -> list[Ask]:
    """Short and long prompts in turn; users that hang up in between."""
    settings = session.settings
    count = settings.num_garble_requests
    short = session.prompts("garble-short", (count + 1) // 2, settings.short_tokens)
    long = session.prompts("garble-long", count // 2, settings.long_tokens)
    prompts = [prompt for pair in zip(short, long, strict=False) for prompt in pair] + short[len(long) :]
    asks = [session.ask("garble", prompt, temperature=settings.temperature, logprobs_wanted=1) for prompt in prompts]
    num_aborts = round(count * settings.abort_share) if session.endpoint.offer.streams else 0
    for number in range(num_aborts):
        at = (number + 1) * len(prompts) // (num_aborts + 1)
        leaving = session.ask("abort", prompts[at], temperature=settings.temperature)
        leaving = replace(leaving, id=f"{leaving.id}/{number}", abort_after=ABORT_AFTER[number % len(ABORT_AFTER)])
        asks.insert(at + number, leaving)
    return asks


def _slim(exchange: Exchange) -> Exchange:
    """Log-probabilities are kept of replies that are odd; those of 7,500 would fill a gigabyte."""
    if nonfinite_sign(exchange) is not None or signs_of(exchange, is_end_expected=False):
        return exchange
    return replace(exchange, rows=())


def find_suspects(answered: Sequence[Exchange]) -> list[Suspect]:
    """Replies with at least one sign."""
    cut = sum(one.reply.finish_reason == "length" for one in answered)
    is_end_expected = cut < USUAL_LENGTH_SHARE * len(answered)
    found = []
    for number, one in enumerate(answered):
        signs = signs_of(one, is_end_expected=is_end_expected)
        if signs:
            found.append(Suspect(one, tuple(signs), number + 1))
    return found


def signs_of(exchange: Exchange, *, is_end_expected: bool) -> list[Sign]:
    reply = exchange.reply
    return signs_in(
        exchange.ask.prompt,
        reply.text,
        reasoning=reply.reasoning,
        finish_reason=reply.finish_reason,
        token_ids=reply.token_ids,
        rows=exchange.rows,
        is_end_expected=is_end_expected,
    )


# ------------------------------------------------------------------------------------------------ habit or fault
def _sort_out(session: ProbeSession, suspects: Sequence[Suspect]) -> tuple[list[Suspect], list[Suspect], list[Suspect]]:
    """(garbled, the model's habits, not to be told)."""
    garbled: list[Suspect] = []
    habits: list[Suspect] = []
    unknown: list[Suspect] = []
    undecided = list(suspects)
    if suspects and why_not(session) is None:
        scored = session.score([one.exchange for one in suspects], session.settings.concurrency)
        by_id = {one.exchange.id: one for one in scored}
        undecided = []
        for suspect in suspects:
            own = is_own(by_id.get(suspect.exchange.id), session.settings.temperature)
            (undecided if own is None else habits if own else garbled).append(suspect)
    if session.settings.temperature > 0:
        return garbled, habits, undecided
    again = undecided[:MOST_ASKED_AGAIN]
    asks = [replace(one.exchange.ask, id=f"again/{one.exchange.id}") for one in again]
    for suspect, alone in zip(again, session.client.ask_together(asks, 1), strict=True):
        if not alone.is_answered:
            unknown.append(suspect)
            continue
        signs = signs_of(alone, is_end_expected="missing_end" in suspect.kinds)
        is_habit = {sign.kind for sign in signs} >= set(suspect.kinds)
        (habits if is_habit else garbled).append(suspect)
    return sorted(garbled, key=lambda one: one.number), habits, [*unknown, *undecided[MOST_ASKED_AGAIN:]]


def is_own(scored: RescoredReply | None, temperature: float) -> bool | None:
    """Whether prefill would have written the reply, too. None: it could not be scored."""
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    chosen_P = scored.prefill.chosen_P.astype(float)
    if temperature > 0:
        return bool(np.nanmin(chosen_P) > -SURPRISE_NATS)
    gap_P = np.nanmax(scored.prefill.logprobs_PK.astype(float), axis=1) - chosen_P
    return bool(np.nanmax(gap_P) < FOREIGN_NATS)
