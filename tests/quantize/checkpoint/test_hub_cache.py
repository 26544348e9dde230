"""Files of a data set in the Hugging Face cache: what a hub says of them names no paths, and what comes is what it states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import Hub

from assay import hub_session
from assay.errors import CheckpointError
from assay_quantize.checkpoint import hub as hub_module
from assay_quantize.checkpoint.hub import Repository, file_in_cache
from assay_quantize.remote.hub_download import download_model

TEXT = b'{"text": "The old dog waits near the river."}\n' * 20
SHARD = bytes(range(256)) * 100


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(TEXT)
    (folder / "large.safetensors").write_bytes(SHARD)  # one with a SHA-256
    made = Hub(folder)
    made.use(monkeypatch, tmp_path / "home")
    yield made
    made.close()


def read(name: str) -> bytes:
    return file_in_cache(Repository("org/model", kind="dataset"), name).read_bytes()


def refused(name: str = "a.jsonl") -> str:
    with pytest.raises(CheckpointError) as raised:
        read(name)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def listing(hub: Hub, **changes: Any) -> bytes:
    """The list of files with others in place of what it says of a.jsonl, or of itself."""
    stated = json.loads(hub.list_of_files())
    of_file = {key: changes.pop(key) for key in ("rfilename", "size", "blobId") if key in changes}
    stated["siblings"][0] |= of_file
    return json.dumps(stated | changes).encode()


def test_small_and_large_files_are_what_the_hub_states(hub: Hub) -> None:
    assert (read("a.jsonl"), read("large.safetensors")) == (TEXT, SHARD)
    asked = len(hub.asked)
    assert read("a.jsonl") == TEXT
    assert [one.path for one in hub.asked[asked:]] == ["/api/datasets/org/model/revision/main?blobs=true"]


@pytest.mark.parametrize(("name", "hash_name"), [("a.jsonl", "git hash"), ("large.safetensors", "SHA-256")])
def test_other_bytes_of_the_same_length_are_no_data(hub: Hub, tmp_path: Path, name: str, hash_name: str) -> None:
    """Before, they were calibrated on."""
    hub.replaced[name] = bytes(len(hub.folder.joinpath(name).read_bytes()))
    assert refused(name) == (
        f"datasets/org/model/{name}: its {hash_name} is not the one the hub states, downloaded twice; something between "
        f"{hub.url} and here changes it; try another network, or give a local folder"
    )
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size > 300] == []
    del hub.replaced[name]
    assert read(name) == hub.folder.joinpath(name).read_bytes()


def test_what_was_damaged_in_the_cache_is_fetched_again(hub: Hub) -> None:
    path = file_in_cache(Repository("org/model", kind="dataset"), "a.jsonl").resolve()
    path.write_bytes(TEXT.replace(b"dog", b"cat"))
    assert read("a.jsonl") == TEXT


@pytest.mark.parametrize("name", ["../../../../../outside", "/tmp/assay-outside", "..", "a\\b", "x" * 300])
@pytest.mark.parametrize("what", ["ETag", "commit"])
def test_no_header_names_a_path(hub: Hub, tmp_path: Path, what: str, name: str) -> None:
    """huggingface_hub 1.33 writes the file to `blobs/ETAG`, and an empty one to `.no_exist/COMMIT/NAME`."""
    if what == "ETag":
        hub.etag = name
    else:
        hub.commit_of_files = name
    assert refused().startswith(f"{hub.url} states {ascii(name)[:80]} as the {what} of a file, which no hub does; something")
    assert not Path("/tmp/assay-outside").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "hub"}
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name", ["../a.jsonl", "/a.jsonl", "a/../../b.jsonl", "a\x00.jsonl", "\x1b[31m.jsonl", "x" * 300, "a//b", ""]
)
def test_no_list_names_a_path(hub: Hub, name: str) -> None:
    hub.listing = listing(hub, rfilename=name)
    assert refused() == f"datasets/org/model: {ascii(name)[:100]} is listed, which is no path in a data set"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": None}, "/a.jsonl: the hub states no size or no hash of it, so a damaged download could not be told"),
        ({"size": -5}, "/a.jsonl: the hub states no size or no hash of it"),
        ({"size": True}, "/a.jsonl: the hub states no size or no hash of it"),
        ({"size": 10**30}, ": file list: 'siblings.0.size' is 100000000000... of 31 digits, beyond 64 bits"),
        ({"blobId": "../../x"}, "/a.jsonl: the hub states no size or no hash of it"),
        ({"size": 7}, "/a.jsonl: more than the 7 bytes that the hub states were sent; try again"),
        ({"size": 10**15}, f"/a.jsonl: {len(TEXT)} bytes where the hub states 1000000000000000, downloaded twice"),
    ],
)
def test_a_list_that_states_little_is_refused(hub: Hub, changes: dict[str, Any], problem: str) -> None:
    hub.listing = listing(hub, **changes)
    assert refused().startswith(f"datasets/org/model{problem}")


def test_the_commit_that_was_asked_for(hub: Hub) -> None:
    hub.listing = listing(hub, sha="b" * 40)
    with pytest.raises(CheckpointError, match=r"datasets/org/model: commit aaaaaaaaaaaa was asked for, bbbbbbbbbbbb is listed"):
        Repository("org/model", hub.commit, "dataset")


# ------------------------------------------------------------------------------------------------ bounds
def test_a_list_has_an_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_session, "MAX_ANSWER_BYTES", 1000)
    hub.listing = listing(hub, x="a" * 2000)
    assert refused() == (f"{hub.url}: the answer for /api/datasets/org/model/revision/main is longer than 1,000 bytes")


def test_a_list_of_too_many_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_FILES", 2)
    assert refused() == "datasets/org/model: 3 files are listed, at most 2 are read"


def test_a_list_that_comes_letter_by_letter(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_session, "PATIENCE_S", 0.05)
    hub.drips_s = 0.002
    assert "came too slowly" in refused()


def test_pages_have_an_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `snapshot_download`, which asks page after page."""
    monkeypatch.setattr(hub_session, "MAX_PAGES", 5)
    hub.endless_pages = True
    with pytest.raises(CheckpointError, match="has more than 5 pages"):
        download_model("org/model", hub.commit, {})
    assert sum("/tree/" in one.path for one in hub.asked) == 6
