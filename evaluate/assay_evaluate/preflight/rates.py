"""Tokens a second of a checkpoint on a profile, as a range: a roofline, and what was measured of it.

Writing is bound by memory: each step reads the weights that its tokens touch, once. With e of E experts for each token, t
tokens in a step touch 1 - (1 - e / E)^t of them. Reading prompts is bound by arithmetic: two operations for each weight that a
token multiplies with. Real servers reach a share of either; the range of that share is what the results carry.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.families import form_of, num_experts, size_of, text_of
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe

Range = tuple[float, float]
"""From the least to the most."""


class Device(NamedTuple):
    """Of one GPU: bytes read, and BF16 operations without sparsity, a second."""

    bytes_s: float
    operations_s: float


DEVICES = {
    "H100": Device(3.35e12, 0.99e15),
    "H200": Device(4.8e12, 0.99e15),
    "B200": Device(8.0e12, 2.25e15),
    "RTX PRO 6000": Device(1.79e12, 0.5e15),
}
"""GPU as profiles name it -> NVIDIA's data sheet (SXM, one GPU): nvidia.com/en-us/data-center/{h100,h200,dgx-b200}, and
nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000."""
CPU_CORE = Device(8e9, 50e9)
"""One core of a server with AVX2: its part of memory bandwidth, and FP32 operations."""

WRITING_SHARE: Range = (0.10, 0.30)
"""Of the roofline. GLM-5.2 on eight H200, five drafted tokens of which 28 % are accepted, wrote 94 to 126 tokens a second alone
and 828 to 925 with 32 requests, as FP8, W4A16 and NVFP4: shares of 0.11 to 0.23
(https://huggingface.co/canada-quant/GLM-5.2-W4A16-MTP)."""
READING_SHARE: Range = (0.10, 0.40)
"""Of the arithmetic roofline. Assumption: GPUs reach up to 40 % on long prompts; many of a suite's are short."""
CPU_SHARE: Range = (0.3, 2.0)
CPU_STEP_S: Range = (0.01, 0.05)
"""Of a step on a CPU beside the model: scheduling, sampling, Python."""
ACCEPTED_SHARE: Range = (0.28, 0.52)
"""Of drafted tokens. GLM-5.2: 28 % of them on random prompts, 46 to 52 % on natural text (the same card)."""
LOADING_BYTES_S: Range = (1e9, 6e9)
"""From disk or page cache to GPUs. Assumption."""
START_S: dict[str, Range] = {"cuda": (120.0, 900.0), "cpu": (25.0, 70.0)}
"""Of a start beside loading: imports, compiling, CUDA graphs. Assumption for GPUs; measured on two cores of a CPU."""


@dataclass(frozen=True)
class ServedWeights:
    """What a checkpoint makes a server read and compute.

    shared_bytes: of what every token reads (all but experts and embeddings). expert_bytes: of all routed experts.
    active_params: weights that one token multiplies with. num_experts, experts_per_token: 0 without experts.
    """

    shared_bytes: int
    expert_bytes: int
    active_params: int
    num_experts: int
    experts_per_token: int

    @property
    def num_bytes(self) -> int:
        return self.shared_bytes + self.expert_bytes

    def touched_bytes(self, tokens: int) -> float:
        """Read in a step of so many tokens, each routed on its own."""
        if not self.num_experts:
            return self.num_bytes
        untouched = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.shared_bytes + self.expert_bytes * (1 - untouched)


def served_weights(
    family: str,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, tuple[int, ...], int]],
    *,
    bytes_each: float | None = None,
) -> ServedWeights:
    """Of a checkpoint's weights: (name, shape unpacked, bytes with scales). bytes_each: each weight is held so instead."""
    shared = experts = shared_params = expert_params = 0
    for name, shape, num_bytes in weights:
        part, count = form_of(family, name, config).part, math.prod(shape)
        held = num_bytes if bytes_each is None else int(count * bytes_each)
        if part == "routed_expert":
            experts, expert_params = experts + held, expert_params + count
        elif part != "embedding":  # one row a token
            shared, shared_params = shared + held, shared_params + count
    each = size_of(text_of(config), "num_experts_per_tok", 0)
    number = num_experts(family, config) if each else 0  # a router of another kind: every expert is taken to be used
    if number and each > number:
        raise PlanError(f"config.json: num_experts_per_tok is {each:,}, and a layer has {number} experts; correct the config")
    active = expert_params * each // number if number else expert_params
    return ServedWeights(shared, experts, shared_params + active, number, each)


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
        device = _device(hardware.gpu)
        if device is None or hardware.num_gpus == 0:
            return None
        step_s = touched / (device.bytes_s * hardware.num_gpus)
        reading = [device.operations_s * hardware.num_gpus * share / (2 * weights.active_params) for share in READING_SHARE]
        writing = [share * tokens / step_s for share, tokens in zip(WRITING_SHARE, written, strict=True)]
    return Rates((reading[0], reading[1]), (writing[0], writing[1]), (start[0] + loading[0], start[1] + loading[1]))


def _device(gpu: str | None) -> Device | None:
    """The profile's `gpu` is a part of the name that a driver reports."""
    return next((device for name, device in DEVICES.items() if gpu is not None and name.lower() in gpu.lower()), None)
