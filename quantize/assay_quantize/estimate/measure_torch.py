"""What one core of this machine does of a calibration: products, factorizations, steps of llm-compressor's GPTQ.

Measured in some seconds, on shapes of the plan. Rates are of processor time, with one thread of torch; how they scale to more
cores is assumed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from assay.records.plan import Plan
from assay_quantize.calibration.memory import BATCH_TOKENS, weights_at_once
from assay_quantize.calibration.quiet import quiet
from assay_quantize.estimate.calibration_time import TorchRates
from assay_quantize.plan.calibrated import calibrated_tensors

BLOCK = 128
MOST_COLUMNS = 4096
"""Of a Hessian that is factorized to be measured."""
SECONDS_EACH = 0.5
SOURCE = "measured just now on one core of this machine, with torch and llm-compressor, on the plan's commonest shapes"


def measured_torch(plan: Plan) -> TorchRates:
    """Of one core, on the two commonest shapes that the plan rounds."""
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
            products, factors, steps = [], [], []
            for (rows, columns, at_once), count in shapes:
                products.append((count * 2.0 * BATCH_TOKENS * rows * columns, count * _product_s(rows, columns)))
                some = min(columns, MOST_COLUMNS)
                factors.append((count * 4 / 3 * some**3, count * _factor_s(rows, some)))
                steps += [(float(batch * rows), _step_s(batch, rows, scheme)) for batch in sorted({1, at_once})]
            column_s, number_s = _line(steps)
            return TorchRates(
                product=_rate(products),
                factor=_rate(factors),
                column_s=column_s,
                column_number_s=number_s,
                searched_number_s=_searched_s(),
                tuned_number_s=_tuned_s(),
                bus=None,
                source=SOURCE,
            )
        finally:
            torch.set_num_threads(threads)


def _rate(done: list[tuple[float, float]]) -> float:
    """Of (operations, seconds) of several shapes."""
    return sum(flops for flops, _ in done) / sum(seconds for _, seconds in done)


def _product_s(rows: int, columns: int) -> float:
    """A batch through a linear layer."""
    x_TI, w_OI = _random(BATCH_TOKENS, columns), _random(rows, columns)
    return _seconds(lambda: x_TI @ w_OI.T)


def _factor_s(rows: int, columns: int) -> float:
    import torch
    from llmcompressor.modifiers.gptq.helpers import factorize_hessian

    x_TI, w_BOI = _random(BATCH_TOKENS, columns), _random(1, rows, columns)
    hessian_BII = (x_TI.T @ x_TI)[None]
    return _seconds(lambda: factorize_hessian(w_BOI, hessian_BII.clone(), 0.01, torch.zeros(1, dtype=torch.bool)))


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

    return _seconds(block) / BLOCK


def _searched_s() -> float:
    """What AWQ does with one number of a weight for a candidate: scaled, its range, rounded, scaled back; in FP32."""
    w_OI = _random(1024, 1024)

    def search() -> None:
        scaled = w_OI * 1.1
        step = scaled.view(1024, 8, 128).abs().amax(-1, keepdim=True) / 7.5
        (scaled.view(1024, 8, 128) / step).clamp(-8, 7).round().mul(step).view(1024, 1024).div(1.1).to(w_OI.dtype)

    return _seconds(search) / int(w_OI.numel())


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

    return _seconds(step) / int(weight_OI.numel())


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * numbers, least squares; b of the largest point alone where there is but one size."""
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y / mean_x
    slope = max(slope, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope


def _seconds(action: Callable[[], object]) -> float:
    """Processor time of this thread, the median of several; the first run does not count."""
    action()
    took: list[float] = []
    deadline = time.monotonic() + SECONDS_EACH
    while len(took) < 3 or (time.monotonic() < deadline and len(took) < 50):
        began = time.thread_time()
        action()
        took.append(max(time.thread_time() - began, 1e-9))
    return statistics.median(took)
