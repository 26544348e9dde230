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
    compared, reason = believed_texts(session, replies)
    found = _contradictions(session, replies, compared)
    looked = [
        one
        for one in replies
        if one.id in compared or one.reply.output_tokens is not None or one.reply.usage_problem or one.reply.token_ids
    ]
    if not looked and not found:
        return not_run("text", "request", "replies tell neither ids nor numbers of tokens", len(replies))
    events = [(number, one, found[one.id]) for number, one in enumerate(replies, 1) if one.id in found]
    kinds = Counter[str](each.kind for _, _, told in events for each in told)
    first = events[0][2][0].sentence if events else ""
    seen = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return session.result(
        "text",
        events=len(events),
        trials=len(replies),
        unit="request",
        alarm=f"{len(events)} of {len(replies)} replies contradict themselves ({seen}); the first: {first}" if events else None,
        reason=reason,
        num_requests=len(replies),
        witnesses=[_witness(one, told[0]) for _, one, told in events],
        first_event_at=events[0][0] if events else None,
        details={
            "kinds": dict(kinds),
            "num_decoded": len(compared),
            "num_with_ids": sum(one.reply.token_ids is not None for one in replies),
            "num_read": len(session.read_alike),
        },
    )


def _witness(exchange: Exchange, told: Contradiction) -> Witness:
    at = len(exchange.text) if told.kind != "row" else 0
    return witness(exchange, f"{told.kind}: {told.sentence}", told.position, excerpt_at=at)


# ------------------------------------------------------------------------------------------------ texts and ids
def compared_texts(session: ProbeSession, replies: Sequence[Exchange]) -> dict[str, TextComparison]:
    """By id: text against what the server's /detokenize makes of the ids, of replies that have ids. Each is asked once."""
    if not session.endpoint.offer.detokenize:
        return {}
    for one in replies:
        if one.id in session.compared or not one.reply.token_ids or one.reply.has_tool_calls:
            continue
        if isinstance(one.reply.stop_reason, str) or (told := _compare(session, one, one.reply.token_ids)) is None:
            continue
        if not told.is_equal and one.reply.finish_reason == "stop" and len(one.reply.token_ids) > 1:
            # the token that ended it may be text of its own, which a reply leaves out
            before = _compare(session, one, one.reply.token_ids[:-1])
            told = TextComparison(True, None, True) if before is not None and before.is_equal else told
        session.compared[one.id] = told
    return {one.id: session.compared[one.id] for one in replies if one.id in session.compared}


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


def believed_texts(session: ProbeSession, replies: Sequence[Exchange]) -> tuple[dict[str, TextComparison], str | None]:
    """`compared_texts`; and why they are not believed: many differ, and /detokenize writes those texts otherwise, too.

    A text that /tokenize and /detokenize give back as it is can be written with this tokenizer. If its reply's ids decode to
    another one, it is not their text, be it in every reply.
    """
    compared = compared_texts(session, replies)
    differ = [one for one in replies if one.id in compared and not compared[one.id].is_equal]
    if len(differ) <= FEW * len(compared):
        return compared, None
    if session.endpoint.offer.tokenize and all(_comes_back(session, one) for one in differ[:MOST_ROUND_TRIPS]):
        return compared, None
    why = f"the text of {len(differ)} of {len(compared)} replies is not what /detokenize makes of their ids, and /detokenize "
    return {}, why + "writes their text otherwise as well: it is not believed"


def _comes_back(session: ProbeSession, exchange: Exchange) -> bool:
    text = MARK.sub("", exchange.reply.text)
    if not text:
        return True
    back = _detokenized(session, _tokenized(session, text))
    return back is not None and compare_text(back, text, left_out=lambda mark: _is_no_text(session, mark)).is_equal


# ------------------------------------------------------------------------------------------------ each reply
def _contradictions(
    session: ProbeSession, replies: Sequence[Exchange], compared: dict[str, TextComparison]
) -> dict[str, list[Contradiction]]:
    ends = EndTokens()
    for one in replies:
        ends.learn(one.reply, compared.get(one.id))
    longest = max((total for one in replies if (total := _total(one)) is not None), default=None)
    found: dict[str, list[Contradiction]] = {}
    for one in replies:
        told = find_contradictions(
            one.reply, max_tokens=one.ask.body["max_tokens"], room_tokens=_room(session, one, longest), rows=one.rows,
            compared=compared.get(one.id), ends=ends,
        )  # fmt: skip
        if told:
            found[one.id] = told
    for name, one_more in (*_misread(session, replies), *_billed_otherwise(replies)):
        found.setdefault(name, []).append(one_more)
    return found


def _total(exchange: Exchange) -> int | None:
    reply = exchange.reply
    return None if reply.prompt_tokens is None or reply.output_tokens is None else reply.prompt_tokens + reply.output_tokens


def _room(session: ProbeSession, exchange: Exchange, longest: int | None) -> int | None:
    """Tokens that the context leaves for a reply; of a server that does not tell, at least what its longest text leaves."""
    most = session.endpoint.max_model_len or longest
    return None if most is None or exchange.reply.prompt_tokens is None else most - exchange.reply.prompt_tokens


def _misread(session: ProbeSession, replies: Sequence[Exchange]) -> list[tuple[str, Contradiction]]:
    """Replies without ids whose log-probabilities are of other tokens than the text; not where they are so in most."""
    for one in replies:
        if one.id not in session.read_alike and (alike := reads_alike(one)) is not None:
            session.read_alike[one.id] = alike
    names = [one.id for one in replies if session.read_alike.get(one.id) is False]
    if 2 * len(names) > len(session.read_alike):
        return []
    sentence = "the text is not what the tokens of its log-probabilities read"
    return [(name, Contradiction("text", sentence)) for name in names]


def reads_alike(exchange: Exchange) -> bool | None:
    """Whether the tokens of a reply's log-probabilities read as its text; None: they are not told, or ids say more."""
    if exchange.reply.token_ids is not None or exchange.reply.has_tool_calls or exchange.reply.reasoning:
        return None
    read = text_of_rows(exchange.rows)
    return None if read is None else compare_text(read, exchange.reply.text).is_equal


def has_odd_rows(exchange: Exchange) -> bool:
    """Whether log-probabilities of a reply contradict it, so that they are kept."""
    is_odd = check_rows(exchange.rows) or check_count(exchange.reply, max_tokens=1 << 40, rows=exchange.rows)
    return bool(is_odd) or reads_alike(exchange) is False


def _billed_otherwise(replies: Sequence[Exchange]) -> list[tuple[str, Contradiction]]:
    """Without ids: the same greedy reply to the same question, for another number of tokens.

    One token more or less may be another way to spell the same text. Where far more tokens than characters are billed,
    thinking is hidden in them, which may be longer the second time.
    """
    kept = [
        (one.id, (one.ask.prompt, one.text, one.reply.finish_reason), one.reply.output_tokens)
        for one in replies
        if one.reply.token_ids is None and not one.ask.body["temperature"] and not one.reply.thinking_tokens
        and len(one.text) >= (one.reply.output_tokens or 0)
    ]  # fmt: skip
    return [
        (str(name), Contradiction("count", f"{count} tokens are billed, and {usual} for the same reply to the same question"))
        for name, (count, usual) in find_unlike_counts(kept).items()
        if abs(count - usual) > 1
    ]
