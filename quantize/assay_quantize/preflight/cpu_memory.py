"""Does this machine's memory hold a checkpoint that vLLM serves on its CPUs, and the KV cache beside it?

vLLM 0.32 (`platforms/cpu.py`, `v1/worker/cpu_worker.py`) allocates VLLM_CPU_KVCACHE_SPACE on each rank after the weights, and
refuses to start if one sequence of `max-model-len` does not fit into it. Without it the cache gets what the weights leave of
`gpu-memory-utilization` (0.92) of the memory. Weights are dequantized where the profile emulates.
"""

from __future__ import annotations

import math
from dataclasses import replace

from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.report import Check
from assay_quantize.plan.fits import kv_bytes_per_token, rank_bytes, ranks_of, windows
from assay_quantize.plan.stored import StoredModel, is_speculative
from assay_quantize.preflight.memory import GIB, context_of

WORKSPACE_BYTES = 2 * GIB
"""Allowed on each rank for the process beside weights and KV cache: Python, torch, vLLM, activations, logits."""
STEP_TOKENS = 2048
"""Of one step on one rank, where no flag says so (`get_batch_defaults` of vLLM's arg_utils.py)."""
_SPACE = "VLLM_CPU_KVCACHE_SPACE"


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
    ranks, length = ranks_of(profile), context_of(model, profile, serving)
    sequence_bytes = length * kv_bytes_per_token(model, bytes_each, ranks.tensor_parallel)
    kept = windows(model, bytes_each, ranks.tensor_parallel, step_tokens=STEP_TOKENS * ranks.tensor_parallel)
    sequence_bytes += sum(min(length, one.tokens) * one.bytes_per_token for one in kept)
    cache_bytes, whose = sequence_bytes, f"one sequence of max-model-len {length:,}"
    usable = int(memory_bytes * profile.gpu_memory_utilization)
    if space:
        if not space.isdecimal() or int(space) * GIB < sequence_bytes:
            return _no_space(label, space, length, sequence_bytes)
        cache_bytes, whose, usable = int(space) * GIB, _SPACE, memory_bytes
    n = ranks.tensor_parallel
    held = tuple(weight._replace(num_bytes=math.prod(weight.shape) * bytes_each) for weight in model.weights)
    weight_bytes = n * rank_bytes(replace(model, weights=held), ranks)
    needed = weight_bytes + n * (cache_bytes + WORKSPACE_BYTES)
    detail = (
        f"{needed / GIB:.1f} GiB needed, {usable / GIB:.1f} usable in this machine: weights {weight_bytes / GIB:.1f} "
        f"({bytes_each} bytes each), KV cache {n * cache_bytes / GIB:.1f} ({whose}), allowed for the rest "
        f"{n * WORKSPACE_BYTES / GIB:g}"
    )
    if needed <= usable:
        return Check(check="memory", subject=label, outcome="PASS", detail=detail)
    remedy = "take a machine with more memory, or a profile for GPUs"
    if bytes_each > 2:
        remedy += "; `dtype: bfloat16` in the profile's `vllm:` takes half of it, and is slower"
    left = usable - needed + n * WORKSPACE_BYTES
    if left >= 0:
        detail += f"; it fits if the rest takes no more than {left / GIB:.1f}"
        return Check(check="memory", subject=label, outcome="UNKNOWN", detail=detail, remedy=remedy)
    return Check(check="memory", subject=label, outcome="FAIL", detail=detail, remedy=remedy)


def _no_space(label: str, space: str, length: int, sequence_bytes: int) -> Check:
    """The KV cache that the environment sets is no number, or too small."""
    enough = math.ceil(sequence_bytes / GIB)
    detail = (
        f"{_SPACE} is {space[:20]!r}: vLLM takes a whole number of GiB, and one sequence of max-model-len {length:,} needs "
        f"{sequence_bytes / GIB:.2f} GiB of KV cache"
    )
    remedy = f"set {_SPACE} to {enough} or more in the profile's `environment:`, or lower its max-model-len"
    return Check(check="memory", subject=label, outcome="FAIL", detail=detail, remedy=remedy)
