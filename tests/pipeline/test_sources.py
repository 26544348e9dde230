"""What a checkpoint was made from, and what is taken for done: attacks on both from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_errors import one_error, perturbed
from command_line import Run
from given_servers import given_servers
from local_hub import Hub

from assay.records.manifest import Manifest
from assay.records.run import RunRecord, SourceData
from assay_pipeline.run_folders import choose_run

W4A16 = ("--precision", "w4a16")


@pytest.fixture
def source(tiny_glm: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_glm, tmp_path / "source"))


@pytest.fixture
def hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(source)
    server.use(monkeypatch, tmp_path / "home")
    yield server
    server.close()


def made(run: Run, *words: object) -> str:
    """What a successful command prints: results, then progress."""
    code, out, err = run(*words)
    assert code == 0, out + err
    return out + err


def flip(path: Path, position: int = -1) -> None:
    """Change one byte, in place."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------ another source
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_another_small_file_is_another_source(run: Run, source: Path, name: str) -> None:
    made(run, "quantize", source, *W4A16, "--out", "made")
    path = source / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2") + b" ")
    message = one_error(run("quantize", source, *W4A16, "--out", "made"))
    assert message.startswith(f"made: holds a finished checkpoint made from other data ({source}: {name} was sha256 ")


def test_a_small_file_that_came_or_went_is_another_source(run: Run, source: Path) -> None:
    made(run, "quantize", source, *W4A16, "--out", "made")
    (source / "special_tokens_map.json").write_text("{}")
    assert "special_tokens_map.json is new" in one_error(run("quantize", source, *W4A16, "--out", "made"))
    (source / "special_tokens_map.json").unlink()
    (source / "README.md").write_text("words are not copied")
    assert "done before and verified" in made(run, "quantize", source, *W4A16, "--out", "made")


def test_candidates_with_another_config_than_the_source_has_are_refused(run: Run, source: Path) -> None:
    made(run, "quantize", source, "--precisions", "w4a16")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    with given_servers("fp8", "w4a16", "bf16") as servers:
        Path("here.yaml").write_text(servers.profile())
        asked = ("evaluate", source, "--precisions", "w4a16", "--suite", "quick", "--profile", "here.yaml")
        assert "config.json was sha256 " in one_error(run(*asked))


def test_models_of_one_name_by_two_owners_are_two_runs(tmp_path: Path) -> None:
    def about(owner: str, files: dict[str, str] | None) -> RunRecord:
        return RunRecord(model="X", source=SourceData(location=f"{owner}/X", revision="a" * 40 if files else None, files=files))

    first = about("org1", {"model.safetensors": "sha256:1"})
    (tmp_path / "X").mkdir()
    first.save(tmp_path / "X" / "run.json")
    for other in (about("org2", {"model.safetensors": "sha256:2"}), about("org2", None)):
        folder, why = choose_run(tmp_path, other)
        assert folder != tmp_path / "X" and why == f"{tmp_path}/X holds checkpoints made from org1/X"


# ------------------------------------------------------------------------------------------------ from the hub
def test_a_moved_main_gets_a_run_of_its_own(run: Run, hub: Hub) -> None:
    made(run, "quantize", "org/model", *W4A16)
    first = Manifest.load(Path("runs/model/w4a16/checkpoint/assay_manifest.json"))
    perturbed(hub.folder, hub.folder.with_name("next"), 1)
    hub.folder, hub.commit = hub.folder.with_name("next"), "b" * 40
    said = made(run, "quantize", "org/model", *W4A16)
    assert "runs/model holds checkpoints made from org/model at commit aaaaaaaaaaaa; writing to runs/model-" in said
    [other] = [path for path in Path("runs").iterdir() if path.name != "model"]
    second = Manifest.load(other / "w4a16/checkpoint/assay_manifest.json")
    assert (first.source_revision, second.source_revision) == ("a" * 40, "b" * 40)
    assert first.plan_sha256 == second.plan_sha256 and first.checkpoint_sha256 != second.checkpoint_sha256


def test_a_push_between_plan_and_download_changes_nothing(run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub here has one commit at a time: whoever asks for another one than was planned is told so."""
    from assay_pipeline import planning

    made_plan = planning.plan_for

    def then_pushed(*arguments: object) -> object:
        plan = made_plan(*arguments)  # type: ignore[arg-type]
        hub.commit = "b" * 40
        return plan

    monkeypatch.setattr("assay_pipeline.quantizing.plan_for", then_pushed)
    code, _, err = run("quantize", "org/model", *W4A16)
    assert code == 2 and "\nerror: org/model: no such revision on " in err
    hub.commit = "a" * 40
    assert "no such revision" in one_error(run("quantize", "org/model", *W4A16, "--stream-from", "hub"))


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_download_that_is_not_what_the_hub_states_is_fetched_again_or_refused(run: Run, hub: Hub, name: str) -> None:
    true = (hub.folder / name).read_bytes()
    hub.replaced[name] = true[:-1] + bytes([true[-1] ^ 1])
    code, _, err = run("quantize", "org/model", *W4A16)
    what = "SHA-256" if name.endswith("safetensors") else "git hash"
    assert code == 2 and f"\nerror: org/model/{name}: its {what} is not the one the hub states, downloaded twice; " in err
    assert not Path("runs/model/w4a16/checkpoint").exists()
    hub.replaced.clear()
    assert "org/model: its 6 files are compared with the hashes that" in made(run, "quantize", "org/model", *W4A16)
    # A copy in the cache that rotted is fetched again.
    [cached] = (hub.folder.parent / "home" / "hub").rglob(f"snapshots/*/{name}")
    shutil.rmtree("runs")
    flip(cached.resolve())
    made(run, "quantize", "org/model", *W4A16)
    assert cached.read_bytes() == true


@pytest.mark.parametrize("way", [(), ("--stream-from", "hub")])
def test_a_hub_that_states_no_hash_of_a_file_is_refused(run: Run, hub: Hub, way: tuple[str, ...]) -> None:
    listing = json.loads(hub.list_of_files())
    for one in listing["siblings"]:
        if one["rfilename"] == "model-00002-of-00002.safetensors":
            del one["blobId"], one["lfs"]
    hub.listing = json.dumps(listing).encode()
    assert one_error(run("quantize", "org/model", *W4A16, *way)) == (
        "org/model: the hub states no hash of model-00002-of-00002.safetensors, so a damaged download could not be told from "
        "a whole one; download it by other means and give the folder"
    )
    assert sum(count for name, count in hub.bytes_of.items() if name.endswith("safetensors")) < 200_000


# ------------------------------------------------------------------------------------------------ done before
@pytest.mark.parametrize("name", ["params.json", "modeling_other.py", "generation_config.json.bak", "tokenizer.model"])
def test_a_file_that_came_after_the_verification_is_not_passed_over(run: Run, source: Path, name: str) -> None:
    made(run, "quantize", source, *W4A16, "--out", "made")
    (Path("made") / name).write_text("{}")
    assert "done before and verified" not in run("quantize", source, *W4A16, "--out", "made")[1]


def test_a_verification_of_another_folder_proves_nothing(run: Run, source: Path) -> None:
    """A record that was copied along with the checkpoint is of other files."""
    made(run, "quantize", source, *W4A16, "--out", "made")
    shutil.copytree("made", "copied")
    assert "done before and verified" not in made(run, "quantize", source, *W4A16, "--out", "copied")


def test_a_card_that_was_not_written_any_more_is_written(run: Run, source: Path) -> None:
    made(run, "quantize", source, *W4A16, "--out", "made")
    card = Path("made/README.md").read_text()
    Path("made/README.md").unlink()
    assert "done before and verified" in made(run, "quantize", source, *W4A16, "--out", "made")
    assert Path("made/README.md").read_text() == card


# ------------------------------------------------------------------------------------------------ --out
def test_records_of_a_checkpoint_touch_nothing_beside_it(run: Run, source: Path) -> None:
    theirs = {Path(name): f"of somebody else: {name}" for name in ("plan.json", "verify.json", "assay_plan.json")}
    for path, text in theirs.items():
        path.write_text(text)
    made(run, "quantize", source, *W4A16, "--out", "one")
    made(run, "quantize", source, "--precision", "fp8", "--out", "two")
    made(run, "quantize", source, "--precision", "fp8", "--out", "checkpoint")
    assert {path: path.read_text() for path in theirs} == theirs
    assert sorted(path.name for path in Path().iterdir()) == sorted(["one", "two", "checkpoint", "source", *map(str, theirs)])


@pytest.mark.parametrize("out", ["source", "source/made", "source/deep/made"])
def test_out_inside_the_source_is_refused(run: Run, source: Path, out: str) -> None:
    before = sorted(source.rglob("*"))
    assert one_error(run("quantize", source, *W4A16, "--out", out)).startswith(f"{out}: ")
    assert sorted(source.rglob("*")) == before
