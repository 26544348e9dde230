"""Streaming from the hub: the bytes of a local run, the source never whole on the disk, whatever breaks on the way.

The hub is a real HTTP server on loopback (`local_hub.py`); it can answer 503, cut connections, send wrong bytes, and it counts
what it sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_xet
import pytest
from command_line import INTERRUPTIBLE
from local_hub import TOKEN, Hub
from tiny_checkpoints import make_tiny_glm4_moe, store_as_fp8

from assay.errors import CheckpointError, QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import MANIFEST, Manifest, ShardRecord
from assay.records.plan import Plan
from assay.records.run import PLAN_INSIDE, VERIFICATION_INSIDE
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.hub import FIRST_BYTES, open_hub_checkpoint
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.remote import hub_stream
from assay_quantize.remote.hub_download import XET_BUFFER_BYTES, HubFiles, Stopped
from assay_quantize.remote.hub_stream import HubStream, Need, content_time_ns, needs_of, stage_shard

pytestmark = pytest.mark.slow

SHARDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("hub") / "model", shards=SHARDS, num_experts=12, mtp_file=True)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(Path(shutil.copytree(model, tmp_path / "model")))
    server.use(monkeypatch, tmp_path / "home")
    yield server
    server.close()


def hub_plan(precision: str) -> Plan:
    return make_plan(open_hub_checkpoint("org/model"), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def streamed(plan: Plan, tmp_path: Path) -> Manifest:
    out, staging = tmp_path / "out", tmp_path / "staging"
    with HubStream(plan, staging) as source:
        made = quantize(plan, source.folder, out, workers=1, runner=source.run)
        source.remove()
    return made


def bytes_on_disk(folder: Path) -> int:
    """What all files below `folder` take of the disk, those that arrive as well."""
    bytes_of = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # moved to its place meanwhile
                status = os.stat(os.path.join(parent, name))
                bytes_of[status.st_ino] = status.st_blocks * 512
    return sum(bytes_of.values())


def local_bytes(model: Path, precision: str, folder: Path) -> dict[str, bytes]:
    plan = make_plan(open_checkpoint(model), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantize(plan, model, folder, workers=1)
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
    assert not list((tmp_path / "home").rglob("*.safetensors")), "nothing in the cache of Hugging Face"
    assert (made.source, made.bytes_in) == ("org/model", plan.bytes_in)
    for path in model.glob("*.safetensors"):
        extra = hub.bytes_of[path.name] - path.stat().st_size
        assert extra >= 0, "every shard is downloaded"
        assert extra < 0.25 * path.stat().st_size + 3 * FIRST_BYTES, "and only parts of it again"


def test_two_shards_of_the_source_are_on_the_disk_at_most(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, most = hub_plan("nvfp4a16"), 0
    largest = max(path.stat().st_size for path in model.glob("*.safetensors"))
    partners = max(
        sum(end - begin for ranges in need.ranges.values() for begin, end in ranges)
        for need in needs_of(plan, open_checkpoint(model).tensors).values()
    )
    make = hub_stream.quantize_shard

    def watched(*args: Any, **more: Any) -> Any:
        nonlocal most
        record = make(*args, **more)
        most = max(most, bytes_on_disk(tmp_path / "staging"))
        return record

    monkeypatch.setattr(hub_stream, "quantize_shard", watched)
    streamed(plan, tmp_path)
    headers = sum(path.stat().st_size for path in model.glob("*.json")) + (SHARDS + 1) * 200_000
    assert largest < most <= 2 * largest + 2 * partners + headers < sum(p.stat().st_size for p in model.glob("*.safetensors"))


def test_scales_in_another_file_come_with_all_of_it(hub: Hub, model: Path, tmp_path: Path) -> None:
    """A range has no hash of its own, and a wrong scale of an FP8 weight would be in the result."""
    hub.folder = store_as_fp8(model, tmp_path / "fp8", scales_apart=True)
    plan, last = hub_plan("w4a16"), "mtp.safetensors"
    needs = needs_of(plan, open_checkpoint(hub.folder).tensors)
    assert {plan.tensors[0].scale, *(tensor.shard_in for tensor in plan.tensors if tensor.action == "consume")} == {None, last}
    assert all(last in need.whole and not need.ranges for need in needs.values())
    streamed(plan, tmp_path)
    assert contents(tmp_path / "out") == local_bytes(hub.folder, "w4a16", tmp_path / "local")
    assert hub.bytes_of[last] < 1.5 * (hub.folder / last).stat().st_size, "once"


@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_refusals_of_the_moment_and_broken_connections_cost_nothing_but_time(
    hub: Hub, model: Path, tmp_path: Path, precision: str
) -> None:
    """Whole shards, and with NVFP4 ranges of others."""
    plan = hub_plan(precision)
    busy = iter([12])

    def be_busy(name: str, begin: int) -> None:
        hub.answers_503 += next(busy, 0)

    hub.on_data = be_busy
    hub.cuts = [1, 50_000, 0, 99_999, 7, 12_345] * 5
    streamed(plan, tmp_path)
    assert (hub.cuts, hub.answers_503) == ([], 0)
    assert contents(tmp_path / "out") == local_bytes(model, precision, tmp_path / "local")
    needs = needs_of(plan, open_checkpoint(model).tensors).values()
    partners = sum(end - begin for need in needs for ranges in need.ranges.values() for begin, end in ranges)
    again = sum(hub.bytes_of[path.name] - path.stat().st_size for path in model.glob("*.safetensors")) - partners
    assert again < (SHARDS + 1) * 3 * FIRST_BYTES + 30 * 10_000, "a download that broke goes on where it broke"


class Killed(BaseException):
    """Stands for a kill: no handler of ours catches it."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_killed_anywhere_it_goes_on_and_downloads_no_finished_shard(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    plan = hub_plan(precision)
    make, calls = hub_stream.quantize_shard, 0

    def dies_at_times(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise Killed
        return make(*args, **more)

    monkeypatch.setattr(hub_stream, "quantize_shard", dies_at_times)
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


@pytest.mark.slow
def test_killed_after_the_last_shard_it_is_finished(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Nothing is left to download: config, index and manifest are written."""
    plan, out = hub_plan("w4a16"), tmp_path / "out"
    made: list[str] = []

    def stop(record: ShardRecord) -> None:
        made.append(record.name)
        if len(made) == len(planned_shards(plan)):
            raise Killed

    with HubStream(plan, tmp_path / "staging") as source, pytest.raises(Killed):
        quantize(plan, source.folder, out, workers=1, runner=source.run, on_shard=stop)
    before = hub.bytes_of.total()
    streamed(plan, tmp_path)
    assert contents(out) == local_bytes(model, "w4a16", tmp_path / "local")
    assert hub.bytes_of.total() - before < 4 * FIRST_BYTES * SHARDS, "headers and small files"


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
        # -1: progress bars also where nobody looks
        child_env = dict(os.environ, OMP_NUM_THREADS="1", TQDM_POSITION="-1")
        children.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_env))
        _, messages = children[-1].communicate(timeout=120)
        lines = [
            line for line in messages.splitlines() if not line.startswith("verifying ")
        ]  # ours, where verifying takes long
        assert not any("%|" in line or "B/s" in line for line in lines), messages
        assert children[-1].returncode == (0 if kill_at is None else -9), messages
        assert (out / MANIFEST).exists() == (out / "config.json").exists() == (kill_at is None)
    made = contents(out)
    assert b"base_model: org/model" in made.pop("README.md")
    assert json.loads(made.pop(PLAN_INSIDE))["source"] == "org/model"
    assert json.loads(made.pop(VERIFICATION_INSIDE))["passed"]
    assert made == local_bytes(model, "nvfp4a16", tmp_path / "local")
    assert [path.name for path in out.parent.iterdir()] == ["checkpoint"]


def test_what_a_killed_process_had_of_a_file_takes_no_room(hub: Hub, tmp_path: Path) -> None:
    """`hf_hub_download` begins a file anew, under another name: what lies there nobody would go on with."""
    plan, staging = hub_plan("w4a16"), tmp_path / "staging"
    left = staging / ".download" / ".cache" / "huggingface" / "download"
    left.mkdir(parents=True)
    (left / "name.hash.12345678.incomplete").write_bytes(b"x" * 1_000_000)
    with HubStream(plan, staging) as source:
        assert bytes_on_disk(source.folder) < 1_000_000
        assert [path.name for path in source.folder.iterdir() if path.is_dir()] == []


def test_wrong_bytes_are_found_by_the_hash_and_fetched_again_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    files = HubFiles("org/model", hub.commit)
    hub.spoil = 1
    files.download(path.name, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert hub.bytes_of[path.name] == 2 * path.stat().st_size
    hub.spoil = 1 << 30
    with pytest.raises(CheckpointError) as caught:
        files.download(path.name, tmp_path / "again")
    altered = f"something between {hub.url} and here changes it; try another network, or give a local folder"
    assert str(caught.value) == (
        f"org/model/{path.name}: its SHA-256 is not the one the hub states, downloaded twice; {altered}"
    )  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "model"}


def test_a_shard_in_the_cache_of_hugging_face_is_taken_if_it_is_right(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    snapshot = tmp_path / "home" / "hub" / "models--org--model" / "snapshots" / hub.commit
    snapshot.mkdir(parents=True)
    (snapshot / path.name).write_bytes(path.read_bytes())
    files = HubFiles("org/model", hub.commit)
    files.download(path.name, tmp_path / "first")
    assert (tmp_path / "first").read_bytes() == path.read_bytes() and hub.bytes_of[path.name] == 0
    (snapshot / path.name).write_bytes(b"x" * path.stat().st_size)
    files.download(path.name, tmp_path / "second")
    assert (tmp_path / "second").read_bytes() == path.read_bytes() and hub.bytes_of[path.name] == path.stat().st_size


def test_a_hub_that_sends_more_than_it_states_is_cut_off(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    size = path.stat().st_size
    hub.replaced[path.name] = path.read_bytes() + bytes(50_000_000)
    with pytest.raises(CheckpointError) as caught:
        HubFiles("org/model", hub.commit).download(path.name, tmp_path / "more")
    assert str(caught.value) == f"org/model/{path.name}: more than the {size} bytes that the hub states were sent; try again"


def test_a_hub_that_does_not_send_a_file_is_given_up(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    files = HubFiles("org/model", hub.commit)
    hub.cuts = [0] * 1000
    with pytest.raises(CheckpointError) as caught:
        files.download(path.name, tmp_path / "never")
    assert str(caught.value) == (
        f"org/model/{path.name}: {hub.url} does not answer: peer closed connection without sending complete message body "
        f"(received 0 bytes, expected {path.stat().st_size}); give a local folder, or try again"
    )
    hub.answers_503 = 1000
    with pytest.raises(CheckpointError, match=rf"^org/model/{path.name}: {hub.url} answered HTTP 503; give a local folder, or"):
        files.download(path.name, tmp_path / "never")
    assert not list(tmp_path.glob("*never*"))


def test_a_small_file_is_what_the_hub_states_or_refused(hub: Hub, tmp_path: Path) -> None:
    """Tokenizer and template go into the checkpoint as they are; on the disk they are checked again by the next run."""
    plan, staging, name = hub_plan("w4a16"), tmp_path / "staging", "tokenizer_config.json"
    true = (hub.folder / name).read_bytes()
    hub.replaced[name] = true[:-2] + b" }"
    altered = f"something between {hub.url} and here changes it; try another network, or give a local folder"
    with pytest.raises(CheckpointError) as caught:
        HubStream(plan, staging)
    assert str(caught.value) == f"org/model/{name}: its git hash is not the one the hub states, downloaded twice; {altered}"
    hub.replaced[name] = true[:-2]
    with pytest.raises(CheckpointError) as caught:
        HubStream(plan, staging)
    stderr = f"{len(true) - 2} bytes where the hub states {len(true)}"
    assert str(caught.value) == f"org/model/{name}: {stderr}, downloaded twice; {altered}"
    assert not (staging / name).exists()
    del hub.replaced[name]
    HubStream(plan, staging).close()
    (staging / name).write_bytes(true[:-2])
    HubStream(plan, staging).close()
    assert (staging / name).read_bytes() == true


def test_a_mark_that_goes_while_it_is_looked_at_was_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread gives back the disk of a shard that the next one has ranges of."""
    from assay_quantize.remote.hub_stream import _is_whole, _mark_path

    shard = tmp_path / "model.safetensors"
    mark = _mark_path(shard)
    for path in (shard, mark):
        path.write_text("content")
    assert _is_whole(shard, "content") and not _is_whole(shard, "other")

    def is_file(path: Path) -> bool:
        mark.unlink(missing_ok=True)
        return True

    monkeypatch.setattr(Path, "is_file", is_file)
    assert not _is_whole(shard, "content")


def test_the_token_goes_to_the_hub_only(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4 takes whole shards, and ranges of others."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.is_gated = True
    streamed(hub_plan("nvfp4a16"), tmp_path)
    assert hub.tokens() == {"hub": {f"Bearer {TOKEN}"}, "storage": {None}}
    assert {asked.method for asked in hub.asked if asked.host == "hub"} == {"GET", "HEAD"}
    assert TOKEN.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_closing_waits_for_no_hub_that_does_not_answer(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_stream, "CLOSE_WITHIN_S", 0.05)
    began, go_on = threading.Event(), threading.Event()

    def hold(name: str, begin: int) -> None:
        began.set()
        go_on.wait()

    hub.on_data = hold
    with HubStream(hub_plan("w4a16"), tmp_path / "staging") as source:
        _, future = source._stage_ahead(next(iter(source.needs))) or ("", None)
        began.wait()
    assert future is not None and not future.done()
    go_on.set()
    assert isinstance(future.exception(), Stopped), "it ends with the next bytes"
    assert not (tmp_path / "staging" / ".download").exists()


@pytest.mark.slow
def test_ctrl_c_waits_for_no_hub_that_does_not_answer(hub: Hub, tmp_path: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold(name: str, begin: int) -> None:
        began.set()
        go_on.wait()

    hub.on_data = hold
    words = ["quantize", "org/model", "-p", "w4a16", "--out", str(tmp_path / "out"), "--stream-from", "hub"]
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, *words], stderr=subprocess.PIPE, text=True)
    assert began.wait(300), "kernels may have to be compiled first"
    child.send_signal(signal.SIGINT)
    _, messages = child.communicate(timeout=120)
    assert (child.returncode, "Traceback" in messages) == (130, False), messages
    go_on.set()


def test_shards_that_the_hub_keeps_in_xet(hub: Hub, model: Path, tmp_path: Path) -> None:
    """The real client of Xet, with a store in a folder in place of the servers; HTTP carries headers and ranges only."""
    hub.xet_endpoint = f"local://{tmp_path / 'xet'}"
    shards = sorted(hub.folder.glob("*.safetensors"))
    altered = tmp_path / "altered"
    altered.write_bytes(shards[0].read_bytes()[:-1] + b"?")
    commit = hf_xet.XetSession().new_upload_commit(endpoint=hub.xet_endpoint)
    uploads = {path.name: commit.start_upload_file(str(path)) for path in (*shards, altered)}
    commit.wait_to_finish()
    hub.xet_hashes = {name: upload.result().xet_info.hash for name, upload in uploads.items()}
    streamed(hub_plan("w4a16"), tmp_path)
    assert contents(tmp_path / "out") == local_bytes(model, "w4a16", tmp_path / "local")
    assert all(hub.bytes_of[path.name] <= 3 * FIRST_BYTES for path in shards)
    assert not list((tmp_path / "home").rglob("*chunk*")), "no cache of chunks"
    assert f"download_buffer_size={XET_BUFFER_BYTES}" in repr(hf_xet.XetSession())
    hub.xet_hashes[shards[0].name] = hub.xet_hashes["altered"]
    with pytest.raises(
        CheckpointError, match=rf"^org/model/{shards[0].name}: its SHA-256 is not the one the hub states, downlo"
    ):
        HubFiles("org/model", hub.commit).download(shards[0].name, tmp_path / "other")
    hub.xet_hashes[shards[0].name] = hub.xet_hashes[shards[1].name]
    with pytest.raises(
        CheckpointError, match=rf"^org/model/{shards[0].name}: cannot be downloaded: .*; give a local folder, or"
    ):
        HubFiles("org/model", hub.commit).download(shards[0].name, tmp_path / "other")


def test_a_shard_that_changed_on_the_hub_since_the_run_began_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, make = hub_plan("w4a16"), hub_stream.quantize_shard
    done: list[str] = []

    def only_one(plan: Plan, name: str, *args: Any, **more: Any) -> Any:
        if done:
            raise Killed
        done.append(name)
        return make(plan, name, *args, **more)

    monkeypatch.setattr(hub_stream, "quantize_shard", only_one)
    with pytest.raises(Killed):
        streamed(plan, tmp_path)
    victim = sorted(hub.folder.glob("*.safetensors"))[3]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    hub.commit = "b" * 40
    changed = hub_plan("w4a16")
    assert changed.source_sha256 == plan.source_sha256, "same names, shapes and dtypes"
    with pytest.raises(
        QuantizeError, match=rf"out: begun with other data \(org/model: {victim.name} was sha256 \w+, is sha256"
    ):
        streamed(changed, tmp_path)


def test_other_data_under_the_same_commit_is_refused(hub: Hub, tmp_path: Path) -> None:
    plan = hub_plan("w4a16")
    victim = sorted(hub.folder.glob("*.safetensors"))[3]
    old, data = hub.sha256_of(victim), bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    stderr = (
        "org/model: has other data on the hub than the plan was made from "
        f"({victim.name} was sha256 {old[:12]}, is sha256 {hub.sha256_of(victim)[:12]}); make a new plan"
    )
    with pytest.raises(CheckpointError) as caught:
        HubStream(plan, tmp_path / "staging")
    assert str(caught.value) == stderr
    checkpoint, need = open_checkpoint(hub.folder), Need((victim.name,), {})
    (tmp_path / "task").mkdir()
    with pytest.raises(CheckpointError) as caught:
        stage_shard(plan, checkpoint, need, tmp_path / "task")
    assert str(caught.value) == stderr
    hub.listing = hub.list_of_files().replace(b"a" * 40, b"b" * 40)
    with pytest.raises(CheckpointError, match=r"^org/model: commit a{12} was asked for, b{12} is listed; try again later$"):
        HubStream(plan, tmp_path / "staging")


def test_a_commit_that_changed_no_weights_goes_on(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, make = hub_plan("w4a16"), hub_stream.quantize_shard
    monkeypatch.setattr(hub_stream, "quantize_shard", lambda *args, **more: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        streamed(plan, tmp_path)
    (hub.folder / "generation_config.json").write_text("{}")
    (hub.folder / "README.md").write_text("better words")
    hub.commit = "b" * 40
    monkeypatch.setattr(hub_stream, "quantize_shard", make)
    streamed(hub_plan("w4a16"), tmp_path)
    expected = local_bytes(model, "w4a16", tmp_path / "local") | {"generation_config.json": b"{}"}
    assert contents(tmp_path / "out") == expected


def test_a_hub_that_states_no_hashes_is_identified_by_its_blobs(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.states_hashes = False
    path = sorted(model.glob("*.safetensors"))[0]
    git_says = subprocess.run(["git", "hash-object", "--no-filters", path], capture_output=True, text=True, check=True)
    blob = git_says.stdout.strip()
    with HubStream(hub_plan("w4a16"), tmp_path / "staging") as source:
        status = (source.folder / path.name).stat()
    assert (status.st_size, status.st_mtime_ns) == (path.stat().st_size, content_time_ns(f"blob:{blob}"))


def test_too_little_disk_is_said_before_the_first_download(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hub_plan("w4a16")
    monkeypatch.setattr(hub_stream, "SPARE_BYTES", 1 << 60)
    sent = None
    with HubStream(plan, tmp_path / "staging") as source:
        sent = hub.bytes_of.copy()
        with pytest.raises(QuantizeError, match=r"staging: \d+\.\d\d GB are needed for two shards of the source and what is"):
            quantize(plan, source.folder, tmp_path / "out", workers=1, runner=source.run)
    assert hub.bytes_of == sent


def test_a_local_source_cannot_be_streamed(model: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(model), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    with pytest.raises(QuantizeError, match="--stream-from hub needs a model on the hub; give an id such as zai-org/GLM-5"):
        HubStream(plan, tmp_path / "staging")


# ------------------------------------------------------------------------------------------------ a disk without room
@pytest.mark.parametrize(
    "write",
    [
        lambda path: hub_stream.write_hollow(path, bytes(2000), 4000),
        lambda path: hub_stream.write_text_atomically(path, "0" * 2000),
    ],
)
def test_a_disk_without_room_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Errors of writes and of truncate have no path of their own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"staged\.safetensors"):
            write(tmp_path / "staged.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
