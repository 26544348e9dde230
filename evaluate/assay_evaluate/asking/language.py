"""Which scripts a text is written in, and whether a reply uses one that neither question nor answer uses."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection

_BLOCKS: tuple[tuple[int, int, str], ...] = (
    (0x0041, 0x024F, "Latin"), (0x0370, 0x03FF, "Greek"), (0x0400, 0x052F, "Cyrillic"), (0x0530, 0x058F, "Armenian"),
    (0x0590, 0x05FF, "Hebrew"), (0x0600, 0x077F, "Arabic"), (0x0900, 0x097F, "Devanagari"), (0x0980, 0x09FF, "Bengali"),
    (0x0B80, 0x0BFF, "Tamil"), (0x0E00, 0x0E7F, "Thai"), (0x10A0, 0x10FF, "Georgian"), (0x1100, 0x11FF, "Hangul"),
    (0x1E00, 0x1EFF, "Latin"), (0x1F00, 0x1FFF, "Greek"), (0x3040, 0x30FF, "Kana"), (0x3130, 0x318F, "Hangul"),
    (0x31F0, 0x31FF, "Kana"), (0x3400, 0x4DBF, "Han"), (0x4E00, 0x9FFF, "Han"), (0xAC00, 0xD7AF, "Hangul"),
    (0xF900, 0xFAFF, "Han"), (0xFB50, 0xFDFF, "Arabic"), (0xFE70, 0xFEFF, "Arabic"), (0xFF21, 0xFF5A, "Latin"),
    (0xFF66, 0xFF9D, "Kana"), (0x20000, 0x3134F, "Han"),
)  # fmt: skip
"""First and last code point of blocks, in order (Unicode 16, Blocks.txt); letters elsewhere count as "Other"."""

_STARTS = tuple(first for first, _, _ in _BLOCKS)

_ASCII = re.compile(r"[\x00-\x7f]+")
_ASCII_WITHOUT_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())

MAX_FOREIGN_SHARE = 0.005
"""Letters of a foreign script that are let pass: above half a percent is the alarm used for garbled serving."""
MAX_FOREIGN_SHARE_IN_FORMULAS = 0.2
"""Formulas, units and names put Latin and Greek letters into any language, so a switch has to be larger to count."""


def count_scripts(text: str) -> Counter[str]:
    """Letters of `text` by script; digits, punctuation and symbols belong to none."""
    scripts: Counter[str] = Counter()
    if num_latin := len(text.encode("ascii", "ignore").translate(None, _ASCII_WITHOUT_LETTERS)):
        scripts["Latin"] = num_latin
    if not text.isascii():
        for letter, count in Counter(_ASCII.sub("", text)).items():
            if letter.isalpha():
                scripts[_script(letter)] += count
    return scripts


def _script(letter: str) -> str:
    code = ord(letter)
    at = bisect_right(_STARTS, code) - 1
    return _BLOCKS[at][2] if at >= 0 and code <= _BLOCKS[at][1] else "Other"


def is_wrong_script(reply: str, *expected: str) -> bool:
    """Whether `reply` has more than a small share of letters in a script that none of the `expected` texts use."""
    return is_foreign(count_scripts(reply), {script for text in expected for script in count_scripts(text)})


def is_foreign(scripts: Counter[str], allowed: Collection[str]) -> bool:
    """The same of letters that are counted already (`count_scripts`) and the scripts that may be used."""
    total = scripts.total()
    return any(
        count > total * (MAX_FOREIGN_SHARE_IN_FORMULAS if script in {"Latin", "Greek"} else MAX_FOREIGN_SHARE)
        for script, count in scripts.items()
        if script not in allowed
    )
