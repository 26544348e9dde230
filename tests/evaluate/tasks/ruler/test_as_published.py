"""Items on texts in the formats of RULER's sources: whole prompts, laid out as RULER's scripts lay them out.

By hand from NVIDIA/RULER at c3f5e3b (`niah.py`, `variable_tracking.py`, `qa.py`, `constants.py`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from published_texts import FILES

from assay_evaluate.tasks.ruler.haystacks import TextFolder, read_text_folder
from assay_evaluate.tasks.ruler.items import RulerItem
from assay_evaluate.tasks.ruler.niah import DEPTHS
from assay_evaluate.tasks.ruler.qa import NUM_PUBLISHED, QaQuestion, QaSource, read_hotpotqa, read_squad
from assay_evaluate.tasks.ruler.tasks import Sources, ruler_item
from assay_evaluate.tasks.ruler.tokens import Prompt

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for source, files in FILES.items():
        (tmp_path / source).mkdir()
        for name, content in files.items():
            (tmp_path / source / name).write_bytes(content)
    return Sources(
        essays=read_text_folder(tmp_path / "essays"),
        squad=read_squad(tmp_path / "squad" / "dev-v2.0.json"),
        hotpotqa=read_hotpotqa(tmp_path / "hotpotqa" / "hotpot_dev_distractor_v1.json"),
    )


def words(prompt: Prompt) -> int:
    return len((prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)).split())


def make(task: str, length_tokens: int, sources: Sources | None = None, index: int = 0) -> RulerItem:
    return ruler_item(
        task, length_tokens, index, seed="eval", style="base", count_tokens=words, sources=sources, reply_tokens=10
    )


# ------------------------------------------------------------------------------------------------ whole prompts
def test_a_needle_in_noise() -> None:
    item = make("niah_single_1", 110)
    assert item.prompt == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "number afterwards.\n"
        "One of the special magic numbers for autumn-rail is: 8296468.\n"
        f"{NOISE}\n{NOISE}\n"
        "What is the special magic number for autumn-rail mentioned in the provided text? The special magic number for "
        "autumn-rail mentioned in the provided text is"
    )
    assert item.comparable


def test_a_needle_in_essays_that_are_cut_by_word_and_begin_again(sources: Sources) -> None:
    assert make("niah_single_2", 92, sources).prompt == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "number afterwards.\n"
        "One of the special magic numbers for eager-flock is: 5432965. The harbour was quiet at dawn. Boats came in with the "
        "tide. Nobody spoke of it. The harbour was quiet at dawn. Boats came\n"
        "What is the special magic number for eager-flock mentioned in the provided text? The special magic number for "
        "eager-flock mentioned in the provided text is"
    )


def test_needles_in_essays(sources: Sources) -> None:
    item = make("niah_multivalue", 130, sources)
    assert item.prompt == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "numbers afterwards.\n"
        "One of the special magic numbers for solid-tailor is: 2682343. The harbour was quiet at dawn. Boats came in with the "
        "tide. One of the special magic numbers for solid-tailor is: 3330624. One of the special magic numbers for "
        "solid-tailor is: 4219022. Nobody spoke of it. The harbour was quiet at dawn. Boats came in with the tide. One of the "
        "special magic numbers for solid-tailor is: 4704677. Nobody spoke of\n"
        "What are all the special magic numbers for solid-tailor mentioned in the provided text? The special magic numbers for "
        "solid-tailor mentioned in the provided text are"
    )
    assert (item.comparable, item.expected) == (True, ("4704677", "2682343", "3330624", "4219022"))


def test_a_chain_of_variables() -> None:
    """16 lines in the worked example, whose variables have three letters; no full stop after an assignment, and a space."""
    example, own = make("vt", 600).prompt.split("\n\nMemorize")  # type: ignore[union-attr]
    assert own == (
        " and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"VAR KNPVW = 71835\n{NOISE}\n{NOISE}\nVAR YTFWS = VAR KNPVW \n{NOISE}\nVAR BYVKY = VAR YTFWS \n{NOISE}\n"
        f"VAR MMBID = VAR BYVKY \n{NOISE}\nVAR LOHWJ = VAR MMBID \n{NOISE}\n{NOISE}\n"
        "Question: Find all variables that are assigned the value 71835 in the text above. Answer: According to the chain(s) "
        "of variable assignment in the text above, 5 variables are assigned the value 71835, they are:"
    )
    lines = example.split("\n")
    assert Counter(lines)[NOISE] == 16 and example.endswith("are assigned the value 72386, they are: JDY WAX BUZ LTI UEL")
    assert [line for line in lines if line.startswith("VAR")] == [
        "VAR JDY = 72386", "VAR WAX = VAR JDY ", "VAR BUZ = VAR WAX ", "VAR LTI = VAR BUZ ", "VAR UEL = VAR LTI ",
    ]  # fmt: skip
    short = make("vt", 200)
    assert Counter(short.question.split("\n\nMemorize")[0].split("\n"))[NOISE] == 2
    assert (short.comparable, short.note) == (False, "the worked example is shortened to fit")


def test_a_question_of_squad_among_paragraphs_of_its_article_first(sources: Sources) -> None:
    asked = [make("qa_1", 86, sources, index) for index in (0, 1)]
    assert {item.expected for item in asked} == {("north",), ("low",)}
    (item,) = (item for item in asked if item.expected == ("north",))
    assert item.prompt == (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
        "The following are given documents.\n\n"
        "Document 1:\nThe Elbe is long. It flows north.\n\n"
        "Document 2:\nHills are low. Sheep like\n\n"
        "Document 3:\nThe Oder has many arms.\n\n"
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
        "Question: Where to does the Elbe flow? Answer:"
    )
    assert item.facts["about"] == "The Elbe is long. It flows north." and item.comparable
    short = make("qa_1", 80, sources, asked.index(item))
    assert "The Oder has many arms." in short.question and "Hills" not in short.question


def test_a_question_of_hotpotqa_among_all_its_paragraphs(sources: Sources) -> None:
    asked = [make("qa_2", 90, sources, index) for index in (0, 1)]
    (index,) = (index for index in (0, 1) if asked[index].expected == ("Ash",))
    item = asked[index]
    assert item.prompt == (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
        "The following are given documents.\n\n"
        "Document 1:\nElm\nElm is new.\n\n"
        "Document 2:\nOak\nOak is a tree.\n\n"
        "Document 3:\nAsh\nAsh is old. It is a town.\n\n"
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
        "Question: Which is older, Ash or Elm? Answer:"
    )
    assert len(item.depths) == 2 and item.comparable
    few = make("qa_2", 80, sources, index)
    assert (few.comparable, few.note) == (False, "reduced to fit: without the question's own distractor documents")
    assert "Ash is old. It is a town." in few.question and "Elm is new." in few.question and "Oak is" not in few.question


# ------------------------------------------------------------------------------------------------ places and order
def test_forty_places_in_essays_none_twice() -> None:
    assert DEPTHS[:4] == (0, 3, 5, 8) and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40
    text = tuple(f"Word{number}." for number in range(1, 1001))
    sources = Sources(essays=TextFolder(Path(), text, text))  # each sentence has one word
    places = Counter[int]()
    for index in range(60):
        item = make("niah_multiquery", 1000, sources, index)
        parts = item.question.split("\n")[1].replace("One of the special magic numbers for ", "\n").split("\n")
        before = [sum(part.count("Word") for part in parts[: number + 1]) for number in range(4)]
        total = item.facts["num_units"]
        assert len(parts) == 5 and total == sum(part.count("Word") for part in parts)
        assert len(set(before)) == 4 and set(before) <= {int(total * (depth / 100)) for depth in DEPTHS}
        places.update(before)
    assert len(places) > 35


def test_a_needle_in_noise_stands_before_any_line_alike() -> None:
    shown = [make("niah_single_1", 300, index=index).question.split("\n")[1:-1] for index in range(400)]
    places = Counter(next(i for i, line in enumerate(lines) if line.startswith("One of")) for lines in shown)
    num_lines = make("niah_single_1", 300).facts["num_units"]
    assert set(places) == set(range(num_lines)) and max(places.values()) < 2 * min(places.values())


def test_the_first_500_questions_are_asked_first() -> None:
    documents = tuple(f"Number {number}." for number in range(700))
    source = QaSource(tuple(QaQuestion(f"Which is {document}?", ("it",), (document,)) for document in documents), documents)
    asked = [make("qa_1", 80, Sources(squad=source), index).facts["about"] for index in range(701)]
    assert set(asked[:NUM_PUBLISHED]) == set(documents[:NUM_PUBLISHED]) and asked[:NUM_PUBLISHED] != [
        *documents[:NUM_PUBLISHED]
    ]
    assert set(asked[:700]) == set(documents) and asked[700] == asked[0]


def test_documents_stand_in_any_order() -> None:
    documents = tuple(f"Number {number}." for number in range(40))
    source = QaSource((QaQuestion("Which?", ("it",), documents[:1]),), documents)
    places = Counter[int]()
    for index in range(300):
        item = make("qa_1", 110, Sources(squad=source), index)
        shown = [line for line in item.question.split("\n") if line.startswith("Number")]
        assert len(set(shown)) == len(shown)
        places[shown.index("Number 0.")] += 1
    assert min(places.values()) > 0.4 * max(places.values())
