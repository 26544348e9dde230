"""Replies against themselves: every reply of the run, its text, ids, counts, log-probabilities and the reason for its end.

Scores hardly show it when a gateway, a detokenizer or a filter cuts, empties or changes some texts, renames `length` to `stop`
or caps a few requests; the evidence stands in each reply (`client/reply_checks.py`). No model makes what is looked for
here, so one reply is an alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.client.decoded_text import MARK, TextComparison, compare_text, is_known_mark
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.reply_checks import (
    Contradiction,
    EndTokens,
    check_count,
    check_rows,
    find_contradictions,
    find_unlike_counts,
    text_of_rows,
)
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness
from assay_evaluate.transport.foreign_json import text_of

FEW = 0.25
"""Share of replies that differ from what their ids decode to, beyond which /detokenize has to show that it can be believed."""
MOST_ROUND_TRIPS = 4
"""Texts that are sent through /tokenize and /detokenize for that."""


def probe_text(session: ProbeSession) -> ProbeResult:
    """Everything that was generated in this run. Alarm: one reply that contradicts itself."""
    _ = session.greedy
    replies = session.generated()
    if not replies:
        return not_run("text", "request", "no request had a reply")
    compared, reason = credible_texts(session, replies)
    contradictions = _find_all_contradictions(session, replies, compared)
    has_counts = any(
        exchange.id in compared
        or exchange.reply.output_tokens is not None
        or exchange.reply.usage_problem
        or exchange.reply.token_ids
        for exchange in replies
    )
    if not has_counts and not contradictions:
        return not_run("text", "request", "replies tell neither ids nor numbers of tokens", len(replies))
    events = [
        (number, exchange, contradictions[exchange.id])
        for number, exchange in enumerate(replies, 1)
        if exchange.id in contradictions
    ]
    kinds = Counter[str](contradiction.kind for _, _, own in events for contradiction in own)
    alarms = []
    if events:
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        first = events[0][2][0].sentence
        alarms.append(f"{len(events)} of {len(replies)} replies contradict themselves ({counts}); the first: {first}")
    return session.result(
        "text",
        trials=len(replies),
        unit="request",
        alarms=alarms,
        reason=reason,
        witnesses=[_witness(exchange, own[0]) for _, exchange, own in events],
        first_event_at=events[0][0] if events else None,
        details={
            "kinds": dict(kinds),
            "num_decoded": len(compared),
            "num_with_ids": sum(exchange.reply.token_ids is not None for exchange in replies),
            "num_read": len(session.is_text_of_rows),
        },
    )


def _witness(exchange: Exchange, contradiction: Contradiction) -> Witness:
    at = len(exchange.text) if contradiction.kind != "row" else 0
    return witness(exchange, f"{contradiction.kind}: {contradiction.sentence}", contradiction.position, excerpt_at=at)


# ------------------------------------------------------------------------------------------------ texts and ids
def texts_against_ids(session: ProbeSession, replies: Sequence[Exchange]) -> dict[str, TextComparison]:
    """By id: text against what the server's /detokenize makes of the ids, of replies that have ids. Each is asked once."""
    if not session.endpoint.offer.detokenize:
        return {}
    for exchange in replies:
        reply = exchange.reply
        if exchange.id in session.compared or not reply.token_ids or reply.has_tool_calls:
            continue
        if isinstance(reply.stop_reason, str) or (comparison := _compare(session, exchange, reply.token_ids)) is None:
            continue
        if not comparison.is_equal and reply.finish_reason == "stop" and len(reply.token_ids) > 1:
            # the token that ended it may be text of its own, which a reply leaves out
            before = _compare(session, exchange, reply.token_ids[:-1])
            comparison = TextComparison(True, None, True) if before is not None and before.is_equal else comparison
        session.compared[exchange.id] = comparison
    return {exchange.id: session.compared[exchange.id] for exchange in replies if exchange.id in session.compared}


def _compare(session: ProbeSession, exchange: Exchange, ids: Sequence[int]) -> TextComparison | None:
    decoded = _detokenized(session, ids)
    if decoded is None:
        return None
    return compare_text(
        decoded, exchange.reply.text, exchange.reply.reasoning, left_out=lambda mark: _is_no_text(session, mark)
    )


def _detokenized(session: ProbeSession, ids: Sequence[int]) -> str | None:
    text = session.client.post("/detokenize", {"tokens": list(ids)}).data.get("prompt")
    return text_of(text) if isinstance(text, str) else None


def _is_no_text(session: ProbeSession, mark: str) -> bool:
    """Marks of published tokenizers, and others that the server's tokenizer has one token for."""
    return is_known_mark(mark) or (session.endpoint.offer.tokenize and len(_tokenized(session, mark)) == 1)


def _tokenized(session: ProbeSession, text: str) -> tuple[int, ...]:
    return session.client.post("/tokenize", {"prompt": text, "add_special_tokens": False}).tokens


def credible_texts(session: ProbeSession, replies: Sequence[Exchange]) -> tuple[dict[str, TextComparison], str | None]:
    """`texts_against_ids`; and why they are not believed: many differ, and /detokenize writes those texts otherwise, too.

    A text that /tokenize and /detokenize give back as it is can be written with this tokenizer. If its reply's ids decode to
    another one, it is not their text, be it in every reply.
    """
    compared = texts_against_ids(session, replies)
    differ = [exchange for exchange in replies if exchange.id in compared and not compared[exchange.id].is_equal]
    if len(differ) <= FEW * len(compared):
        return compared, None
    if session.endpoint.offer.tokenize and all(_comes_back(session, exchange) for exchange in differ[:MOST_ROUND_TRIPS]):
        return compared, None
    return {}, (
        f"the text of {len(differ)} of {len(compared)} replies is not what /detokenize makes of their ids, and /detokenize "
        "writes their text otherwise as well: it is not believed"
    )


def _comes_back(session: ProbeSession, exchange: Exchange) -> bool:
    text = MARK.sub("", exchange.reply.text)
    if not text:
        return True
    back = _detokenized(session, _tokenized(session, text))
    return back is not None and compare_text(back, text, left_out=lambda mark: _is_no_text(session, mark)).is_equal


# ------------------------------------------------------------------------------------------------ each reply
def _find_all_contradictions(
    session: ProbeSession, replies: Sequence[Exchange], compared: dict[str, TextComparison]
) -> dict[str, list[Contradiction]]:
    ends = EndTokens()
    for exchange in replies:
        ends.learn(exchange.reply, compared.get(exchange.id))
    counts = [(exchange.reply.prompt_tokens, exchange.reply.output_tokens) for exchange in replies]
    # of a server that does not tell its longest context, it is at least as long as its longest text
    longest = max((prompt + output for prompt, output in counts if prompt is not None and output is not None), default=None)
    most = session.endpoint.max_model_len or longest
    contradictions: dict[str, list[Contradiction]] = {}
    for exchange in replies:
        reply = exchange.reply
        own = find_contradictions(
            reply, max_tokens=exchange.ask.body["max_tokens"], rows=exchange.rows, compared=compared.get(exchange.id),
            room_tokens=None if most is None or reply.prompt_tokens is None else most - reply.prompt_tokens, ends=ends,
        )  # fmt: skip
        if own:
            contradictions[exchange.id] = own
    for name, contradiction in (*_misread(session, replies), *_billed_otherwise(replies)):
        contradictions.setdefault(name, []).append(contradiction)
    return contradictions


def _misread(session: ProbeSession, replies: Sequence[Exchange]) -> list[tuple[str, Contradiction]]:
    """Replies without ids whose log-probabilities are of other tokens than the text; not where they are so in most."""
    known = session.is_text_of_rows
    for exchange in replies:
        if exchange.id not in known and (is_its_text := is_text_of_rows(exchange)) is not None:
            known[exchange.id] = is_its_text
    names = [exchange.id for exchange in replies if known.get(exchange.id) is False]
    if 2 * len(names) > len(known):
        return []
    sentence = "the text is not what the tokens of its log-probabilities read"
    return [(name, Contradiction("text", sentence)) for name in names]


def is_text_of_rows(exchange: Exchange) -> bool | None:
    """Whether the tokens of a reply's log-probabilities read as its text; None: they are not told, or ids say more."""
    if exchange.reply.token_ids is not None or exchange.reply.has_tool_calls or exchange.reply.reasoning:
        return None
    read = text_of_rows(exchange.rows)
    return None if read is None else compare_text(read, exchange.reply.text).is_equal


def has_odd_rows(exchange: Exchange) -> bool:
    """Whether log-probabilities of a reply contradict it, so that they are kept."""
    is_odd = check_rows(exchange.rows) or check_count(exchange.reply, max_tokens=1 << 40, rows=exchange.rows)
    return bool(is_odd) or is_text_of_rows(exchange) is False


def _billed_otherwise(replies: Sequence[Exchange]) -> list[tuple[str, Contradiction]]:
    """Without ids: the same greedy reply to the same question, for another number of tokens.

    One token more or less may be another way to spell the same text. Where far more tokens than characters are billed,
    thinking is hidden in them, which may be longer the second time.
    """
    counted = [
        (exchange.id, (exchange.ask.prompt, exchange.text, exchange.reply.finish_reason), exchange.reply.output_tokens)
        for exchange in replies
        if exchange.reply.token_ids is None and not exchange.ask.body["temperature"] and not exchange.reply.thinking_tokens
        and len(exchange.text) >= (exchange.reply.output_tokens or 0)
    ]  # fmt: skip
    return [
        (str(name), Contradiction("count", f"{count} tokens are billed, and {usual} for the same reply to the same question"))
        for name, (count, usual) in find_unlike_counts(counted).items()
        if abs(count - usual) > 1
    ]
