"""Streaming from the hub: the bytes of a local run, the source never whole on the disk, whatever breaks on the way.

The hub is a real HTTP server on loopback with the endpoints that are used: file list with hashes, redirects of shards to
another host, ranges; it can answer 503, cut connections, send wrong bytes, and it counts what it sent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import Hub
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError, QuantizeError
from assay.recipes import PrecisionRecipe, load_recipe
from assay.records import MANIFEST, Manifest, Plan
from assay_quantize import hub_download, stream
from assay_quantize.checkpoint import open_checkpoint
from assay_quantize.engine import quantize
from assay_quantize.hub import open_hub_checkpoint
from assay_quantize.plan import make_plan
from assay_quantize.stream import HubStream, content_time_ns, needs_of

SHARDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("hub") / "model", shards=SHARDS, num_experts=12, mtp_file=True)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(Path(shutil.copytree(model, tmp_path / "model")))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub_download, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(hub_download, "FIRST_WAIT_S", 0.001)
    yield server
    server.close()


def hub_plan(precision: str) -> Plan:
    return make_plan(open_hub_checkpoint("org/model"), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def streamed(plan: Plan, tmp_path: Path) -> Manifest:
    out, staging = tmp_path / "out", tmp_path / "staging"
    with HubStream(plan, staging) as source:
        made = quantize(plan, source.folder, out, device="cpu", workers=1, runner=source.run)
        source.remove()
    return made


def local_bytes(model: Path, precision: str, folder: Path) -> dict[str, bytes]:
    plan = make_plan(open_checkpoint(model), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantize(plan, model, folder, device="cpu", workers=1)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which tells times."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != MANIFEST}


@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_streaming_makes_the_bytes_of_a_local_run(hub: Hub, model: Path, tmp_path: Path, precision: str) -> None:
    """With NVFP4, scales are shared across shards: the shards are cut between gate and up projections."""
    plan = hub_plan(precision)
    assert plan.source_revision == hub.commit
    crossing = sum(len(need.ranges) for need in needs_of(plan, open_checkpoint(model).tensors).values())
    assert crossing == (2 * (SHARDS - 1) if precision == "nvfp4a16" else 0)
    made = streamed(plan, tmp_path)
    assert contents(tmp_path / "out") == local_bytes(model, precision, tmp_path / "local")
    assert not (tmp_path / "staging").exists()
    assert (made.source, made.bytes_in) == ("org/model", plan.bytes_in)
    for path in model.glob("*.safetensors"):
        extra = hub.bytes_of[path.name] - path.stat().st_size
        assert extra >= 0, "every shard is downloaded"
        assert extra < 0.25 * path.stat().st_size + 3 * hub_download.FIRST_BYTES, "and only parts of it again"


def test_two_shards_of_the_source_are_on_the_disk_at_most(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, most = hub_plan("nvfp4a16"), 0
    largest = max(path.stat().st_size for path in model.glob("*.safetensors"))
    partners = max(
        sum(end - begin for ranges in need.ranges.values() for begin, end in ranges)
        for need in needs_of(plan, open_checkpoint(model).tensors).values()
    )
    make = stream.quantize_shard

    def watched(*args: Any, **more: Any) -> Any:
        nonlocal most
        record = make(*args, **more)
        staged = [path for path in (tmp_path / "staging").iterdir() if "safetensors" in path.name]
        most = max(most, sum(path.stat().st_blocks * 512 for path in staged))
        return record

    monkeypatch.setattr(stream, "quantize_shard", watched)
    streamed(plan, tmp_path)
    headers = sum(path.stat().st_size for path in model.glob("*.json")) + (SHARDS + 1) * 200_000
    assert largest < most <= 2 * largest + 2 * partners + headers < sum(p.stat().st_size for p in model.glob("*.safetensors"))


def test_refusals_of_the_moment_and_broken_connections_cost_nothing_but_time(hub: Hub, model: Path, tmp_path: Path) -> None:
    plan = hub_plan("w4a16")
    busy = iter([20])

    def be_busy(name: str, begin: int) -> None:
        hub.answers_503 += next(busy, 0)

    hub.on_data = be_busy
    hub.cuts = [1, 50_000, 0, 99_999, 7, 12_345] * 5
    streamed(plan, tmp_path)
    assert (hub.cuts, hub.answers_503) == ([], 0)
    assert contents(tmp_path / "out") == local_bytes(model, "w4a16", tmp_path / "local")
    again = sum(hub.bytes_of[path.name] - path.stat().st_size for path in model.glob("*.safetensors"))
    assert again < (SHARDS + 1) * 3 * hub_download.FIRST_BYTES, "a broken piece goes on where it broke"


class Killed(BaseException):
    """Stands for a kill: no handler of ours catches it."""


@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_killed_anywhere_it_goes_on_and_downloads_no_finished_shard(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    plan = hub_plan(precision)
    make, calls = stream.quantize_shard, 0

    def dies_at_times(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise Killed
        return make(*args, **more)

    monkeypatch.setattr(stream, "quantize_shard", dies_at_times)
    kills = 0
    while True:
        finished = {
            plan_shard: tmp_path / "out" / plan_shard
            for plan_shard in {t.shard_out for t in plan.tensors if t.shard_out}
            if (tmp_path / "out" / plan_shard).is_file()
        }
        before, times = hub.bytes_of.copy(), {name: path.stat().st_mtime_ns for name, path in finished.items()}
        try:
            streamed(plan, tmp_path)
        except Killed:
            kills += 1
        sources = {tensor.shard_in for tensor in plan.tensors if tensor.shard_out in finished}
        for file in sources:
            assert hub.bytes_of[file] - before[file] <= (0 if precision == "w4a16" else 300_000), f"{file} again"
        assert times == {name: path.stat().st_mtime_ns for name, path in finished.items()}
        if (tmp_path / "out" / MANIFEST).exists():
            break
    assert kills == 3
    assert contents(tmp_path / "out") == local_bytes(model, precision, tmp_path / "local")


def test_the_command_killed_while_it_downloads_goes_on(hub: Hub, model: Path, tmp_path: Path) -> None:
    """SIGKILL, so that nothing is cleaned up: in the first shard, in a later one, and in what another shard shares with it."""
    out = tmp_path / "run" / "checkpoint"
    assay = str(Path(sys.executable).with_name("assay"))
    command = [assay, "quantize", "org/model", "-p", "nvfp4a16", "--out", str(out), "--stream-from", "hub", "--workers", "1"]
    due, children = 0, list[subprocess.Popen[str]]()

    def kill_when_due(name: str, begin: int) -> None:
        nonlocal due
        due -= 1
        if due == 0:
            children[-1].kill()

    hub.on_data = kill_when_due
    for kill_at in (1, 5, 6, None):
        due = kill_at or -1
        children.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1")))
        _, said = children[-1].communicate(timeout=120)
        assert children[-1].returncode == (0 if kill_at is None else -9), said
        assert (out / MANIFEST).exists() == (out / "config.json").exists() == (kill_at is None)
    made = contents(out)
    assert b"base_model: org/model" in made.pop("README.md")
    assert made == local_bytes(model, "nvfp4a16", tmp_path / "local")
    assert sorted(path.name for path in out.parent.iterdir()) == ["checkpoint", "plan.json", "verify.json"]


def test_a_download_that_was_killed_goes_on_with_the_missing_pieces(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    size = path.stat().st_size
    sent: list[int] = []

    def die_late(name: str, begin: int) -> None:
        sent.append(begin)
        if begin == 300_000:
            raise ConnectionAbortedError

    monkeypatch.setattr(hub_download, "TRIES", 1)
    monkeypatch.setattr(hub_download, "NUM_CONNECTIONS", 1)
    hub.on_data = die_late
    with hub_download.HubFiles("org/model", hub.commit) as files, pytest.raises(CheckpointError, match="does not send it"):
        files.download(path.name, tmp_path / path.name, size)
    assert sent == [0, 100_000, 200_000, 300_000]
    sent.clear()
    hub.on_data = lambda name, begin: sent.append(begin)
    with hub_download.HubFiles("org/model", hub.commit) as files:
        files.download(path.name, tmp_path / path.name, size)
    assert sent == list(range(300_000, size, 100_000))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [path.name]


def test_wrong_bytes_are_found_by_the_hash_and_fetched_again_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    with hub_download.HubFiles("org/model", hub.commit) as files:
        hub.spoil = 1
        files.download(path.name, tmp_path / path.name, path.stat().st_size)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        hub.spoil = 1 << 30
        with pytest.raises(CheckpointError) as caught:
            files.download(path.name, tmp_path / "again", path.stat().st_size)
    assert str(caught.value) == (
        f"org/model/{path.name}: its SHA-256 is not the one {hub.url} states, downloaded twice; something on the way changes "
        "it; try another network, or give a local folder"
    )
    assert not list(tmp_path.glob("*again*"))


def test_a_shard_that_changed_on_the_hub_since_the_run_began_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, make = hub_plan("w4a16"), stream.quantize_shard
    done: list[str] = []

    def only_one(plan: Plan, name: str, *args: Any, **more: Any) -> Any:
        if done:
            raise Killed
        done.append(name)
        return make(plan, name, *args, **more)

    monkeypatch.setattr(stream, "quantize_shard", only_one)
    with pytest.raises(Killed):
        streamed(plan, tmp_path)
    victim = sorted(hub.folder.glob("*.safetensors"))[3]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    hub.commit = "b" * 40
    changed = hub_plan("w4a16")
    assert changed.source_sha256 == plan.source_sha256, "same names, shapes and dtypes"
    with pytest.raises(QuantizeError, match=rf"{victim.name}: changed since this run began"):
        streamed(changed, tmp_path)


def test_a_commit_that_changed_no_weights_goes_on(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, make = hub_plan("w4a16"), stream.quantize_shard
    monkeypatch.setattr(stream, "quantize_shard", lambda *args, **more: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        streamed(plan, tmp_path)
    (hub.folder / "generation_config.json").write_text("{}")
    (hub.folder / "README.md").write_text("better words")
    hub.commit = "b" * 40
    monkeypatch.setattr(stream, "quantize_shard", make)
    streamed(hub_plan("w4a16"), tmp_path)
    expected = local_bytes(model, "w4a16", tmp_path / "local") | {"generation_config.json": b"{}"}
    assert contents(tmp_path / "out") == expected


def test_a_hub_that_states_no_hashes_is_identified_by_its_blobs(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.states_hashes = False
    path = sorted(model.glob("*.safetensors"))[0]
    blob = hashlib.sha256(path.read_bytes()).hexdigest()[:40]
    with HubStream(hub_plan("w4a16"), tmp_path / "staging") as source:
        status = (source.folder / path.name).stat()
    assert (status.st_size, status.st_mtime_ns) == (path.stat().st_size, content_time_ns(f"blob:{blob}"))


def test_too_little_disk_is_said_before_the_first_download(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hub_plan("w4a16")
    monkeypatch.setattr(stream, "SPARE_BYTES", 1 << 60)
    sent = None
    with HubStream(plan, tmp_path / "staging") as source:
        sent = hub.bytes_of.copy()
        with pytest.raises(QuantizeError, match=r"staging: \d+\.\d\d GB are needed for two shards of the source and what is"):
            quantize(plan, source.folder, tmp_path / "out", device="cpu", workers=1, runner=source.run)
    assert hub.bytes_of == sent


def test_a_local_source_cannot_be_streamed(model: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(model), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    with pytest.raises(QuantizeError, match="--stream-from hub needs a model on the hub; give an id such as zai-org/GLM-5"):
        HubStream(plan, tmp_path / "staging")
