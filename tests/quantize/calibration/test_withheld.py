"""Items of an evaluation are found in texts: verbatim, reworded in form, in part; and what only looks like one is not."""

from __future__ import annotations

import random

import pytest

from assay_evaluate.tasks.items import arithmetic_item
from assay_quantize.calibration.withheld import LEAST_WORDS, RUN_WORDS, Withheld, hashes_of, runs_of, words_of

ITEM = (
    "A rectangle has a perimeter of 48 metres and its longer side is three times as long as its shorter side. What is the "
    "area of the rectangle in square metres? Write only the number."
)
ZH = "一个长方形的周长是四十八米，长边是短边的三倍。这个长方形的面积是多少平方米？请只写出数字。"
WORDS = [f"word{n}" for n in range(5000)]


def sentences(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return ". ".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(count))


def against(*items: str) -> Withheld:
    withheld = Withheld()
    withheld.add("full", "math500", items)
    return withheld


def test_words_are_letters_and_digits_without_case_and_characters_where_no_spaces_are_written() -> None:
    assert words_of("Ｔhe “Area”: 3,5 m²_x") == ["the", "area", "3", "5", "m2", "x"]
    assert words_of("面积 is 5。ราคา") == ["面", "积", "is", "5", *"ราคา"]
    assert words_of(" \n--- ") == []


def test_runs_are_the_same_wherever_they_stand() -> None:
    words = hashes_of(words_of(ITEM))
    inside = hashes_of(words_of(f"{sentences(0, 3)} {ITEM} {sentences(1, 3)}"))
    assert set(runs_of(words, RUN_WORDS).tolist()) < set(runs_of(inside, RUN_WORDS).tolist())
    assert len(runs_of(words, len(words))) == 1 and len(runs_of(words, len(words) + 1)) == 0


@pytest.mark.parametrize(
    "text",
    [
        ITEM,
        ITEM.upper().replace(" ", "\n"),
        f"{sentences(2, 200)} {ITEM} {sentences(3, 200)}",
        ITEM.removesuffix(" Write only the number."),
        f"Problem: {ITEM} Solution: 108",
        ZH,
        f"题目：{ZH.replace('，', ' ').replace('。', ' ')}",
    ],
)
def test_an_item_is_found(text: str) -> None:
    withheld = against(ITEM, ZH)
    assert withheld.find([sentences(9, 2), text]) == "full/math500"
    assert withheld.record()[0].dropped == 1


@pytest.mark.parametrize(
    "text",
    [
        sentences(4, 500),
        "A rectangle has a perimeter of 48 metres and a diagonal of 17 metres, and nobody asks for more than that.",
        "What is the area of the rectangle in square metres? Write only the number.",
        "",
        "长方形的面积是多少平方米？",
    ],
)
def test_other_texts_are_not(text: str) -> None:
    assert against(ITEM, ZH).find([text]) is None


def test_short_items_are_found_as_whole_messages_only() -> None:
    short = "What is 17 times 23?"
    assert len(words_of(short)) < LEAST_WORDS
    withheld = against(short)
    assert withheld.find([f"Somebody asked: {short} Nobody knew."]) is None
    assert withheld.find(["what is 17 times 23"]) == "full/math500"


def test_what_all_items_of_a_task_say_is_no_evidence() -> None:
    """A template as long as the questions: one run of 13 words in common would refuse every text of this form."""
    items = [arithmetic_item("eval-quick-1", n, "en", 3).prompt for n in range(100)]
    others = [arithmetic_item("train-1", n, "en", 3).prompt for n in range(200)]
    withheld = against(*items)
    one_run = {run for item in items for run in runs_of(hashes_of(words_of(item)), RUN_WORDS).tolist()}
    assert all(set(runs_of(hashes_of(words_of(other)), RUN_WORDS).tolist()) & one_run for other in others)
    assert [withheld.find([other]) for other in others] == [None] * 200
    assert all(withheld.find([f"Read this. {item}"]) for item in items)


def test_what_is_not_known_is_in_the_record() -> None:
    withheld = against(ITEM)
    withheld.leave_out("full", "gpqa-diamond", "its data set is not on this machine")
    assert withheld.find([ITEM]) == "full/math500"
    known, unknown = withheld.record()
    assert (known.num_items, known.dropped, known.why) == (1, 1, None)
    assert (unknown.task, unknown.num_items, unknown.why) == ("gpqa-diamond", None, "its data set is not on this machine")


def test_an_item_in_one_of_many_is_found_through_its_sketch() -> None:
    """Long items are known by 32 of their runs."""
    items = [sentences(seed, 100) for seed in range(300)]
    withheld = against(*items)
    assert all(withheld.find([f"{sentences(1000 + n, 3)}. {item}"]) for n, item in enumerate(items))
    half = [" ".join(item.split()[: len(item.split()) // 4]) for item in items]
    assert sum(withheld.find([text]) is not None for text in half) <= 10, "a quarter of an item is not the item"
