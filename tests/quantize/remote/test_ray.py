"""The Ray runner, on a real local Ray: the same bytes as the local runner's, whoever is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import Hub
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import QuantizeError
from assay.installation import install_command
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import MANIFEST
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.checkpoint.hub import open_hub_checkpoint
from assay_quantize.checkpoint.shard_files import planned_shards
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.quantize import quantize
from assay_quantize.engine.shards import ShardOptions
from assay_quantize.plan.planner import make_plan
from assay_quantize.remote import ray_cluster, ray_runner, ray_worker
from assay_quantize.remote.hub_stream import HubStream, Need, needs_of
from assay_quantize.storage.resident import resident_bytes

pytestmark = pytest.mark.slow

MEMORY_BYTES = 1 << 30
RUNNERS: dict[Any, Any] = {"local": run_local, "ray": ray_runner.run_ray}


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Ray for all tests here, as the engine starts it; never a cluster that happens to run on this machine."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ADDRESS", "local")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
    patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    patch.setattr(ray_cluster, "default_workers", lambda: 2)
    with ray_cluster.connected(ray_cluster.TaskNeeds(1, MEMORY_BYTES)) as cluster:
        yield cluster.ray
    patch.undo()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("ray") / "tiny", shards=3)


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which tells times."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def run(plan: Plan, source: Path, out: Path, runner: Any, **more: Any) -> Any:
    bound = resident_bytes() + MEMORY_BYTES  # what other tests left in this process counts when the runner is local
    return quantize(
        plan, source, out, workers=1, memory_bytes=bound, runner=RUNNERS.get(runner, runner),
        runs_elsewhere=runner == "ray", **more,
    )  # fmt: skip


def test_it_listens_on_loopback_only_and_reports_to_nobody(local_ray: Any) -> None:
    (node,) = local_ray.nodes()
    assert node["NodeManagerAddress"] == "127.0.0.1"
    assert node["Resources"]["CPU"] == 2.0
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_the_result_is_bit_identical_to_the_local_engine(local_ray: Any, source: Path, tmp_path: Path, precision: str) -> None:
    plan = plan_of(source, precision)
    progress: list[tuple[str, int]] = []
    local = run(plan, source, tmp_path / "local", "local")
    ray = run(plan, source, tmp_path / "ray", "ray", on_progress=lambda name, num_bytes: progress.append((name, num_bytes)))
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert sorted(path.name for path in (tmp_path / "ray").iterdir()) == sorted(p.name for p in (tmp_path / "local").iterdir())
    timeless = [{**shard.model_dump(), "seconds": None} for shard in ray.shards]
    assert timeless == [{**shard.model_dump(), "seconds": None} for shard in local.shards]
    assert dict(progress) == {
        name: sum(tensor.num_bytes for tensor in tensors) for name, tensors in planned_shards(plan).items()
    }  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [("local", "ray"), ("ray", "local")])
def test_a_run_begun_with_one_engine_is_finished_by_the_other(
    local_ray: Any, source: Path, tmp_path: Path, first: str, second: str
) -> None:
    plan = plan_of(source, "w4a16")
    run(plan, source, tmp_path / "whole", "local")

    def one_shard(plan: Plan, names: Any, *rest: Any) -> Iterator[Any]:
        yield from RUNNERS[first](plan, names[:1], *rest)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, source, tmp_path / "out", one_shard)
    done = next(iter(planned_shards(plan)))
    before = (tmp_path / "out" / done).stat().st_mtime_ns
    assert len((tmp_path / "out" / JOURNAL).read_text().splitlines()) == 2
    run(plan, source, tmp_path / "out", second)
    assert (tmp_path / "out" / done).stat().st_mtime_ns == before, "the finished shard was made again"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ from the hub
@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(make_tiny_glm4_moe(tmp_path / "model", shards=4, num_experts=12))
    server.use(monkeypatch, tmp_path / "home")
    yield server
    server.close()


def stream_with_ray(precision: str, folder: Path) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision)
    plan = make_plan(open_hub_checkpoint("org/model"), recipe, model="tiny", family=None)
    with HubStream(plan, folder / "staging") as stream:
        run(plan, stream.folder, folder / "ray", ray_runner.from_hub(stream))
        staged = sum(path.stat().st_blocks * 512 for path in stream.folder.glob("*.safetensors"))
        assert staged < 4 * 200_000, "headers, and no data"
        stream.remove()
    return plan


def test_tasks_download_what_they_read_and_no_more_at_a_time_than_allowed(
    local_ray: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFP4 shares scales across shards; one task at a time, so that downloads of two shards never mix."""
    monkeypatch.setattr(ray_runner, "DOWNLOADS_AT_ONCE", 1)
    asked: list[str] = []
    hub.on_data = lambda name, begin: asked.append(name)
    stream_with_ray("nvfp4a16", tmp_path)
    local = plan_of(hub.folder, "nvfp4a16")
    needs = needs_of(local, open_checkpoint(hub.folder).tensors)
    assert sum(len(need.ranges) for need in needs.values()) == 4, "some weights are merged across shards"
    assert asked == [file for need in needs.values() for file in (*need.whole, *need.ranges) for _ in range(parts(need, file))]
    run(local, hub.folder, tmp_path / "local", "local")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert {path.name for path in tmp_path.iterdir()} - {"home"} == {"local", "model", "ray"}


def parts(need: Need, file: str) -> int:
    """Requests that a file takes: one, for all of it or for each range that is read."""
    return len(need.ranges.get(file, ((0, 0),)))


def test_what_a_lost_worker_had_downloaded_is_downloaded_again(
    local_ray: Any, hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    one_at_a_time = threading.Lock()

    def kill_once(name: str, begin: int) -> None:
        with one_at_a_time:
            if not killed and (victims := writers_in(tmp_path / "ray")):
                killed.append(victims[0])
                os.kill(victims[0], signal.SIGKILL)

    hub.on_data = kill_once
    stream_with_ray("w4a16", tmp_path)
    assert len(killed) == 1 and sum("is begun again" in record.getMessage() for record in caplog.records) == 1
    run(plan_of(hub.folder, "w4a16"), hub.folder, tmp_path / "local", "local")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_password_of_the_hub_is_in_nothing_that_ray_keeps(
    local_ray: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in its logs nor in the environment of its tasks; nodes that do not know the address say what to do."""
    plain, password = hub.url, "pa55w0rd-of-a-mirror"
    secret = hub.url.replace("://", f"://reader:{password}@")
    monkeypatch.setattr(hub, "url", secret)
    hub.use(monkeypatch, tmp_path / "home")
    asks = (
        rf"^node \S+ asks the hub at https://huggingface\.co, the driver at {re.escape(plain)}: .*; set it on every node before"
    )
    with pytest.raises(QuantizeError, match=asks) as refused:
        stream_with_ray("w4a16", tmp_path)
    assert "\n" not in str(refused.value) and password not in str(refused.value)
    session = Path(local_ray._private.worker._global_node.get_session_dir_path())
    logged = [path for path in session.rglob("*") if path.is_file()]
    assert logged and not [path for path in logged if password.encode() in path.read_bytes()]
    environments = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/environ") if b"ray::" in cmdline(path.parent)
    ]  # fmt: skip
    assert not [environment for environment in environments if password.encode() in environment]


def cmdline(process: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def test_a_node_that_has_the_address_with_its_password_is_let_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://reader:word@mirror.example")
    ray_worker.check_endpoint("https://mirror.example")
    ray_worker.check_endpoint(None)
    with pytest.raises(
        QuantizeError, match=r"asks the hub at https://mirror\.example, the driver at https://huggingface\.co: "
    ):
        ray_worker.check_endpoint("https://huggingface.co")


def test_too_little_disk_for_one_shard_is_said_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runner, "SPARE_BYTES", 1 << 60)
    with pytest.raises(QuantizeError, match=r"ray: [\d.]+ GB are needed for one shard of the source and what is still to be"):
        stream_with_ray("w4a16", tmp_path)
    assert not list((tmp_path / "ray").glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ lost workers, Ctrl-C, errors
@pytest.fixture(scope="module")
def slow_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for the reference kernels to be at work on a shard for about a second."""
    folder = tmp_path_factory.mktemp("slow") / "tiny"
    return make_tiny_glm4_moe(folder, hidden=512, moe_intermediate=256, num_experts=8, shards=2, mtp=False)


def is_being_written(folder: Path, min_bytes: int = 0) -> bool:
    """Whether some attempt at a shard in `folder` has `min_bytes` or more."""
    try:
        return any(path.stat().st_size >= min_bytes for path in folder.glob(".ray-*/*/.*.partial"))
    except FileNotFoundError:
        return False


def writers_in(folder: Path, min_bytes: int = 0) -> list[int]:
    """Ids of the other processes that have a file of an attempt below `folder` open, of `min_bytes` or more."""
    addresses = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or closed the file
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(f"{folder}/.ray-") and descriptor.stat().st_size >= min_bytes:
                        addresses.add(int(pid))
    return sorted(addresses - {os.getpid()})


class Killer(threading.Thread):
    """Sends SIGKILL to the first `kills` processes that have written 256 KiB of an attempt at a shard in `folder`."""

    def __init__(self, folder: Path, kills: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.left, self.killed = folder, kills, list[int]()
        self.stop = threading.Event()

    def run(self) -> None:
        while self.left and not self.stop.wait(0.01):
            if not is_being_written(self.folder, 1 << 18):
                continue
            for pid in writers_in(self.folder, 1 << 18)[: self.left]:
                if pid not in self.killed:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)
                    self.left -= 1


def test_shards_of_killed_workers_are_made_again(
    local_ray: Any, slow_source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(slow_source, "w4a16")
    run(plan, slow_source, tmp_path / "local", "local")
    killer = Killer(tmp_path / "ray", kills=2)
    killer.start()
    made = run(plan, slow_source, tmp_path / "ray", "ray", kernels="reference")
    killer.stop.set()
    killer.join()
    assert len(killer.killed) == 2, "the test came too late to kill anyone"
    again = [record.getMessage() for record in caplog.records if "is begun again" in record.getMessage()]
    assert len(again) == 2 and all("its worker was lost" in line for line in again)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert [shard.name for shard in made.shards] == list(planned_shards(plan))


def test_a_shard_that_loses_every_worker_ends_the_run_in_one_line(
    local_ray: Any, slow_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "ATTEMPTS", 1)
    killer = Killer(tmp_path / "out", kills=1)
    killer.start()
    with pytest.raises(QuantizeError) as caught:
        run(plan_of(slow_source, "w4a16"), slow_source, tmp_path / "out", "ray", kernels="reference")
    killer.stop.set()
    killer.join()
    assert "its worker was lost 1 times" in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob(".*"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_ctrl_c_ends_the_tasks_and_leaves_nothing_half_written(local_ray: Any, slow_source: Path, tmp_path: Path) -> None:
    plan, out = plan_of(slow_source, "w4a16"), tmp_path / "out"

    def interrupt() -> None:
        while not is_being_written(out, 1 << 18):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # ignored where the tests run in the background of a script
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(plan, slow_source, out, "ray", kernels="reference")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert writers_in(out) == []
    assert {path.suffix for path in out.iterdir()} <= {".jsonl", ".safetensors"}
    run(plan, slow_source, out, "ray")
    run(plan, slow_source, tmp_path / "local", "local")
    assert contents(out) == contents(tmp_path / "local")


def test_an_error_in_a_task_is_the_one_the_local_engine_gives(local_ray: Any, tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "tiny", shards=2)
    checkpoint = open_checkpoint(source)
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    header = checkpoint.tensors[name]
    with (source / header.shard).open("r+b") as file:
        file.seek(header.begin)
        file.write(b"\xc0\x7f" * 3)  # three NaN
    plan = plan_of(source, "w4a16")
    messages = []
    for runner in ("local", "ray"):
        with pytest.raises(QuantizeError) as caught:
            run(plan, source, tmp_path / runner, runner)
        messages.append(str(caught.value))
        assert not list((tmp_path / runner).glob(".*"))
    assert messages[0] == messages[1] and name in messages[0]


def test_a_shard_that_no_node_can_hold_is_refused(local_ray: Any) -> None:
    with pytest.raises(QuantizeError) as caught:
        ray_cluster.Cluster(local_ray, is_ours=True).check_fits(ray_cluster.TaskNeeds(3, 1 << 50))
    assert str(caught.value) == (
        "no node of the Ray cluster has 3 CPUs and 1048576.00 GiB of memory, which one shard takes; lower --workers or --memory"
    )


def test_a_node_that_does_not_see_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(QuantizeError) as caught:
        ray_worker.wait_for(tmp_path / "nowhere", None)
    assert str(caught.value) == (
        f"node {os.uname().nodename} does not see {tmp_path}/nowhere; with --runner ray, source and output must be folders of "
        "a file system that all nodes share"
    )


def test_without_ray_one_line_says_how_to_get_it(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(QuantizeError) as caught:
        run(plan_of(source, "w4a16"), source, tmp_path / "out", "ray")
    assert (
        str(caught.value)
        == f"--runner ray: Ray is not installed; take --runner local, or install it with: {install_command('ray')}"
    )


def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path: Path, source: Path) -> None:
    """In a process of its own: here Ray is connected already."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assay = str(Path(sys.executable).with_name("assay"))
        child = subprocess.run(
            [assay, "quantize", str(source), "-p", "w4a16", "--out", str(tmp_path / "out"), "--runner", "ray"],
            env=dict(os.environ, RAY_ADDRESS=address, COLUMNS="300"),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1] == (
        f"error: --runner ray: no Ray cluster at {address}: [Errno 111] Connection refused; set RAY_ADDRESS to the cluster's, "
        "or take --runner local"
    )


def test_what_a_task_declares() -> None:
    options = ShardOptions(workers=16, memory_bytes=3 << 30)
    assert ray_runner.needs_of(options) == ray_cluster.TaskNeeds(cpus=4, memory_bytes=3 << 30)
    assert ray_runner.needs_of(ShardOptions(workers=2)) == ray_cluster.TaskNeeds(cpus=2, memory_bytes=2 << 30)
