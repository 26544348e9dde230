"""Real vLLM servers with planted faults: the lever finder names what each depends on."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.planting import faulty_spec, planted

from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.diagnosis.levers.reproduction import reproduce
from assay_evaluate.diagnosis.levers.search import LeverSettings, find_levers
from assay_evaluate.diagnosis.levers.settings import Setting, Start, facts_of, serve_here

pytestmark = [pytest.mark.serve, pytest.mark.long]

BLOCKS = 160
"""Of 32 tokens, handed out in turn. What eight requests need at once is a third of it."""
STALE_FROM = 100
SETTINGS = LeverSettings(num_requests=16, concurrency=8, max_tokens=32, levers=("concurrency", "speculation", "kv_cache"))


class Servers:
    """tiny-glm under one setting after another; each is started once and stays for the module. Two of them start together."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        flags = {"block_size": 32, "num_gpu_blocks_override": BLOCKS, "max_model_len": 1024}
        self.spec = faulty_spec(folder / "vllm.log", enable_prefix_caching=True, **flags)
        self._start, self._stack = serve_here(self.spec), stack
        self._pool = stack.enter_context(ThreadPoolExecutor())
        self._running: dict[Setting, Future[ProbedEndpoint]] = {}
        for early in (Setting(1), Setting(1, speculation=False)):
            self._begin(early)

    def _begin(self, setting: Setting) -> None:
        context = self._start(setting)
        self._running[setting] = starting = self._pool.submit(context.__enter__)

        def stop() -> None:
            if starting.exception() is None:  # waits until it is up
                context.__exit__(None, None, None)

        self._stack.callback(stop)

    def at(self, setting: Setting) -> ProbedEndpoint:
        own = Setting(1, kv_cache_blocks=setting.kv_cache_blocks, speculation=setting.speculation)
        if own not in self._running:
            self._begin(own)
        return self._running[own].result()

    def with_fault(self, fault: str, **parameters: Any) -> Start:
        """Every server of a search has the fault in it, as all servers of a faulty version would."""

        @contextmanager
        def start(setting: Setting) -> Iterator[ProbedEndpoint]:
            endpoint = self.at(setting)
            with planted(endpoint.base_url, fault, **parameters):
                yield endpoint

        return start


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("faults"), stack)


@pytest.mark.parametrize(
    ("fault", "parameters", "lever"),
    [
        ("rows mixed up under load", {"row": 2, "hold_s": 0.25}, "concurrency"),
        ("stale KV above a slot", {"block": STALE_FROM}, "kv_cache"),
        ("wrong drafts accepted", {"rate": 1.0}, "speculation"),
    ],
)
def test_the_right_lever_is_named(fault: str, parameters: dict[str, Any], lever: str, servers: Servers, tmp_path: Path) -> None:
    start = servers.with_fault(fault, **parameters)
    report, search = find_levers(start, SETTINGS, label=fault, facts=functools.partial(facts_of, can_restart=True))
    effects = {effect.lever: (effect.effect, effect.sentence) for effect in report.effects}
    # which blocks a request gets depends on when others end: on a server without drafts the failure may begin elsewhere
    also = [other for other in report.also if lever != "kv_cache" or effects[other][0] != "moved"]
    assert (report.lever, also) == (lever, []), effects
    assert effects[lever][0] == "gone"
    if lever == "concurrency":
        done = reproduce(report, search, tmp_path / "bundle", servers.spec)
        assert len(done.smallest) == 3  # places 0 to 2 of the batch
        script = [sys.executable, "-I", "-S", str(tmp_path / "bundle" / "reproduce.py"), servers.at(Setting(8)).base_url]
        with start(Setting(8)):
            assert subprocess.run(script, capture_output=True, check=False, timeout=120).returncode == 1
        assert subprocess.run(script, capture_output=True, check=False, timeout=120).returncode == 0
        assert "--num-gpu-blocks-override 160" in (tmp_path / "bundle" / "server.sh").read_text()
