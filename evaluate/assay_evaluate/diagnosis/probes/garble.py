"""Garble scan: many replies under load, long contexts among short ones, some users hanging up, and a search for odd text.

Every reply of the run is looked at, also those that other probes asked for. Replies of the scan in which nothing is odd are
scored as well, as many as the settings say: a token that was lost on the way leaves ids that prefill would not have written.
Users hang up because caches recycled under an aborted request were the cause of 3 to 5 in 10,000 garbled replies (z.ai,
"Scaling Pain").

An odd reply may be the model's own habit. One at temperature 0 is scored where it can be: if prefill would have chosen its ids,
they are the model's own. Where nothing can be scored, and for signs that may stand in the text alone, the same request is asked
again alone: a habit shows the same signs. What neither tells is undecided: no event, and not among the replies that were
judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from assay.records.probe import Detail, ProbeResult, Witness
from assay_evaluate.client.decoded_text import TextComparison
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.probes.nonfinite import nonfinite_sign
from assay_evaluate.diagnosis.probes.probe_session import (
    TOP_OF_TWO,
    ProbeSession,
    RescoredReply,
    is_for_a_reader,
    not_run,
    renamed,
    witness,
)
from assay_evaluate.diagnosis.probes.signs import (
    STILL_THIN,
    SURPRISE_NATS,
    Sign,
    UsualLength,
    ends_at_limit,
    signs_among,
    signs_of,
    start_equal,
    usual_length_of,
)
from assay_evaluate.diagnosis.probes.whole_text import credible_texts, has_odd_rows, is_text_of_rows
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
FOREIGN_NATS = 2.0
"""A token this far below the best one of prefill is none that this model picks at temperature 0; eight times a decision."""
RARE_DRAW = 1e-7
"""A sampled reply with a token of almost no probability is not the model's if so many tokens that are not listed are drawn with
less probability. One token below e^-15 is one of very many that a model may draw: it stood in one of 1,300 sampled replies of a
healthy server (tiny-glm)."""
LEAST_REST = 1e-6
"""Probability of all tokens that are not listed at one place, at least: what is left of 1 in single precision."""
MOST_ASKED_AGAIN = 64
"""Suspects that are asked again alone; it takes as many replies one after the other."""
OF_TEXT = frozenset(
    {"wrong_script", "replacement_character", "control_character", "open_thinking", "empty", "repeated", "thin", "end_at_limit"}
)
"""Signs that may stand in the text, or in what comes with it, alone."""
URGENT = (
    "replacement_character", "wrong_script", "control_character", "id_zero", "surprise", "empty", "thin", "repeated",
    "end_at_limit", "open_thinking", "loop", "missing_end",
)  # fmt: skip
"""In the order in which suspects are asked again: what models do often by themselves comes last."""
AT_ANY_TEMPERATURE = frozenset(URGENT[:6])
"""Signs that are looked for in sampled replies, too: these loop and miss their ends by themselves, and nobody could tell."""


@dataclass(frozen=True)
class Suspect:
    """A reply with its signs. `number` counts answered replies from 1."""

    exchange: Exchange
    signs: tuple[Sign, ...]
    number: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({sign.kind for sign in self.signs}))

    @property
    def temperature(self) -> float:
        return float(self.exchange.ask.body["temperature"])

    @property
    def urgency(self) -> int:
        return min((URGENT.index(kind) for kind in self.kinds if kind in URGENT), default=len(URGENT))


@dataclass(frozen=True)
class SortedSuspects:
    """Suspects: of serving's making, of the model's, and not to be told."""

    garbled: list[Suspect]
    habits: list[Suspect]
    unknown: list[Suspect]


def probe_garble(session: ProbeSession) -> ProbeResult:
    """Alarm: one reply that serving has garbled; or, of the whole run, surely more than 1 % of the requests without a reply, or
    more than 0.1 % of the replies broken off."""

    def slim(exchange: Exchange) -> Exchange:
        """Log-probabilities are kept of replies that are odd; those of 7,500 would fill gigabytes."""
        if exchange.is_answered and (is_its_text := is_text_of_rows(exchange)) is not None:
            session.is_text_of_rows[exchange.id] = is_its_text
        if nonfinite_sign(exchange) is not None or signs_of(exchange) or has_odd_rows(exchange):
            return exchange
        return replace(exchange, rows=())

    exchanges = session.client.ask_together(_scan_asks(session), session.settings.concurrency, slim=slim)
    scan = [exchange for exchange in exchanges if exchange.ask.abort_after is None]
    if not any(exchange.is_answered for exchange in scan):
        return not_run("garble", "request", "no request of the scan had a reply", len(scan))
    answered = session.generated()
    compared, _ = credible_texts(session, answered)
    usual = usual_length_of([exchange for exchange in answered if not exchange.ask.body["temperature"]])
    suspects = find_suspects(answered, usual)
    groups = sort_out(session, suspects, compared, usual)
    garbled = sorted([*groups.garbled, *_not_written(session, scan, suspects)], key=lambda suspect: suspect.number)
    trials = len(answered) - len(groups.unknown)
    alarms = []
    if garbled:
        kinds = ", ".join(f"{kind} {count}" for kind, count in _count_kinds(garbled).most_common())
        alarms.append(f"{len(garbled)} of {trials} replies are garbled, and not by the model's habit: {kinds}")
    lost, lost_alarms = _replies_lost(session)
    alarms += lost_alarms
    reason = f"{len(groups.unknown)} odd replies could not be told from habits and are not counted" if groups.unknown else None
    return session.result(
        "garble",
        trials=trials,
        unit="request",
        alarms=alarms,
        reason=reason,
        witnesses=[_witness(suspect) for suspect in garbled],
        undecided=[_witness(suspect) for suspect in groups.unknown],
        first_event_at=garbled[0].number if garbled else None,
        stands_without_events=bool(lost_alarms),
        details={
            "num_habits": len(groups.habits),
            "num_unknown": len(groups.unknown),
            "num_of_the_scan": sum(exchange.is_answered for exchange in scan),
            "habits": dict(_count_kinds(groups.habits)),
            "num_aborted": sum(exchange.status == "aborted" for exchange in exchanges),
            **lost,
            "concurrency": session.settings.concurrency,
            "longest_prompt_tokens": max((exchange.reply.prompt_tokens or 0 for exchange in answered), default=0) or None,
        },
    )


def _replies_lost(session: ProbeSession) -> tuple[dict[str, Detail], list[str]]:
    """(figures, alarms) of all requests of the run, so far, that nobody hung up on.

    num_wanted: replies that a user would read; num_failed: those that did not come. num_asked: everything; num_broken_off:
    replies that began and ended before all of them was there, which do not count as failed.
    """
    exchanges = [exchange for exchange in session.client.tally.exchanges.values() if exchange.ask.abort_after is None]
    for_readers = [exchange for exchange in exchanges if is_for_a_reader(exchange.ask) and "tools" not in exchange.ask.body]
    num_wanted, num_asked = len(for_readers), len(exchanges)
    num_failed = sum(exchange.status == "failed" and not exchange.is_broken_off for exchange in for_readers)
    num_broken_off = sum(exchange.is_broken_off for exchange in exchanges)
    alarms = []
    if num_broken_off >= LEAST_BROKEN_OFF and lower_bound(num_broken_off, num_asked) > BROKEN_OFF_SHARE:
        alarms.append(f"the bodies of {num_broken_off} of {num_asked} replies broke off")
    if num_wanted and lower_bound(num_failed, num_wanted) > FAILED_SHARE:
        alarms.append(f"{num_failed} of {num_wanted} requests had no reply")
    figures: dict[str, Detail] = {
        "num_wanted": num_wanted, "num_failed": num_failed, "num_asked": num_asked, "num_broken_off": num_broken_off,
    }  # fmt: skip
    return figures, alarms


def _count_kinds(suspects: Sequence[Suspect]) -> Counter[str]:
    return Counter(kind for suspect in suspects for kind in suspect.kinds)


def _witness(suspect: Suspect) -> Witness:
    sign, text = suspect.signs[0], suspect.exchange.text
    odd_at = next((at for at, letter in enumerate(text) if letter == "\ufffd" or ord(letter) < 9), len(text))
    return witness(suspect.exchange, f"{sign.kind}: {sign.detail}", sign.position, excerpt_at=odd_at)


def _scan_asks(session: ProbeSession) -> list[Ask]:
    """Short and long prompts in turn; users that hang up in between."""
    settings = session.settings
    prompts = session.mixed_prompts("garble", settings.num_garble_requests)
    asks = [session.ask("garble", prompt, temperature=settings.temperature, num_logprobs=TOP_OF_TWO) for prompt in prompts]
    num_aborts = round(len(prompts) * settings.abort_share) if session.endpoint.offer.streams else 0
    for number in range(num_aborts):
        at = (number + 1) * len(prompts) // (num_aborts + 1)
        leaving = session.ask("abort", prompts[at], temperature=settings.temperature)
        leaving = replace(leaving, id=f"{leaving.id}/{number}", abort_after=ABORT_AFTER[number % len(ABORT_AFTER)])
        asks.insert(at + number, leaving)
    return asks


def find_suspects(answered: Sequence[Exchange], usual: UsualLength) -> list[Suspect]:
    """Replies with at least one sign, of all groups of requests."""
    among = signs_among([exchange for exchange in answered if not exchange.ask.body["temperature"]], usual)
    is_cut: dict[str, list[bool]] = defaultdict(list)
    for exchange in answered:
        is_cut[exchange.id.partition("/")[0]].append(exchange.reply.finish_reason == "length")
    suspects = []
    for number, exchange in enumerate(answered, 1):
        group = is_cut[exchange.id.partition("/")[0]]
        is_end_expected = sum(group) < USUAL_LENGTH_SHARE * len(group)
        signs = [*signs_of(exchange, is_end_expected=is_end_expected), *among.get(exchange.id, [])]
        if exchange.ask.body["temperature"]:
            signs = [sign for sign in signs if sign.kind in AT_ANY_TEMPERATURE]
        if exchange.reply.has_tool_calls:
            signs = [sign for sign in signs if sign.kind not in ("empty", "loop", "missing_end")]
        if signs:
            suspects.append(Suspect(exchange, tuple(signs), number))
    return suspects


def _not_written(session: ProbeSession, scan: Sequence[Exchange], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Greedy replies of the scan without any sign that prefill would not have written, of those that are scored."""
    if session.settings.temperature or session.reason_unscorable is not None:
        return []
    odd = {suspect.exchange.id for suspect in suspects}
    plain = [exchange for exchange in scan if exchange.is_answered and exchange.id not in odd][: session.settings.num_scored]
    numbers = {exchange.id: number for number, exchange in enumerate(session.generated(), 1)}
    unwritten = []
    for scored in session.score(plain, session.settings.concurrency, top_k=1):
        gap = furthest_behind(scored)
        if gap is not None and gap >= FOREIGN_NATS:
            sign = Sign("not_written", f"prefill puts another token {gap:.1f} nats before one of it")
            unwritten.append(Suspect(scored.exchange, (sign,), numbers[scored.exchange.id]))
    return unwritten


# ------------------------------------------------------------------------------------------------ habits
def sort_out(
    session: ProbeSession, suspects: Sequence[Suspect], compared: dict[str, TextComparison], usual: UsualLength
) -> SortedSuspects:
    """Score them all, and ask the most urgent ones again."""
    groups = SortedSuspects([], [], [])
    by_urgency = sorted(suspects, key=lambda suspect: (suspect.urgency, suspect.number))
    undecided = by_urgency[: session.settings.most_suspects]
    groups.unknown.extend(by_urgency[len(undecided) :])
    if undecided and session.reason_unscorable is None:
        scored = session.score([suspect.exchange for suspect in undecided], session.settings.concurrency)
        by_id = {reply.exchange.id: reply for reply in scored}
        remaining: list[Suspect] = []
        for suspect in undecided:
            own = is_own(by_id.get(suspect.exchange.id), suspect.temperature)
            if own and not _is_cleared_by_its_ids(suspect, compared):
                own = None
            (remaining if own is None else groups.habits if own else groups.garbled).append(suspect)
        undecided = remaining
    greedy = [suspect for suspect in undecided if not suspect.temperature]
    groups.unknown.extend(suspect for suspect in undecided if suspect.temperature)
    groups.unknown.extend(greedy[MOST_ASKED_AGAIN:])
    asks = renamed([suspect.exchange.ask for suspect in greedy[:MOST_ASKED_AGAIN]], "once-more")
    for suspect, alone in zip(greedy, session.client.ask_together(asks, 1), strict=False):
        if not alone.is_answered:
            groups.unknown.append(suspect)
        else:
            (groups.habits if _has_signs_again(suspect, alone, usual) else groups.garbled).append(suspect)
    for group in (groups.garbled, groups.habits, groups.unknown):
        group.sort(key=lambda suspect: suspect.number)
    return groups


def _has_signs_again(suspect: Suspect, alone: Exchange, usual: UsualLength) -> bool:
    """Whether the reply to the same request alone has every sign that the suspect has."""
    again = {sign.kind for sign in signs_of(alone, is_end_expected="missing_end" in suspect.kinds)}
    if start_equal(alone.text, suspect.exchange.text):
        again.add("repeated")
    if usual.is_thin(alone, STILL_THIN):
        again.add("thin")
    if ends_at_limit(alone):
        again.add("end_at_limit")
    return again >= set(suspect.kinds)


def _is_cleared_by_its_ids(suspect: Suspect, compared: dict[str, TextComparison]) -> bool:
    """Whether the model's having chosen the ids says all about the reply's signs."""
    if "wrong_script" in suspect.kinds:
        return False
    text = compared.get(suspect.exchange.id)
    return (text is not None and text.is_equal) or not OF_TEXT & set(suspect.kinds)


def is_own(scored: RescoredReply | None, temperature: float) -> bool | None:
    """Whether prefill would have written the reply, too. None: it could not be scored, or was drawn above temperature 1."""
    gap = furthest_behind(scored)
    if gap is not None and not temperature:
        return gap < FOREIGN_NATS
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    chosen_P = scored.prefill.chosen_P.astype(np.float64)
    if np.nanmin(chosen_P) > -SURPRISE_NATS:
        return True
    if temperature > 1:
        return None
    top_PK = scored.prefill.logprobs_PK.astype(np.float64)
    num_outside = int(np.sum(chosen_P < np.nanmin(top_PK, axis=1)))
    expected = float(np.clip(1 - np.nansum(np.exp(top_PK), axis=1), LEAST_REST, 1.0).sum())
    return bool(stats.poisson.sf(num_outside - 1, expected) > RARE_DRAW)


def furthest_behind(scored: RescoredReply | None) -> float | None:
    """Nats by which a token of the reply is behind the best one of prefill, at most. None: it could not be scored."""
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    gap_P = np.nanmax(scored.prefill.logprobs_PK.astype(float), axis=1) - scored.prefill.chosen_P.astype(float)
    return float(np.nanmax(gap_P))
