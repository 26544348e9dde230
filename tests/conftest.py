"""Fixtures shared by the tests; the makers are in support/."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe
from warm import WarmVllm

import assay_cli as cli


def pytest_configure() -> None:
    """Two modules at once on two cores: tests and servers compute with one thread each (or one a rank), bound to no core.

    Sums of MKL do not depend on where in memory a matrix begins: on some CPUs they do else, and two implementations that are
    compared have theirs at different places.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # here it is loaded already, and has read the variable
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-4-MoE with an MTP block: 3 layers, first dense, 4 experts, two shards. Read only; copy it to damage it."""
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("tiny") / "tiny-glm4-moe")


@pytest.fixture(scope="session", autouse=True)
def warm_vllm() -> Iterator[WarmVllm]:
    """Servers are forks of a Python that has imported vLLM: a start costs 3 CPU seconds, not 22."""
    warm = WarmVllm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assay_evaluate.serving.server.SupervisedProcess", warm.process)
        patch.setattr("assay_evaluate.speed.bench.SupervisedProcess", warm.process)
        yield warm
    warm.close()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """`run("plan", folder, ...)` -> (exit code, stdout, stderr), in an empty folder; temporary files lie elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["assay", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that take minutes (a vLLM server, containers) first, those with a slow test next: begun last, one would keep one
    core of two waiting."""
    long = {item.path for item in items if item.get_closest_marker("serve") or item.get_closest_marker("timeout")}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: 0 if item.path in long else 1 if item.path in slow else 2)
