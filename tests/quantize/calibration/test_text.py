"""Where calibration text comes from: files, data sets of a hub, conversations, mixes by weight; and what is left out of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from local_hub import Hub
from transformers import AutoTokenizer

from assay.errors import QuantizeError
from assay.records.calibration import TextSource
from assay_quantize.calibration.sources import Conversations, FileText, HubText, entry_of
from assay_quantize.calibration.text import Stream, Text, Weighted, mix_of
from assay_quantize.calibration.withheld import Withheld

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
CHAT = [
    {"role": "user", "content": "How many coins does Ben have?"},
    {"role": "assistant", "reasoning_content": "Two and three make five.", "content": "#### 5"},
]


def quiet(line: str) -> None:
    pass


def no_folder(path: Path) -> Any:
    raise AssertionError(path)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TRAINED)


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def taken(text: Text, length: int = 16) -> tuple[list[list[int]], Stream]:
    stream = text.stream(TRAINED, length, quiet)
    return list(stream), stream


# ------------------------------------------------------------------------------------------------ one source
def test_a_conversation_is_read_as_the_model_reads_it_with_its_thinking(tmp_path: Path, tokenizer: Any) -> None:
    path = rows_file(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    (sequence,), stream = taken(Text(mix=(Weighted(FileText(path)),)), 24)
    shown = "[gMASK]<sop><|user|>\nHow many coins does Ben have?<|assistant|>\n<think>Two and three make five.</think>\n#### 5"
    ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert sequence == ids[:24] and len(ids) - 24 < 24
    assert sequence.count(ids[0]) == 1, "special tokens stand there once: the template writes them"
    (used,) = stream.taken(None).sources
    assert (used.num_texts, used.num_tokens, used.is_exhausted) == (1, len(ids), True) and used.sha256 is not None


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_has_several_names(key: str) -> None:
    (_, message) = entry_of({"messages": [CHAT[0], {"role": "assistant", "content": "x", key: "hm"}]}, "here").messages
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_thinking_that_a_template_leaves_out_is_put_into_the_reply_or_counted(tmp_path: Path, tokenizer: Any) -> None:
    from assay_quantize.calibration.sources import as_text

    entry = entry_of({"messages": CHAT}, "here")
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    tokenizer.chat_template = "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}"
    text, is_shown = as_text(entry, tokenizer)
    assert is_shown and text.endswith("<assistant><think>\nTwo and three make five.\n</think>\n\n#### 5")
    tokenizer.chat_template = "{%- for m in messages -%}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{%- endfor -%}"
    text, is_shown = as_text(entry, tokenizer)
    assert not is_shown and text == "<user>How many coins does Ben have?<assistant>#### 5"
    tokenizer.chat_template = None
    with pytest.raises(QuantizeError, match="a conversation needs the checkpoint's chat template, and it has none"):
        as_text(entry, tokenizer)


def test_rows_of_other_shapes() -> None:
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert entry_of(shared, "x").messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert entry_of({"text": None, "prompt": "p"}, "x").text == "p"
    assert entry_of({"code": "c", "text": "t"}, "x", "code").text == "c"
    tool = {"type": "function", "function": {"name": "f"}}
    assert entry_of({"messages": CHAT, "tools": json.dumps([tool])}, "x").tools == (tool,)
    with pytest.raises(QuantizeError, match="row 3: an object with `code` is needed"):
        entry_of({"text": "t"}, "row 3", "code")


def test_what_no_tokenizer_or_reader_takes_is_said_in_a_line(tmp_path: Path) -> None:
    asked = '{"messages": [{"role": "user", "content": "a"}], "tools": "%s"}'
    deep = "[" * 100_000
    for line, message in {
        '{"text": ' + deep: "line 1: not JSON: nested too deeply",
        '{"text": "a", "id": ' + "9" * 5000 + "}": "line 1: not JSON: Exceeds the limit (4300 digits)",
        asked % "no": "line 1: `tools`: not JSON: Expecting value",
        asked % deep: "line 1: `tools`: not JSON: nested too deeply",
        '{"messages": [{"role": "assistant", "content": "a", "tool_calls": ["x"]}]}': "",
    }.items():
        (tmp_path / "a.jsonl").write_text(line + "\n")
        with pytest.raises(QuantizeError) as caught:
            taken(Text((tmp_path / "a.jsonl",)))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_no_letter(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "The small cat \\ud800 sits in the park on \\ud83d\\ude00 a ball."}\n')
    (sequence,), _ = taken(Text((tmp_path / "a.jsonl",)))
    assert sequence == tokenizer("The small cat \ufffd sits in the park on \U0001f600 a ball.")["input_ids"][:16]


def test_a_page_of_parquet_that_is_damaged_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [f"{n} cats sit" for n in range(500)]}), path, compression="snappy")
    data = bytearray(path.read_bytes())
    begin = pa.parquet.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    data[begin + 20 : begin + 60] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(QuantizeError, match=r"a\.parquet: is damaged Parquet: ") as caught:
        list(FileText(path).open().entries)
    assert "None" not in str(caught.value)


def test_parquet_is_read_in_rows(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"The small cat number {n} sits in the park." for n in range(600)]
    pa.parquet.write_table(pa.table({"text": texts, "id": list(range(600))}), tmp_path / "a.parquet", row_group_size=100)
    sequences, stream = taken(Text(mix=(Weighted(FileText(tmp_path / "a.parquet")),)))
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    assert [token for sequence in sequences for token in sequence] == ids[: len(ids) // 16 * 16]
    assert stream.taken(None).sources[0].num_texts == 600
    (tmp_path / "b.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(QuantizeError, match=r"b\.parquet: not Parquet: "):
        taken(Text((tmp_path / "b.parquet",)))


def test_a_data_set_of_the_hub_is_read_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    pa.parquet.write_table(pa.table({"text": ["The old dog waits near the river."] * 20}), folder / "a.parquet")
    rows_file(folder / "b.jsonl", [{"text": "A farmer has 12 apples."}] * 20)
    (folder / "loader.py").write_text("raise SystemExit('code of the data set was run')")
    hub = Hub(folder)
    try:
        hub.use(monkeypatch, tmp_path / "home")
        source = HubText("org/model")
        sequences, stream = taken(Text(mix=(Weighted(source),)))
        lines = ["The old dog waits near the river."] * 20 + ["A farmer has 12 apples."] * 20
        ids = [token for text in lines for token in tokenizer(text)["input_ids"]]
        assert [token for sequence in sequences for token in sequence] == ids[: len(ids) // 16 * 16]
        (used,) = stream.taken(None).sources
        assert (used.source, used.revision, used.num_texts) == ("hub:org/model", hub.commit, 40)
        assert not any("loader.py" in asked.path for asked in hub.asked)
        only, _ = taken(Text(mix=(Weighted(HubText("org/model", ("b.*",))),)))
        assert len(only) < len(sequences)
        with pytest.raises(QuantizeError, match=r"hub:org/model:c\.\*: none of its 4 files is c\.\*"):
            taken(Text(mix=(Weighted(HubText("org/model", ("c.*",))),)))
        with pytest.raises(QuantizeError, match="no such model"):
            taken(Text(mix=(Weighted(HubText("org/other")),)))
    finally:
        hub.close()


def test_conversations_are_begun_anew_for_each_pass() -> None:
    rows = [{"messages": CHAT}] * 3
    text = Text(mix=(Weighted(Conversations("replies of RUN", lambda: iter(rows))),))
    assert taken(text)[0] == taken(text)[0]


# ------------------------------------------------------------------------------------------------ mixes
def test_sources_are_mixed_by_tokens(tmp_path: Path) -> None:
    long = rows_file(tmp_path / "long.jsonl", [{"text": "The small cat sits in the park. " * 20}] * 200)
    short = rows_file(tmp_path / "short.jsonl", [{"text": "A farmer has 12 apples."}] * 4000)
    text = Text(mix=(Weighted(FileText(long), 3.0, "notes"), Weighted(FileText(short), 1.0, "stories")))
    stream = text.stream(TRAINED, 64, quiet)
    for _ in range(200):
        next(stream)
    notes, stories = stream.taken(None).sources
    assert (notes.weight, notes.kind, stories.weight, stories.kind) == (0.75, "notes", 0.25, "stories")
    longest = 180
    assert abs(notes.num_tokens - 0.75 * (notes.num_tokens + stories.num_tokens)) <= longest
    assert text.describe() == (f"{long} (75%)", f"{short} (25%)")


def test_what_runs_out_leaves_the_rest_to_others(tmp_path: Path) -> None:
    few = rows_file(tmp_path / "few.jsonl", [{"text": "A farmer has 12 apples."}] * 2)
    many = rows_file(tmp_path / "many.jsonl", [{"text": "The small cat sits in the park."}] * 100)
    _, stream = taken(Text(mix=(Weighted(FileText(few)), Weighted(FileText(many)))))
    assert [(source.num_texts, source.is_exhausted) for source in stream.taken(None).sources] == [(2, True), (100, True)]


def test_a_mix_in_options_and_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b.txt").write_text("x")
    (tmp_path / "run").mkdir()
    run = Conversations("a run", lambda: iter(()))
    named = ["a@b.txt", "own@0.5", "hub:org/code:data/*.parquet@2", "run@3"]
    assert mix_of(named, lambda path: run) == (
        Weighted(FileText(Path("a@b.txt"))),
        Weighted(None, 0.5),
        Weighted(HubText("org/code", ("data/*.parquet",)), 2.0),
        Weighted(run, 3.0),
    )
    (tmp_path / "mixes").mkdir()
    file = tmp_path / "mixes" / "mix.yaml"
    file.write_text(
        "texts:\n  - {source: c.jsonl, weight: 3, kind: code, column: body}\n"
        "  - {source: hub:org/tools, files: [x.jsonl], revision: v1, weight: 1}\n"
    )
    assert mix_of(["mixes/mix.yaml@2"], no_folder) == (
        Weighted(FileText(Path("mixes/c.jsonl"), "body"), 1.5, "code"),
        Weighted(HubText("org/tools", ("x.jsonl",), "v1"), 0.5),
    )
    for content, message in (
        ("texts: []", "texts: "),
        ("texts: [{source: a, weight: 0}]", "texts.0.weight: "),
        ("texts: [{from: a}]", "texts.0.source: "),
        ("a: [", "not YAML"),
        ("texts: [{source: a, weight: .nan}]", "texts.0.weight: "),
        ("texts: [{source: a, weight: 1.0e-320}]", "texts.0.weight: "),
    ):
        file.write_text(content)
        with pytest.raises(QuantizeError) as caught:
            mix_of([str(file)], no_folder)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    # the shares of 1e308 and 1e308, or of 1e-320 in a mix, are no numbers above 0
    for bad in ("x.txt@0", "x.txt@-1", "x.txt@inf", "x.txt@nan", "x.txt@1e308", "x.txt@1e-320"):
        with pytest.raises(QuantizeError, match=r"a weight is a number from 1e-06 to 1e\+06, as in x\.txt@0\.3"):
            mix_of([bad], no_folder)


# ------------------------------------------------------------------------------------------------ what is left out
ITEM = (
    "Maria has 47 marbles. Then Maria gives 12 to Jonas. Then Maria finds 8 more. How many marbles does Maria have now? "
    "Think step by step, then write the final answer after ####."
)


def against(*items: str) -> Withheld:
    withheld = Withheld()
    withheld.add("quick", "arithmetic", items)
    return withheld


def test_texts_with_an_item_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"text": "The small cat sits in the park. " * 4}] * 3
    rows += [{"messages": [{"role": "user", "content": ITEM.upper()}, CHAT[1]]}, {"text": f"Before it. {ITEM} And behind it."}]
    path, withheld = rows_file(tmp_path / "a.jsonl", rows), against(ITEM)
    _, stream = taken(Text(mix=(Weighted(FileText(path)),), withheld=withheld))
    assert (stream.taken(None).sources[0].num_texts, stream.taken(None).sources[0].num_dropped) == (3, 2)
    (items,) = withheld.record()
    assert (items.suite, items.task, items.num_items, items.dropped) == ("quick", "arithmetic", 1, 2)
    only = rows_file(tmp_path / "b.jsonl", rows[3:])
    with pytest.raises(QuantizeError, match="sequence of 16 tokens, 2 texts with items of an evaluation left out"):
        taken(Text(mix=(Weighted(FileText(only)),), withheld=against(ITEM)))


def test_of_a_plain_text_the_paragraphs_around_an_item_stay(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(["The small cat sits in the park. " * 4, ITEM, "The old dog waits near the river. " * 4]))
    sequences, stream = taken(Text(mix=(Weighted(FileText(path)),), withheld=against(ITEM)))
    text = "\n\n".join(["The small cat sits in the park. " * 4, "The old dog waits near the river. " * 4])
    ids = tokenizer(text)["input_ids"]
    assert [token for sequence in sequences for token in sequence] == ids[: len(ids) // 16 * 16]
    assert stream.taken(None).sources[0] == TextSource(
        source=str(path), weight=1.0, num_texts=1, num_tokens=len(ids), num_dropped=1, is_exhausted=True,
        sha256=stream.taken(None).sources[0].sha256,
    )  # fmt: skip


def test_sources_are_read_only_as_far_as_they_are_needed() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"text": "The small cat sits in the park. " * 40}
        raise AssertionError("more was read than needed")

    text = Text(mix=(Weighted(Conversations("rows", rows)),))
    assert [len(sequence) for sequence in text.sequences(None, TRAINED, 64, 32, quiet)] == [32, 32]
    assert not text.needs_model and Text().needs_model
