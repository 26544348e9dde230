"""Do a profile's devices hold a checkpoint and share it? Arithmetic and rules of `plan/fits.py`.

vLLM 0.32 on CPUs (`platforms/cpu.py`, `v1/worker/cpu_worker.py`) allocates VLLM_CPU_KVCACHE_SPACE on each rank after the
weights, and refuses to start if one sequence of `max-model-len` does not fit into it. Without it the cache gets what the
weights leave of `gpu-memory-utilization` (0.92) of the memory. Weights are dequantized where the profile emulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay.records.preflight.report import Check
from assay_quantize.plan.fits import (
    WORKSPACE_BYTES,
    Fit,
    fit_on,
    kv_bytes_per_token,
    misfits,
    rank_bytes,
    ranks_of,
    remedy,
    sentence,
    windows,
)
from assay_quantize.plan.stored import StoredModel, is_speculative

GIB = 2**30
CPU_WORKSPACE_BYTES = 2 * GIB
"""Allowed on each rank for the process beside weights and KV cache: Python, torch, vLLM, activations, logits."""
STEP_TOKENS = 2048
"""Of one step on one rank, where no flag says so (`get_batch_defaults` of vLLM's arg_utils.py)."""
_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def check_split(label: str, model: StoredModel, profile: ProfileRecipe, serving: Serving) -> Check:
    """Whether tensor parallelism can split one checkpoint on one profile."""
    ranks = ranks_of(profile)
    if cut := misfits(model.served(is_speculative(profile, serving)), ranks):
        return Check(check="split", subject=label, outcome="FAIL", detail=sentence(cut), remedy=remedy(cut))
    n = ranks.tensor_parallel
    detail = f"each of {n} ranks has whole heads, and groups and blocks that share a scale end where its part ends"
    if n == 1:
        detail = "tensor-parallel-size 1: nothing is split"
    return Check(check="split", subject=label, outcome="PASS", detail=detail)


# ------------------------------------------------------------------------------------------------ GPUs
def check_memory(
    label: str, model: StoredModel, profile: ProfileRecipe, serving: Serving, others: Sequence[ProfileRecipe]
) -> Check | None:
    """One checkpoint on one profile. others: profiles to take instead, best first. None: the profile states no memory.

    FAIL: it does not fit, even if nothing but weights and KV cache took memory. What else does is an allowance that was not
    measured, so a checkpoint that fits without it only is UNKNOWN.
    """
    if profile.hardware.memory_bytes_each is None:
        return None
    fit, length = fit_on(model, profile, serving), _context_of(model, profile, serving)
    detail = (
        f"{_needed_gib(fit, length):.1f} GiB needed, {fit.usable_bytes / GIB:.1f} usable on each of {fit.num_gpus} GPUs: "
        f"weights {fit.weight_bytes / GIB:.1f}, KV cache for max-model-len {length:,} {fit.kv_bytes(length) / GIB:.1f}, "
        f"allowed for the rest {WORKSPACE_BYTES / GIB:g}"
    )
    if fit.holds(length):
        detail += f"; {fit.kv_tokens:,} tokens of KV cache fit"
        return Check(check="memory", subject=label, outcome="PASS", detail=detail)
    problems = {profile.name: problem_on(model, profile, serving) for profile in others}
    ways = []
    if (room := fit.kv_tokens // 1024 * 1024) > 0:
        ways.append(f"set `serving: {{max_model_len: {room}}}` in the model's recipe (`max-model-len` in the profile wins)")
    if holds := [name for name, problem in problems.items() if problem is None]:
        ways.append(f"take a profile that holds it: --profile {' or '.join(holds)}")
    ways = ways or ["take a profile with more GPUs or more memory each"]
    why_not = "; ".join(f"not {name}: {problem}" for name, problem in problems.items() if problem is not None)
    advice = ", or ".join(ways) + (f" ({why_not})" if why_not else "")
    left_bytes = fit.free_bytes + WORKSPACE_BYTES - fit.kv_bytes(length)
    if left_bytes >= 0:
        detail += f"; it fits if the rest takes no more than {left_bytes / GIB:.1f} GiB"
    outcome: Literal["UNKNOWN", "FAIL"] = "UNKNOWN" if left_bytes >= 0 else "FAIL"
    return Check(check="memory", subject=label, outcome=outcome, detail=detail, remedy=advice)


def problem_on(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> str | None:
    """Why a profile's GPUs cannot share or hold a checkpoint, in a few words; None: they can, or its memory is not known."""
    if cut := misfits(model.served(is_speculative(profile, serving)), ranks_of(profile)):
        return cut[0].sentence
    if profile.hardware.memory_bytes_each is None:
        return None
    fit, length = fit_on(model, profile, serving), _context_of(model, profile, serving)
    return None if fit.holds(length) else f"{_needed_gib(fit, length):.1f} GiB needed, {fit.usable_bytes / GIB:.1f} usable"


def _context_of(model: StoredModel, profile: ProfileRecipe, serving: Serving) -> int:
    """Tokens of the longest sequence that the server takes; 0 if nobody says."""
    return context_tokens(model.config, profile, serving) or 0


def _needed_gib(fit: Fit, length: int) -> float:
    return (fit.weight_bytes + fit.kv_bytes(length) + WORKSPACE_BYTES) / GIB


# ------------------------------------------------------------------------------------------------ CPUs
def check_cpu_memory(
    label: str,
    model: StoredModel,
    profile: ProfileRecipe,
    serving: Serving,
    *,
    bytes_each: int | None,
    space: str | None,
    memory_bytes: int,
) -> Check:
    """One checkpoint on a profile for CPUs.

    bytes_each: in which each weight and each value of the cache is held; None: as vLLM's kernels like, which is not known.
    space: the server's VLLM_CPU_KVCACHE_SPACE, in GiB; None: not set. memory_bytes: of this machine. FAIL: it does not fit even
    if weights and KV cache were all; UNKNOWN: it fits only without the allowance for the rest.
    """
    if bytes_each is None:
        detail = f"profile {profile.name} does not emulate, and how vLLM's kernels for CPUs hold the weights is not known here"
        return Check(check="memory", subject=label, outcome="UNKNOWN", detail=detail)
    model = model.served(is_speculative(profile, serving))
    ranks, length = ranks_of(profile), _context_of(model, profile, serving)
    sequence_bytes = length * kv_bytes_per_token(model, bytes_each, ranks.tensor_parallel)
    kept = windows(model, bytes_each, ranks.tensor_parallel, step_tokens=STEP_TOKENS * ranks.tensor_parallel)
    sequence_bytes += sum(min(length, window.tokens) * window.bytes_per_token for window in kept)
    cache_bytes, whose = sequence_bytes, f"one sequence of max-model-len {length:,}"
    usable = int(memory_bytes * profile.gpu_memory_utilization)
    if space:
        if not space.isdecimal() or int(space) * GIB < sequence_bytes:
            detail = (
                f"{_SPACE} is {space[:20]!r}: vLLM takes a whole number of GiB, and one sequence of max-model-len {length:,} "
                f"needs {sequence_bytes / GIB:.2f} GiB of KV cache"
            )
            enough = math.ceil(sequence_bytes / GIB)
            advice = f"set {_SPACE} to {enough} or more in the profile's `environment:`, or lower its max-model-len"
            return Check(check="memory", subject=label, outcome="FAIL", detail=detail, remedy=advice)
        cache_bytes, whose, usable = int(space) * GIB, _SPACE, memory_bytes
    n = ranks.tensor_parallel
    held = tuple(weight._replace(num_bytes=math.prod(weight.shape) * bytes_each) for weight in model.weights)
    weight_bytes = n * rank_bytes(replace(model, weights=held), ranks)
    needed = weight_bytes + n * (cache_bytes + CPU_WORKSPACE_BYTES)
    detail = (
        f"{needed / GIB:.1f} GiB needed, {usable / GIB:.1f} usable in this machine: weights {weight_bytes / GIB:.1f} "
        f"({bytes_each} bytes each), KV cache {n * cache_bytes / GIB:.1f} ({whose}), allowed for the rest "
        f"{n * CPU_WORKSPACE_BYTES / GIB:g}"
    )
    if needed <= usable:
        return Check(check="memory", subject=label, outcome="PASS", detail=detail)
    advice = "take a machine with more memory, or a profile for GPUs"
    if bytes_each > 2:
        advice += "; `dtype: bfloat16` in the profile's `vllm:` takes half of it, and is slower"
    left = usable - needed + n * CPU_WORKSPACE_BYTES
    if left >= 0:
        detail += f"; it fits if the rest takes no more than {left / GIB:.1f}"
    outcome: Literal["UNKNOWN", "FAIL"] = "UNKNOWN" if left >= 0 else "FAIL"
    return Check(check="memory", subject=label, outcome=outcome, detail=detail, remedy=advice)
