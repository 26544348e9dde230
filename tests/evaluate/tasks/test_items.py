"""The generated questions: same seed, same item; whole expected prompts; answers read back from replies."""

from __future__ import annotations

import pytest

from assay_evaluate.tasks.items import ArithmeticStep, Item, arithmetic_item, extract_answer, needle_item, score, writing_item


def test_arithmetic_item_whole() -> None:
    assert arithmetic_item("eval", 0, "en", 4) == Item(
        id="arithmetic/en/4/0",
        kind="arithmetic",
        language="en",
        prompt="Mia has 39 shells. Then Mia sells 19. Then Mia sells 18. Then Mia gives 2 to Anna. Then Mia gets "
        "22 more from Anna. How many shells does Mia have now? Think step by step, "
        "then write the final answer after ####.",
        answer="22",
        facts={
            "steps": (
                ArithmeticStep(39, "-", 19, 20),
                ArithmeticStep(20, "-", 18, 2),
                ArithmeticStep(2, "-", 2, 0),
                ArithmeticStep(0, "+", 22, 22),
            ),
            "name": "Mia",
            "thing": "shells",
        },
    )


def test_arithmetic_item_chinese() -> None:
    assert arithmetic_item("eval", 0, "zh", 4).prompt == (
        "小华有11个硬币。然后小华送给小军7个。然后小华卖了3个。然后小华又捡到27个。然后小华送给小军19个。"
        "小华现在有多少个硬币？请一步一步地想，最后在 #### 后面写出答案。"
    )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_arithmetic_steps_lead_to_the_answer_within_bounds(language: str) -> None:
    for index in range(300):
        item = arithmetic_item("eval", index, language, 3 + index % 3)  # type: ignore[arg-type]
        value = item.facts["steps"][0].before
        for before, sign, amount, after in item.facts["steps"]:
            assert before == value and amount >= 1
            value = before + amount if sign == "+" else before - amount
            assert after == value and 0 <= value <= 99
        assert item.answer == str(value)


def test_other_seed_other_items() -> None:
    assert arithmetic_item("train", 0, "en", 4).prompt != arithmetic_item("eval", 0, "en", 4).prompt
    assert writing_item("eval-1", 3, "zh") == writing_item("eval-1", 3, "zh")
    assert writing_item("eval-1", 3, "zh").prompt.startswith("请写")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_lies_at_its_depth_and_fills_the_length(language: str, depth: float) -> None:
    item = needle_item("eval", 1, language, num_needles=4, depth=depth, max_tokens=900, count_tokens=len)  # type: ignore[arg-type]
    asked = item.facts["needles"][item.facts["asked"]]
    assert 0.9 * 900 <= len(item.prompt) <= 900 and item.facts["num_tokens"] == len(item.prompt)
    assert all(item.prompt.count(needle.sentence) == 1 for needle in item.facts["needles"])
    assert item.prompt.index(asked.sentence) / len(item.prompt) == pytest.approx(0.05 + 0.85 * depth, abs=0.12)
    assert item.answer == asked.code


def test_needles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="5 codes alone need more than 100 tokens"):
        needle_item("eval", 0, "en", num_needles=5, depth=0, max_tokens=100, count_tokens=len)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 7 = 19.\n#### 19", "19"),
        ("#### 3 apples, no: #### 1,204", "1204"),
        ("#### **42**", "42"),
        ("the answer is 19", None),
        ("####", None),
        ("#### none", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_score() -> None:
    item = arithmetic_item("eval", 0, "en", 4)
    assert [score(item, text) for text in ("#### 22", "#### 022", "#### 23", "22", "")] == [True, True, False, False, False]
    assert score(writing_item("eval", 0, "en"), "#### 1") is None
