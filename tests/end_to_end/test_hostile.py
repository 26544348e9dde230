"""Hostile checkpoints through the command line: each ends in one line that names the file, exit code 2, and nothing written.

The files are real; what is damaged is damaged in the bytes on disk. Nothing of a source is ever executed or followed out
of its folder, and nothing makes the reader hang or allocate without bound.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_tiny_glm4_moe

pytestmark = pytest.mark.slow


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Run = Callable[..., tuple[int, str, str]]
Entries = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(
        tmp_path_factory.mktemp("hostile") / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128
    )


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "source"))


def assert_refused(run: Run, source: Path, *expected: str) -> None:
    """`assay plan` and `assay quantize` say it in one line and write nothing."""
    out_folder = source.parent / "out"
    for command in (("plan", source, "-p", "w4a16"), ("quantize", source, "-p", "w4a16", "--out", out_folder)):
        code, out, err = run(*command)
        lines = err.strip().splitlines()
        assert (code, out, len(lines)) == (2, "", 1), err[-2000:]
        assert lines[0].startswith("error: ") and len(lines[0]) < 1000, lines[0][:2000]
        for words in expected:
            assert words in lines[0]
        assert not out_folder.exists()


# ------------------------------------------------------------------------------------------------ headers of shards
def header_of(path: Path) -> tuple[Entries, bytes]:
    """(entries, data) of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_file(path: Path, header: str | bytes, data: bytes, *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def edited(change: Callable[[Entries], object]) -> Callable[[Path], None]:
    """Damage that changes the entries of the second shard's header."""

    def damage(folder: Path) -> None:
        entries, data = header_of(folder / SECOND)
        change(entries)
        write_file(folder / SECOND, json.dumps(entries), data)

    return damage


def entry(name: str = "model.norm.weight", **values: Any) -> Callable[[Path], None]:
    return edited(lambda entries: entries[name].update(values))


def with_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Damage that changes the text of the second shard's header."""

    def damage(folder: Path) -> None:
        entries, data = header_of(folder / SECOND)
        write_file(folder / SECOND, change(json.dumps(entries)), data)

    return damage


def with_length(length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        entries, data = header_of(folder / SECOND)
        write_file(folder / SECOND, json.dumps(entries), data, length=length)

    return damage


def huge_header(folder: Path) -> None:
    """A header of one byte more than safetensors allows, as a hole."""
    with (folder / SECOND).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(8 + 100_000_001 + 1000)


def shift(begin: int, end: int) -> Callable[[Path], None]:
    """Move the offsets of the final norm by so many bytes."""

    def change(entries: Entries) -> None:
        first, last = entries["model.norm.weight"]["data_offsets"]
        entries["model.norm.weight"]["data_offsets"] = [first + begin, last + end]

    return edited(change)


def again(text: str) -> str:
    """The header with its norm named twice, first in another place: json.loads would keep the second without a word."""
    return '{"model.norm.weight": ' + json.dumps(json.loads(text)["lm_head.weight"]) + ", " + text[1:]


def truncated(folder: Path) -> None:
    with (folder / SECOND).open("r+b") as file:
        file.truncate((folder / SECOND).stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(with_length(1 << 20 << 3), "header", id="header beyond the file"),
        pytest.param(with_length((1 << 64) - 1), "18446744073709551615", id="header of 2^64 - 1 bytes"),
        pytest.param(huge_header, "100000001 bytes (allowed: 2 to 100000000)", id="header over the limit"),
        pytest.param(lambda f: (f / SECOND).write_bytes(b""), "0 bytes", id="empty file"),
        pytest.param(lambda f: (f / SECOND).write_bytes(b"\x01\x00"), "2 bytes", id="two bytes"),
        pytest.param(truncated, "truncated", id="truncated by one byte"),
        pytest.param(with_text(lambda text: text[:-1]), "not JSON", id="header is not JSON"),
        pytest.param(with_text(lambda text: "[" + text + "]"), "list", id="header is a list"),
        pytest.param(with_text(lambda _: "[" * 200_000), "not JSON", id="deeply nested header"),
        pytest.param(with_text(lambda text: text.replace('"BF16"', '"BF16\\udcff"', 1)), "has dtype BF16", id="lone surrogate"),
        pytest.param(lambda f: write_file(f / SECOND, b'{"\xff\xfe": 1}', b""), "not JSON", id="header is not UTF-8"),
        pytest.param(with_text(again), "model.norm.weight", id="a name twice in one header"),
        pytest.param(shift(-2, -2), "model.norm.weight", id="overlapping tensors"),
        pytest.param(shift(2, 2), "model.norm.weight", id="a gap between tensors"),
        pytest.param(entry(data_offsets=[-256, 0]), "model.norm.weight", id="negative offsets"),
        pytest.param(entry(data_offsets=[256, 0]), "model.norm.weight", id="end before begin"),
        pytest.param(entry(data_offsets=[1 << 40, (1 << 40) + 256]), "gap", id="offsets beyond the file"),
        pytest.param(entry(data_offsets=[0.0, 256.0]), "model.norm.weight", id="offsets that are no integers"),
        pytest.param(entry(data_offsets="0256"), "model.norm.weight", id="offsets that are text"),
        pytest.param(entry(dtype="F32"), "needs 512 bytes", id="dtype disagrees with size"),
        pytest.param(entry(dtype="F4_E3M0"), "has dtype F4_E3M0, known are", id="unknown dtype"),
        pytest.param(entry(dtype=["BF16"]), "model.norm.weight", id="dtype is a list"),
        pytest.param(entry(shape=[129]), "needs 258 bytes", id="shape disagrees with size"),
        pytest.param(entry(shape=[-128]), "model.norm.weight", id="negative shape"),
        pytest.param(entry(shape=[True] * 3), "model.norm.weight", id="shape of booleans"),
        pytest.param(entry(shape=128), "model.norm.weight", id="shape is a number"),
        pytest.param(entry(shape=[1 << 62, 1 << 62]), "model.norm.weight", id="shape that overflows 64 bits"),
        pytest.param(entry(shape=[1 << 63, 2, 64]), "model.norm.weight", id="shape that wraps to the right size"),
        pytest.param(with_text(lambda t: t.replace("[128]", f"[{'9' * 5000}]", 1)), "not JSON", id="a number of 5000 digits"),
        pytest.param(entry(shape=[*[1] * 100_000, 128]), "model.norm.weight", id="a hundred thousand dimensions"),
        pytest.param(entry(shape=[0], data_offsets=[0, 0]), "model.norm.weight", id="empty tensor"),
        pytest.param(edited(lambda e: e.update({"x": 7})), "header of x is damaged", id="entry is a number"),
        pytest.param(edited(lambda e: e.update({"a\nb\x1b[2J": 7})), "is damaged", id="control characters in a name"),
    ],
)
def test_a_hostile_header(run: Run, source: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(source)
    assert_refused(run, source, SECOND, words)


def test_a_name_in_two_shards(run: Run, source: Path) -> None:
    entries, data = header_of(source / FIRST)
    end = len(data)
    entries["model.norm.weight"] = {"dtype": "BF16", "shape": [128], "data_offsets": [end, end + 256]}
    write_file(source / FIRST, json.dumps(entries), data + bytes(256))
    assert_refused(run, source, "model.norm.weight", FIRST, SECOND)


def test_an_empty_weight(run: Run, source: Path) -> None:
    """A matrix of no rows where a weight is to be quantized."""
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    shard = next(s for s in (FIRST, SECOND) if name in header_of(source / s)[0])
    entries, data = header_of(source / shard)
    begin, end = entries[name]["data_offsets"]
    entries[name].update(shape=[0, 128], data_offsets=[begin, begin])
    for other in entries.values():
        if "data_offsets" in other and other["data_offsets"][0] >= end:
            other["data_offsets"] = [offset - (end - begin) for offset in other["data_offsets"]]
    write_file(source / shard, json.dumps(entries), data[:begin] + data[end:])
    assert_refused(run, source, name, shard)


# ------------------------------------------------------------------------------------------------ index and config
def index_entry(file: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    "file",
    ["../source/" + SECOND, "/etc/passwd", "..\\" + SECOND, "sub/" + SECOND, "", ".", "..", f"{SECOND}\0", 7, None, ["a"],
     "config.json", f"./{SECOND}", f"{SECOND}/", "a\n" + SECOND],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(run: Run, source: Path, file: object) -> None:
    index_entry(file)(source)
    assert_refused(run, source, INDEX)


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())  # type: ignore[return-value]


def config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def huge_json(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 40)  # a hole: reading it whole would take a terabyte

    return damage


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("[]", id="list"),
        pytest.param("7", id="number"),
        pytest.param("", id="empty"),
        pytest.param("{", id="torn"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param("[" * 200_000, id="nested"),
        pytest.param('{"a":' * 200_000, id="nested objects"),
        pytest.param('{"a": ' + "9" * 5000 + "}", id="long number"),
    ],
)
def test_json_that_is_none(run: Run, source: Path, name: str, content: str | bytes) -> None:
    written(name, content)(source)
    assert_refused(run, source, name)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_of_a_terabyte(run: Run, source: Path, name: str) -> None:
    huge_json(name)(source)
    assert_refused(run, source, name)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": ["glm4_moe"], "architectures": 7},
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": None},
        {"n_routed_experts": 10**9},
        {"n_routed_experts": "many"},
        {"num_nextn_predict_layers": 10**9},
        {"num_nextn_predict_layers": {"a": 1}},
    ],
    ids=str,
)
def test_a_config_with_impossible_numbers(run: Run, source: Path, values: dict[str, Any]) -> None:
    """Refused at once: no loop or set grows with a number somebody wrote into a config."""
    config(**values)(source)
    assert_refused(run, source, "config.json", next(iter(values)))


def test_a_config_nested_as_deep_as_a_parser_goes(run: Run, source: Path) -> None:
    """It was read, and what walked through it afterwards ended in a RecursionError."""
    config(hidden_act=json.loads(450 * "[" + 450 * "]"), vocab_size=False)(source)
    assert_refused(run, source, "config.json: more than 100 lists and objects inside each other; download the file again")


# ------------------------------------------------------------------------------------------------ what lies in the folder
@pytest.mark.parametrize("name", [FIRST, SECOND, "config.json", INDEX])
def test_a_link_out_of_the_folder(run: Run, source: Path, name: str) -> None:
    elsewhere = source.parent / "elsewhere"
    elsewhere.mkdir()
    shutil.move(source / name, elsewhere / name)
    (source / name).symlink_to(elsewhere / name)
    assert_refused(run, source, name)


def test_a_link_to_a_device(run: Run, source: Path) -> None:
    (source / "config.json").unlink()
    (source / "config.json").symlink_to("/dev/zero")
    assert_refused(run, source, "config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_tokenizer_that_links_out_is_not_copied(run: Run, source: Path, name: str) -> None:
    secret = source.parent / "secret"
    secret.write_text("not for you")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(secret)
    out_folder = source.parent / "out"
    code, _, err = run("quantize", source, "-p", "w4a16", "--out", out_folder)
    assert code == 0, err
    assert not (out_folder / name).exists() and not (out_folder / name).is_symlink()
    assert all(path.read_bytes() != b"not for you" for path in out_folder.iterdir())


def test_links_inside_a_hugging_face_cache_are_followed(run: Run, source: Path, tmp_path: Path) -> None:
    """The cache's own layout: snapshots/COMMIT/file -> ../../blobs/HASH."""
    entry_folder = tmp_path / "models--org--tiny"
    snapshot, blobs = entry_folder / "snapshots" / "0123abcd", entry_folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.move(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
    code, out, err = run("plan", snapshot, "-p", "w4a16", "--json")
    assert code == 0, err
    assert len(json.loads(out)["tensors"]) == 67


@pytest.mark.parametrize("name", [SECOND, "config.json", INDEX, "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file(source: Path, name: str, kind: str) -> None:
    """In a child with a deadline: opening a pipe that nobody writes to would hang."""
    if name == "model.safetensors":
        for path in (source / FIRST, source / SECOND, source / INDEX):
            path.unlink()
    else:
        (source / name).unlink()
    os.mkfifo(source / name) if kind == "pipe" else (source / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from assay_cli.root import main; main()", "plan", source, "-p", "w4a16"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=source.parent,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and str(source) in line


class _Creates:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def write_pickle(path: Path, creates: Path) -> None:
    """A torch-style `.bin` whose unpickling creates the folder `creates`; proved to work once."""
    import pickle  # noqa: TID251

    data = pickle.dumps(_Creates(creates))
    pickle.loads(data)
    creates.rmdir()
    path.write_bytes(data)


def test_pickled_weights_are_never_opened(run: Run, source: Path, tmp_path: Path) -> None:
    """Alone they are refused, beside safetensors they are neither read nor copied."""
    trap = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "tokenizer.pkl", "optimizer.pt", "training_args.bin"):
        write_pickle(source / name, trap)
        os.utime(source / name, ns=(0, 0))
    out_folder = tmp_path / "out"
    code, _, err = run("quantize", source, "-p", "w4a16", "--out", out_folder)
    assert code == 0, err
    assert not trap.exists()
    assert {path.suffix for path in out_folder.iterdir()} == {".safetensors", ".json", ".md"}
    shutil.rmtree(out_folder)
    for path in source.glob("*.safetensors*"):
        path.unlink()
    assert_refused(run, source, str(source), "no *.safetensors")
    assert not trap.exists()


def test_a_header_at_the_limit_costs_bounded_memory(tmp_path: Path, whole: Path) -> None:
    """99 MB of spaces are legal JSON around a small header: read, and no more than a few times that in memory."""
    folder = Path(shutil.copytree(whole, tmp_path / "source"))
    entries, data = header_of(folder / SECOND)
    write_file(folder / SECOND, json.dumps(entries) + " " * 99_000_000, data)
    code = (
        "import sys; from pathlib import Path; from assay_quantize.checkpoint.checkpoint import open_checkpoint;"
        "print(len(open_checkpoint(Path(sys.argv[1])).tensors));"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, timeout=120)
    tensors, peak_kib = map(int, done.stdout.split())
    assert tensors == 67
    assert peak_kib < 512 << 10, f"{peak_kib} KiB"
