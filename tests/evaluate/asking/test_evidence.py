"""What replies carry, as it is gathered: marks of one reply, and a task's names, prompts and texts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from assay.records.measurement import Truncation
from assay.records.served.evidence import PromptCount, ServedEvidence, TextCounts
from assay_evaluate.asking.evidence import ReferenceComparison, ServedTally, key_of, marks_of
from assay_evaluate.client.journal import Identity, Journal, Reply, Request

SENTENCE = "The ferry leaves at seven, and the harbour is empty by then. "


def reply(text: str = SENTENCE, **more: Any) -> Reply:
    return Reply("answered", text=text, **{"prompt_tokens": 40, "finish_reason": "stop", **more})


def request(number: int, words: int = 1) -> Request:
    return Request("task", f"i{number}", 0, "/v1/chat/completions", {"messages": [{"content": "word " * words}], "i": number})


def gathered(*replies: Reply, **counters: Any) -> ServedEvidence:
    tally = ServedTally()
    for number, one in enumerate(replies):
        tally.note(request(number), one)
    return tally.evidence(
        **{"temperature": 0.0, "asked_model": "m", "count_prompt": None, "count_text": None, **counters}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "cut_by", "expected", "marks"),
    [
        (reply("Yes.", reasoning="So it is"), None, "Yes", (4, 8, False, False)),
        (reply("It is 42"), None, "42", (8, 0, True, False)),
        (reply("", reasoning="so the code is 42."), "empty", "42", (0, 18, False, True)),
        (reply("", reasoning="so the code is 427."), "empty", "42", (0, 19, False, False)),
        (reply("", reasoning="I still think of 42 and"), "budget", "42", (0, 23, True, False)),
        (reply("", reasoning="the answer is B"), "reasoning_only", "", (0, 15, True, True)),
        (reply("", reasoning="42", tool_calls=({"id": "1"},), has_tool_calls=True), None, "42", (0, 2, True, False)),
        (reply("答案是四十二。"), None, "", (7, 0, False, False)),
    ],
)
def test_marks_of_one_reply(one: Reply, cut_by: Truncation | None, expected: str, marks: tuple[int, int, bool, bool]) -> None:
    found = marks_of(one, cut_by, expected)
    assert (found["text_chars"], found["reasoning_chars"], found["ends_open"], found["answer_in_reasoning"]) == marks
    assert found["reply_key"] is None
    assert marks_of(Reply("failed"), None, "x") == {}


def test_calls_say_the_same_whatever_their_ids() -> None:
    first, again, other = (
        marks_of(reply("", tool_calls=({"id": name, "function": {"name": tool}},)), None, "")["text_key"]
        for name, tool in (("a", "look"), ("b", "look"), ("a", "send"))
    )
    assert first == again != other
    assert 0 <= key_of("x") < 2**48


def test_replies_from_a_cache_are_counted() -> None:
    by = "cf-aig-cache-status: HIT"
    found = gathered(reply(), reply(cache_header=by), reply(cache_header="x-cache: HIT"), Reply("failed", cache_header=by))
    assert (found.num_from_cache, found.cache_header) == (2, by)


def test_names_ids_and_problems_are_counted() -> None:
    found = gathered(
        reply(model="m", reply_id="chatcmpl-0f3a8c1d2b4e5f60", system_fingerprint="fp", stop_reason="Question:"),
        reply(model="m", reply_id="chatcmpl-17", stop_reason="end_turn", usage_problem="a > b"),
        reply(model="x", stop_reason=151336, usage_problem="c > d"),
        reply(model="m", finish_reason="repetition", stop_reason="repetition_detected"),  # vLLM's own word, no stop string
        reply("Yes.", model="m", stop_reason="<|im_end|>"),
        Reply("failed", model="y"),
    )
    assert found == ServedEvidence(
        num_replies=5, temperature=0, asked_model="m", models={"m": 4, "x": 1}, system_fingerprints={"fp": 1},
        num_unguessable_ids=1, stop_strings={"Question:": 1}, num_usage_problems=2, usage_problem="a > b",
    )  # fmt: skip


def test_names_without_end_are_counted_together() -> None:
    found = gathered(*(reply(model=f"m{number}") for number in range(50)))
    assert len(found.models) == 9 and found.models["others"] == 42


def test_a_text_that_many_questions_get_is_kept_as_it_begins() -> None:
    page = "Down for maintenance.\nPlease come back later, at noon or in the evening of this very day."
    found = gathered(*[reply(page)] * 5, *[reply("No.")] * 9, *(reply(f"{number} {SENTENCE}") for number in range(9)))
    assert list(found.common_texts.values()) == ["Down for maintenance. Please come back later, at noon or in …"]


def test_the_shortest_and_longest_prompts_are_counted() -> None:
    tally = ServedTally()
    for number in (5, 1, 3, 8, 2, 7, 6, 4):
        tally.note(request(number, words=10 * number), reply(prompt_tokens=10 * number))
    found = tally.evidence(
        temperature=0, asked_model="m", count_prompt=lambda body: None if body["i"] == 2 else 10 * body["i"], count_text=None
    )  # fmt: skip
    assert set(found.prompt_counts) == {
        PromptCount(item=f"i{number}", billed=10 * number, counted=10 * number) for number in (1, 3, 6, 7, 8)
    }
    assert [one.item for one in tally.prompts.shortest] == [f"i{number}" for number in range(1, 9)]


def test_many_short_questions_are_kept_and_few_long_ones() -> None:
    def kept(words: int) -> int:
        tally = ServedTally()
        for number in range(300):
            tally.note(request(number, words=words), reply(prompt_tokens=words))
        return len(tally.prompts.shortest)

    assert (kept(10), kept(20_000)) == (256, 24)


def test_the_shortest_of_long_questions_are_kept_whatever_came_first() -> None:
    tally = ServedTally()
    for number in range(100, 0, -1):
        tally.note(request(number, words=20_000 + number), reply(prompt_tokens=1))
    assert [question.item for question in tally.prompts.shortest] == [f"i{number}" for number in range(1, 25)]


def test_texts_that_lack_billed_tokens_are_counted_among_the_thinnest() -> None:
    """A word is a token: of thirty replies two have lost their last third, and one is of long words by itself."""
    words = [" ".join(f"{number}w{place}" for place in range(60)) for number in range(30)]
    whole = [reply(text, output_tokens=62) for text in words[:27]]
    long_words = reply(" ".join("a" for _ in range(60)), output_tokens=62)
    lost = [reply(text[: 2 * len(text) // 3], output_tokens=62) for text in words[27:29]]
    found = gathered(*whole, long_words, *lost, count_text=lambda text: len(text.split()))
    assert found.texts is not None and found.texts.shortest is not None
    assert found.texts == TextCounts(
        typical_share=0.9677, num_typical=6, num_suspects=2, num_counted=2, num_short=2, shortest=found.texts.shortest
    )  # fmt: skip  # what repeats itself is the model's
    assert (found.texts.shortest.billed, 38 <= found.texts.shortest.counted <= 42) == (62, True)


def test_an_empty_text_lacks_all_of_it_and_a_short_one_nothing() -> None:
    whole = [reply(" ".join(f"{number}w{place}" for place in range(60)), output_tokens=61) for number in range(12)]
    found = gathered(
        *whole, reply("", output_tokens=61), reply("Yes.", output_tokens=2), count_text=lambda text: len(text.split())
    )
    assert found.texts is not None and found.texts.num_short == 1
    assert found.texts.shortest == PromptCount(item="i12", billed=61, counted=0)


@pytest.mark.parametrize(
    ("whole", "text", "is_cut"),
    [
        ("None", "No", False),  # another token, so another word: labels and names begin alike
        ("Answer: Smithson", "Answer: Smith", False),
        ("Paris", "", True),
        ("Answer: New York", "Answer: Ne", True),
        ("答案是四十二，因为每个人都有两本书和一支铅笔。", "答案是四十二，", True),
    ],
)
def test_a_word_that_begins_as_the_references_is_not_cut(tmp_path: Path, whole: str, text: str, is_cut: bool) -> None:
    reference, asked = Identity("a", "b", "c"), request(0)
    with Journal(tmp_path / "journal.db") as journal:
        key = asked.key(reference)
        journal.write_requests([(key, asked)], reference)
        journal.write_replies([(key, reply(whole, output_tokens=4), 1)])
        comparison = ReferenceComparison(journal, reference)
        comparison.note(asked, reply(text, output_tokens=4))
        assert tuple(comparison.counted().values()) == (1, is_cut, 0)


@pytest.mark.parametrize(
    ("text", "tokens", "thinking", "cut"),
    [
        ("So it is #### 42", 9, "hm", (1, 0, 0)),
        ("So it is ##", 9, "hm", (1, 1, 0)),
        ("So it is ##", 8, "hm", (1, 0, 0)),  # fewer tokens: it ended there
        ("So it is ##", 9, "well", (1, 0, 0)),
        ("So it is #### 4", 9, "hm", (1, 0, 0)),  # a digit may be the weights'
        ("So it is #### 42, I think", 9, "hm", (1, 0, 1)),
    ],
)
def test_a_text_that_ends_before_the_references(
    tmp_path: Path, text: str, tokens: int, thinking: str, cut: tuple[int, int, int]
) -> None:  # fmt: skip
    reference, asked = Identity("a", "b", "c"), request(0)
    with Journal(tmp_path / "journal.db") as journal:
        key = asked.key(reference)
        journal.write_requests([(key, asked)], reference)
        whole = reply("So it is #### 42", output_tokens=9, reasoning="hm")
        journal.write_replies([(key, whole, 1)])
        comparison = ReferenceComparison(journal, reference)
        comparison.note(dataclasses.replace(asked, sample=1), reply(text, output_tokens=tokens, reasoning=thinking))
        comparison.note(request(1), reply(text, output_tokens=tokens, reasoning=thinking))  # it was not asked that
        assert tuple(comparison.counted().values()) == cut


def test_other_scripts_are_compared_among_themselves() -> None:
    latin = [reply(" ".join(f"word{number}x{place}" for place in range(40)), output_tokens=41) for number in range(10)]
    chinese = [
        reply("".join(chr(0x4E00 + 50 * number + place) for place in range(40)), output_tokens=41) for number in range(10)
    ]
    found = gathered(*latin, *chinese, count_text=lambda text: 40)
    assert found.texts is not None and (found.texts.num_suspects, found.texts.num_short) == (0, 0)
