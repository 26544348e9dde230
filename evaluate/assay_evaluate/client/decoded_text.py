"""Whether a reply's text is, letter for letter, what its token ids decode to.

A detokenizer, a gateway or a filter can lose, cut or change text behind right ids. What healthy servers do to text on the way
is allowed for, and nothing else:

- marks (`<|user|>`, `</think>`) are left out of replies and stand in what ids decode to (vLLM's `skip_special_tokens`);
- a reasoning parser splits thinking from answer and drops white space and marks between and around them; what stands before
  a mark that opens thinking is lost to it (vLLM reasoning/basic_parsers.py: `partition(start_token)`); of several pieces of
  thinking it makes one, and one of the text between (vLLM parser/engine, of GLM, DeepSeek V4, Ling); it may write the mark
  that the template opened thinking with in front (vLLM's `minimax_m2_append_think`);
- a tool parser takes calls out that were not offered, and what it began to read as one (vLLM parser/abstract_parser.py
  `_extract_tool_calls`, tool_choice "none"): from the first mark of a call on, texts are not compared;
- a character whose bytes are not all there yet is no text, nor is what came in the same token; decoded it is U+FFFD, and bytes
  on both sides of a mark that is left out may join (`DecodeStream` of tokenizers, which vLLM's v1/engine/detokenizer.py uses);
- a SentencePiece tokenizer decodes without the first space; `clean_up_tokenization_spaces` takes spaces before punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

LeftOut = Callable[[str], bool]
"""Whether a mark that decoded ids have may be missing in a reply."""

MARK = re.compile(r"<[^<>\s]{1,60}>|\[\|[^\]\s]{1,60}\|\]|\[/?g?[A-Z_]{2,24}\]|[◁▷][^◁▷\s]{1,24}[▷◁]")
"""Looks like a token that is no text: `<|im_end|>`, `</think>`, `[|endofturn|]`, `[/THINK]`, `◁/think▷`."""
KNOWN_MARK = re.compile(
    r"<[|｜].*[|｜]>|\[\|.*\|\]|◁.*▷"
    r"|<[/|]?(?:s|bos|eos|pad|unk|mask|sop|eop|gmask|start_of_turn|end_of_turn|think|thinking|thought|answer"
    r"|[a-z0-9_]+[:_](?:think|answer|tool_calls?|response|cot_budget_reflect)|tool_calls?|tool_response|arg_key|arg_value)>"
    r"|<(?:unused|extra_id_|reserved_special_token_)\w*>|\[/?(?:THINK|INST|SYSTEM_PROMPT|TOOL_CALLS|ARGS|gMASK|EOS)\]",
    re.IGNORECASE,
)
OPENING = re.compile(r"<(?:[a-z0-9_]+[:_])?(?:think|thinking|thought)>|\[THINK\]|\u25c1think\u25b7", re.IGNORECASE)
CLOSING = re.compile(r"</(?:[a-z0-9_]+[:_])?(?:think|thinking|thought)>|\[/THINK\]|\u25c1/think\u25b7", re.IGNORECASE)
CALL = re.compile(
    r"<[^<>]{0,20}tool[_\u2581](?:calls?|requests?)[^<>]{0,24}>|<\uff5cDSML\uff5c ?\w*calls>|<\|content_invoke_tool_\w+\|>"
)
"""Begins a tool call: `<tool_call>`, `<minimax:tool_call>`, `<|tool_calls_section_begin|>`, `<\uff5cDSML\uff5ctool_calls>`."""
CHANNEL_WORDS = re.compile(r"(?<=>)(?:assistant|analysis|final|commentary)(?=<\||$)")
"""Between the marks of the harmony format: `<|start|>assistant<|channel|>final<|message|>`."""
BROKEN = "\ufffd"
MARKED = "\ufdd0"
"""In place of a mark that is left out: no character, by Unicode."""
MOST_HELD_BACK = 8
"""Characters that came in the same token as the last broken one."""
_SPACE_BEFORE = re.compile(r" ([.?!,]|n't|'(?:m|s|ve|re)\b)")


def is_known_mark(mark: str) -> bool:
    """Whether it is one of the marks that tokenizers of published models call special, or that a parser takes out."""
    return KNOWN_MARK.fullmatch(mark) is not None


@dataclass(frozen=True)
class TextComparison:
    """How a reply's text stands to what its ids decode to."""

    is_equal: bool
    difference: str | None = None
    """In words, of texts that differ: `its last 31 of 93 characters are lost`."""
    ends_with_mark: bool = False
    """The ids end in a token that is no text, as they do where a model ended its reply itself."""


def compare_text(decoded: str, text: str, reasoning: str | None = None, *, left_out: LeftOut = is_known_mark) -> TextComparison:
    """Compare a reply's text, and the thinking that a parser split from it, with what all of its ids decode to.

    left_out: which of the marks in `decoded` may be missing; at the very end any may be.
    """
    body, ending = _without_last_mark(decoded)
    has_mark = bool(ending)
    if not reasoning and text in (decoded, body):
        return TextComparison(True, None, has_mark)
    parts = [part for part in (reasoning, text) if part]
    is_equal = _stands_in(decoded, body, parts, is_split=bool(reasoning), left_out=left_out)
    if not is_equal and (opened := OPENING.search(body)) is not None:
        behind = body[opened.end() :]
        is_equal = _stands_in(behind, behind, parts, is_split=True, left_out=left_out)
        is_equal = is_equal or (bool(reasoning) and _is_regrouped(body, reasoning or "", text, left_out))
    if not is_equal and not reasoning and (written := OPENING.match(text)) is not None:
        rest = text[written.end() :]
        is_equal = _stands_in(decoded, body, [rest] if rest else [], is_split=False, left_out=left_out)
    if not is_equal and (call := CALL.search(body)) is not None:
        is_equal = _letters("".join(parts), left_out).startswith(_letters(body[: call.start()], left_out))
    return TextComparison(is_equal, None if is_equal else _difference(body, "".join(parts), left_out), has_mark)


def _without_last_mark(decoded: str) -> tuple[str, str]:
    """(what comes before the mark at the very end, that mark); no mark: ""."""
    marks = list(MARK.finditer(decoded, max(0, len(decoded) - 128)))
    if not marks or marks[-1].end() != len(decoded):
        return decoded, ""
    return decoded[: marks[-1].start()], marks[-1].group()


def _is_regrouped(body: str, reasoning: str, text: str, left_out: LeftOut) -> bool:
    """Whether all pieces of thinking in `body`, one behind the other, are the reasoning, and what is between them the text."""
    pieces: dict[bool, list[str]] = {True: [], False: []}
    marks = sorted(
        (mark.start(), mark.end(), opens) for kind, opens in ((OPENING, True), (CLOSING, False)) for mark in kind.finditer(body)
    )
    at, is_thinking = 0, bool(marks) and not marks[0][2]
    for start, end, opens in marks:
        pieces[is_thinking].append(body[at:start])
        at, is_thinking = end, opens
    pieces[is_thinking].append(body[at:])
    return all(
        _is_made_of("".join(pieces[kind]), [part] if part else [], True, left_out)
        for kind, part in ((True, reasoning), (False, text))
    )


def _letters(text: str, left_out: LeftOut) -> str:
    """The text without white space and marks that may be left out."""
    return "".join(MARK.sub(lambda mark: "" if left_out(mark.group()) else mark.group(), text).split())


def _stands_in(decoded: str, body: str, parts: list[str], *, is_split: bool, left_out: LeftOut) -> bool:
    # SentencePiece decodes without the first space
    ways = [parts] if is_split or not parts or not parts[0].startswith(" ") else [parts, [parts[0][1:]]]
    if any(_is_made_of(whole, way, is_split, left_out) for whole in dict.fromkeys((decoded, body)) for way in ways):
        return True
    if BROKEN in body and not is_split:
        text = parts[0] if parts else ""
        return any(_is_but_for_broken(body, variant, left_out) for variant in dict.fromkeys((text, text.removeprefix(" "))))
    cleaned = [_SPACE_BEFORE.sub(r"\1", part) for part in parts]
    return _is_made_of(_SPACE_BEFORE.sub(r"\1", body), cleaned, is_split, left_out)


def _is_made_of(decoded: str, parts: list[str], is_split: bool, left_out: LeftOut) -> bool:
    """Whether `decoded` is the parts one behind the other, with marks between that may be left out."""
    written, canonical_parts = _canonical(decoded), [_canonical(part) for part in parts]
    at = 0
    for part in canonical_parts:
        end = _behind_gap(written, at, part.strip(), left_out) if is_split else _consumed(written, at, part, left_out)
        if end is None:
            return False
        at = end
    while (mark := MARK.match(written, at)) and left_out(mark.group()):
        at = mark.end()
    while is_split and (gap := _gap_end(written, at, left_out)) is not None:
        at = gap
    return at == len(written)


def _canonical(text: str) -> str:
    """Characters that are not whole, at the end or before the last marks, are no text; others count once in a row."""
    whole = re.sub(f"{BROKEN}+", BROKEN, text)
    return re.sub(f"{BROKEN}(?=(?:{MARK.pattern})*$)", "", whole)


def _is_but_for_broken(decoded: str, text: str, left_out: LeftOut) -> bool:
    """Whether the text is `decoded` without its marks, whatever became of characters that are not whole.

    As many characters as there are broken ones may stand in their place; of the last, what came with it may be missing.
    """
    written = MARK.sub(lambda mark: MARKED if left_out(mark.group()) else mark.group(), decoded)
    shown = MARK.sub(lambda mark: "" if left_out(mark.group()) else mark.group(), text)
    ends, at, before, length = {0}, 0, {0}, 0
    for broken in re.finditer(f"{MARKED}*{BROKEN}[{BROKEN}{MARKED}]*", written):
        whole = written[at : broken.start()].replace(MARKED, "")
        before, length = ends, len(whole)
        behind = {end + length for end in ends if shown.startswith(whole, end)}
        count = broken.group().count(BROKEN)
        ends, at = {end + more for end in behind for more in range(count + 1)}, broken.end()
    last = written[at:].replace(MARKED, "")
    if any(shown.startswith(last, end) and end + len(last) == len(shown) for end in ends):
        return True
    if last:
        return False
    whole = re.sub(f"[{BROKEN}{MARKED}]+$", "", written).replace(MARKED, "")[-length:] if length else ""
    missing = range(1, min(MOST_HELD_BACK, length) + 1)
    return any(shown[end:] == whole[: length - count] for end in before for count in missing)


def _consumed(decoded: str, at: int, part: str, left_out: LeftOut) -> int | None:
    """Where `part` ends that begins at `at`, marks in between left out where they may be; None: it does not stand there."""
    done = 0
    while done < len(part):
        mark = MARK.search(decoded, at)
        plain_end = len(decoded) if mark is None else mark.start()
        length = min(plain_end - at, len(part) - done)
        if decoded[at : at + length] != part[done : done + length]:
            return None
        at, done = at + length, done + length
        if done == len(part):
            break
        if mark is None:
            return None
        if part.startswith(mark.group(), done):
            at, done = mark.end(), done + len(mark.group())
        elif left_out(mark.group()):
            at = mark.end()
        else:
            at, rest = at + 1, part[done : done + 1]
            if rest != decoded[at - 1]:
                return None
            done += 1
    return at


def _behind_gap(decoded: str, at: int, part: str, left_out: LeftOut) -> int | None:
    """Where `part` ends that begins at `at` or behind a gap; None: it does not stand there."""
    here: int | None = at
    while here is not None:
        if (end := _consumed(decoded, here, part, left_out)) is not None:
            return end
        here = _gap_end(decoded, here, left_out)
    return None


def _gap_end(decoded: str, at: int, left_out: LeftOut) -> int | None:
    """Behind one mark that may be left out, word of harmony's channels, or white space at `at`; None: none stands there."""
    if (mark := MARK.match(decoded, at)) and left_out(mark.group()):
        return mark.end()
    if (word := CHANNEL_WORDS.match(decoded, at)) is not None:
        return word.end()
    return at + 1 if at < len(decoded) and decoded[at].isspace() else None


def _difference(decoded: str, shown: str, left_out: LeftOut) -> str:
    """What is wrong, in words, of a text that is not what its ids decode to."""
    written = MARK.sub(lambda mark: "" if left_out(mark.group()) else mark.group(), decoded)
    if not shown:
        return f"it is empty, and its ids decode to {len(written)} characters"
    if written.startswith(shown):
        return f"its last {len(written) - len(shown)} of {len(written)} characters are lost"
    if shown.strip() == written.strip():
        return "white space at its ends is lost or added"
    if "".join(shown.split()) == "".join(written.split()):
        return "its white space or line ends are changed"
    at = next((i for i, (a, b) in enumerate(zip(written, shown, strict=False)) if a != b), min(len(written), len(shown)))
    return f"they part at character {at + 1}: {written[at : at + 12]!r} decoded, {shown[at : at + 12]!r} in the reply"
