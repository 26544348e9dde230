"""What this process may compute on: how many cores, and whether there is a GPU to calibrate on."""

from __future__ import annotations

import os
from pathlib import Path

from assay.errors import QuantizeError


def default_workers(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity, and no more than the CPU quota of its control group (at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs the control group may use (v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None: no limit, or none that can be read."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        own = []
    paths = [line.split(":", 2)[2].lstrip("/") for line in own if line.count(":") >= 2]
    quotas = []
    for folder in {cgroup, cgroup / "cpu", *(cgroup / p for p in paths), *(cgroup / "cpu" / p for p in paths)}:
        try:
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            elif (folder / "cpu.cfs_quota_us").is_file():
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
            else:
                continue
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def device_here(asked: str) -> str:
    """`cpu` or `cuda`, of `cpu`, `cuda` or `auto`, which is the GPU if PyTorch sees one. Imports torch unless it is `cpu`.

    Raises QuantizeError: `cuda`, and PyTorch sees none.
    """
    if asked == "cpu":
        return asked
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise QuantizeError("--device cuda: PyTorch sees no CUDA device here; say --device cpu")
    return "cpu"
