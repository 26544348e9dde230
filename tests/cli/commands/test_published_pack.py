"""A pack that is published as a data set, and screened against where it lies: two hubs on loopback, one written, one read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import local_hub
import pytest
import upload_hub
from command_errors import one_error
from command_line import Run
from huggingface_hub import DatasetCard
from tiny_families import glm4_moe, make_tiny

from assay.records.pack import Pack
from assay.records.screening import Screening, StatedTexts

pytestmark = pytest.mark.slow

REPO = "me/tiny-pack"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, pack of it."""
    from assay_pipeline.comparison.packing import pack

    folder = tmp_path_factory.mktemp("published")
    make_tiny(folder / "source", glm4_moe())
    replies = [{"prompt": f"{n} + 3?", "reply": f"</think>It is {n + 3}."} for n in range(24)]
    (folder / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    stated = StatedTexts(source="made for this test", licence="MIT", date="2026")
    pack(folder / "source", text=[folder / "replies.jsonl"], out=folder / "pack", stated=stated)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[upload_hub.Hub]:
    hub = upload_hub.Hub()
    hub.use(monkeypatch, tmp_path / "home")
    yield hub
    hub.close()


def test_the_data_set_holds_the_pack_and_a_card(hub: upload_hub.Hub, folder: Path, run: Run) -> None:
    code, out, err = run("publish", str(folder / "pack"), REPO)
    assert code == 0, err
    held = hub.files(f"datasets/{REPO}")
    card = DatasetCard(held.pop("README.md").decode())
    assert held == {
        path.relative_to(folder / "pack").as_posix(): path.read_bytes()
        for path in (folder / "pack").rglob("*")
        if path.is_file()
    }
    commit = hub.repositories[f"datasets/{REPO}"].branches["main"]
    first, second = out.splitlines()
    assert first.startswith(f"{hub.url}/datasets/{REPO}/tree/{commit}: pack of source: {len(held) + 1} files, ")
    assert second == f"read back: {len(held) + 1} files are the same"
    assert (card.data["license"], card.data["tags"]) == ("mit", ["assay", "quantization", "kl-divergence"])
    record = Pack.load(folder / "pack" / "pack.json")
    for told in (
        f"assay screen --pack {REPO} CANDIDATE",
        record.reference_sha256,
        record.panel.sha256,
        "made for this test; 2026",
    ):
        assert told in card.text
    code, out, err = run("publish", str(folder / "pack"), REPO)
    assert code == 0 and f", {len(held) + 1} of them there before" in out, err


def test_a_dry_run_asks_nothing_and_a_changed_pack_is_refused(
    hub: upload_hub.Hub, folder: Path, run: Run, tmp_path: Path
) -> None:
    code, out, _ = run("publish", str(folder / "pack"), REPO, "--dry-run")
    assert code == 0 and out.splitlines()[-1].startswith("pack of source: ") and "nothing was uploaded" in out
    changed = tmp_path / "changed"
    for path in (folder / "pack").rglob("*"):
        if path.is_file():
            (changed / path.relative_to(folder / "pack")).parent.mkdir(parents=True, exist_ok=True)
            (changed / path.relative_to(folder / "pack")).write_bytes(path.read_bytes())
    (changed / "texts.jsonl").write_text("{}\n")
    assert one_error(run("publish", str(changed), REPO)) == (
        f"{changed}: is not the pack that was sealed: it was changed in texts.jsonl; get or make it again"
    )
    assert one_error(run("publish", str(folder / "pack"), REPO, "--despite", "FAIL")) == (
        "--despite: a pack has no verdict; leave it out"
    )
    assert hub.asked == []


def test_screened_against_where_it_lies(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Downloaded once, sealed; card and .gitattributes do not count."""
    published = tmp_path / "data set"
    (published / "states").mkdir(parents=True)
    for path in (folder / "pack").rglob("*"):
        if path.is_file():
            (published / path.relative_to(folder / "pack")).parent.mkdir(parents=True, exist_ok=True)
            (published / path.relative_to(folder / "pack")).write_bytes(path.read_bytes())
    (published / "README.md").write_text("---\n---\n")
    (published / ".gitattributes").write_bytes(upload_hub.ATTRIBUTES)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    hub = local_hub.Hub(published)
    hub.use(monkeypatch, tmp_path / "home")
    try:
        words = ("screen", "--pack", "org/model", str(folder / "source"), "--json", "--out", str(tmp_path / "a"))
        code, out, err = run(*words)
        assert code == 0, err
        [candidate] = Screening.model_validate_json(out).candidates
        assert candidate.drift.kl_mean.value == 0
        asked = len([asked for asked in hub.asked if "resolve" in asked.path])
        code, _, err = run(*words[:-1], str(tmp_path / "b"))
        assert code == 0, err
        assert len([asked for asked in hub.asked if "resolve" in asked.path]) == asked
        (published / "pack.json").unlink()
        hub.commit = "b" * 40
        assert one_error(run(*words)) == (
            "datasets/org/model: has no pack.json, so it is no pack; give one that `assay publish` uploaded"
        )
    finally:
        hub.close()
