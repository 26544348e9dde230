"""Files that appear whole, reads that are complete, and a manifest that is there or not."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from assay import safe_files
from assay.atomic_files import naming, replacing
from assay.errors import AssayError, CheckpointError
from assay.records.base import sha256_of_file, write_text_atomically
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.run import RunRecord
from assay.safe_files import parse_json_object


def test_a_file_appears_whole_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    with replacing(path) as partial:
        partial.write_text("one")
        assert not path.exists()
        assert partial.parent == path.parent and partial.name.startswith(".file.txt.") and partial.suffix == ".partial"
    assert path.read_text() == "one" and os.listdir(path.parent) == ["file.txt"]
    write_text_atomically(path, "two, не одно\n")
    assert path.read_text(encoding="utf-8") == "two, не одно\n" and os.listdir(path.parent) == ["file.txt"]


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "\ud800")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("named", [None, "partial", "elsewhere"])
def test_what_the_system_refuses_names_the_file(tmp_path: Path, named: str | None) -> None:
    with pytest.raises(OSError, match="No space left on device") as refused, replacing(tmp_path / "file.txt") as partial:
        raise OSError(errno.ENOSPC, "No space left on device", {"partial": str(partial)}.get(named or "", named))
    assert refused.value.filename == ("elsewhere" if named == "elsewhere" else str(tmp_path / "file.txt"))


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_what_the_system_refuses_names_what_was_to_be_written(tmp_path: Path, named: str | None) -> None:
    with pytest.raises(OSError, match="No space left on device") as refused, naming(tmp_path / "shard"):
        raise OSError(errno.ENOSPC, "No space left on device", named)
    assert refused.value.filename == (named or str(tmp_path / "shard"))


def test_what_a_killed_writer_left_goes_with_the_next_one_of_the_same_file(tmp_path: Path) -> None:
    path, others = tmp_path / "file.txt", {".file.txt.bak.partial", ".file_txt.0123abcd.partial", ".other.0123abcd.partial"}
    for name in {".file.txt.0123abcd.partial", *others}:
        (tmp_path / name).write_text("half")
    with replacing(tmp_path / "neighbour") as partial:  # whose writer is at work, so nobody knows whose leftovers these are
        partial.write_text("whole")
        write_text_atomically(path, "one")
        assert (tmp_path / ".file.txt.0123abcd.partial").exists() and partial.exists()
    write_text_atomically(path, "two")
    assert path.read_text() == "two" and set(os.listdir(tmp_path)) == {"file.txt", "neighbour", *others}


def test_an_error_is_not_hidden_by_that_of_the_clean_up(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"), replacing(tmp_path / "file.txt") as partial:
        partial.mkdir()  # which is not unlinked
        raise OSError(errno.ENOSPC, "No space left on device")


def test_only_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_atomically(tmp_path / "one", "first", only_new=True)
    with pytest.raises(FileExistsError):
        write_text_atomically(tmp_path / "one", "second", only_new=True)
    assert (tmp_path / "one").read_text() == "first" and os.listdir(tmp_path) == ["one"]

    def without_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", without_links)
    write_text_atomically(tmp_path / "two", "first", only_new=True)
    assert (tmp_path / "two").read_text() == "first" and sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path, texts = tmp_path / "file.txt", [str(number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_text_atomically, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts and os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_reading_goes_on_until_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A read of the system may give less than was asked for: on some network file systems, and always beyond 2 GiB."""
    (tmp_path / "file").write_bytes(bytes(range(10)))
    preadv = os.preadv
    monkeypatch.setattr(safe_files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:at_once]], at))
    with (tmp_path / "file").open("rb") as file:
        buffer = bytearray(6)
        assert safe_files.read_fully(file.fileno(), memoryview(buffer), 2) == 6 and buffer == bytes(range(2, 8))
        assert safe_files.read_fully(file.fileno(), memoryview(buffer), 7) == 3 and buffer[:3] == bytes((7, 8, 9))
        assert safe_files.read_fully(file.fileno(), memoryview(buffer), 10) == 0
        assert safe_files.read_fully(file.fileno(), memoryview(bytearray()), 0) == 0


def test_past_the_page_cache_a_part_of_a_block_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no reading on from the middle of a block."""
    (tmp_path / "file").write_bytes(bytes(10))
    calls: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, views: list[memoryview], at: int) -> int:
        calls.append(at)
        return preadv(descriptor, views, at)

    monkeypatch.setattr(safe_files.os, "preadv", counted)
    with (tmp_path / "file").open("rb") as file:
        assert safe_files.read_fully(file.fileno(), memoryview(bytearray(16)), 0, block_bytes=4) == 10
        assert calls == [0]
        assert safe_files.read_fully(file.fileno(), memoryview(bytearray(16)), 2, block_bytes=4) == 8
        assert calls == [0, 2, 10]


def test_hash_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_folder_without_a_manifest_has_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None and load_manifest(tmp_path / "nowhere") is None
    made = Manifest(
        model="m", precision="w4a16", source="s", source_sha256="0", source_files={}, recipe_sha256="0", plan_sha256="0",
        precision_recipe={}, shards=(), files={}, bytes_in=1, bytes_out=1, versions={}, seconds=0.5,
    )  # fmt: skip
    made.save(tmp_path / MANIFEST)
    assert load_manifest(tmp_path) == made
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(AssayError, match=r"assay_manifest\.json: not a Manifest record of schema 1"):
        load_manifest(tmp_path)


def test_a_name_that_stands_twice_among_very_many(tmp_path: Path) -> None:
    """What is looked for grows as the names do: as it was, with their square, this took minutes."""
    pairs = [f'"model.layers.{number}.weight":1' for number in range(200_000)]
    with pytest.raises(AssayError, match=r"^header: not JSON: 'model\.layers\.199999\.weight' is named twice; download"):
        parse_json_object("header", f"{{{','.join([*pairs, pairs[-1]])}}}".encode(), unique_names=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": {"b": [1, 9223372036854775808]}}', "'a.b.1' is 9223372036854775808, beyond 64 bits; write a smaller"),
        ('{"a": -1' + 40 * "0" + "}", "'a' is -10000000000... of 41 digits, beyond 64 bits; write a smaller number there"),
        ('{"a": 1e400}', "'a' is inf, which is no number of JSON; write a number or null there"),
        ('{"a": [true, {"b": NaN}]}', "'a.1.b' is nan, which is no number of JSON; write a number or null there"),
        ('{"a": ' + 100 * "[" + 100 * "]" + "}", None),
        ('{"a": ' + 101 * "[" + 101 * "]" + "}", "more than 100 lists and objects inside each other; download the file again"),
        ('{"a": ' + 100_000 * "[" + 100_000 * "]" + "}", "not JSON: nested too deeply; download the file again"),
        ('{"model_max_length": 1000000000000000019884624838656}', None),  # of every second tokenizer_config.json
        ('{"a": -9223372036854775807, "b": null, "c": 1.5}', None),
    ],
)  # fmt: skip
def test_numbers_and_depths_that_no_checkpoint_has(text: str, problem: str | None) -> None:
    if problem is None:
        assert parse_json_object("config.json", text.encode()) == json.loads(text)
        return
    with pytest.raises(CheckpointError) as raised:
        parse_json_object("config.json", text.encode())
    assert str(raised.value).removesuffix(" number there") == f"config.json: {problem.removesuffix(' number there')}"


@pytest.mark.parametrize("number", [2**63, -(10**30), 10**4000])
def test_a_record_holds_no_number_beyond_64_bits(tmp_path: Path, number: int) -> None:
    """pydantic takes whole numbers of any size, and sums, arrays and divisions further on do not."""
    path = tmp_path / "record.json"
    RunRecord(model="tiny-glm").save(path)
    text = path.read_text()
    path.write_text(text.replace('"schema_version": 1', f'"schema_version": {number}'))
    with pytest.raises(AssayError) as raised:
        RunRecord.load(path)
    assert "schema_version is " in str(raised.value) and "beyond 64 bits" in str(raised.value)
    path.write_text(text.replace("tiny-glm", "9" * 64))  # text is none
    assert RunRecord.load(path).model == "9" * 64
