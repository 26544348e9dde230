"""Files that nobody vouches for: one line that says what and where, whatever is wrong with them."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
from foreign_results import inspect_log, write_archive

from assay.errors import AssayError
from assay_evaluate.harnesses import files
from assay_evaluate.harnesses.find import read_results


def refusal(path: Path, metric: str | None = None) -> str:
    """What is said of a file or folder that is refused, without the folder it lies in."""
    with pytest.raises(AssayError) as error:
        read_results(path, metric)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(f"{path.parent}/", "")


SAMPLE = '{"doc_id": 0, "metrics": ["acc"], "acc": 1.0, "doc": {}, "target": "x", "filter": "none", "filtered_resps": ["x"]}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "a.csv: has no column item and score; it has none"),
        ("a.csv", b"item,points\n1,1\n", "a.csv: has no column score; it has item, points"),
        ("a.csv", b"item,score\n", "a.csv: has no row; write one for each item"),
        ("a.csv", b"item,score\n1,1\n1,0\n", "a.csv, task scores: item 1 stands there twice; leave one of them"),
        ("a.csv", b"item,score,score\n1,1,1\n", "a.csv: has two columns score; leave one of them"),
        ("a.csv", b"item,score\n1,nan\n", "a.csv line 2: score nan is no number between 0 and 1"),
        ("a.csv", b"item,score\n1,inf\n", "a.csv line 2: score inf is no number between 0 and 1"),
        ("a.csv", b"item,score\n1,57.5\n", "a.csv line 2: score 57.5 is no number between 0 and 1"),
        ("a.csv", b"item,score\n1,good\n", "a.csv line 2: score 'good' is no number between 0 and 1"),
        ("a.csv", b"item,score\n1,1,9\n", "a.csv line 2: has another number of fields than the header (2)"),
        ("a.csv", b"item,score\n,1\n", "a.csv line 2: item is None; a name or a whole number was expected"),
        ("a.csv", b"item,score\n\xff\xfe,1\n", "a.csv: is not UTF-8 (byte 11); save it as UTF-8"),
        ("a.csv", b"item,score,sample\n1,1,-1\n", "a.csv line 2: sample is -1; a whole number from 0 to 10,000 was expected"),
        ("a.csv", b"item,score,side\n1,1,a\n2,1,\n",
         "a.csv: has rows with a side and rows without; name the side in every row"),
        ("a.jsonl", b'{"item": "1", "score": NaN}\n', "a.jsonl line 1: score nan is no number between 0 and 1"),
        ("a.jsonl", b'{"item": "1", "score": 1}\n{"item": "2"}\n',
         "a.jsonl line 2: has no score; write null where no reply came"),
        ("a.jsonl", b'{"item": "1", "score": 1}\n[1]\n', "a.jsonl line 2: holds a JSON list, an object was expected"),
        ("a.jsonl", b'{"item": "1", "score": 1}\n{"item": \n',
         "a.jsonl line 2: no JSON (Expecting value: line 2 column 1 (char 10)): "
         "'{\"item\":'; export it again"),
        ("a.jsonl", b'{"item": {"a": 1}, "score": 1}\n',
         "a.jsonl line 1: item is {'a': 1}; a name or a whole number was expected"),
        ("a.json", b"[" * 100_000, "a.json: no readable JSON: nested too deeply; export it again"),
        ("samples_gsm8k.jsonl", SAMPLE.encode() * 2, "samples_gsm8k.jsonl: item 0 stands there twice; leave one of them"),
        ("samples_gsm8k.jsonl", SAMPLE.replace("1.0", "37").encode(),
         "samples_gsm8k.jsonl line 1: score 37 is no number between 0 and 1"),
        ("a.json", b'{"resolved_ids": ["a__b-1"], "unresolved_ids": ["a__b-1"]}',
         "a.json: item a__b-1 stands there twice; leave one of them"),
        ("a.json", b'{"resolved_ids": []}',
         "a.json: does not list unresolved_ids: it has totals only; grade again with swebench 2 or newer"),
        ("a.eval", b"PK not a zip", "a.eval: is no whole zip file (File is not a zip file); export the log again"),
        ("a.json", b'{"eval": {}, "status": "started"}',
         "a.json: is the log of an evaluation that is not finished; wait for it, or run "
         "`inspect eval-retry`"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path / name) == said


def test_what_is_no_result_is_said_with_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    assert refusal(tmp_path / "notes.json").startswith(
        "notes.json: holds no results that are known; give lm-eval's samples_*.jsonl"
    )
    (tmp_path / "results.json").write_text('{"results": {}, "configs": {}}')
    assert refusal(tmp_path).endswith("has lm-eval's totals only; evaluate with `--log_samples`")
    assert refusal(tmp_path / "nothing") == "nothing: no such file or folder; give results of a harness"


def test_totals_of_a_container_are_named_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "results.yml").write_text("results: {}\n")
    assert refusal(folder) == (
        "out: has totals only (results.yml), which cannot be paired; import the items that the container's harness wrote"
    )


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    assert refusal(tmp_path / "a.csv").startswith("a.csv: is no regular file (a pipe, a device or a folder)")


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("item,score\n1,1\n")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "gsm8k.csv").symlink_to(tmp_path / "secret.csv")
    assert refusal(folder).startswith("results: holds no results that are known")


def test_two_results_of_one_task_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("first", "second"):
        (folder / f"{name}.csv").write_text("item,score,task\n1,1,gsm8k\n")
    assert refusal(folder) == (
        "results/first.csv and results/second.csv: are both results of task gsm8k; name one of them, or leave one in the folder"
    )


# ------------------------------------------------------------------------------------------------ zip
def test_a_member_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip bomb: 100 MB of zeros in 100 kB."""
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 1_000_000)
    path = write_archive(tmp_path / "a.eval", inspect_log({"0": [1.0]}))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/1_epoch_1.json", b"0" * 100_000_000)
    assert refusal(path).startswith(
        "a.eval/samples/1_epoch_1.json: unpacks to more than is read (1,000,000 bytes of one member"
    )


def test_many_members_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_UNPACKED_BYTES", 20_000)
    path = write_archive(tmp_path / "a.eval", inspect_log({str(i): [1.0] for i in range(200)}))
    assert "unpacks to more than is read" in refusal(path)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.eval", inspect_log({"0": [1.0]}))
    data = bytearray(path.read_bytes())
    at = data.index(b"samples/0_epoch_1.json") + len("samples/0_epoch_1.json") + 20
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))
    assert "samples/0_epoch_1.json: cannot be unpacked" in refusal(path)


def test_zstandard_without_its_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of inspect compress so. The method stands in the central directory and in the member's header."""
    path = write_archive(tmp_path / "a.eval", inspect_log({"0": [1.0]}))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            struct.pack_into("<H", data, info.header_offset + 8, files.ZSTANDARD)
    at = data.index(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<H", data, at + 10, files.ZSTANDARD)
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(bytes(data))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert refusal(path) == (
        "a.eval: is compressed with Zstandard, which needs a package: `pip install zstandard`, or convert the log: `inspect "
        "log convert --to json`"
    )


def test_text_that_is_no_unicode_can_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"item": "\ud800x\n", "score": 1, "answer": "\udfff"}) + "\n")
    (scores,) = read_results(tmp_path / "a.jsonl")[None]
    (reply,) = scores.replies
    assert (reply.item, reply.answer) == ("�x\\n", "\\udfff")
