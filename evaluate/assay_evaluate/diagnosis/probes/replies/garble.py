"""Garble scan: many replies under load, long contexts among short ones, some users hanging up, and a search for odd text.

Every reply of the run is looked at, also those that other probes asked for. An odd one may be the model's own habit, which
`habits` tells. Replies of the scan in which nothing is odd are scored as well, as many as the settings say: a token that was
lost on the way leaves ids that prefill would not have written.

Users hang up because caches recycled under an aborted request were the cause of 3 to 5 in 10,000 garbled replies (z.ai,
"Scaling Pain").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.waves import Slim
from assay_evaluate.diagnosis.probes.probe_session import TOP_OF_TWO, ProbeSession, is_for_a_reader, not_run, witness
from assay_evaluate.diagnosis.probes.recompute import why_not
from assay_evaluate.diagnosis.probes.replies.batch_signs import Usual, signs_among, usual_of
from assay_evaluate.diagnosis.probes.replies.detectors import Sign
from assay_evaluate.diagnosis.probes.replies.habits import (
    AT_ANY_TEMPERATURE,
    FOREIGN_NATS,
    Suspect,
    furthest_behind,
    signs_of,
    sort_out,
)
from assay_evaluate.diagnosis.probes.replies.nonfinite import nonfinite_sign
from assay_evaluate.diagnosis.probes.replies.whole_text import believed_texts, has_odd_rows, reads_alike
from assay_evaluate.statistics.rates import lower_bound

USUAL_LENGTH_SHARE = 0.2
"""When fewer replies than this run into their budget, one that does has missed its end."""
FAILED_SHARE = 0.01
BROKEN_OFF_SHARE = 0.001
LEAST_BROKEN_OFF = 2
"""Replies that begin and break off are a fault at a smaller share than requests that a busy server leaves unanswered; a network
loses one now and then."""
ABORT_AFTER = (2, 6, 20)
"""Chunks of a streamed reply after which a request is hung up on, in turn."""


def probe_garble(session: ProbeSession) -> ProbeResult:
    """Alarm: one reply that serving has garbled; or, of the whole run, surely more than 1 % of the requests without a reply, or
    more than 0.1 % of the replies broken off."""
    exchanges = session.client.ask_together(_asks(session), session.settings.concurrency, slim=_slim_of(session))
    kept = [one for one in exchanges if one.ask.abort_after is None]
    if not any(one.is_answered for one in kept):
        return not_run("garble", "request", "no request of the scan had a reply", len(kept))
    answered = session.generated()
    compared, _ = believed_texts(session, answered)
    usual = usual_of([one for one in answered if not one.ask.body["temperature"]])
    suspects = find_suspects(answered, usual)
    told = sort_out(session, suspects, compared, usual)
    garbled = sorted([*told.garbled, *_not_written(session, kept, suspects)], key=lambda one: one.number)
    trials = len(answered) - len(told.unknown)
    alarms = []
    if garbled:
        kinds = Counter(kind for one in garbled for kind in one.kinds)
        seen = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        alarms.append(f"{len(garbled)} of {trials} replies are garbled, and not by the model's habit: {seen}")
    lost = _replies_lost(session)
    alarms += lost.alarms
    reason = f"{len(told.unknown)} odd replies could not be told from habits and are not counted" if told.unknown else None
    return session.result(
        "garble",
        events=len(garbled),
        trials=trials,
        unit="request",
        alarm="; ".join(alarms) or None,
        reason=reason,
        num_requests=trials,
        witnesses=[_witness(one) for one in garbled],
        undecided=[_witness(one) for one in told.unknown],
        first_event_at=garbled[0].number if garbled else None,
        stands_without_events=bool(lost.alarms),
        details={
            "num_habits": len(told.habits),
            "num_unknown": len(told.unknown),
            "num_of_the_scan": sum(one.is_answered for one in kept),
            "habits": dict(Counter(kind for one in told.habits for kind in one.kinds)),
            "num_aborted": sum(one.status == "aborted" for one in exchanges),
            "num_wanted": lost.num_wanted,
            "num_failed": lost.num_failed,
            "num_asked": lost.num_asked,
            "num_broken_off": lost.num_broken_off,
            "concurrency": session.settings.concurrency,
            "longest_prompt_tokens": max((one.reply.prompt_tokens or 0 for one in answered), default=0) or None,
        },
    )


@dataclass(frozen=True)
class RepliesLost:
    """Of all requests of the run, so far, that nobody hung up on.

    wanted: replies that a user would read; failed: those that did not come. asked: everything; broken_off: replies that began
    and ended before all of them was there, which do not count as failed.
    """

    num_wanted: int
    num_failed: int
    num_asked: int
    num_broken_off: int

    @property
    def alarms(self) -> list[str]:
        sentences = []
        is_broken = self.num_broken_off >= LEAST_BROKEN_OFF
        if is_broken and lower_bound(self.num_broken_off, self.num_asked) > BROKEN_OFF_SHARE:
            sentences.append(f"the bodies of {self.num_broken_off} of {self.num_asked} replies broke off")
        if self.num_wanted and lower_bound(self.num_failed, self.num_wanted) > FAILED_SHARE:
            sentences.append(f"{self.num_failed} of {self.num_wanted} requests had no reply")
        return sentences


def _replies_lost(session: ProbeSession) -> RepliesLost:
    asked = [one for one in session.client.tally.exchanges.values() if one.ask.abort_after is None]
    wanted = [one for one in asked if is_for_a_reader(one.ask) and "tools" not in one.ask.body]
    return RepliesLost(
        num_wanted=len(wanted),
        num_failed=sum(one.status == "failed" and not one.is_broken_off for one in wanted),
        num_asked=len(asked),
        num_broken_off=sum(one.is_broken_off for one in asked),
    )


def _witness(suspect: Suspect) -> Witness:
    sign, text = suspect.signs[0], suspect.exchange.text
    odd = next((at for at, letter in enumerate(text) if letter == "\ufffd" or ord(letter) < 9), None)
    return witness(suspect.exchange, f"{sign.kind}: {sign.detail}", sign.position, excerpt_at=len(text) if odd is None else odd)


def _asks(session: ProbeSession) -> list[Ask]:
    """Short and long prompts in turn; users that hang up in between."""
    settings = session.settings
    count = settings.num_garble_requests
    short = session.prompts("garble-short", (count + 1) // 2, settings.short_tokens)
    long = session.prompts("garble-long", count // 2, settings.long_tokens)
    prompts = [prompt for pair in zip(short, long, strict=False) for prompt in pair] + short[len(long) :]
    asks = [session.ask("garble", prompt, temperature=settings.temperature, logprobs_wanted=TOP_OF_TWO) for prompt in prompts]
    num_aborts = round(count * settings.abort_share) if session.endpoint.offer.streams else 0
    for number in range(num_aborts):
        at = (number + 1) * len(prompts) // (num_aborts + 1)
        leaving = session.ask("abort", prompts[at], temperature=settings.temperature)
        leaving = replace(leaving, id=f"{leaving.id}/{number}", abort_after=ABORT_AFTER[number % len(ABORT_AFTER)])
        asks.insert(at + number, leaving)
    return asks


def _slim_of(session: ProbeSession) -> Slim:
    """Log-probabilities are kept of replies that are odd; those of 7,500 would fill gigabytes."""

    def slim(exchange: Exchange) -> Exchange:
        if exchange.is_answered and (alike := reads_alike(exchange)) is not None:
            session.read_alike[exchange.id] = alike
        if nonfinite_sign(exchange) is not None or signs_of(exchange, is_end_expected=False) or has_odd_rows(exchange):
            return exchange
        return replace(exchange, rows=())

    return slim


def find_suspects(answered: Sequence[Exchange], usual: Usual) -> list[Suspect]:
    """Replies with at least one sign, of all groups of requests."""
    greedy = [one for one in answered if not one.ask.body["temperature"]]
    among = signs_among(greedy, usual)
    groups: dict[str, list[Exchange]] = {}
    for one in answered:
        groups.setdefault(one.id.partition("/")[0], []).append(one)
    cut = {name: sum(one.reply.finish_reason == "length" for one in some) for name, some in groups.items()}
    found = []
    for number, one in enumerate(answered, 1):
        group = one.id.partition("/")[0]
        is_end_expected = cut[group] < USUAL_LENGTH_SHARE * len(groups[group])
        signs = [*signs_of(one, is_end_expected=is_end_expected), *among.get(one.id, [])]
        if one.ask.body["temperature"]:
            signs = [sign for sign in signs if sign.kind in AT_ANY_TEMPERATURE]
        if one.reply.has_tool_calls:
            signs = [sign for sign in signs if sign.kind not in ("empty", "loop", "missing_end")]
        if signs:
            found.append(Suspect(one, tuple(signs), number))
    return found


def _not_written(session: ProbeSession, scan: Sequence[Exchange], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Greedy replies of the scan without any sign that prefill would not have written, of those that are scored."""
    if session.settings.temperature or why_not(session) is not None:
        return []
    odd = {one.exchange.id for one in suspects}
    some = [one for one in scan if one.is_answered and one.id not in odd][: session.settings.num_scored]
    numbers = {one.id: number for number, one in enumerate(session.generated(), 1)}
    found = []
    for scored in session.score(some, session.settings.concurrency, top_k=1):
        gap = furthest_behind(scored)
        if gap is not None and gap >= FOREIGN_NATS:
            sign = Sign("not_written", f"prefill puts another token {gap:.1f} nats before one of it")
            found.append(Suspect(scored.exchange, (sign,), numbers[scored.exchange.id]))
    return found
