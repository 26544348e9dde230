"""A checkpoint on the hub: the same headers as on disk, by range requests; its weights are never sent, its token only to it.

The hub is a local one (`local_hub.py`) that sends shards from another host, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hollow
import httpx
import pytest
from huggingface_hub import constants
from local_hub import TOKEN, Hub

from assay.errors import CheckpointError
from assay.hub_errors import hub_error
from assay.recipes.model import Location
from assay_pipeline.targets import local_checkpoint
from assay_quantize.checkpoint import hub
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.hub import open_hub_checkpoint
from assay_quantize.checkpoint.torch_tensors import read_tensor

INDEX = "model.safetensors.index.json"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(hollow.hollow_model(tmp_path / "model", "glm-5.2", layers=4, experts=64, shards=5))
    server.is_hollow = True
    server.use(monkeypatch, tmp_path / "home")
    yield server
    server.close()


def error_of(hub_id: str = "org/model", revision: str = "main") -> str:
    with pytest.raises(CheckpointError) as caught:
        open_hub_checkpoint(hub_id, revision)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    return str(caught.value)


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


# ------------------------------------------------------------------------------------------------ what is read
def test_headers_from_the_hub_are_those_on_disk_and_weights_stay_there(served: Hub) -> None:
    from_hub, from_disk = open_hub_checkpoint("org/model"), open_checkpoint(served.folder)
    assert from_hub.tensors == from_disk.tensors
    assert (from_hub.shards, from_hub.files, from_hub.config) == (from_disk.shards, from_disk.files, from_disk.config)
    assert from_hub.sha256 == from_disk.sha256
    assert (from_hub.location, from_hub.folder, from_hub.revision) == ("org/model", None, served.commit)
    assert sum(from_hub.shards.values()) > 10_000_000_000
    stated = {name: f"sha256:{served.sha256_of(served.folder / name)}" for name in from_hub.shards}
    config = (served.folder / "config.json").read_bytes()
    assert from_hub.data == stated | {"config.json": f"blob:{git_hash(config)}"}
    assert from_disk.data["config.json"] == f"sha256:{hashlib.sha256(config).hexdigest()}"
    assert all(served.bytes_of[shard] <= hub.FIRST_BYTES for shard in from_hub.shards)
    assert len(served.asked) == 1 + 2 + 2 * 5, "the list, config and index; for each shard the hub and its storage"
    with pytest.raises(CheckpointError, match="org/model: its weights are on the hub; download it first"):
        read_tensor(from_hub, "model.norm.weight")


def test_further_chat_templates_are_among_what_is_copied(served: Hub) -> None:
    """One folder of a repository is looked into, and of what is in it only templates count."""
    for name in ("additional_chat_templates/tool_use.jinja", "additional_chat_templates/notes.txt", "other/x.jinja"):
        (served.folder / name).parent.mkdir(exist_ok=True)
        (served.folder / name).write_text(name)
    data = open_hub_checkpoint("org/model").data
    template = "additional_chat_templates/tool_use.jinja"
    assert {name: content for name, content in data.items() if "/" in name} == {template: f"blob:{git_hash(template.encode())}"}
    assert {name for name in open_checkpoint(served.folder).data if "/" in name} == {template}


def test_a_header_longer_than_the_first_request_takes_a_second(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_BYTES", 100)
    assert open_hub_checkpoint("org/model").tensors == open_checkpoint(served.folder).tensors
    assert len(served.asked) == 1 + 2 + 4 * 5
    for path in served.folder.glob("*.safetensors"):
        assert served.bytes_of[path.name] == header_bytes(path), "exactly the header, not one byte of weights"


def test_a_passing_failure_is_tried_again(served: Hub) -> None:
    served.answers_503 = 2
    assert len(open_hub_checkpoint("org/model").tensors) == len(open_checkpoint(served.folder).tensors)


def test_what_names_the_content_where_the_hub_states_less(served: Hub) -> None:
    named = "model-00002-of-00005.safetensors"
    siblings = [
        {"rfilename": path.name} | ({"blobId": "5" * 40} if path.name == named else {}) for path in served.folder.iterdir()
    ]
    served.listing = json.dumps({"sha": served.commit, "siblings": siblings}).encode()
    files = {path.name for path in served.folder.iterdir()} - {INDEX}
    assert open_hub_checkpoint("org/model").data == {
        name: f"blob:{'5' * 40}" if name == named else f"commit:{served.commit}" for name in files
    }


# ------------------------------------------------------------------------------------------------ login
def test_the_token_goes_to_the_hub_only(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    open_hub_checkpoint("org/model")
    assert served.tokens() == {"hub": {f"Bearer {TOKEN}"}, "storage": {None}}
    error_of("org/other")


def test_the_login_of_huggingface_is_taken(served: Hub, tmp_path: Path) -> None:
    """What `hf auth login` leaves; by the command, which is another process."""
    served.is_gated = True
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    command = [sys.executable, "-c", "from assay_cli.root import main; main()", "plan", "org/model", "-p", "w4a16"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_VERBOSITY": "info"})
    assert done.returncode == 0, done.stderr
    assert served.tokens() == {"hub": {f"Bearer {TOKEN}"}, "storage": {None}}
    assert TOKEN not in done.stdout + done.stderr


def test_a_gated_model(served: Hub) -> None:
    served.is_gated = True
    assert error_of() == (
        f"org/model: is gated; accept its terms at {served.url}/org/model, then log in (hf auth login) or set HF_TOKEN; "
        "a local folder works too"
    )


# ------------------------------------------------------------------------------------------------ what is not there
def test_no_such_model_revision_or_shard(served: Hub) -> None:
    private = "(HTTP 404); if it is private, log in (hf auth login) or set HF_TOKEN; a local folder works too"
    assert error_of("org/other") == f"org/other: no such model on {served.url} {private}"
    at = f"{served.url}; its branches, tags and files are at {served.url}/org/model"
    assert error_of("org/model", "v9") == f"org/model: no such revision on {at}"
    assert error_of("org/mo--del") == "org/mo--del: is no id of a model on the hub; write it like zai-org/GLM-5"
    shard = served.folder / "model-00001-of-00005.safetensors"
    shard.unlink()
    assert "names model-00001-of-00005.safetensors, not there; complete the download" in error_of()


def test_a_quantized_model_costs_two_requests(served: Hub) -> None:
    config = json.loads((served.folder / "config.json").read_text())
    (served.folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    assert error_of() == (
        "org/model: is quantized already (config.json says quant_method 'awq'); a BF16, FP16, FP32 or FP8 source is needed"
    )
    assert len(served.asked) == 2


def test_a_model_without_safetensors(served: Hub) -> None:
    for path in served.folder.glob("*.safetensors"):
        path.unlink()
    assert error_of() == "org/model: has no *.safetensors; take a release in safetensors"


def test_offline(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.close()
    said = error_of()
    assert said.startswith(f"org/model: {served.url} does not answer: ") and said.endswith(
        "; give a local folder, or try again"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert error_of() == "org/model: HF_HUB_OFFLINE is set; give a local folder, or unset it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "huggingface.co")
    assert error_of() == (
        "org/model: 'huggingface.co' (HF_ENDPOINT) is not a URL; write it like https://huggingface.co"
    )  # fmt: skip


def test_a_hub_that_sends_a_download_to_a_file_is_told_apart_from_an_address_without_http(served: Hub) -> None:
    refused = httpx.UnsupportedProtocol("Request URL has an unsupported protocol 'file://'.")
    assert str(hub_error("org/model", refused, "config.json")) == (
        f"org/model/config.json: {served.url} sends the download on to an address that is not HTTP; try another network, or "
        "give a local folder"
    )


def test_a_busy_hub_is_given_up_with_its_status(served: Hub) -> None:
    served.answers_503 = 1000
    assert error_of() == f"org/model: {served.url} answered HTTP 503; give a local folder, or try again"


# ------------------------------------------------------------------------------------------------ what is sent is checked
def test_a_hub_that_ignores_ranges_sends_no_weights(served: Hub) -> None:
    served.honours_ranges = False
    assert error_of() == f"org/model: {served.url} ignores range requests; download it and give the folder"


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        (b"<html>", "org/model: file list: not JSON: Expecting value: line 1 column 1 (char 0); download the file again"),
        (b"[1]", "org/model: file list: holds a JSON list, an object was expected; download it again"),
        (b'{"siblings": 7}', "org/model: has no config.json; is it a model in transformers format?"),
        (
            b'{"siblings": [3, {"rfilename": 4, "lfs": "x"}], "cardData": 5}',
            "org/model: has no config.json; is it a model in transformers format?",
        ),
    ],
)
def test_a_list_of_files_that_is_none(served: Hub, listing: bytes, said: str) -> None:
    served.listing = listing
    assert error_of() == said


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_small_file_that_is_not_what_the_hub_states(served: Hub, name: str) -> None:
    true = (served.folder / name).read_bytes()
    altered = (
        "downloaded twice; something between "
        + served.url
        + " and here changes it; try another network, or give a local folder"
    )
    served.replaced[name] = true[:-1] + b" "
    assert error_of() == f"org/model/{name}: its git hash is not the one the hub states, {altered}"
    served.replaced[name] = true[:-1]
    assert error_of() == f"org/model/{name}: {len(true) - 1} bytes where the hub states {len(true)}, {altered}"
    served.replaced[name] = true + b" "
    assert error_of().endswith(f"{name} is longer than the {len(true)} bytes expected")


def test_a_shard_of_another_size_than_listed(served: Hub) -> None:
    name = "model-00003-of-00005.safetensors"
    served.replaced[name] = bytes(100_000)
    size = (served.folder / name).stat().st_size
    assert error_of() == f"org/model/{name}: 100000 bytes, listed with {size}; try again later"


# ------------------------------------------------------------------------------------------------ the whole model
def test_a_whole_model_is_downloaded_into_the_cache_of_huggingface(served: Hub, tmp_path: Path) -> None:
    for path in served.folder.glob("*.safetensors"):
        path.write_bytes(b"weights")
    served.is_hollow = False
    folder = local_checkpoint(Location(hub="org/model", revision=served.commit))
    assert folder.is_relative_to(tmp_path / "home" / "hub") and folder.name == served.commit
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in served.folder.iterdir()}


def test_a_whole_model_that_cannot_be_downloaded(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(hub_id: str, **more: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            local_checkpoint(Location(hub=hub_id, **more))
        return str(caught.value)

    private = "(HTTP 404); if it is private, log in (hf auth login) or set HF_TOKEN; a local folder works too"
    assert said("org/other") == f"org/other: no such model on {served.url} {private}"
    at = f"{served.url}; its branches, tags and files are at {served.url}/org/model"
    assert said("org/model", revision="v9") == f"org/model: no such revision on {at}"
    served.is_gated = True
    assert said("org/model").startswith("org/model: is gated; accept its terms at ")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert said("org/model") == "org/model: HF_HUB_OFFLINE is set; give a local folder, or unset it"
