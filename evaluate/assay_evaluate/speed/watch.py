"""What a server holds and draws while it is asked: memory of its processes or GPUs, energy where the GPUs tell it."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from assay_evaluate.serving.hardware import parse_gpus
from assay_evaluate.serving.process import group_members

_QUERY = "index,uuid,name,memory.total,driver_version,memory.used,power.draw"
INTERVAL_S = 0.5


class GpuState(NamedTuple):
    """memory_bytes: used, of the fullest GPU. watts: of all together. None: a GPU does not tell."""

    memory_bytes: int | None
    watts: float | None


class Watch:
    """`with Watch(pid, on_gpus) as watch: ...`; then `watch.memory_bytes` (the most) and `watch.energy_j`.

    pid: the server's process group. On GPUs vLLM takes its share of the memory when it starts (`gpu-memory-utilization`): the
    number says what was reserved, not what the requests needed.
    """

    def __init__(self, pid: int | None, *, on_gpus: bool, ask: Callable[[], GpuState] | None = None) -> None:
        self.memory_bytes: int | None = None
        self.energy_j: float | None = None
        self._pid, self._on_gpus, self._ask = pid, on_gpus, ask or ask_gpus
        self._power: list[tuple[float, float]] = []
        self._tells_power = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        self._sample()
        if self._tells_power and len(self._power) > 2:
            self.energy_j = energy_of(self._power)

    def _sample_until_stopped(self) -> None:
        self._sample()
        while not self._stopped.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        if self._on_gpus:
            now, state = time.monotonic(), self._ask()
            self._tells_power = self._tells_power and state.watts is not None
            if state.watts is not None:
                self._power.append((now, state.watts))
            held = state.memory_bytes
        else:
            held = None if self._pid is None else memory_of_group(self._pid)
        if held is not None:
            self.memory_bytes = max(held, self.memory_bytes or 0)


def energy_of(samples: list[tuple[float, float]]) -> float:
    """Joules of (seconds, watts), by trapezoids."""
    return sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in itertools.pairwise(samples))


def memory_of_group(group: int) -> int | None:
    """Bytes that the processes of a group hold, shared pages counted once (PSS). None: the system does not tell."""
    bytes_held: list[int] = []
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines()
            bytes_held += [int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")][:1]
    return sum(bytes_held) if bytes_held else None


def ask_gpus() -> GpuState:
    """State of the GPUs that a process started now would see."""
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return GpuState(None, None)
    return parse_state(answer.stdout if answer.returncode == 0 else "", os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_state(csv: str, visible: str | None) -> GpuState:
    """Lines `index, uuid, name, MiB, driver, MiB used, watts`; `visible` as in CUDA_VISIBLE_DEVICES (None: all)."""
    used: list[int] = []
    watts: list[float | None] = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 7 or not parse_gpus(", ".join(fields[:5]), visible):
            continue
        if fields[5].isdigit():
            used.append(int(fields[5]) << 20)
        watts.append(float(fields[6]) if fields[6].replace(".", "", 1).isdigit() else None)
    known = [watt for watt in watts if watt is not None]
    return GpuState(max(used, default=None), sum(known) if known and len(known) == len(watts) else None)
