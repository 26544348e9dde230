"""Six small repositories with eight bugs: contents, history, issue, gold patch and tests, as plain text.

Each bug is real in the sense that counts here: tests fail at the base commit, pass with the gold patch, and a plausible wrong
fix keeps failing. Repositories are clusters; two of them have two instances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Files = dict[str, str]


@dataclass(frozen=True)
class Bug:
    """One instance. `fix` and `tests` replace whole files; `wrong` is a fix that looks right and is not."""

    number: int
    issue: str
    fix: Files
    tests: Files
    wrong: Files


@dataclass(frozen=True)
class Repository:
    """`first`: the files of the first commit; `later`: (message, files) of the commits up to the base of its bugs."""

    name: str
    first: Files
    later: tuple[tuple[str, Files], ...]
    bugs: tuple[Bug, ...] = field(default=())


WRAP = '''"""Wrap text to a width."""


def wrap(text, width):
    """Lines of at most `width` characters; words are never split, longer ones stand alone."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) >= width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return lines
'''
WRAP_LAST = WRAP.replace("    return lines\n", "    if line:\n        lines.append(line)\n    return lines\n")
WRAP_EDGE = WRAP.replace("1 + len(word) >= width", "1 + len(word) > width")
WRAP_TEST = """from wordwrap import wrap


def test_an_empty_text_has_no_lines():
    assert wrap("   ", 10) == []
"""

RANGES = '''"""Sets of whole numbers as sorted ranges [first, last]."""


def merge(ranges):
    """Overlapping ranges become one."""
    merged = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged
'''
RANGES_INSIDE = RANGES.replace("(merged[-1][0], last)", "(merged[-1][0], max(last, merged[-1][1]))")
RANGES_TOUCH = RANGES.replace("first <= merged[-1][1]:", "first <= merged[-1][1] + 1:")
RANGES_TEST = """from ranges import merge


def test_ranges_apart_stay_apart():
    assert merge([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]


def test_overlapping_ranges_become_one():
    assert merge([(1, 4), (3, 6)]) == [(1, 6)]
"""

ROMAN = '''"""Roman numerals."""

LETTERS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]


def to_roman(number):
    """1 <= number < 4000."""
    text = ""
    for value, letter in LETTERS:
        while number >= value:
            text += letter
            number -= value
    return text
'''
ROMAN_FIX = ROMAN.replace(
    '[(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]',
    '[\n    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),\n'
    '    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),\n]',
)
ROMAN_WRONG = ROMAN.replace('(5, "V"), (1, "I")]', '(9, "IX"), (5, "V"), (4, "IV"), (1, "I")]')
ROMAN_TEST = """from roman import to_roman


def test_letters_add_up():
    assert to_roman(1666) == "MDCLXVI"
"""

CSVLINE = '''"""One line of a CSV file."""


def split_line(line):
    """Fields of a line; quotes around a field are taken off."""
    return [field.strip('"') for field in line.rstrip("\\n").split(",")]
'''
CSVLINE_FIX = '''"""One line of a CSV file."""


def split_line(line):
    """Fields of a line; quotes around a field are taken off, commas inside them stay, doubled quotes are one."""
    fields, field, quoted, rest = [], "", False, list(line.rstrip("\\n"))
    while rest:
        letter = rest.pop(0)
        if letter == '"' and quoted and rest and rest[0] == '"':
            field += rest.pop(0)
        elif letter == '"':
            quoted = not quoted
        elif letter == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += letter
    return [*fields, field]
'''
CSVLINE_WRONG = CSVLINE.replace('split(",")', 'split(", ")')
CSVLINE_TEST = """from csvline import split_line


def test_plain_fields():
    assert split_line("a,b,c\\n") == ["a", "b", "c"]


def test_quotes_are_taken_off():
    assert split_line('"a",b') == ["a", "b"]
"""

LRU = '''"""A cache that forgets what was used least recently."""


class Cache:
    def __init__(self, size):
        self.size = size
        self.items = {}

    def put(self, key, value):
        self.items.pop(key, None)
        self.items[key] = value
        if len(self.items) > self.size:
            self.items.pop(next(iter(self.items)))

    def get(self, key):
        return self.items[key]
'''
LRU_FIX = LRU.replace(
    "        return self.items[key]\n", "        self.items[key] = self.items.pop(key)\n        return self.items[key]\n"
)
LRU_WRONG = LRU.replace("        return self.items[key]\n", "        return self.items.get(key)\n")
LRU_TEST = """import pytest
from lru import Cache


def test_the_oldest_is_forgotten():
    cache = Cache(2)
    for key in "abc":
        cache.put(key, key.upper())
    assert cache.get("c") == "C"
    with pytest.raises(KeyError):
        cache.get("a")
"""

SLUG = '''"""Titles as parts of addresses."""


def slug(title):
    """Lower-case words joined by hyphens."""
    return "-".join(title.lower().split(" "))
'''
SLUG_FIX = '''"""Titles as parts of addresses."""

import re


def slug(title):
    """Lower-case words joined by hyphens; whatever is neither a letter nor a digit separates words."""
    return "-".join(re.findall(r"\\w+", title.lower()))
'''
SLUG_WRONG = SLUG.replace('title.lower().split(" ")', "title.lower().split()")
SLUG_TEST = """from slug import slug


def test_words_are_joined():
    assert slug("Tiny Repositories") == "tiny-repositories"
"""


def _readme(name: str, text: str) -> Files:
    return {"README.md": f"# {name}\n\n{text}\n"}


REPOSITORIES = (
    Repository(
        "wordwrap",
        {**_readme("wordwrap", "Wraps text."), "wordwrap.py": WRAP.split("\n\n\n")[0] + "\n"},
        (("Wrap words", {"wordwrap.py": WRAP}), ("Test the empty text", {"tests/test_wordwrap.py": WRAP_TEST})),
        (
            Bug(
                3,
                "`wrap` loses the last line.\n\n`wrap(\"one two\", 20)` gives `[]`, expected `['one two']`.",
                {"wordwrap.py": WRAP_LAST},
                {
                    "tests/test_wordwrap.py": WRAP_TEST
                    + """

def test_the_last_line_is_kept():
    assert wrap("one two", 20) == ["one two"]
    assert wrap("one two three", 8)[-1] == "three"
"""
                },
                {"wordwrap.py": WRAP.replace("    return lines\n", "    return lines or [line]\n")},
            ),
            Bug(
                5,
                'Lines are broken one character too early.\n\nEvery line should use the whole width: with `wrap("ab cd ef'
                '", 5)` the first line should be `ab cd`, which has exactly 5 characters.',
                {"wordwrap.py": WRAP_EDGE},
                {
                    "tests/test_wordwrap.py": WRAP_TEST
                    + """

def test_a_line_may_fill_the_width():
    assert wrap("ab cd ef", 5)[0] == "ab cd"
    assert wrap("abc cd ef", 5)[0] == "abc"
"""
                },
                {"wordwrap.py": WRAP.replace("1 + len(word) >= width", "len(word) > width")},
            ),
        ),
    ),
    Repository(
        "ranges",
        {**_readme("ranges", "Merges ranges."), "ranges.py": RANGES.split("\n\n\n")[0] + "\n"},
        (("Merge ranges", {"ranges.py": RANGES}), ("Test merging", {"tests/test_ranges.py": RANGES_TEST})),
        (
            Bug(
                7,
                "A range inside another one shortens it.\n\n`merge([(1, 9), (2, 3)])` gives `[(1, 3)]`, expected `[(1, 9)]`.",
                {"ranges.py": RANGES_INSIDE},
                {
                    "tests/test_ranges.py": RANGES_TEST
                    + """

def test_a_range_inside_another_changes_nothing():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]
"""
                },
                {"ranges.py": RANGES.replace("(merged[-1][0], last)", "(merged[-1][0], merged[-1][1])")},
            ),
            Bug(
                9,
                "Ranges that touch should be merged.\n\nThese are whole numbers, so `merge([(1, 2), (3, 4)])` should be "
                "`[(1, 4)]`.",
                {"ranges.py": RANGES_TOUCH},
                {
                    "tests/test_ranges.py": RANGES_TEST
                    + """

def test_ranges_that_touch_become_one():
    assert merge([(1, 2), (3, 4)]) == [(1, 4)]
    assert merge([(1, 2), (4, 5)]) == [(1, 2), (4, 5)]
"""
                },
                {"ranges.py": RANGES.replace("first <= merged[-1][1]:", "first <= merged[-1][1] + 2:")},
            ),
        ),
    ),
    Repository(
        "roman",
        {**_readme("roman", "Writes Roman numerals."), "roman.py": '"""Roman numerals."""\n'},
        (("Write numerals", {"roman.py": ROMAN, "tests/test_roman.py": ROMAN_TEST}),),
        (
            Bug(
                2,
                "4 is written IIII.\n\nSubtractive forms are missing: 4 should be IV, 9 IX, 40 XL, 90 XC, 400 CD, 900 CM.",
                {"roman.py": ROMAN_FIX},
                {
                    "tests/test_roman.py": ROMAN_TEST
                    + """

def test_subtractive_forms():
    assert [to_roman(n) for n in (4, 9, 40, 90, 400, 900)] == ["IV", "IX", "XL", "XC", "CD", "CM"]
"""
                },
                {"roman.py": ROMAN_WRONG},
            ),
        ),
    ),
    Repository(
        "csvline",
        {**_readme("csvline", "Splits lines."), "csvline.py": '"""One line of a CSV file."""\n'},
        (("Split lines", {"csvline.py": CSVLINE}), ("Test it", {"tests/test_csvline.py": CSVLINE_TEST})),
        (
            Bug(
                4,
                "A comma inside quotes splits the field.\n\n`split_line('\"a,b\",c')` has two fields, `a,b` and `c`; a doubled "
                "quote inside a quoted field stands for one.",
                {"csvline.py": CSVLINE_FIX},
                {
                    "tests/test_csvline.py": CSVLINE_TEST
                    + '''

def test_a_comma_inside_quotes_stays():
    assert split_line('"a,b",c') == ["a,b", "c"]


def test_a_doubled_quote_is_one():
    assert split_line('"say ""hi""",x') == ['say "hi"', "x"]
'''
                },
                {"csvline.py": CSVLINE_WRONG},
            ),
        ),
    ),
    Repository(
        "lru",
        {**_readme("lru", "A cache."), "lru.py": '"""A cache that forgets what was used least recently."""\n'},
        (("Add the cache", {"lru.py": LRU}), ("Test forgetting", {"tests/test_lru.py": LRU_TEST})),
        (
            Bug(
                6,
                "Reading does not count as use.\n\nPut a and b, read a, put c into a cache of size 2: `a` is "
                "gone; `b` should be.",
                {"lru.py": LRU_FIX},
                {
                    "tests/test_lru.py": LRU_TEST
                    + """

def test_reading_is_using():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert cache.get("a") == 1
    with pytest.raises(KeyError):
        cache.get("b")
"""
                },
                {"lru.py": LRU_WRONG},
            ),
        ),
    ),
    Repository(
        "slug",
        {**_readme("slug", "Titles for addresses."), "slug.py": '"""Titles as parts of addresses."""\n'},
        (("Make slugs", {"slug.py": SLUG, "tests/test_slug.py": SLUG_TEST}),),
        (
            Bug(
                8,
                'Punctuation ends up in slugs.\n\n`slug("What\'s new?  Everything!")` should be `what-s-new-everything`.',
                {"slug.py": SLUG_FIX},
                {
                    "tests/test_slug.py": SLUG_TEST
                    + """

def test_punctuation_separates_words():
    assert slug("What's new?  Everything!") == "what-s-new-everything"
"""
                },
                {"slug.py": SLUG_WRONG},
            ),
        ),
    ),
)
