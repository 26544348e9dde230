"""Text of any size: of a large file pieces from all over it, of a long text a part at a time, and text that repeats itself."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from assay.errors import QuantizeError
from assay.records.calibration import CalibratedLayers
from assay_pipeline.calibration.sentences import repeated_lines
from assay_quantize.calibration import pieces, sources
from assay_quantize.calibration.sources import FileText
from assay_quantize.calibration.text import Text, Weighted
from assay_quantize.calibration.withheld import Withheld

TRAINED = Path(__file__).parents[3] / "examples" / "tiny_glm" / "checkpoint"
ITEM = "A farmer has twelve apples and buys seven more at the market, and how many apples does the farmer have now in all?"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 bytes, in files of more than 4,000."""
    for module, name, value in (
        (pieces, "LARGE_BYTES", 4000), (sources, "LARGE_BYTES", 4000), (pieces, "PIECE_BYTES", 1000), (pieces, "AROUND", 300),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 letters."""
    monkeypatch.setattr(pieces, "PART_LETTERS", 400)
    monkeypatch.setattr("assay_quantize.calibration.text.PART_LETTERS", 400)
    monkeypatch.setattr(pieces, "AROUND", 300)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TRAINED)


def prose(count: int, seed: int = 0) -> str:
    """Numbered paragraphs, some words beyond ASCII."""
    drawn = random.Random(seed)
    return "\n\n".join(
        f"{number}: " + " ".join(drawn.choices(["cat", "river", "naïve", "雪", "waits"], k=12)) for number in range(count)
    )


def read(path: Path) -> list[str]:
    return [entry.text or "" for entry in FileText(path).open().entries]


def test_the_first_of_an_order_are_spread() -> None:
    assert list(pieces.spread_order(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    for count in (0, 1, 2, 5, 1000):
        assert sorted(pieces.spread_order(count)) == list(range(count))
    first = sorted(list(pieces.spread_order(4096))[:64])
    assert {after - before for before, after in itertools.pairwise(first)} == {64}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("text", [prose(200), prose(200).replace("\n\n", "\n"), prose(200).replace("\n", " "), "雪" * 5000])
def test_pieces_of_a_plain_text_are_all_of_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    texts = read(path)
    assert len(texts) > 8 and "".join(sorted(texts, key=text.index) if "雪雪" not in text else texts) == text
    begins = [text.index(sequence) for sequence in texts[:4]] if "雪雪" not in text else None
    assert begins is None or [round(begin / len(text), 1) for begin in begins] == pytest.approx([0, 0.5, 0.25, 0.75], abs=0.2)


@pytest.mark.usefixtures("small_pieces")
def test_rows_of_a_large_file_each_come_once_and_from_all_over_it(tmp_path: Path) -> None:
    drawn = random.Random(1)
    texts = [f"{number} " + "x" * drawn.choice((5, 50, 500, 3500)) for number in range(100)]
    path = tmp_path / "large.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    rows_read = read(path)
    assert sorted(rows_read) == sorted(texts) and rows_read != texts
    numbers = [int(text.split()[0]) for text in rows_read[:12]]
    assert min(numbers) < 10 and max(numbers) > 60
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "large.parquet", row_group_size=10, compression="none")
    rows = read(tmp_path / "large.parquet")
    assert sorted(rows) == sorted(texts) and [rows[0], rows[10]] == [texts[0], texts[80]]


@pytest.mark.usefixtures("small_pieces")
def test_a_line_that_never_ends_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_LINE_BYTES", 3000)
    path = tmp_path / "giant.jsonl"
    path.write_text('{"text": "short"}\n{"text": "' + "word " * 2000 + '"}\n')
    entries = FileText(path).open().entries
    assert next(entries).text == "short"
    with pytest.raises(QuantizeError) as raised:
        next(entries)
    assert str(raised.value) == f"{path}: the line from byte 18 on is longer than 3 kB; write one text a line"


@pytest.mark.usefixtures("small_pieces")
def test_a_large_file_is_known_by_samples_of_it(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    data = prose(2000).encode()
    path.write_bytes(data)
    before = FileText(path).identity()
    assert before[1].startswith("spread:") and FileText(path).identity() == before
    for other in (data + b" ", data[:-1] + b"!", data[:9000] + b"#" * 5000 + data[14000:]):
        path.write_bytes(other)
        assert FileText(path).identity() != before
    path.write_bytes(data)
    assert FileText(path).identity() == before


@pytest.mark.usefixtures("small_pieces")
def test_an_item_that_two_pieces_share_is_found(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    text = prose(200)
    cut = text.index(" ", 975)  # shortly before the second piece begins
    path.write_text(f"{text[:cut]} {ITEM} {text[cut:]}", encoding="utf-8")
    withheld = Withheld()
    withheld.add("suite", "task", [ITEM])
    stream = Text(mix=(Weighted(FileText(path)),), withheld=withheld).stream(TRAINED, 16, lambda line: None)
    assert all(len(sequence) == 16 for sequence in stream)
    assert withheld.record()[0].dropped >= 1


@pytest.mark.usefixtures("short_parts")
def test_a_long_text_is_tokenized_as_far_as_it_is_needed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(prose(40).split())
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    stream = Text(mix=(Weighted(FileText(tmp_path / "long.jsonl")),)).stream(TRAINED, 16, lambda line: None)
    next(stream)
    (used,) = stream.taken(None).sources
    assert (used.num_texts, used.num_tokens < 500, used.is_exhausted) == (1, True, False)
    made = [token for sequence in stream for token in sequence]
    (used,) = stream.taken(None).sources
    assert used.num_texts == 1 and tokenizer.decode(made)[-200:] in text  # nothing is lost between parts
    assert used.num_tokens == pytest.approx(len(tokenizer(text)["input_ids"]), abs=20)


def test_special_tokens_stand_at_the_ends_of_a_text_in_parts(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("assay_quantize.calibration.text.PART_LETTERS", 400)
    monkeypatch.setattr(pieces, "PART_LETTERS", 400)
    folder = tmp_path / "tokenizer"
    changed = AutoTokenizer.from_pretrained(TRAINED)
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single="[gMASK] $A <sop>", special_tokens=[("[gMASK]", 1), ("<sop>", 2)]
    )
    changed.save_pretrained(folder)
    text = " ".join(prose(40).split())
    (tmp_path / "long.txt").write_text(text)
    stream = Text((tmp_path / "long.txt",)).stream(folder, 8, lambda line: None)
    tokens = [token for sequence in stream for token in sequence]
    whole = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert (tokens[0], tokens.count(1), tokens.count(2) <= 1) == (1, 1, True)
    assert (whole[0], whole[-1]) == (1, 2)


def test_sequences_that_repeat_are_counted_and_said(tmp_path: Path) -> None:
    """Text of one line that is repeated makes few sequences many times."""
    path = tmp_path / "same.jsonl"
    path.write_text('{"text": "The old dog waits near the river."}\n' * 200)
    stream = Text((path,)).stream(TRAINED, 16, lambda line: None)
    made = list(stream)
    different = len({tuple(sequence) for sequence in made})
    taken = stream.taken(None)
    assert taken.num_repeated == len(made) - different > 20
    record = CalibratedLayers(
        method="gptq", asked_sha256="a", text=("t",), num_tokens=16 * len(made), length=16, tokens_sha256="b", layers={},
        versions={}, seconds=1.0, sources=taken.sources, num_repeated=taken.num_repeated,
    )  # fmt: skip
    assert list(repeated_lines(record)) == [
        f"note: {taken.num_repeated} of {len(made)} sequences are the same as one before them, token for token, so only "
        f"{different} are different; give more text"
    ]
    assert list(repeated_lines(record.model_copy(update={"num_repeated": 0}))) == []
    assert list(repeated_lines(record.model_copy(update={"num_repeated": None}))) == []


def test_a_pipe_makes_nobody_wait_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for use in (FileText(tmp_path / "pipe.jsonl").identity, lambda: read(tmp_path / "pipe.jsonl")):
        with pytest.raises(QuantizeError, match=r"pipe\.jsonl: is no regular file \(a pipe, a device or a folder\)"):
            use()
    (tmp_path / "of_windows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert read(tmp_path / "of_windows.jsonl") == ["a", "b"]
