"""A pass on three simulated nodes: the files that a local pass leaves, whoever is killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_nodes import WorkerKiller, simulated_nodes, workers_at
from tiny_families import glm4_moe, make_tiny

from assay.errors import QuantizeError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.remote import ray_cluster, ray_worker
from assay_quantize.remote.ray_cluster import Cluster, TaskNeeds
from assay_quantize.screen import ray_pass, ray_share
from assay_quantize.screen.forward import num_layers_done, run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.ray_pass import SHARES, PassTasks, needs_of, run_ray_pass, shared_out
from assay_quantize.sensitivity.texts import ScoredText

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ray-pass") / "source", glm4_moe())


@pytest.fixture(scope="module")
def tasks() -> Iterator[PassTasks]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    needs = needs_of("cpu", None)
    with simulated_nodes(3), ray_cluster.connected(needs) as cluster:
        yield PassTasks(cluster, needs)
    torch.set_num_threads(threads)


def texts(count: int, length: int = 20) -> list[ScoredText]:
    draw = np.random.default_rng(0)
    return [
        ScoredText(tuple(map(int, draw.integers(7, 800, length + 9 * (number % 5)))), 1 + number % 4) for number in range(count)
    ]


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> LayerModel:
    return LayerModel(open_stored(open_checkpoint(folder, allow_quantized=True)), dtype)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def on_ray(source: Path, given: list[ScoredText], folder: Path, tasks: PassTasks, **more: Any) -> list[str]:
    """What it says."""
    lines: list[str] = []
    run_ray_pass(open_model(source), given, folder, "an identity", lines.append, checkpoint=source, tasks=tasks, **more)
    return lines


def locally(source: Path, given: list[ScoredText], folder: Path, **more: Any) -> dict[str, str]:
    run_pass(open_model(source), given, folder, "an identity", lambda _: None, **more)
    return files_of(folder)


# ------------------------------------------------------------------------------------------------ how texts are shared out
def test_shares_have_about_as_many_tokens() -> None:
    given = [ScoredText(tuple(range(length))) for length in (5, 50, 10, 40, 20, 35)]
    assert shared_out(given, 0, 3) == [[0, 1], [2, 3], [4, 5]]
    assert shared_out(given, 2, 3) == [[1], [0, 2, 3], [4, 5]], "two texts run as two copies more: 15 and 150 tokens"
    assert shared_out(given[:2], 0, 9) == [[1], [0]]


def test_as_many_shares_as_tasks_run_at_once() -> None:
    class Ray:
        @staticmethod
        def nodes() -> list[dict[str, Any]]:
            resources = [{"CPU": 9.0, "memory": 64e9, "GPU": 2.0}, {"CPU": 8.0, "memory": 17e9}, {"CPU": 64.0, "memory": 900e9}]
            return [{"Alive": number < 2, "Resources": each} for number, each in enumerate(resources)]

    def num_shares(needs: TaskNeeds, num_texts: int) -> int:
        return PassTasks(Cluster(Ray), needs).num_shares(num_texts)  # type: ignore[arg-type]

    assert num_shares(TaskNeeds(4, 10 << 30), 100) == 2 + 1
    assert num_shares(TaskNeeds(4, 10 << 30), 2) == 2
    assert num_shares(TaskNeeds(4, 10 << 30, gpus=1), 100) == 2
    assert num_shares(TaskNeeds(10, 1 << 30), 100) == 1, "none is large enough: one waits for a node to join"


def test_what_a_task_declares(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 24)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    words = ("a share of the texts", "--workers")
    no_node: Any = type("Ray", (), {"nodes": staticmethod(list)})
    cluster, model = Cluster(no_node, is_ours=True), open_model(source)
    layer_bytes = max(model.parts(layer).whole_bytes for layer in range(3))
    on_cpu = PassTasks(cluster, needs_of("cpu", None)).for_model(model)
    assert on_cpu.needs == TaskNeeds(24, (2 << 30) + layer_bytes, 0, *words)
    assert needs_of("cpu", 4) == TaskNeeds(4, 2 << 30, 0, *words)
    on_gpu = PassTasks(cluster, needs_of("cuda", None)).for_model(model)
    assert on_gpu.needs == TaskNeeds(3, 2 << 30, 1, *words)
    assert needs_of("cuda", 5) == TaskNeeds(5, 2 << 30, 1, *words)
    with pytest.raises(QuantizeError) as caught:
        cluster.check_fits(on_gpu.needs)
    assert str(caught.value) == (
        "no node of the Ray cluster has 1 GPU, 3 CPUs and 2.00 GiB of memory, which a share of the texts takes; lower --workers"
    )


# ------------------------------------------------------------------------------------------------ the same files
@slow
@pytest.mark.parametrize(("count", "doubled"), [(7, 0), (7, 4), (2, 0)])
def test_the_files_are_those_of_a_local_pass(tasks: PassTasks, source: Path, tmp_path: Path, count: int, doubled: int) -> None:
    """Also with fewer texts than nodes."""
    expected = locally(source, texts(count), tmp_path / "local", num_doubled=doubled)
    lines = on_ray(source, texts(count), tmp_path / "ray", tasks, num_doubled=doubled)
    assert files_of(tmp_path / "ray") == expected and len(expected) == 1 + 2 + count + doubled
    assert lines == [f"layer {layer} of 3, {min(count, 3)} shares" for layer in (1, 2, 3)]
    assert on_ray(source, texts(count), tmp_path / "ray", tasks, num_doubled=doubled) == [], "it is whole"


@slow
def test_layers_of_a_local_pass_that_was_not_finished_are_run_again(tasks: PassTasks, source: Path, tmp_path: Path) -> None:
    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    expected = locally(source, texts(4), tmp_path / "local")
    with pytest.raises(KeyboardInterrupt):
        run_pass(open_model(source), texts(4), tmp_path / "ray", "an identity", stop)
    assert len(on_ray(source, texts(4), tmp_path / "ray", tasks)) == 3
    assert files_of(tmp_path / "ray") == expected


# ------------------------------------------------------------------------------------------------ lost workers, a killed driver
def attempts_in(folder: Path) -> list[Path]:
    return [path for path in (folder / SHARES).glob("*.*") if path.is_dir()]


def worker_in_layer(folder: Path, layer: int) -> int | None:
    """A process that has states of some text behind `layer` and not of all."""
    if any(any(attempt.glob(f".behind-{layer:05d}.partial/*")) for attempt in attempts_in(folder)):
        return next(iter(workers_at("run_share")), None)
    return None


@slow
def test_a_lost_worker_costs_the_layer_it_was_at(
    tasks: PassTasks, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = texts(120, 300)
    expected = locally(source, given, tmp_path / "local")
    gone_on_from: list[int] = []
    link_layers = ray_pass._link_layers

    def watched(source: Path, folder: Path, num_sequences: int) -> None:
        link_layers(source, folder, num_sequences)
        gone_on_from.append(num_layers_done(folder))

    monkeypatch.setattr(ray_pass, "_link_layers", watched)
    folder = tmp_path / "ray"
    killer = WorkerKiller(lambda: worker_in_layer(folder, 1), lambda: worker_in_layer(folder, 2))
    killer.start()
    lines = on_ray(source, given, folder, tasks)
    killer.stop.set()
    killer.join()
    assert len(killer.killed) == 2, "the test came too late to kill anyone"
    again = [record.getMessage() for record in caplog.records if "is begun again" in record.getMessage()]
    assert len(again) == 2 and all(re.search(r"/source: share \d of its texts: its worker was lost", line) for line in again)
    assert files_of(folder) == expected
    assert lines == [f"layer {layer} of 3, 3 shares" for layer in (1, 2, 3)]
    assert len(gone_on_from) == 2 and max(gone_on_from) >= 1, gone_on_from


@slow
def test_a_pass_whose_driver_was_stopped_goes_on_with_its_shares(
    tasks: PassTasks, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60, 200)
    expected = locally(source, given, tmp_path / "local")

    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "ray"
    with pytest.raises(KeyboardInterrupt):
        run_ray_pass(open_model(source), given, folder, "an identity", stop, checkpoint=source, tasks=tasks)
    assert not workers_at("run_share")
    shares = json.loads((folder / SHARES / "shares.json").read_text())
    assert shares == shared_out(given, 0, 3)
    assert min(num_layers_done(attempt) for attempt in attempts_in(folder)) >= 1
    monkeypatch.setattr(PassTasks, "num_shares", lambda *_: 1)  # two nodes have left
    lines = on_ray(source, given, folder, tasks)
    assert files_of(folder) == expected and "layer 1 of 3, 3 shares" not in lines


@slow
def test_a_share_that_loses_every_worker_ends_the_pass_in_one_line(
    tasks: PassTasks, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "ATTEMPTS", 1)
    killer = WorkerKiller(lambda: worker_in_layer(tmp_path / "ray", 1))
    killer.start()
    with pytest.raises(QuantizeError) as caught:
        on_ray(source, texts(120, 300), tmp_path / "ray", tasks)
    killer.stop.set()
    killer.join()
    line = str(caught.value)
    assert re.match(rf"{source}: share \d of its texts: its worker was lost 1 times, last: ", line) and "\n" not in line
    assert line.endswith("; finished layers stay: look into Ray's log of that node, and run again")
    assert not workers_at("run_share")


def test_an_attempt_begins_with_whole_layers_only(tmp_path: Path) -> None:
    """A worker that was thought lost may still be at work: what it removes meanwhile is looked for again."""
    before, place = tmp_path / "before", tmp_path / "place"
    for layer in (0, 1):
        (before / f"behind-{layer:05d}").mkdir(parents=True)
        (before / f"experts-{layer:05d}.safetensors").write_text(f"experts {layer}")
        for sequence in range(1 if layer else 2):  # behind the second layer it has removed one by now
            (before / f"behind-{layer:05d}" / f"{sequence:06d}.safetensors").write_text(f"{layer} {sequence}")
    (before / "experts-00002.safetensors").write_text("of a layer that is not finished")
    place.mkdir()

    looked: list[int] = []

    def num_layers(folder: Path) -> int:
        looked.append(num_layers_done(folder))
        if len(looked) == 2:  # by then it is through the next one
            (before / "behind-00002").mkdir()
            for sequence in range(2):
                (before / "behind-00002" / f"{sequence:06d}.safetensors").write_text(f"2 {sequence}")
            return num_layers_done(folder)
        return looked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_pass, "num_layers_done", num_layers)
        ray_pass._link_layers(before, place, 2)
    linked = [*place.glob("behind-*/*"), *place.glob("experts-*")]
    assert {str(path.relative_to(place)): path.read_text() for path in linked} == {
        "behind-00002/000000.safetensors": "2 0",
        "behind-00002/000001.safetensors": "2 1",
        "experts-00000.safetensors": "experts 0",
        "experts-00001.safetensors": "experts 1",
        "experts-00002.safetensors": "of a layer that is not finished",
    }


# ------------------------------------------------------------------------------------------------ nodes that are refused
@slow
def test_a_node_that_computes_otherwise_is_refused(
    tasks: PassTasks, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ray_share.numerics_here("cpu")
    monkeypatch.setattr(ray_pass, "numerics_here", lambda device: own | {"torch": "1.0"})
    with pytest.raises(QuantizeError) as caught:
        on_ray(source, texts(4), tmp_path / "ray", tasks)
    assert str(caught.value) == (
        f"node {os.uname().nodename} computes otherwise than the driver, and figures of different numerics are not mixed: "
        f"torch {torch.__version__}, the driver 1.0; take nodes of one kind, the driver's among them"
    )


def job_of(source: Path, **changes: Any) -> ray_share.ShareJob:
    threads = torch.get_num_threads()
    job = ray_share.ShareJob(
        source, str(source), dict(open_checkpoint(source).data), None, torch.float32, "cpu", False, None, threads,
        ray_share.numerics_here("cpu"),
    )  # fmt: skip
    return replace(job, **changes)


def test_a_node_with_another_checkpoint_or_version_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "pass.json").write_text("{}")
    node = os.uname().nodename
    data = dict(open_checkpoint(source).data) | {"config.json": "sha256:" + "0" * 64}
    with pytest.raises(QuantizeError) as caught:
        ray_share.run_share(job_of(source, data=data), texts(1), 0, tmp_path, "an identity", 2)
    assert str(caught.value).startswith(f"node {node} reads another checkpoint in {source} than the driver: config.json was ")
    with pytest.raises(QuantizeError) as caught:
        ray_share.run_share(job_of(source, version="0.0"), texts(1), 0, tmp_path, "an identity", 2)
    assert str(caught.value) == f"node {node} has assay {ray_share.assay.__version__}, the driver 0.0; install the same on all"


def test_a_node_that_does_not_see_the_folder_of_states(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(QuantizeError) as caught:
        ray_share.run_share(job_of(source), texts(1), 0, tmp_path / "nowhere", "an identity", 2)
    assert str(caught.value) == (
        f"node {os.uname().nodename} does not see {tmp_path}/nowhere/pass.json; with --runner ray, source and output must be "
        "folders of a file system that all nodes share"
    )
