"""Tokens a second of a checkpoint on a profile, as a range: a roofline, and what was measured of it.

Writing is bound by memory: each step reads the weights that its tokens touch, once. With e of E experts for each token, t
tokens in a step touch 1 - (1 - e / E)^t of them. Reading prompts is bound by arithmetic: two operations for each weight that a
token multiplies with. Real servers reach a share of either; the range of that share is what the results carry.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.roofline.devices import Device, device_named
from assay_evaluate.roofline.rows import ACCEPTED_SHARE, WRITING_SHARE, Range
from assay_evaluate.roofline.weights import ServedWeights

CPU_CORE = Device(8e9, 50e9)
"""One core of a server with AVX2: its part of memory bandwidth, and FP32 operations."""

READING_SHARE: Range = (0.10, 0.40)
"""Of the arithmetic roofline. Assumption: GPUs reach up to 40 % on long prompts; many of a suite's are short."""
CPU_SHARE: Range = (0.3, 2.0)
CPU_STEP_S: Range = (0.01, 0.05)
"""Of a step on a CPU beside the model: scheduling, sampling, Python."""
LOADING_BYTES_S: Range = (1e9, 6e9)
"""From disk or page cache to GPUs. Assumption."""
START_S: dict[str, Range] = {"cuda": (120.0, 900.0), "cpu": (25.0, 70.0)}
"""Of a start beside loading: imports, compiling, CUDA graphs. Assumption for GPUs; measured on two cores of a CPU."""


def held_by(profile: ProfileRecipe) -> int | None:
    """Bytes in which emulation holds every weight, dequantized. None: as it is stored."""
    if not profile.emulate:
        return None
    return 4 if profile.flags.get("dtype") == "float32" else 2


@dataclass(frozen=True)
class Rates:
    """Tokens a second of all requests together, and seconds of a start."""

    prompt_tokens_s: Range
    output_tokens_s: Range
    start_s: Range


def rates_on(profile: ProfileRecipe, weights: ServedWeights, serving: Serving) -> Rates | None:
    """None: a GPU that is not in the table, or a profile that does not say how many there are."""
    hardware = profile.hardware
    drafted = serving.num_speculative_tokens or 0
    written = [profile.concurrency * (1 + accepted * drafted) for accepted in ACCEPTED_SHARE]
    touched = weights.touched_bytes(profile.concurrency * (1 + drafted))
    loading = (weights.num_bytes / LOADING_BYTES_S[1], weights.num_bytes / LOADING_BYTES_S[0])
    start = START_S[hardware.device]
    if hardware.device == "cpu":
        cores = os.cpu_count() or 1
        own = zip(CPU_SHARE, reversed(CPU_STEP_S), strict=True)
        step = [touched / (CPU_CORE.bytes_s * cores * share) + beside for share, beside in own]
        reading = [CPU_CORE.operations_s * cores * share / (2 * weights.active_params) for share in CPU_SHARE]
        writing = [tokens / seconds for tokens, seconds in zip(written, step, strict=True)]
    else:
        device = device_named(hardware.gpu)
        if device is None or hardware.num_gpus == 0:
            return None
        step_s = touched / (device.bytes_s * hardware.num_gpus)
        reading = [device.operations_s * hardware.num_gpus * share / (2 * weights.active_params) for share in READING_SHARE]
        writing = [share * tokens / step_s for share, tokens in zip(WRITING_SHARE, written, strict=True)]
    return Rates((reading[0], reading[1]), (writing[0], writing[1]), (start[0] + loading[0], start[1] + loading[1]))
