"""What this machine's cores and disk do, measured in seconds, for `assay plan --hardware this`.

Rates are of processor time, so that other work on the machine counts little; how those of torch scale to more cores is
assumed. The network is not measured.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from assay.records.plan import Plan
from assay_quantize.calibration.memory import BATCH_TOKENS, weights_at_once
from assay_quantize.calibration.quiet import quiet
from assay_quantize.estimate.calibration_time import TorchRates
from assay_quantize.estimate.hardware_time import CoreRates, Machine, bytes_by_scheme, mean_rate
from assay_quantize.kernels.devices import default_workers
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.plan.slabs import observer_of
from assay_quantize.storage.direct_file import DirectFile

ROWS, COLUMNS = 1024, 4096
"""A slab of 8 MiB that fits the group size of every scheme."""
DISK_BYTES = 128 << 20
PIECE_BYTES = 8 << 20
SECONDS_EACH = 0.4
BLOCK = 128
MOST_COLUMNS = 4096
"""Of a Hessian that is factorized to be measured."""
TORCH_SOURCE = "measured just now on one core of this machine, with torch and llm-compressor, on the plan's commonest shapes"


def _median_seconds(action: Callable[[], object], seconds: float = SECONDS_EACH) -> float:
    """Processor time of this thread, the median of several runs; the first, which may compile, does not count."""
    action()
    runs: list[float] = []
    deadline = time.monotonic() + seconds
    while len(runs) < 3 or (time.monotonic() < deadline and len(runs) < 50):
        began = time.thread_time()
        action()
        runs.append(max(time.thread_time() - began, 1e-9))
    return statistics.median(runs)


# ------------------------------------------------------------------------------------------------ kernels and disk
def measured_machine(plan: Plan, folder: Path) -> tuple[Machine, CoreRates]:
    """This machine and the rates of one of its cores, for the schemes of `plan`; the disk is that of `folder`.

    Raises OSError when nothing can be written to `folder`.
    """
    from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows
    from assay_quantize.kernels.dequantize import dequantize_rows

    read, write, copy_in, copy_out = _disk_rates(folder)
    observer = observer_of(plan)
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    w_OI = (values.view(np.uint32) >> 16).astype(np.uint16)
    amax = amax_rows(w_OI, "BF16")
    stored = np.random.default_rng(1).integers(0, 0x7F, w_OI.shape, np.uint8)
    scale = np.full((ROWS // 128, COLUMNS // 128), 0.01, np.float32)
    out = np.empty_like(w_OI)

    def dequantize() -> None:
        dequantize_rows(stored, scale, 128, 128, 0, out)

    def quantize(scheme: str) -> object:
        return quantize_rows(w_OI, "BF16", scheme, amax=amax if needs_amax(scheme) else None, observer=observer)

    def rate(action: Callable[[], object]) -> float:
        return w_OI.nbytes / _median_seconds(action) / 1e9

    cores = default_workers()
    disk = f"its disk measured with a file of {DISK_BYTES >> 20} MiB in {folder}"
    return Machine(f"this machine, {cores} cores", cores, read, write, None, disk), CoreRates(
        quantize=mean_rate(plan, {scheme: rate(functools.partial(quantize, scheme)) for scheme in bytes_by_scheme(plan)}),
        amax=rate(lambda: amax_rows(w_OI, "BF16")),
        dequantize=rate(dequantize),
        copy_in=copy_in,
        copy_out=copy_out,
        sha256=rate(lambda: hashlib.sha256(w_OI.data)),
        source="measured just now on one core of this machine, CPU time of single slabs",
    )


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
        copy_s = _median_seconds(lambda: os.preadv(handle, [buffer], next(positions)), seconds=0.1)
    return written / read_s / 1e9, written / write_s / 1e9, PIECE_BYTES / copy_s / 1e9, written / max(cpu_s, 1e-9) / 1e9


# ------------------------------------------------------------------------------------------------ calibration
def measured_torch(plan: Plan) -> TorchRates:
    """Products, factorizations and steps of llm-compressor's GPTQ on one core, on the plan's two commonest shapes."""
    with quiet():
        import torch

        from assay_quantize.formats.schemes import compressed_tensors_scheme

        layers = calibrated_tensors(plan).values()
        rounded = [(t, weights_at_once(tensors)) for tensors in layers for t in tensors if t.action == "quantize"]
        if not rounded:  # of `assay sensitivity`, which rounds nothing by GPTQ
            rounded = [(t, 1) for t in plan.tensors if t.action == "quantize"]
        shapes = Counter((t.shape[0], t.shape[1], at_once) for t, at_once in rounded).most_common(2)
        scheme = compressed_tensors_scheme(str(rounded[0][0].scheme)).weights
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            product_flops = product_s = factor_flops = factor_s = 0.0
            steps: list[tuple[float, float]] = []
            for (rows, columns, at_once), count in shapes:
                x_TI, w_OI = _random(BATCH_TOKENS, columns), _random(rows, columns)
                product_flops += count * 2.0 * BATCH_TOKENS * rows * columns
                product_s += count * _median_seconds(functools.partial(torch.matmul, x_TI, w_OI.T))
                width = min(columns, MOST_COLUMNS)
                factor_flops += count * 4 / 3 * width**3
                factor_s += count * _factor_s(x_TI[:, :width], w_OI[:, :width])
                steps += [(float(batch * rows), _step_s(batch, rows, scheme)) for batch in sorted({1, at_once})]
            column_s, number_s = _line(steps)
            return TorchRates(
                product=product_flops / product_s,
                factor=factor_flops / factor_s,
                column_s=column_s,
                column_number_s=number_s,
                searched_number_s=_searched_s(),
                tuned_number_s=_tuned_s(),
                bus=None,
                source=TORCH_SOURCE,
            )
        finally:
            torch.set_num_threads(threads)


def _factor_s(x_TI: Any, w_OI: Any) -> float:
    import torch
    from llmcompressor.modifiers.gptq.helpers import factorize_hessian

    hessian_BII = (x_TI.T @ x_TI)[None]
    return _median_seconds(lambda: factorize_hessian(w_OI[None], hessian_BII.clone(), 0.01, torch.zeros(1, dtype=torch.bool)))


def _step_s(batch: int, rows: int, scheme: Any) -> float:
    """One column of `batch` weights, of a block of them."""
    import torch
    from llmcompressor.modifiers.gptq.gptq_quantize import gptq_block_update

    work = _random(batch, rows, BLOCK)
    inverse = torch.eye(BLOCK).expand(batch, BLOCK, BLOCK) + 0.01
    scale, groups = torch.ones(batch, rows, 1), torch.zeros(BLOCK, dtype=torch.int)

    def block() -> None:
        made = [torch.zeros_like(work) for _ in range(3)]
        of_scales = {"scale": scale, "zero_point": torch.zeros_like(scale), "global_scale": None, "g_idx": groups}
        gptq_block_update(work.clone(), inverse, *made, **of_scales, quant_args=scheme, i1=0)

    return _median_seconds(block) / BLOCK


def _searched_s() -> float:
    """What AWQ does with one number of a weight for a candidate: scaled, its range, rounded, scaled back; in FP32."""
    w_OI = _random(1024, 1024)

    def search() -> None:
        scaled = w_OI * 1.1
        step = scaled.view(1024, 8, 128).abs().amax(-1, keepdim=True) / 7.5
        (scaled.view(1024, 8, 128) / step).clamp(-8, 7).round().mul(step).view(1024, 1024).div(1.1).to(w_OI.dtype)

    return _median_seconds(search) / int(w_OI.numel())


def _tuned_s() -> float:
    """What a step of AutoRound does with one number of a weight: rounded with its offset, the gradient, the offset moved and
    kept."""
    import torch
    from auto_round.data_type.int import quant_tensor_sym

    weight_OI = _random(2048, 1024).bfloat16()
    groups_GI = weight_OI.view(-1, 128)
    offset_GI = torch.zeros(groups_GI.shape, requires_grad=True)
    clipping = {name: torch.ones(len(groups_GI), requires_grad=True) for name in ("min_scale", "max_scale")}
    ranges = {"tensor_min": groups_GI.min(1)[0], "tensor_max": groups_GI.max(1)[0]}

    def step() -> None:
        rounded_OI, *_ = quant_tensor_sym(weight_OI, bits=4, group_size=128, v=offset_GI, **clipping, **ranges)
        gradient_GI, *_ = torch.autograd.grad(rounded_OI, [offset_GI, *clipping.values()], weight_OI)
        offset_GI.data.sub_(0.005 * gradient_GI.sign())
        offset_GI.data.clone()

    return _median_seconds(step) / int(weight_OI.numel())


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * numbers, least squares; b of the largest point alone where there is but one size."""
    sizes, seconds = zip(*points, strict=True)
    if len(set(sizes)) == 1:
        return 0.0, statistics.fmean(seconds) / sizes[0]
    slope = max(statistics.linear_regression(sizes, seconds).slope, 0.0)
    return max(statistics.fmean(seconds) - slope * statistics.fmean(sizes), 0.0), slope
