"""How many workers, how large a slab: what fits into `--memory`. Standard library only.

Memory is: what the process holds already (interpreter, plan) + for every slab in flight its source rows and what is made of
them + scratch of every worker + what must wait in memory until its place in the file is reached (scales). None of it
depends on the size of a shard or of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from assay.errors import QuantizeError
from assay.quantities import size
from assay_quantize.plan.slabs import SLAB_BYTES
from assay_quantize.storage.direct_file import STAGE_BYTES, STAGES
from assay_quantize.storage.past_cache import buffer_bytes

DEFAULT_MEMORY_BYTES = 2 << 30
"""Bound of the process's memory when none is given."""

RUNTIME_BYTES = 224 << 20
"""What importing numba, compiling the kernels and writing config.json take beyond what the process holds at the start."""

FRESH_PROCESS_BYTES = 256 << 20
"""What a Ray worker holds when a task begins: interpreter, Ray, the plan of 60,000 tensors."""

SCRATCH_SLABS: Mapping[str, float] = {"fused": 0.5, "reference": 14.0}
"""Kernels -> scratch of a worker, in slabs of BF16. The reference holds quotients, masks and rounded values in FP32."""

WORKERS_PER_LANE = 4
"""One SHA-256 keeps up with about so many workers; beyond, several shards are written at once."""

FILES_PER_LANE = 2
"""Shards with buffers on their way to the disk: the one that is made, and the one before it."""

WAITING_SLABS = 2
"""Slabs that may be finished, or begun, ahead of the one being written, beyond one for each worker."""

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Budget:
    """What the engine may use: `workers` threads, `slab_bytes` of source at a time each, at most `bytes` in all."""

    workers: int
    slab_bytes: int
    bytes: int


def parse_memory(text: str) -> int:
    """`1.5GiB`, `800MB`, `2G`... as bytes. With `B` units are powers of 1000, with `iB` or neither of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B|)\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise QuantizeError(f"--memory {text}: not a size; write it like 2GiB, 1.5GiB or 800MB")
    number, unit, suffix = match.groups()
    if not unit:
        raise QuantizeError(f"--memory {text}: say the unit as well: {number}GiB, {number}MB, ...")
    base = 1000 if suffix.upper() == "B" else 1024
    return int(float(number) * base ** _UNITS[unit.upper()])


def window_of(workers: int) -> int:
    """Slabs that may be in flight at once: read, being worked on, or waiting for their turn to be written."""
    return workers + WAITING_SLABS


def lanes_of(workers: int) -> int:
    """Shards that so many workers make at once."""
    return max(1, workers // WORKERS_PER_LANE)


def slab_budget_bytes(workers: int, slab_bytes: int, kernels: str) -> int:
    """The most that `workers` hold: rows and results of every slab in flight, slabs that are read ahead, scratch of the
    workers, and what is being written."""
    staged_bytes = FILES_PER_LANE * lanes_of(workers) * STAGES * STAGE_BYTES
    ahead_bytes = (workers + lanes_of(workers) * WAITING_SLABS) * buffer_bytes(slab_bytes)
    return int(slab_bytes * (2 * window_of(workers) + SCRATCH_SLABS[kernels] * workers)) + ahead_bytes + staged_bytes


def plan_budget(
    memory_bytes: int, workers: int, *, least_slab_bytes: int, held_bytes: int, kernels: str, base_bytes: int
) -> Budget:
    """The most workers and the largest slabs that fit into `memory_bytes`: fewer workers first, then smaller slabs.

    least_slab_bytes: the smallest slab that can be cut of every tensor (a row, 128 rows for FP8 blocks...). held_bytes: what
    waits in memory for its place in a file. base_bytes: what the process holds without slabs.
    Raises QuantizeError with the least bound that would do.
    """
    if workers < 1:
        raise QuantizeError(f"--workers {workers}: at least 1 is needed")
    free = memory_bytes - base_bytes - held_bytes
    slab_bytes = max(SLAB_BYTES, least_slab_bytes)
    budget = Budget(workers, slab_bytes, memory_bytes)
    while slab_budget_bytes(budget.workers, budget.slab_bytes, kernels) > free:
        if budget.workers > 1:
            budget = replace(budget, workers=budget.workers - 1)
        elif budget.slab_bytes > least_slab_bytes and budget.slab_bytes > 1 << 16:
            budget = replace(budget, slab_bytes=max(least_slab_bytes, budget.slab_bytes // 2))
        else:
            least = base_bytes + held_bytes + slab_budget_bytes(1, budget.slab_bytes, kernels)
            given = size(memory_bytes) if memory_bytes % (1 << 20) else f"{memory_bytes >> 20}MiB"
            raise QuantizeError(
                f"--memory {given}: too little for one worker with the smallest slabs; "
                f"at least {(least + (1 << 20) - 1) >> 20}MiB are needed here"
            )
    return budget
