"""What this machine's cores and disk do, measured in about two seconds, for `assay plan --hardware this`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from assay.records.plan import Plan
from assay_quantize.estimate.hardware_time import CoreRates, Machine, bytes_by_scheme, mean_rate
from assay_quantize.kernels.devices import default_workers
from assay_quantize.plan.slabs import observer_of
from assay_quantize.storage.direct_file import DirectFile

ROWS, COLUMNS = 1024, 4096
"""A slab of 8 MiB that fits the group size of every scheme."""
DISK_BYTES = 128 << 20
PIECE_BYTES = 8 << 20
SECONDS_EACH = 0.4


def calibrate(plan: Plan, folder: Path) -> tuple[Machine, CoreRates]:
    """This machine and the rates of one of its cores, for the schemes of `plan`; the disk is that of `folder`.

    Rates are of CPU time, so that other work on the machine counts little. The network is not measured.
    Raises OSError when nothing can be written to `folder`.
    """
    read, write, copy_in, copy_out = _disk_rates(folder)
    name = f"this machine, {default_workers()} cores"
    disk = f"its disk measured with a file of {DISK_BYTES >> 20} MiB in {folder}"
    machine = Machine(name, default_workers(), read, write, None, disk)
    return machine, _core_rates(plan, copy_in, copy_out)


def _core_rates(plan: Plan, copy_in: float, copy_out: float) -> CoreRates:
    from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows
    from assay_quantize.kernels.dequantize import dequantize_rows

    observer = observer_of(plan)
    w_OI = _weights()
    amax = amax_rows(w_OI, "BF16")
    stored = np.random.default_rng(1).integers(0, 0x7F, w_OI.shape, np.uint8)
    scale = np.full((ROWS // 128, COLUMNS // 128), 0.01, np.float32)
    out = np.empty_like(w_OI)

    def dequantize() -> None:
        dequantize_rows(stored, scale, 128, 128, 0, out)

    def quantize(scheme: str) -> object:
        return quantize_rows(w_OI, "BF16", scheme, amax=amax if needs_amax(scheme) else None, observer=observer)

    return CoreRates(
        quantize=mean_rate(plan, {s: _rate(functools.partial(quantize, s), w_OI.nbytes) for s in bytes_by_scheme(plan)}),
        amax=_rate(lambda: amax_rows(w_OI, "BF16"), w_OI.nbytes),
        dequantize=_rate(dequantize, w_OI.nbytes),
        copy_in=copy_in,
        copy_out=copy_out,
        sha256=_rate(lambda: hashlib.sha256(w_OI.data), w_OI.nbytes),
        source="measured just now on one core of this machine, CPU time of single slabs",
    )


def _weights() -> Any:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _rate(action: Callable[[], object], num_bytes: int, seconds: float = SECONDS_EACH) -> float:
    """GB per second of this thread's CPU time, the median of several; the first run, which may compile, does not count."""
    action()
    took: list[float] = []
    deadline = time.monotonic() + seconds
    while len(took) < 3 or (time.monotonic() < deadline and len(took) < 20):
        began = time.thread_time()
        action()
        took.append(max(time.thread_time() - began, 1e-9))
    return num_bytes / statistics.median(took) / 1e9


def _disk_rates(folder: Path) -> tuple[float, float, float, float]:
    """GB/s of a file in `folder`: read, written and synced; of one core: copied from the page cache, handed to the disk."""
    piece = np.random.default_rng(2).bytes(PIECE_BYTES)
    buffer = bytearray(PIECE_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".assay-calibrate-") as file:
        written, cpu_began, began = 0, time.process_time(), time.perf_counter()
        direct = DirectFile(Path(file.name), DISK_BYTES)
        try:
            while written < DISK_BYTES and (written == 0 or time.perf_counter() - began < 1.0):
                direct.append(piece)
                written += PIECE_BYTES
            direct.sync()
        finally:
            direct.close()
        write_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        handle = file.fileno()
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # where it was written through the cache
        began = time.perf_counter()
        for position in range(0, written, PIECE_BYTES):
            os.preadv(handle, [buffer], position)
        read_s = time.perf_counter() - began
        positions = itertools.cycle(range(0, written, PIECE_BYTES))
        copy_in = _rate(lambda: os.preadv(handle, [buffer], next(positions)), PIECE_BYTES, seconds=0.1)
    return written / read_s / 1e9, written / write_s / 1e9, copy_in, written / max(cpu_s, 1e-9) / 1e9
