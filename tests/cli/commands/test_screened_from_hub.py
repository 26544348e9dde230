"""Checkpoints of the hub, screened as their shards come: the figures of folders, every shard once, never all on the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import local_hub
import pytest
from command_errors import one_error
from command_line import Run
from tiny_families import glm4_moe, make_tiny

from assay.records.link import LinkAnswer
from assay.records.pack import Pack
from assay.records.screening import Screening

pytestmark = pytest.mark.slow

SHARDS = 4
HEADER_BYTES = 2 * local_hub.FIRST_BYTES
"""Of a shard: read for its mirror, and to look for damage."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source in several shards, w4a16 of it, texts.jsonl."""
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("streamed")
    make_tiny(folder / "source", glm4_moe(num_hidden_layers=5), shards=SHARDS)
    quantize(str(folder / "source"), precision="w4a16-g32", out=folder / "w4a16")
    replies = [{"prompt": f"{n} + 3?", "reply": f"</think>It is {n + 3}."} for n in range(24)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[local_hub.Hub]:
    hub = local_hub.Hub(Path(shutil.copytree(folder / "source", tmp_path / "published")))
    hub.use(monkeypatch, tmp_path / "home")
    yield hub
    hub.close()


def screened(run: Run, *words: str | Path) -> Screening:
    code, out, err = run("screen", *map(str, words), "--json")
    assert code in (0, 1), err
    return Screening.model_validate_json(out)


def figures(record: Screening) -> dict[str, object]:
    """All but places, times and what the reference is called."""
    whole = record.model_dump(exclude={"reference", "seconds", "estimate"})
    whole["candidates"] = [
        {name: value for name, value in candidate.items() if name not in ("location", "label")}
        for candidate in whole["candidates"]
    ]
    return whole


def test_a_reference_that_is_on_the_hub(hub: local_hub.Hub, folder: Path, run: Run, tmp_path: Path) -> None:
    text, out = ("--text", folder / "texts.jsonl"), tmp_path / "out"
    shards = {path.name: path.stat().st_size for path in hub.folder.glob("*.safetensors")}
    most_on_disk = 0

    def watch(_file: str, _begin: int) -> None:
        nonlocal most_on_disk
        held = [path.stat().st_blocks * 512 for path in out.rglob("*.safetensors*") if ".passes" not in path.as_posix()]
        most_on_disk = max(most_on_disk, sum(held))

    hub.on_data = watch
    of_folders = screened(run, folder / "source", folder / "w4a16", *text, "--out", tmp_path / "folders")
    code, _, err = run("screen", "org/model", str(folder / "w4a16"), *map(str, text), "--out", str(out))
    record = Screening.load(out / "screening.json")
    assert code in (0, 1) and figures(record) == figures(of_folders)
    assert record.reference == "org/model" and record.reference_sha256 == of_folders.reference_sha256
    assert f"at commit {'a' * 12}" in err and "org/model: downloading model-00001-of-0000" in err
    assert {name: hub.bytes_of[name] - num_bytes <= HEADER_BYTES for name, num_bytes in shards.items()} == dict.fromkeys(
        shards, True
    )
    assert 0 < most_on_disk < sum(shards.values())
    left = [path for path in (out / "hub").rglob("*.safetensors") if path.stat().st_blocks * 512 >= shards[path.name]]
    assert len(shards) == SHARDS and left == []


def test_a_candidate_that_is_on_the_hub(folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = local_hub.Hub(Path(shutil.copytree(folder / "w4a16", tmp_path / "published")))
    hub.use(monkeypatch, tmp_path / "home")
    try:
        text = ("--text", folder / "texts.jsonl")
        of_folders = screened(run, folder / "source", folder / "w4a16", *text, "--out", tmp_path / "folders")
        of_hub = screened(run, folder / "source", "org/model", *text, "--out", tmp_path / "out")
        assert figures(of_hub) == figures(of_folders)
        (candidate,) = of_hub.candidates
        assert (candidate.label, candidate.location) == ("model", "org/model")
        # a link, from nothing: inspected alone, then with its base
        code, out, err = run("judge", "org/model", "--json")
        answer = LinkAnswer.model_validate_json(out)
        assert (
            code in (0, 1)
            and answer.not_screened == "its weights are on the hub; with --base they are read from there, a shard at a time"
        ), err
        assert answer.steps[0].command == "assay judge org/model --base BASE"
        words = ("--base", folder / "source", *text, "--out", tmp_path / "judged")
        _, out, err = run("judge", "org/model", *map(str, words), "--json")
        answer = LinkAnswer.model_validate_json(out)
        assert answer.screening is not None and figures(answer.screening) == figures(of_folders), err
    finally:
        hub.close()


def test_a_pack_of_a_repository(hub: local_hub.Hub, folder: Path, run: Run, tmp_path: Path) -> None:
    text = ("--text", str(folder / "texts.jsonl"))
    assert run("pack", "org/model", *text, "--out", str(tmp_path / "pack"))[0] == 0
    assert run("pack", str(folder / "source"), *text, "--out", str(tmp_path / "of-folder"))[0] == 0
    of_hub, of_folder = (Pack.load(tmp_path / name / "pack.json") for name in ("pack", "of-folder"))
    assert (of_hub.reference, of_folder.reference) == ("org/model", "source")
    assert of_hub.files == of_folder.files and of_hub.reference_sha256 == of_folder.reference_sha256
    assert not list(tmp_path.glob(".*"))


def test_a_shard_that_arrives_otherwise_than_stated(hub: local_hub.Hub, folder: Path, run: Run, tmp_path: Path) -> None:
    text = ("--text", str(folder / "texts.jsonl"), "--out", str(tmp_path / "out"))
    hub.spoil = 10
    code, _, err = run("screen", "org/model", str(folder / "w4a16"), *text)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: org/model/model-0000") and "Traceback" not in err
    hub.spoil = 0
    assert run("screen", "org/model", str(folder / "w4a16"), *text)[0] in (0, 1)


def test_what_else_lies_in_its_place_stays(hub: local_hub.Hub, folder: Path, run: Run, tmp_path: Path) -> None:
    """As where models are kept in a folder called hub; and what a killed mirror left is its own."""
    own = tmp_path / "hub" / "model"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    words = ("screen", "org/model", str(folder / "w4a16"), "--text", str(folder / "texts.jsonl"), "--out", str(tmp_path))
    assert one_error(run(*words)) == f"{own}: holds something else than a copy of org/model; give another --out"
    assert [path.name for path in own.iterdir()] == ["config.json"] and (own / "config.json").read_text() == "{}"
    shutil.rmtree(own)
    hub.is_gated = True
    assert "is gated" in one_error(run(*words))
    hub.is_gated = False
    assert run(*words)[0] in (0, 1)


def test_a_repository_that_is_not_there(hub: local_hub.Hub, folder: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run("screen", "nobody/nothing", str(folder / "w4a16"), "--out", str(tmp_path / "out"))
    assert code == 2 and err.splitlines()[-1].startswith("error: nobody/nothing: ")
