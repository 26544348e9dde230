"""`assay screen` and `assay pack` with `--runner ray`: the figures of one machine, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_errors import one_error
from command_line import Run
from ray_nodes import simulated_nodes, workers_at
from tiny_families import glm4_moe, make_tiny

from assay.errors import AssayError
from assay.installation import install_command
from assay.records.pack import Pack
from assay.records.screening import Screening
from assay_pipeline.comparison.screen_sources import ScreenSource
from assay_pipeline.comparison.screen_workers import PassWorkers
from assay_quantize.screen.forward import num_layers_done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, w4a16 that was made of it, text.txt."""
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("screen-on-ray")
    make_tiny(folder / "source", glm4_moe())
    quantize(str(folder / "source"), precision="w4a16-g32", out=folder / "w4a16")
    (folder / "text.txt").write_text(" ".join(f"{n} and {n * n % 97} are {n + n * n % 97}." for n in range(4000)))
    return folder


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    with simulated_nodes(3) as address:
        yield address


def words(folder: Path, out: Path) -> tuple[str, ...]:
    checkpoints = (str(folder / "source"), str(folder / "w4a16"))
    return ("screen", *checkpoints, "--text", str(folder / "text.txt"), "--length", "60", "--workers", "1", "--out", str(out))


def timeless(record: Screening) -> Screening:
    return record.model_copy(update={"seconds": 0.0, "estimate": None})


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.slow
def test_the_record_is_that_of_one_machine(run: Run, folder: Path, nodes: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    code, out, _ = run(*words(folder, tmp_path / "local"), "--tokens", "1500", "--json")
    local = Screening.model_validate_json(out)
    assert (code, local.numerics.device.endswith(", 1 threads")) == (0, True)
    code, out, err = run(*words(folder, tmp_path / "ray"), "--tokens", "1500", "--json", "--runner", "ray")
    shared = Screening.model_validate_json(out)
    assert code == 0 and timeless(shared) == timeless(local) == timeless(Screening.load(tmp_path / "ray" / "screening.json"))
    assert local.estimate is not None and shared.estimate is not None
    assert shared.estimate.read_bytes == 3 * local.estimate.read_bytes, "each node reads both checkpoints"
    assert [line for line in err.splitlines() if ": layer " in line] == [
        f"{label}: layer {layer} of 3, 3 shares" for label in ("source", "w4a16") for layer in (1, 2, 3)
    ]
    assert files_of(tmp_path / "ray" / "passes") == files_of(tmp_path / "local" / "passes")
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_pack_is_that_of_one_machine(run: Run, folder: Path, nodes: str, tmp_path: Path) -> None:
    made = ("pack", folder / "source", "--text", folder / "text.txt", "--tokens", "1200", "--length", "60", "--workers", "1")
    assert run(*made, "--out", tmp_path / "local")[0] == 0
    code, _, err = run(*made, "--out", tmp_path / "ray", "--runner", "ray")
    assert code == 0, err
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    assert Pack.load(tmp_path / "ray" / "pack.json").no_drafts is None
    assert not (tmp_path / ".ray.partial").exists()


@pytest.mark.slow
def test_a_killed_driver(run: Run, folder: Path, nodes: str, tmp_path: Path) -> None:
    """SIGKILL to the command when all shares are through a layer: the same command goes on, and the record is the same."""
    more = ("--tokens", "12000", "--runner", "ray")
    command = [str(Path(sys.executable).with_name("assay")), *words(folder, tmp_path / "ray"), *more]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    shares = tmp_path / "ray" / "passes" / "source" / "shares"
    deadline = time.monotonic() + 600
    while min((num_layers_done(path) for path in shares.glob("0*.*")), default=0) < 1:
        assert driver.poll() is None and time.monotonic() < deadline, driver.stderr and driver.stderr.read()
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    while workers_at("run_share"):
        assert time.monotonic() < deadline, "Ray ends the tasks of a driver that is gone"
        time.sleep(0.1)
    assert shares.is_dir()
    code, out, err = run(*words(folder, tmp_path / "ray"), *more, "--json")
    assert code in (0, 1) and "estimate:" not in err, err
    assert "source: layer 1 of 3, 3 shares" not in err
    resumed = Screening.model_validate_json(out)
    code, out, _ = run(*words(folder, tmp_path / "local"), *more[:2], "--json")
    assert timeless(resumed) == timeless(Screening.model_validate_json(out))
    assert files_of(tmp_path / "ray" / "passes") == files_of(tmp_path / "local" / "passes")


@pytest.mark.slow
def test_a_local_command_may_take_over(run: Run, folder: Path, tmp_path: Path) -> None:
    """What shares have is begun again, and none of it stays."""
    code, out, _ = run(*words(folder, tmp_path / "a"), "--tokens", "600", "--json")
    half = tmp_path / "b" / "passes" / "source"
    (half / "shares" / "00000.0123456789ab" / "behind-00001").mkdir(parents=True)
    record = json.loads((tmp_path / "a" / "passes" / "source" / "pass.json").read_text())
    (half / "pass.json").write_text(json.dumps(record))
    again = run(*words(folder, tmp_path / "b"), "--tokens", "600", "--json")
    assert (again[0], timeless(Screening.model_validate_json(again[1]))) == (code, timeless(Screening.model_validate_json(out)))
    assert files_of(tmp_path / "b" / "passes") == files_of(tmp_path / "a" / "passes")


def test_without_ray_one_line_says_how_to_get_it(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = f"--runner ray: Ray is not installed; take --runner local, or install it with: {install_command('ray')}"
    assert one_error(run(*words(folder, tmp_path / "out"), "--runner", "ray")) == line
    made = ("pack", folder / "source", "--text", folder / "text.txt", "--out", tmp_path / "out", "--runner", "ray")
    assert one_error(run(*made)) == line
    assert not (tmp_path / "out").exists()


def test_a_repository_of_the_hub_is_not_shared() -> None:
    mirror: Any = object()
    with pytest.raises(AssayError) as caught:
        PassWorkers("ray").check_source(ScreenSource("owner/name", Path("mirror"), mirror))
    assert str(caught.value) == (
        "owner/name: with --runner ray every node reads the checkpoint; download it to a folder that all of them share "
        "(hf download owner/name --local-dir DIR), and give that folder"
    )
    PassWorkers("ray").check_source(ScreenSource("folder", Path("folder")))
    PassWorkers().check_source(ScreenSource("owner/name", Path("mirror"), mirror))
