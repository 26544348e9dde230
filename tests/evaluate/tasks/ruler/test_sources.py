"""What surrounds the RULER tasks: one's own texts and questions, the needle grid, metrics, saved items, token counts."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.haystacks import generated, hide, read_text_folder, split_sentences
from assay_evaluate.tasks.ruler.items import GENERATOR_VERSION, RulerItem, from_saved_fields, share_found
from assay_evaluate.tasks.ruler.languages import LANGUAGES
from assay_evaluate.tasks.ruler.qa import QaQuestion, QaSource, read_hotpotqa, read_squad
from assay_evaluate.tasks.ruler.tasks import TASKS, Sources, grid_item, ruler_item
from assay_evaluate.tasks.ruler.tokens import Prompt, TokenCounter

CHECKPOINT = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"


def words(prompt: Prompt) -> int:
    """A tokenizer of words."""
    return len((prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)).split())


def characters(prompt: Prompt) -> int:
    return len(prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt))


def make(task: str, length_tokens: int, index: int = 0, sources: Sources | None = None, reply_tokens: int = 10) -> RulerItem:
    return ruler_item(
        task, length_tokens, index, seed="eval", style="base", count_tokens=words, sources=sources, reply_tokens=reply_tokens
    )


def test_item_whole() -> None:
    assert make("niah_single_1", 80) == RulerItem(
        task="niah_single_1",
        length_tokens=80,
        index=0,
        language="en",
        style="base",
        question="A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nOne of the special magic numbers for ready-drum is: 5680383.\nThe grass is green. The sky is "
        "blue. The sun is yellow.\nWhat is the special magic number for ready-drum mentioned in the provided text?",
        answer_prefix="The special magic number for ready-drum mentioned in the provided text is",
        expected=("5680383",),
        match="all",
        prompt_tokens=70,
        reply_tokens=10,
        fill=1.0,
        depths=(0.0,),
        comparable=True,
        note=None,
        facts={"keys": ["ready-drum"], "num_units": 0},
        seed="eval",
    )


def test_another_item_means_another_version() -> None:
    """Where this fails, raise GENERATOR_VERSION: items made before must not pass for items made now."""
    hashes = [make(task, 500).sha256 for task in TASKS]
    for language in LANGUAGES:
        grid = {"seed": "eval", "style": "chat", "count_tokens": characters, "language": language}
        hashes.append(grid_item(2000, 0.5, 0, **grid).sha256)  # type: ignore[arg-type]
    assert (GENERATOR_VERSION, hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]) == ("2", "b216f40d2dfc7d6d")


# ------------------------------------------------------------------------------------------------ haystacks
def test_generated_text_has_no_digits_and_is_the_same_for_any_length() -> None:
    for language in LANGUAGES:
        text = generated("eval:0", language)
        first = text(50)
        assert text(2000)[:50] == first == generated("eval:0", language)(50) != generated("eval:1", language)(50)
        assert not any(letter.isdigit() or letter == "|" for letter in "".join(text(2000)))
        assert "  " not in " ".join(text(2000)) and len(set(text(2000))) > 1980


def test_folder_in_order_of_names_and_begun_again(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text('He said "Stop."  Then he\nleft! Why?', encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("今天下雨。明天呢？好", encoding="utf-8")
    (tmp_path / "c.md").write_text("not this one", encoding="utf-8")
    folder = read_text_folder(tmp_path)
    assert folder.sentences == ("今天下雨。", "明天呢？", "好", 'He said "Stop."', "Then he left!", "Why?")
    assert folder.first(8) == [*folder.sentences, "今天下雨。", "明天呢？"]
    item = make("niah_single_2", 300, sources=Sources(essays=folder))
    assert item.comparable and item.note is None and item.fill > 0.95 and item.question.count("Then he left!") > 20


def test_folder_refused(tmp_path: Path) -> None:
    with pytest.raises(RulerError, match=r"none: not a folder; a haystack is a folder of UTF-8 \.txt files"):
        read_text_folder(tmp_path / "none")
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(RulerError, match=r"inside: no text in any \.txt file"):
        read_text_folder(inside)
    (tmp_path / "secret.txt").write_text("A secret.", encoding="utf-8")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(RulerError, match=r"link\.txt: leads out of the haystack folder .*inside; put a copy of the file there"):
        read_text_folder(inside)
    (inside / "link.txt").unlink()
    (inside / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(RulerError, match=r"latin\.txt: cannot be read as UTF-8 text"):
        read_text_folder(inside)


def test_hide_and_split() -> None:
    sentences = list("abcdefgh")
    assert hide(sentences, [(1.0, "Z"), (0.5, "X"), (0.5, "Y"), (0.0, "W")]) == "W a b c d X Y e f g h Z"
    assert hide([], [(0.3, "X")]) == "X" and hide(sentences[:2], [(0.5, "X")], "") == "aXb"
    assert split_sentences("One.Two. (Three.) Four") == ["One.Two.", "(Three.)", "Four"]


def test_a_text_that_holds_the_needle_is_refused(tmp_path: Path) -> None:
    needle = next(s for s in make("niah_single_2", 300).question.split("\n")[1].split(". ") if "special magic" in s)
    (tmp_path / "a.txt").write_text(f"Rain again. {needle}. Sun again.", encoding="utf-8")
    with pytest.raises(
        RulerError, match=r"niah_single_2 at 300 tokens .*the context holds 'One of the special magic numbers for"
    ):
        make("niah_single_2", 300, sources=Sources(essays=read_text_folder(tmp_path)))


# ------------------------------------------------------------------------------------------------ questions
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": "The Elbe is long. It flows north.",
                    "qas": [
                        {"question": "Where to?", "answers": [{"text": "north"}, {"text": "north"}, {"text": "flows north"}]},
                        {"question": "Why?", "is_impossible": True, "answers": [], "plausible_answers": [{"text": "north"}]},
                    ],
                },
                {"context": "Nobody asks about this. It is only here to fill.", "qas": []},
            ],
        },
        {
            "title": "Hills",
            "paragraphs": [{"context": "Hills are low.", "qas": [{"question": "How high?", "answers": [{"text": "low"}]}]}],
        },
    ],
}
HOTPOT = [
    {
        "_id": "1",
        "question": "Which is older?",
        "answer": "Ash",
        "supporting_facts": [["Ash", 0], ["Elm", 0], ["Ash", 1]],
        "context": [["Oak", ["Oak is a tree."]], ["Ash", ["Ash is old.", " It is a town."]], ["Elm", ["Elm is new."]]],
    },
    {
        "_id": "2",
        "question": "Unsupported?",
        "answer": "no",
        "supporting_facts": [["Gone", 0]],
        "context": [["Fir", ["Fir is green."]]],
    },
]


def test_squad(tmp_path: Path) -> None:
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(SQUAD), encoding="utf-8")
    squad = read_squad(file)
    elbe, hills = "The Elbe is long. It flows north.", "Hills are low."
    nobody = "Nobody asks about this. It is only here to fill."
    assert squad == QaSource(
        (
            QaQuestion("Where to?", ("north", "flows north"), (elbe,), near=(nobody,)),
            QaQuestion("How high?", ("low",), (hills,)),
        ),
        (elbe, nobody, hills),
    )
    items = [make("qa_1", 200, index, Sources(squad=squad)) for index in range(4)]
    assert [item.facts["question"] for item in items[:2]] == [item.facts["question"] for item in items[2:]]
    assert {item.expected for item in items} == {("north", "flows north"), ("low",)}
    for item in items:
        assert item.comparable and item.match == "any" and item.fill >= 0.95
        own = elbe if "north" in item.expected else hills
        assert item.question.count(own) == 1 and item.question.count("Nobody asks about this.") > 2  # distractors come again
        numbers = [int(line[9:-1]) for line in item.question.split("\n") if line.startswith("Document ")]
        assert numbers == list(range(1, item.facts["num_documents"] + 1))


def test_hotpotqa(tmp_path: Path) -> None:
    file = tmp_path / "hotpot.json"
    file.write_text(json.dumps(HOTPOT), encoding="utf-8")
    hotpot = read_hotpotqa(file)
    oak, ash, elm, fir = "Oak\nOak is a tree.", "Ash\nAsh is old. It is a town.", "Elm\nElm is new.", "Fir\nFir is green."
    older = QaQuestion("Which is older?", ("Ash",), (oak, ash, elm), support=(ash, elm))
    assert hotpot == QaSource((older, QaQuestion("Unsupported?", ("no",), (fir,))), (oak, ash, elm, fir))
    (item,) = (one for one in (make("qa_2", 150, i, Sources(hotpotqa=hotpot)) for i in (0, 1)) if one.expected == ("Ash",))
    assert len(item.depths) == 2 and item.question.count(ash) == item.question.count(elm) == item.question.count(oak) == 1
    assert item.question.endswith("Question: Which is older?") and item.answer_prefix == "Answer:"


def test_invented_facts_are_flagged() -> None:
    item = make("qa_2", 300)
    assert not item.comparable and item.note == "the questions are about facts invented by assay"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"x\.json: cannot be read as SQuAD JSON"),
        ('{"data": [{"title": "x"}]}', r"x\.json: not SQuAD as published \(KeyError: 'paragraphs'\)"),
        ("[]", r"x\.json: not SQuAD as published \(TypeError"),
        ('{"data": []}', r"x\.json: no question with an answer and another document to set beside it"),
    ],
)
def test_other_question_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(RulerError, match=message) as refused:
        read_squad(tmp_path / "x.json")
    assert "\n" not in str(refused.value)


def test_too_few_documents_are_refused() -> None:
    only = QaSource((QaQuestion("Who?", ("Ada",), ("Ada was here.",)),), ("Ada was here.",))
    with pytest.raises(RulerError, match=r"qa_1 at 500 tokens .* there is no more filler than 0 units"):
        make("qa_1", 500, sources=Sources(squad=only))


# ------------------------------------------------------------------------------------------------ needle grid
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_grid_needle_lies_at_its_depth_in_every_language(language: str, depth: float) -> None:
    item = grid_item(
        4000,
        depth,
        1,
        seed="eval",
        style="chat",
        count_tokens=characters,
        language=language,
        reply_tokens=100,  # type: ignore[arg-type]
    )
    assert item.question.count(item.expected[0]) == 1 and len(item.expected[0]) == 7
    assert item.depths == pytest.approx((depth,), abs=0.03) and item.language == language and 0.95 <= item.fill <= 1
    assert item.facts["keys"][0] in item.question.rsplit("\n", 1)[1] and item.facts["keys"][0] in item.answer_prefix
    assert item.id == f"needle_grid/{language}/{depth:g}/4000/1" and not item.comparable


def test_grid_refusals() -> None:
    with pytest.raises(RulerError, match=r"depth 1.5: not between 0 \(the front\) and 1 \(the end\)"):
        grid_item(400, 1.5, 0, seed="eval", style="chat", count_tokens=words)
    with pytest.raises(RulerError, match="language 'tlh': unknown to the needle grid; there are en, zh, es, ru, ja"):
        grid_item(400, 1, 0, seed="eval", style="chat", count_tokens=words, language="tlh")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ metrics
def test_metrics_are_the_published_ones() -> None:
    assert share_found("Codes: 12 and ab-CD.", ["12", "AB-cd", "34", "56"], "all") == 0.5
    # one alias is enough: averaging over aliases would give a third
    assert share_found("It was the Normans, in 1066.", ["Normans", "the Norman people", "Norman French"], "any") == 1.0
    assert share_found("It was the Danes.", ["Normans", "the Norman people"], "any") == 0.0


# ------------------------------------------------------------------------------------------------ saved items
def test_saved_and_read_back() -> None:
    for item in (make(task, 400, index) for task in ("niah_multivalue", "fwe", "qa_1", "vt") for index in range(2)):
        assert from_saved_fields(json.loads(json.dumps(asdict(item)))) == item
        assert item.sha256 != replace(item, seed="eval-2").sha256


# ------------------------------------------------------------------------------------------------ tokens
def test_counting_needs_tokenizer_and_template(tmp_path: Path) -> None:
    with pytest.raises(RulerError, match=r"tokenizer\.json: missing; without it, count tokens through the server instead"):
        TokenCounter(tmp_path)("text")
    shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
    assert TokenCounter(tmp_path)("The quiet fox sleeps near the river.") == 8
    chat = [{"role": "user", "content": "Hello."}]
    with pytest.raises(RulerError, match=r"no chat template \(chat_template\.jinja\); use style base"):
        TokenCounter(tmp_path)(chat)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"chat_template": "{{ bos_token }}{{ messages[0].content }}{% if slow %} slowly{% endif %}", "bos_token": "<sop>"}
        ),
        encoding="utf-8",
    )
    assert TokenCounter(tmp_path).render(chat) == "<sop>Hello."
    assert TokenCounter(tmp_path, {"slow": True}).render(chat) == "<sop>Hello. slowly"
    with pytest.raises(RulerError, match="the chat template drops the words a reply begins with; use style chat or base"):
        TokenCounter(tmp_path)([*chat, {"role": "assistant", "content": "Answer:"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}", encoding="utf-8")
    with pytest.raises(RulerError, match="the chat template refuses the prompt: no such role"):
        TokenCounter(tmp_path)(chat)
