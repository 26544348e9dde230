"""Garble scan: many replies under load, long contexts among short ones, some users hanging up, and a search for odd text.

An odd reply may be the model's own habit. At temperature 0 that can be told: if prefill would have chosen the same tokens, or,
where nothing can be scored again, if the same request alone is odd too, it is a habit; else serving made it. Prefill speaks for
the ids, and text can be garbled behind them, by a detokenizer or a gateway. Text that is not what its ids decode to is no
habit; text of which that is not known has to be odd alone, and so has text in another script, whatever prefill says.

Users hang up because caches recycled under an aborted request were the cause of 3 to 5 in 10,000 garbled replies (z.ai,
"Scaling Pain").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.diagnosis.probes.recompute import why_not
from assay_evaluate.diagnosis.probes.replies.detectors import SURPRISE_NATS, Sign, is_text_of, signs_in
from assay_evaluate.diagnosis.probes.replies.nonfinite import nonfinite_sign
from assay_evaluate.statistics.rates import lower_bound
from assay_evaluate.transport.foreign_json import text_of

FOREIGN_NATS = 2.0
"""A token this far below the best one of prefill is none that this model picks at temperature 0; eight times a decision."""
USUAL_LENGTH_SHARE = 0.2
"""When fewer replies than this run into their budget, one that does has missed its end."""
MOST_ASKED_AGAIN = 64
"""Suspects that are asked again alone; it takes as many replies one after the other."""
FAILED_SHARE = 0.01
NOT_ITS_IDS = "not_its_ids"
OF_TEXT = frozenset({"wrong_script", "replacement_character", "control_character", "open_thinking", "empty"})
"""Signs that may stand in the text alone."""
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
    decoded = decode(session, answered)
    garbled, habits, unknown = _sort_out(session, find_suspects(answered, decoded), decoded)
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
        reason="; ".join(_reasons(unknown, decoded)) or None,
        num_requests=len(kept),
        witnesses=[
            witness(one.exchange, f"{one.signs[0].kind}: {one.signs[0].detail}", one.signs[0].position) for one in garbled
        ],
        first_event_at=garbled[0].number if garbled else None,
        details={
            "num_habits": len(habits),
            "num_unknown": len(unknown),
            "num_decoded": len(decoded.agree) + len(decoded.differ),
            "habits": dict(Counter(kind for one in habits for kind in one.kinds)),
            "num_aborted": sum(one.status == "aborted" for one in exchanges),
            "num_failed": failed,
            "concurrency": session.settings.concurrency,
            "longest_prompt_tokens": max((one.reply.prompt_tokens or 0 for one in answered), default=0) or None,
        },
    )


@dataclass(frozen=True)
class Decoded:
    """Ids of requests whose text is, and is not, what the reply's ids decode to."""

    agree: frozenset[str] = frozenset()
    differ: frozenset[str] = frozenset()

    @property
    def is_comparable(self) -> bool:
        """Most agree: else the server's /detokenize has another way of writing."""
        return len(self.differ) <= len(self.agree)


def decode(session: ProbeSession, answered: Sequence[Exchange]) -> Decoded:
    """Ask the server what the ids of every reply are as text; of a server that does not say, nothing is known."""
    agree: set[str] = set()
    differ: set[str] = set()
    for one in answered if session.endpoint.offer.detokenize else ():
        if one.reply.token_ids is None:
            continue
        text = session.client.post("/detokenize", {"tokens": list(one.reply.token_ids)}).data.get("prompt")
        if isinstance(text, str):
            parts = (one.reply.reasoning or "", one.reply.text)
            (agree if is_text_of(text_of(text) or "", parts) else differ).add(one.id)
    return Decoded(frozenset(agree), frozenset(differ))


def _reasons(unknown: Sequence[Suspect], decoded: Decoded) -> list[str]:
    found = [f"{len(unknown)} odd replies could not be told from habits"] if unknown else []
    if not decoded.is_comparable:
        found.append(
            f"the text of {len(decoded.differ)} replies is not what /detokenize makes of their ids: it is not believed"
        )
    return found


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


def find_suspects(answered: Sequence[Exchange], decoded: Decoded) -> list[Suspect]:
    """Replies with at least one sign."""
    cut = sum(one.reply.finish_reason == "length" for one in answered)
    is_end_expected = cut < USUAL_LENGTH_SHARE * len(answered)
    found = []
    for number, one in enumerate(answered):
        signs = signs_of(one, is_end_expected=is_end_expected)
        if decoded.is_comparable and one.id in decoded.differ:
            signs.insert(0, Sign(NOT_ITS_IDS, "the text is not what its token ids decode to"))
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
def _sort_out(
    session: ProbeSession, suspects: Sequence[Suspect], decoded: Decoded
) -> tuple[list[Suspect], list[Suspect], list[Suspect]]:
    """(garbled, the model's habits, not to be told)."""
    garbled = [one for one in suspects if NOT_ITS_IDS in one.kinds]
    habits: list[Suspect] = []
    unknown: list[Suspect] = []
    undecided = [one for one in suspects if NOT_ITS_IDS not in one.kinds]
    if undecided and why_not(session) is None:
        scored = session.score([one.exchange for one in undecided], session.settings.concurrency)
        by_id = {one.exchange.id: one for one in scored}
        told, undecided = undecided, []
        for suspect in told:
            own = is_own(by_id.get(suspect.exchange.id), session.settings.temperature)
            if own and not _is_cleared_by_its_ids(suspect, decoded):
                own = None
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


def _is_cleared_by_its_ids(suspect: Suspect, decoded: Decoded) -> bool:
    """Whether the model's having chosen the ids says all about the reply's signs."""
    if "wrong_script" in suspect.kinds:
        return False
    return suspect.exchange.id in decoded.agree or not OF_TEXT & set(suspect.kinds)


def is_own(scored: RescoredReply | None, temperature: float) -> bool | None:
    """Whether prefill would have written the reply, too. None: it could not be scored."""
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    chosen_P = scored.prefill.chosen_P.astype(float)
    if temperature > 0:
        return bool(np.nanmin(chosen_P) > -SURPRISE_NATS)
    gap_P = np.nanmax(scored.prefill.logprobs_PK.astype(float), axis=1) - chosen_P
    return bool(np.nanmax(gap_P) < FOREIGN_NATS)
