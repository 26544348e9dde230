"""Replays of vLLM's loaders that name given kernels, and what a log says of W4A16 on Hopper."""

from __future__ import annotations

from typing import Any

from assay.records.preflight.replay import Finding, Modules, Replay, ReplayedPart

HOPPER = (
    "Using MacheteLinearKernel for CompressedTensorsWNA16", "Using FLASH_ATTN attention backend",
    "Using CompressedTensorsWNA16MoEMethod", "Using 'MARLIN' WNA16 MoE backend", "Using MarlinExperts",
    "Using TRITON Unquantized MoE backend", "Using TritonExperts MoE backend",
)  # fmt: skip
"""W4A16 on Hopper, with an MTP head in BF16."""


def replayed(*kernels: tuple[str, str, str | None], finding: tuple[Any, str] | None = None) -> Replay:
    rows = tuple(
        Modules(what=what, scheme=scheme, method="M", kernel=kernel, why=None if kernel else "chosen later", num_modules=1,
                example="m")
        for what, scheme, kernel in kernels
    )  # fmt: skip
    findings = ()
    if finding is not None:
        findings = (Finding(kind=finding[0], where=None, message=finding[1], remedy=None, count=1, ranks=()),)
    part = ReplayedPart(part="target", model_class="C", num_ranks=1, layers=(), modules=rows, findings=())
    return Replay(
        checkpoint="c", profile="p", gpu="H200", vllm="0.32.0", cuda_wheel="w", different_sources=(), flags={}, undrafted=None,
        num_tensors=1, num_shards=1, parts=(part,), findings=findings, asked=(), cpu_s=1.0, max_memory_bytes=1,
    )  # fmt: skip
