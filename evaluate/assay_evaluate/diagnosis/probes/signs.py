"""Signs of garbled text, in one reply and among several.

Each also occurs in healthy replies now and then; the garble scan asks again before it calls one a fault. Signs among replies
(one text for several questions, few characters for many tokens, an end at the limit) are for servers that tell no ids: with
ids `whole_text` sees the same for sure.
"""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from assay_evaluate.asking.language import MAX_FOREIGN_SHARE_IN_FORMULAS, count_scripts
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.client.reply_checks import find_repeated_texts

MIN_REPEATS = 4
MIN_LOOP_TOKENS = 24
MIN_LOOP_CHARACTERS = 64
LONGEST_PERIOD = 64
SURPRISE_NATS = 15.0
"""A chosen token of a log-probability below minus this is none that a healthy server samples (e^-15: 3 in 10 million)."""
ID_ZERO_RUN = 4
"""Token id 0 this often in a row: what a sampler picks from NaN logits."""
THINKING = re.compile(r"<(/?)(?:think|thinking|thought)>")


@dataclass(frozen=True)
class Sign:
    """One detector that fired. `position`: index of the first token concerned, where tokens are known."""

    kind: str
    detail: str
    position: int | None = None


def longest_loop(sequence: Sequence[Hashable]) -> tuple[int, int, int]:
    """(start, length, period) of the longest stretch that repeats with a period of at most `LONGEST_PERIOD`, at least
    `MIN_REPEATS` times; (0, 0, 0) if there is none. The stretch holds all repeats.
    """
    best = (0, 0, 0)
    for period in range(1, min(LONGEST_PERIOD, len(sequence) // MIN_REPEATS) + 1):
        run = 0
        for at in range(period, len(sequence) + 1):
            if at < len(sequence) and sequence[at] == sequence[at - period]:
                run += 1
                continue
            length = run + period
            if run and length >= MIN_REPEATS * period and length > best[1]:
                best = (at - length, length, period)
            run = 0
    return best


def _loop(text: str, token_ids: Sequence[int] | None) -> Sign | None:
    if token_ids is not None:
        start, length, period = longest_loop(token_ids)
        return Sign("loop", f"{length} tokens repeat every {period}", start) if length >= MIN_LOOP_TOKENS else None
    start, length, period = longest_loop(text)
    is_rule = period == 1 and not text[start : start + 1].isalnum()  # a line of dashes, spaces of a table
    is_loop = length >= MIN_LOOP_CHARACTERS * (4 if is_rule else 1)
    return Sign("loop", f"{length} characters repeat every {period}") if is_loop else None


def _foreign(text: str, prompt: str) -> Sign | None:
    """One letter of a script that the prompt does not use suffices; Latin and Greek, which formulas bring, need a fifth."""
    counts, expected = count_scripts(text), count_scripts(prompt)
    few = MAX_FOREIGN_SHARE_IN_FORMULAS * counts.total()
    foreign = [s for s, count in counts.items() if s not in expected and (s not in ("Latin", "Greek") or count > few)]
    if not foreign:
        return None
    return Sign("wrong_script", f"{counts[foreign[0]]} letters of {foreign[0]}, which the prompt does not use")


def _characters(text: str, finish_reason: str | None) -> list[Sign]:
    signs = []
    whole = text.rstrip("\ufffd") if finish_reason == "length" else text  # cut in the middle of a character
    if (count := whole.count("\ufffd")) > 0:
        signs.append(Sign("replacement_character", f"{count} times U+FFFD"))
    control = [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn") and c not in "\n\t\r"]
    if control:
        signs.append(Sign("control_character", f"{len(control)} times, first U+{ord(control[0]):04X}"))
    return signs


def _zero_ids(text: str, token_ids: Sequence[int] | None) -> Sign | None:
    if token_ids is None:
        run = re.search(r"!{16,}", text)  # id 0 of most byte-level vocabularies
        return Sign("id_zero", f"{len(run.group())} times '!'") if run else None
    at = id_zero_run(token_ids)
    return None if at is None else Sign("id_zero", f"token id 0 {ID_ZERO_RUN} times in a row", at)


def id_zero_run(token_ids: Sequence[int]) -> int | None:
    """Where token id 0 begins to stand `ID_ZERO_RUN` times in a row; None: nowhere."""
    run_length = 0
    for position, token in enumerate(token_ids):
        run_length = run_length + 1 if token == 0 else 0
        if run_length == ID_ZERO_RUN:
            return position - ID_ZERO_RUN + 1
    return None


def _thinking(text: str, reasoning: str | None, finish_reason: str | None) -> Sign | None:
    if reasoning and not text.strip() and finish_reason == "stop":
        return Sign("open_thinking", "the reply ended inside its thinking")
    depth = sum(-1 if tag.group(1) else 1 for tag in THINKING.finditer(text))
    if depth > 0 and finish_reason == "stop":
        return Sign("open_thinking", "a thinking tag is never closed")
    return None


def signs_in(
    prompt: str,
    text: str,
    *,
    reasoning: str | None = None,
    finish_reason: str | None = None,
    token_ids: Sequence[int] | None = None,
    rows: Sequence[TokenRow] = (),
    is_end_expected: bool = False,
) -> list[Sign]:
    """What looks wrong in one reply to `prompt`. is_end_expected: replies to such prompts end within their budget."""
    whole = (reasoning or "") + text
    signs: list[Sign | None] = list(_characters(whole, finish_reason))
    signs += [_foreign(whole, prompt), _loop(whole, token_ids), _zero_ids(whole, token_ids)]
    surprises = ((at, row.logprob) for at, row in enumerate(rows) if row.logprob < -SURPRISE_NATS)
    if (surprise := next(surprises, None)) is not None:
        signs.append(Sign("surprise", f"a token of log-probability {surprise[1]:.1f}", surprise[0]))
    signs.append(_thinking(text, reasoning, finish_reason))
    if not whole.strip() and finish_reason == "stop":
        signs.append(Sign("empty", "the reply has no text"))
    if is_end_expected and finish_reason == "length":
        signs.append(Sign("missing_end", "the reply did not end within its budget"))
    return [sign for sign in signs if sign is not None]


def signs_of(exchange: Exchange, *, is_end_expected: bool = False) -> list[Sign]:
    """`signs_in` of one reply by itself."""
    reply = exchange.reply
    return signs_in(
        exchange.ask.prompt, reply.text, reasoning=reply.reasoning, finish_reason=reply.finish_reason,
        token_ids=reply.token_ids, rows=exchange.rows, is_end_expected=is_end_expected,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ among other replies
THIN = 0.8
"""A reply with less than this share of the usual characters per token has lost some, or is of another kind ..."""
STILL_THIN = 0.9
"""... and a habit if it still has less than this share when it is asked for again alone."""
LEAST_TOKENS = 24
LEAST_REPLIES = 8
"""Of a script, to know what is usual."""


@dataclass(frozen=True)
class UsualLength:
    """Characters per token of replies to prompts of each script."""

    per_token: dict[str, float] = field(default_factory=dict)

    def is_thin(self, exchange: Exchange, share: float) -> bool:
        usual = self.per_token.get(_script(exchange))
        own = characters_per_token(exchange)
        return usual is not None and own is not None and own < share * usual


def characters_per_token(exchange: Exchange) -> float | None:
    """None: the number of tokens is not told, too small, or known from ids, or thinking is hidden in it."""
    reply = exchange.reply
    count = reply.output_tokens
    if count is None or count < LEAST_TOKENS or reply.token_ids is not None or reply.has_tool_calls:
        return None
    if reply.thinking_tokens and not reply.reasoning:
        count -= reply.thinking_tokens
    return len(exchange.text) / count if count >= LEAST_TOKENS else None


def _script(exchange: Exchange) -> str:
    [(script, _)] = count_scripts(exchange.ask.prompt).most_common(1) or [("none", 0)]
    return script


def usual_length_of(replies: Sequence[Exchange]) -> UsualLength:
    """The median of each script that has enough replies."""
    by_script: dict[str, list[float]] = defaultdict(list)
    for exchange in replies:
        if (own := characters_per_token(exchange)) is not None:
            by_script[_script(exchange)].append(own)
    return UsualLength(
        {script: statistics.median(lengths) for script, lengths in by_script.items() if len(lengths) >= LEAST_REPLIES}
    )


def signs_among(replies: Sequence[Exchange], usual: UsualLength) -> dict[str, list[Sign]]:
    """By id, of greedy replies."""
    signs: dict[str, list[Sign]] = defaultdict(list)
    others = find_repeated_texts((exchange.id, exchange.ask.prompt, exchange.text) for exchange in replies)
    for exchange in replies:
        num_tokens = exchange.reply.output_tokens
        if exchange.id in others:
            signs[exchange.id].append(
                Sign("repeated", f"the same text as {others[exchange.id]}, another question's reply, has")
            )
        if usual.is_thin(exchange, THIN):
            few = f"{len(exchange.text)} characters for {num_tokens} tokens"
            signs[exchange.id].append(Sign("thin", f"{few}, less than {THIN:.0%} of what is usual"))
        if ends_at_limit(exchange):
            signs[exchange.id].append(Sign("end_at_limit", f"`stop` after {num_tokens} tokens, all that were allowed"))
    return dict(signs)


def ends_at_limit(exchange: Exchange) -> bool:
    """Whether a reply without ids says that it ended itself, with the last token that it could have."""
    reply = exchange.reply
    return reply.token_ids is None and reply.finish_reason == "stop" and reply.output_tokens == exchange.ask.body["max_tokens"]


def start_equal(a: str, b: str) -> bool:
    """Whether two texts begin with the same words: 24 characters, or a quarter of the shorter one."""
    length = min(24, max(1, min(len(a), len(b)) // 4))
    return a[:length] == b[:length]
