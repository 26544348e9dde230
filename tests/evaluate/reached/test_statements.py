"""What counts as stated, and what does not; how right answers are read."""

from __future__ import annotations

import pytest

from assay_evaluate.reached.statements import Answer, Stated, read_answer, read_strings, statements_in


@pytest.mark.parametrize(
    ("text", "numbers", "letters"),
    [
        ("58 + 30 = 88. 88 - 33 = 55.", {"88", "55"}, set()),
        ("x = 17 + 3 = 20 apples left, so", {"20"}, set()),  # 17 goes on
        ("Tom has 12 apples and 7 friends", set(), set()),  # occurs, and is not stated
        ("The code for the red lamp is 4821.", {"4821"}, set()),
        ("红色的台灯的密码是4821。小明现在有17个。", {"4821"}, set()),
        ("so she is 5 times as old as Tom is", set(), set()),
        ("Is the answer 42?", set(), set()),
        ("The answer is 42?", set(), set()),
        ("If the answer is 42, then", set(), set()),
        ("The answer is not 42.", set(), set()),
        ("The answer can't be 42.", set(), set()),
        ("The final answer is therefore 3 + 4 = 7", {"7"}, set()),
        ("**Answer:**\n\n$1,234.50", {"1234.5"}, set()),
        ("#### 073 apples", {"73"}, set()),
        ("#### Step 2: add 7", set(), set()),
        ("\\boxed{1{,}000} and \\boxed{18\\text{ cm}}", {"1000", "18"}, set()),
        ("= \\frac{1}{2}, = 1/2, = 2x, = 10^5", set(), set()),
        ("3 - 5 = −2.", {"-2"}, set()),
        ("答案是17。", {"17"}, set()),
        ("Option A says this, B says that, C is larger.", set(), set()),
        ("The answer is (B).", set(), {"B"}),
        ("**Answer: C**", set(), {"C"}),
        ("\\boxed{\\text{(D)}}", set(), {"D"}),
        ("C is correct. So B.", set(), {"C", "B"}),
        ("Is C correct? Maybe C is correct?", set(), set()),
        ("I choose option E, and therefore, (E).", set(), {"E"}),
        ("The answer is a number. The answer is A good one. The answer is I think", set(), set()),
        ("所以选A。", set(), {"A"}),
    ],
)
def test_what_is_stated(text: str, numbers: set[str], letters: set[str]) -> None:
    stated = Stated(statements_in(text))
    assert (stated.numbers, stated.letters) == (numbers, letters)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("42", Answer("number", ("42",))),
        ("She has 3 + 4 = 7.\n#### 1,007", Answer("number", ("1007",))),
        ("$18.00", Answer("number", ("18",))),
        ("-0", Answer("number", ("0",))),
        ("(C)", Answer("letter", ("C",))),
        ("So \\boxed{x^2 + \\dfrac{1}{2}}.", Answer("phrase", ("x^2+\\frac{1}{2}",))),
        ("New York", Answer("phrase", ("newyork",))),
        ("def f(x):\n    return x", None),
        ("a sentence that is longer than any phrase that a text may state as its result", None),
        ("", None),
    ],
)
def test_right_answers(expected: str, answer: Answer | None) -> None:
    assert read_answer(expected) == answer


def test_phrases_and_strings() -> None:
    stated = Stated(statements_in("The answer is New York, because of x. f = $x^2+\\frac{1}{2}$. The variables are: ABC, DEF"))
    assert [stated.has(Answer("phrase", (phrase,))) for phrase in ("newyork", "new", "x^2+\\frac{1}{2}", "x^2")] == [
        True, False, True, False,
    ]  # fmt: skip
    every, some = (read_strings("abc\nxyz", any_of=any_of) for any_of in (False, True))
    both = read_strings("ABC\nDEF", any_of=False)
    assert every and some and both
    assert (stated.has(every), stated.has(some), stated.has(both)) == (False, True, True)
    assert read_strings("1234567", any_of=False) == Answer("number", ("1234567",))
    assert read_strings(" ", any_of=False) is None


def test_long_text_is_read_in_a_moment() -> None:
    """A reply of 64K tokens; no pattern backtracks."""
    text = "answer " * 20_000 + "= " * 20_000 + "if the " * 20_000 + "\\boxed{" * 5_000 + "The answer is 7."
    assert "7" in Stated(statements_in(text)).numbers
