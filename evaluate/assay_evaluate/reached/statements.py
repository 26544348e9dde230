"""What a text states as a result, and what right answers look like that may be among it.

A number, a letter or a phrase that merely occurs is not stated. It is where it stands behind a mark of answers (`#### 7`,
`\\boxed{7}`, "the answer is 7"), where a number ends an equation or a sentence ("3 + 4 = 7", "the code is 7."), or where a
choice is made ("so C", "C is correct", "I choose (C)"). Questions ("is the answer C?"), suppositions ("if the answer is C") and
denials ("the answer is not C") state nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

MOST_CHARS = 200
"""Of what is stated."""
LONGEST_PHRASE = 60
NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?"

# ------------------------------------------------------------------------------------------------ marks
_NOT = r"(?:not\b|never\b|cannot\b|不)"
_ANSWER = re.compile(
    rf"\banswer\b(?:(?!\b{_NOT}|n['’]t\b)[^.\n:=?]){{0,40}}?(?:\b(?:is|are|was|be)\b\s*:?|=|:)(?!\s*{_NOT})"
    rf"|答案\s*(?:应该是|应为|是|为|:|：)(?!\s*{_NOT})",
    re.IGNORECASE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_BOXED = re.compile(r"\\f?boxed\s*\{")
_IS = re.compile(
    rf"(?:[=≈]|\b(?:is|are|was|were|equals|gives|makes|leaves|get)\b\s*:?|是|为|得|等于)(?!\s*{_NOT})", re.IGNORECASE
)
_CHOSEN = re.compile(
    r"(?:\b(?i:so|thus|therefore|hence),?\s+(?:(?i:it|that)(?i:'s| is| must be)\s+)?"
    r"|\b(?i:choose|pick|select|go with|must be)\s+|选择?\s*)(?i:option\s+|choice\s+)?[*(]*([A-J])[*)]*(?=\s*(?:[.,;!。，]|$))",
    re.MULTILINE,
)
_CALLED_RIGHT = re.compile(
    r"(?<![\w(*])[(*]*([A-J])[)*]*\s+(?i:is|must be|seems)\s+(?i:the\s+)?(?i:correct|right|best|answer)\b"
)
_SUPPOSED = re.compile(
    r"\b(?:if|whether|suppose|supposing|assume|assuming|unless|maybe|perhaps)\b[^.,\n]{0,20}\Z|(?:如果|假设)[^。，\n]{0,10}\Z",
    re.IGNORECASE,
)

# ------------------------------------------------------------------------------------------------ what follows a mark
_GAP = re.compile(r"[\s*_:：]*")
_END = re.compile(r"[.!?](?=[\s*_\"”')\]]|\Z)|[。！？\n]")
_NUMBER_FIRST = re.compile(rf"[\s*$€£(\"“]*({NUMBER})(?![A-Za-z0-9_^/{{(]|[.,]\d)")
_NUMBER_ANYWHERE = re.compile(rf"(?<![A-Za-z0-9_.,^{{/\\])({NUMBER})(?![A-Za-z0-9_^/{{(]|[.,]\d)")
_NOTHING_MORE = re.compile(r"[*$_°%]*(?:\s*[\u4e00-\u9fff]{1,3}|(?:\s+[^\W\d_]+){0,3})[*$_]*\s*(?:\Z|[,;:)\]，；：）])")
"""Behind a number that ends a statement: up to three words of what is counted."""
_LETTER_FIRST = re.compile(
    r"[\s*_$\"“'(\[{]*(?:\\text\{)?(?i:option|choice|letter|选项)?[\s*(\[{\"]*([A-J])"
    r"(?:\Z|[)\]}*_\"”',;:$]|\s+(?:because|since|as|with|which|due|based|by|from)\b)"
)
_FIRST_PART = re.compile(r",\s|;|\s(?:because|since|as|so|but)\s")
_NO_VALUE = re.compile(r"\\[()\[\]!,;]|\\(?:left|right)(?![a-z])")
"""Marks of LaTeX that do not change a value."""


class Statement(NamedTuple):
    """start: where its mark begins. is_answer: the mark is one of answers or choices. words: what is stated, to the end of line
    or sentence; empty where a choice alone is."""

    start: int
    is_answer: bool
    number: str | None
    letter: str | None
    words: str


def statements_in(text: str) -> list[Statement]:
    """All statements of a text, in their order."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$")
    text = _NO_VALUE.sub(" ", text)
    return sorted(_statements(text), key=lambda statement: statement.start)


def _statements(text: str) -> Iterator[Statement]:
    for mark in _ANSWER.finditer(text):
        if words := _words_behind(text, mark):
            number = _NUMBER_ANYWHERE.search(words.rpartition("=")[2])
            yield Statement(mark.start(), True, plain_number(number[1]) if number else None, _letter(words), words)
    for mark in _HASHES.finditer(text):
        words = text[mark.end() : mark.end() + MOST_CHARS].partition("\n")[0].strip()
        yield Statement(mark.start(), True, _number_alone(words), _letter(words), words)
    for mark in _BOXED.finditer(text):
        words = _in_braces(text[mark.end() : mark.end() + MOST_CHARS])
        alone = _number_alone(words.replace("\\text{", " ").replace("}", ""))
        yield Statement(mark.start(), True, alone, _letter(words), words)
    for mark in _IS.finditer(text):
        if words := _words_behind(text, mark):
            yield Statement(mark.start(), False, _number_alone(words), None, words)
    for choice in (_CHOSEN, _CALLED_RIGHT):
        for mark in choice.finditer(text):
            if _words_behind(text, mark) is not None:
                yield Statement(mark.start(), True, None, mark[1], "")


def _words_behind(text: str, mark: re.Match[str]) -> str | None:
    """To the end of the sentence. None: it is a question, or supposed."""
    if _SUPPOSED.search(text[max(mark.start() - 40, 0) : mark.start()]):
        return None
    gap = _GAP.match(text, mark.end())
    start = gap.end() if gap and gap.end() < len(text) else mark.end()
    rest = text[start : start + MOST_CHARS]
    end = _END.search(rest)
    return None if end and end[0] in "?？" else rest[: end.start()] if end else rest


def _in_braces(rest: str) -> str:
    """Up to the brace that closes."""
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:at]
    return ""


def _number_alone(words: str) -> str | None:
    number = _NUMBER_FIRST.match(words)
    return plain_number(number[1]) if number and _NOTHING_MORE.match(words, number.end()) else None


def _letter(words: str) -> str | None:
    letter = _LETTER_FIRST.match(words)
    return letter[1] if letter else None


# ------------------------------------------------------------------------------------------------ right answers
@dataclass(frozen=True)
class Answer:
    """A right answer, its values as `Stated` has them. Of `strings` all must stand in one statement; any, if `any_of`."""

    kind: Literal["number", "letter", "phrase", "strings"]
    values: tuple[str, ...]
    any_of: bool = False

    @property
    def form(self) -> str:
        """Answers of one form are taken for equally plausible: numbers of as many digits, letters, phrases, as many strings."""
        size = len(self.values[0].partition(".")[0]) if self.kind == "number" else len(self.values)
        return f"{self.kind} {size}"


def read_answer(expected: str) -> Answer | None:
    """A right answer as a task has it. None: neither number, choice nor short phrase."""
    text = expected.rpartition("####")[2].strip()
    if boxed := list(_BOXED.finditer(text)):
        text = _in_braces(text[boxed[-1].end() :])
    text = text.strip().strip("$*").strip()
    if (number := plain_number(text)) is not None:
        return Answer("number", (number,))
    if letter := re.fullmatch(r"\(?([A-J])\)?[.:]?", text):
        return Answer("letter", (letter[1],))
    phrase = plain_phrase(text)
    return Answer("phrase", (phrase,)) if phrase and "\n" not in text and len(text) <= LONGEST_PHRASE else None


def read_strings(expected: str, *, any_of: bool) -> Answer | None:
    """Right answers of RULER, one a line: strings that a reply must have, or one of which it must."""
    strings = tuple(line.strip().lower() for line in expected.splitlines() if line.strip())
    if len(strings) == 1 and (number := plain_number(strings[0])) is not None:
        return Answer("number", (number,))
    return Answer("strings", strings, any_of) if strings else None


class Stated:
    """The values of some statements."""

    def __init__(self, statements: Iterable[Statement]) -> None:
        kept = list(statements)
        self.numbers = {statement.number for statement in kept if statement.number is not None}
        self.letters = {statement.letter for statement in kept if statement.letter is not None}
        self.words = {statement.words.lower() for statement in kept if statement.words}

    @functools.cached_property
    def phrases(self) -> set[str]:
        return {plain_phrase(part) for words in self.words for part in (words, _FIRST_PART.split(words)[0])}

    def has(self, answer: Answer) -> bool:
        if answer.kind == "strings":
            enough = any if answer.any_of else all
            return any(enough(value in words for value in answer.values) for words in self.words)
        if answer.kind == "phrase":
            return answer.values[0] in self.phrases
        return answer.values[0] in (self.numbers if answer.kind == "number" else self.letters)


def plain_number(text: str) -> str | None:
    """A number, however it is written: `$1,234.50`, `073`, `18.` -> 1234.5, 73, 18. None: the text is none."""
    whole = re.fullmatch(rf"[\s$€£]*({NUMBER})\s*%?\.?\s*", text.replace("−", "-"))
    if whole is None:
        return None
    digits, _, fraction = whole[1].lstrip("-").replace(",", "").partition(".")
    value = ".".join(filter(None, (digits.lstrip("0") or "0", fraction.rstrip("0"))))
    return f"-{value}" if whole[1].startswith("-") and value != "0" else value


def plain_phrase(text: str) -> str:
    """Without case, spaces, marks of LaTeX that do not change a value, and punctuation at the end."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", _NO_VALUE.sub("", text))
    return re.sub(r"[\s$*]", "", re.sub(r"\\[dt]frac", r"\\frac", text)).lower().rstrip(".,;:!")
