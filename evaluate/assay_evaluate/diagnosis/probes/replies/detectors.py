"""Signs of garbled text in one reply. Pure functions of the reply, the prompt and, where told, token ids and log-probabilities.

Each sign also occurs in healthy replies now and then; the garble scan asks again before it calls one a fault.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from assay_evaluate.asking.language import MAX_FOREIGN_SHARE_IN_FORMULAS, count_scripts
from assay_evaluate.client.logprobs import TokenRow

MIN_REPEATS = 4
MIN_LOOP_TOKENS = 24
MIN_LOOP_CHARACTERS = 64
LONGEST_PERIOD = 64
SURPRISE_NATS = 15.0
"""A chosen token of a log-probability below minus this is none that a healthy server samples (e^-15: 3 in 10 million)."""
ID_ZERO_RUN = 4
"""Token id 0 this often in a row: what a sampler picks from NaN logits."""
THINKING = re.compile(r"<(/?)(?:think|thinking|thought)>")


MARK = re.compile(r"<[^<>\s]{1,40}>")
"""A token that is no text (`<|user|>`, `</think>`): replies leave it out, and what ids decode to has it."""


@dataclass(frozen=True)
class Sign:
    """One detector that fired. `position`: index of the first token concerned, where tokens are known."""

    kind: str
    detail: str
    position: int | None = None


def is_text_of(decoded: str, parts: Sequence[str]) -> bool:
    """Whether the parts of a reply stand in what its ids decode to, one behind the other, letter for letter."""
    return _stand_in(decoded, parts) or _stand_in(MARK.sub("", decoded), [MARK.sub("", part) for part in parts])


def _stand_in(decoded: str, parts: Sequence[str]) -> bool:
    at = 0
    for part in parts:
        wanted = part.strip().rstrip("\ufffd")  # cut in the middle of a character
        at = decoded.find(wanted, at)
        if at < 0:
            return False
        at += len(wanted)
    return True


def longest_loop(sequence: Sequence[Hashable], longest_period: int = LONGEST_PERIOD) -> tuple[int, int, int]:
    """(start, length, period) of the longest stretch that repeats with a period of at most `longest_period`, at least
    `MIN_REPEATS` times; (0, 0, 0) if there is none. The stretch holds all repeats.
    """
    best = (0, 0, 0)
    for period in range(1, min(longest_period, len(sequence) // MIN_REPEATS) + 1):
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
        if length >= MIN_LOOP_TOKENS:
            return Sign("loop", f"{length} tokens repeat every {period}", start)
        return None
    start, length, period = longest_loop(text)
    is_rule = period == 1 and not text[start : start + 1].isalnum()  # a line of dashes, spaces of a table
    if length >= MIN_LOOP_CHARACTERS * (4 if is_rule else 1):
        return Sign("loop", f"{length} characters repeat every {period}")
    return None


def _foreign(text: str, prompt: str) -> Sign | None:
    """One letter of a script that the prompt does not use suffices; Latin and Greek, which formulas bring, need a fifth."""
    found, expected = count_scripts(text), count_scripts(prompt)
    few = MAX_FOREIGN_SHARE_IN_FORMULAS * found.total()
    foreign = [s for s, count in found.items() if s not in expected and (s not in ("Latin", "Greek") or count > few)]
    if not foreign:
        return None
    return Sign("wrong_script", f"{found[foreign[0]]} letters of {foreign[0]}, which the prompt does not use")


def _characters(text: str, finish_reason: str | None) -> list[Sign]:
    found = []
    whole = text.rstrip("\ufffd") if finish_reason == "length" else text  # cut in the middle of a character
    if (count := whole.count("\ufffd")) > 0:
        found.append(Sign("replacement_character", f"{count} times U+FFFD"))
    control = [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn") and c not in "\n\t\r"]
    if control:
        found.append(Sign("control_character", f"{len(control)} times, first U+{ord(control[0]):04X}"))
    return found


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


def _surprise(rows: Sequence[TokenRow]) -> Sign | None:
    for position, row in enumerate(rows):
        if row.logprob < -SURPRISE_NATS:
            return Sign("surprise", f"a token of log-probability {row.logprob:.1f}", position)
    return None


def _thinking(text: str, reasoning: str | None, finish_reason: str | None) -> Sign | None:
    if reasoning and not text.strip() and finish_reason == "stop":
        return Sign("open_thinking", "the reply ended inside its thinking")
    depth = 0
    for tag in THINKING.finditer(text):
        depth += -1 if tag.group(1) else 1
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
    found: list[Sign | None] = list(_characters(whole, finish_reason))
    found += [_foreign(whole, prompt), _loop(whole, token_ids), _zero_ids(whole, token_ids), _surprise(rows)]
    found.append(_thinking(text, reasoning, finish_reason))
    if not whole.strip() and finish_reason == "stop":
        found.append(Sign("empty", "the reply has no text"))
    if is_end_expected and finish_reason == "length":
        found.append(Sign("missing_end", "the reply did not end within its budget"))
    return [sign for sign in found if sign is not None]
