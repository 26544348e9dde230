"""RULER items: each task solved from its prompt alone, by readers that share no code with the generators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.items import SLACK, STYLES, RulerItem, Style, largest_fitting, score
from assay_evaluate.tasks.ruler.tasks import REPLY_TOKENS, TASKS, ruler_item
from assay_evaluate.tasks.ruler.tokens import TokenCounter
from assay_evaluate.tasks.ruler.words import NUM_COMPOUNDS, NUM_KEYS, compound, key, stride

CHECKPOINT = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"
COUNT = TokenCounter(CHECKPOINT)


def make(task: str, length_tokens: int, index: int = 0, style: Style = "chat") -> RulerItem:
    return ruler_item(task, length_tokens, index, seed="eval", style=style, count_tokens=COUNT)


# ------------------------------------------------------------------------------------------------ solvers
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def solve_needles(question: str) -> list[str]:
    asked = question.rsplit("\n", 1)[1]
    names = re.findall(r"[a-z]+-[a-z]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", asked)
    return [value for name in names for _, result, value in NEEDLE.findall(question) if result == name]


def solve_tracking(question: str) -> list[str]:
    text = question.rsplit("Memorize and track", 1)[1]
    value = re.findall(r"assigned the value (\d+) in", text)[0]
    holders = {value}
    for name, given in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)", text):
        holders |= {name} if given in holders else set()
    return sorted(holders - {value})


def solve_common(question: str) -> list[str]:
    last = question.rsplit("Below is a numbered list", 1)[1]
    num_words = int(re.findall(r"What are the (\d+) most common", last)[0])
    return [word for word, _ in Counter(re.findall(r"\d+\. ([a-z]+)", last)).most_common(num_words)]


def solve_frequent(question: str) -> list[str]:
    text = question.split("coded words. ", 1)[1].split("\nQuestion:")[0]
    return [word for word, _ in Counter(text.split(" ")).most_common(4)[1:]]


def solve_question(question: str) -> list[str]:
    if result := re.search(r"Who built the (.+) of (\w+)\?$", question):
        return re.findall(rf"\n{result[2]} is a .*?Its {result[1]} was built by (\w+ \w+) in", question)
    result = re.search(r"In which town was the person born who built the (.+) of (\w+)\?$", question)
    assert result is not None
    builder = re.findall(rf"\n{result[2]} is a .*?Its {result[1]} was built by (\w+ \w+) in", question)[0]
    return re.findall(rf"\n{builder} was a .*? was born in (\w+) in", question)


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys([task for task in TASKS if task.startswith("niah")], solve_needles),
    "vt": solve_tracking,
    "cwe": solve_common,
    "fwe": solve_frequent,
    "qa_1": solve_question,
    "qa_2": solve_question,
}


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_alone_gives_the_answer(task: str) -> None:
    for index in range(4):
        item = make(task, 2048, index)
        solved = SOLVERS[task](item.question)
        assert set(solved) <= set(item.expected) and score(item, f"I think: {', '.join(solved).upper()}.") == 1
        assert item.match == "any" or sorted(solved) == sorted(item.expected)
        assert score(item, "I do not know.") == 0 and score(item, "") == 0
        if item.match == "all":
            assert score(item, item.expected[0]) == pytest.approx(1 / len(item.expected))


@pytest.mark.parametrize(
    ("task", "needles", "expected", "value"),
    [
        ("niah_single_1", 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, r"[0-9a-f]{8}-.{27}"),
        ("niah_multikey_1", 4, 1, r"\d{7}"),
        ("niah_multikey_2", 41, 1, r"\d{7}"),
        ("niah_multikey_3", 18, 1, r"[0-9a-f]{8}-.{27}"),
        ("niah_multivalue", 4, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, r"\d{7}"),
    ],
)
def test_needles_are_as_many_and_of_the_kind_published(task: str, needles: int, expected: int, value: str) -> None:
    item = make(task, 2048)
    result = NEEDLE.findall(item.question)
    assert len(result) == needles and len(item.expected) == expected == len(item.depths)
    assert all(re.fullmatch(value, one) for one in item.expected)
    names = Counter(name for _, name, _ in result)
    assert set(names.values()) == ({4} if task == "niah_multivalue" else {1})
    assert item.comparable == (task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"))


def test_one_chain_of_four_hops_in_order() -> None:
    item = make("vt", 2048)
    chain = re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+) ?\n", item.question.rsplit("Memorize", 1)[1])
    assert [name for name, _ in chain] == list(item.expected) and len(chain) == 5
    assert [given for _, given in chain] == [item.facts["value"], *item.expected[:-1]]
    assert item.depths == tuple(sorted(item.depths))
    example, own = item.question.split("\n\nMemorize")
    assert "5 variables are assigned the value" in example and item.facts["value"] not in example and "grass" in own


def test_common_words_counts_and_worked_example() -> None:
    item = make("cwe", 16384)
    example, own = re.split(r"\n\nBelow is", item.question)
    counts = Counter(Counter(re.findall(r"\d+\. ([a-z]+)", own)).values())
    assert set(counts) == {30, 3} and counts[30] == 10
    assert re.findall(r"\d+\. ", own)[-1] == f"{item.facts['num_words']}. "
    answer = example.rsplit("are:", 1)[1]
    assert len(re.findall(r"\d+\. [a-z]+", answer)) == 10 and not set(item.expected) & set(re.findall("[a-z]+", example))
    assert item.note == "the list is of words composed by assay" and item.depths == ()
    assert "reduced to fit: 10 words 20 times among others 2 times" in (make("cwe", 4096).note or "")


def test_frequent_words_follow_the_zeta_distribution() -> None:
    item = make("fwe", 16384)
    times = Counter(item.question.split("coded words. ", 1)[1].split("\nQuestion:")[0].split(" "))
    most = times.most_common(5)
    assert most[0][0] == "..." and tuple(word for word, _ in most[1:4]) == item.expected
    assert [count for _, count in most] == list(item.facts["times"])
    assert [count / most[0][1] for _, count in most] == pytest.approx([1, 1 / 4, 1 / 9, 1 / 16, 1 / 25], abs=0.002)


# ------------------------------------------------------------------------------------------------ size and place
@pytest.mark.parametrize("style", STYLES)
def test_every_task_fills_its_length_as_transformers_counts(style: Style) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for item in (make(task, length, 0, style) for task in TASKS for length in (1024, 3000)):
        if isinstance(item.prompt, str):
            assert item.prompt.endswith(item.answer_prefix)
            num_tokens = len(tokenizer(item.prompt)["input_ids"])
        else:
            going_on = item.prompt[-1] == {"role": "assistant", "content": item.answer_prefix}
            assert going_on == (style == "prefill")
            text = tokenizer.apply_chat_template(
                item.prompt, tokenize=False, add_generation_prompt=not going_on, continue_final_message=going_on
            )
            num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        room_tokens = item.length_tokens - REPLY_TOKENS[item.task]
        assert num_tokens == item.prompt_tokens and 0.95 * room_tokens <= num_tokens <= room_tokens
        assert item.fill == num_tokens / room_tokens and item.reply_tokens == REPLY_TOKENS[item.task]


def test_measured_depth_is_where_the_tokens_are_and_spreads() -> None:
    depths = []
    for index in range(12):
        item = make("niah_single_2", 4096, index)
        context = item.question.split("\n", 1)[1].rsplit("\n", 1)[0]
        before = context[: context.index("One of the special magic")]
        assert COUNT(before) / COUNT(context) == pytest.approx(item.depths[0], abs=0.03)
        depths.append(item.depths[0])
    assert min(depths) < 0.3 and max(depths) > 0.7


@pytest.mark.parametrize("task", ["niah_multivalue", "niah_multiquery", "qa_2"])
def test_depths_are_of_what_was_asked(task: str) -> None:
    item = make(task, 4096)
    assert len(item.depths) == {"qa_2": 2}.get(task, 4) and all(0 <= depth <= 1 for depth in item.depths)
    if task == "niah_multiquery":
        places = [item.question.index(f"is: {value}.") / len(item.question) for value in item.expected]
        assert item.depths == pytest.approx(places, abs=0.06)


@pytest.mark.slow
def test_a_million_tokens() -> None:
    item = make("niah_single_2", 1_048_576)
    assert 0.99 < item.fill <= 1 and item.prompt_tokens == COUNT(item.prompt)
    assert solve_needles(item.question) == list(item.expected)
    sentences = Counter(item.question.split(". "))
    assert len(sentences) > 15_000 and sentences.most_common(1)[0][1] <= 3


def test_128k_tokens() -> None:
    item = make("cwe", 131_072)
    assert 0.99 < item.fill <= 1 and sorted(solve_common(item.question)) == sorted(item.expected)
    assert item.facts["common_times"] == 30


@pytest.mark.parametrize("seed", range(30))
def test_largest_fitting_against_trying_all(seed: int) -> None:
    import random

    draw = random.Random(seed)
    counts = [draw.randrange(50)]
    for _ in range(draw.choice([1, 5, 400, 3000])):
        counts.append(counts[-1] + draw.randint(1, 1 + seed))
    room, last = draw.randrange(60, 3 * counts[-1] // 2 + 61), len(counts) - 1
    best = max(units for units, tokens in enumerate(counts) if tokens <= room)
    calls: list[int] = []
    result = largest_fitting(lambda units: calls.append(units) or counts[units], room, 0, last)  # type: ignore[func-returns-value]
    assert result is not None and result.num_tokens == counts[result.units] <= room and len(calls) <= 20
    assert result.units == best or counts[best] - result.num_tokens <= SLACK * room
    assert largest_fitting(lambda units: counts[units], counts[0] - 1, 0, last) is None


# ------------------------------------------------------------------------------------------------ always the same
@pytest.mark.slow
def test_same_items_in_any_company_and_in_another_process() -> None:
    items = [make(task, length, index) for task in TASKS for length in (1024, 2048) for index in range(2)]
    all_of_them = {item.id: item.sha256 for item in items}
    assert len(set(all_of_them.values())) == len(all_of_them) == 52
    for index in (1, 0):
        for task in reversed(TASKS):
            assert make(task, 2048, index).sha256 == all_of_them[f"{task}/2048/{index}"]
    program = (
        "import json, sys\nfrom pathlib import Path\nfrom assay_evaluate.tasks.ruler.tasks import ruler_item\n"
        "from assay_evaluate.tasks.ruler.tokens import TokenCounter\n"
        "count = TokenCounter(Path(sys.argv[1]))\n"
        "items = [ruler_item(task, 1024, index, seed='eval', style='chat', count_tokens=count)\n"
        "         for task in ['qa_2', 'cwe', 'niah_multikey_3'] for index in range(2)]\n"
        "print(json.dumps({item.id: item.sha256 for item in items}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", program, str(CHECKPOINT)], env=environment, capture_output=True, text=True, check=True
    )
    elsewhere = json.loads(run.stdout)
    assert len(elsewhere) == 6 and elsewhere.items() <= all_of_them.items()


def test_the_style_changes_only_the_filler() -> None:
    items = {style: make("niah_multiquery", 2048, 3, style) for style in STYLES}
    assert len({item.sha256 for item in items.values()}) == 3
    assert len({(item.expected, item.answer_prefix, tuple(item.facts["keys"])) for item in items.values()}) == 1
    other = ruler_item("niah_multiquery", 2048, 3, seed="eval-1", style="chat", count_tokens=COUNT)
    assert other.expected != items["chat"].expected


def test_words_do_not_repeat() -> None:
    assert len({key(i) for i in range(NUM_KEYS)}) == NUM_KEYS > 120_000
    assert len({compound(i) for i in range(NUM_COMPOUNDS)}) == NUM_COMPOUNDS > 180_000
    step = stride(NUM_KEYS, 1000)
    assert step >= 1000 and len({i * step % NUM_KEYS for i in range(NUM_KEYS)}) == NUM_KEYS


# ------------------------------------------------------------------------------------------------ refusals
def test_refused() -> None:
    with pytest.raises(RulerError, match="task 'niah': unknown to RULER; there are niah_single_1, "):
        make("niah", 4096)
    with pytest.raises(
        RulerError, match=r"^vt at 500 tokens \(item 0, style chat\): what must be in it needs more than the 470 "
    ):
        make("vt", 500)

    def lumps(prompt: object) -> int:  # a tokenizer to which nothing is between 800 and 1600 tokens
        assert isinstance(prompt, str)
        return 800 if len(prompt) < 3000 else 1600

    with pytest.raises(
        RulerError,
        match=r"^niah_single_1 at 1600 tokens \(item 2, style base\): 800 of 1472 tokens, 54.3% full, and at least 95% ",
    ):
        ruler_item("niah_single_1", 1600, 2, seed="eval", style="base", count_tokens=lumps)
