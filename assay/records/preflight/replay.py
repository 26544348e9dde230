"""What vLLM's own loaders say about a checkpoint on a GPU machine that is not here (`assay_evaluate.serving.replay`)."""

from __future__ import annotations

from typing import Any, Literal

from assay.records.base import Part, Record

FindingKind = Literal[
    "arguments", "group size", "shape", "missing tensor", "missing expert", "unused tensor", "unknown tensor", "quantization",
    "ignore list", "kernel", "shard", "refused", "unknown",
]  # fmt: skip
"""`arguments`: vLLM refuses the command line or the config; `group size`: groups or blocks do not divide what one rank holds;
`unknown tensor`: stored, and vLLM has no parameter of that name; `unused tensor`: stored, and no parameter takes it;
`quantization`: stored in one way, held by vLLM in another; `shard`: a file is damaged, cut short or not as the index says;
`refused`: vLLM raises for another reason; `unknown`: the replay cannot tell."""

Outcome = Literal["PASS", "FAIL", "UNKNOWN"]


class Finding(Part):
    """One thing that stands against a checkpoint, or (kind `unknown`) that could not be told."""

    kind: FindingKind
    where: str | None
    """Module of vLLM, tensor or file; the first of `count`. None: the checkpoint as a whole."""
    message: str
    """vLLM's or our loader's words, in one line."""
    remedy: str | None
    """What to do, where it is known."""
    count: int
    ranks: tuple[int, ...]
    """Ranks that say so; empty: it does not depend on one."""


class Modules(Part):
    """Modules that vLLM holds in the same way.

    what: `linear`, `experts`, `attention` or `embedding`. scheme: how the weight is stored; None: 16 or 32 bits; `quantized`:
    no plan says how. method: vLLM's class. kernel: vLLM's choice; None: unknown, `why` says why.
    """

    what: str
    scheme: str | None
    method: str
    kernel: str | None
    why: str | None
    num_modules: int
    example: str


class ReplayedPart(Part):
    """Target or draft. layers: what the ranks other than 0 loaded of all layers; rank 0 loads everything."""

    part: Literal["target", "draft"]
    model_class: str | None
    num_ranks: int
    layers: tuple[str, ...]
    modules: tuple[Modules, ...]
    findings: tuple[Finding, ...]


class RankMemory(Part):
    """What the fullest GPU holds by vLLM's own account. Activations, CUDA graphs and communication come on top.

    weight_bytes: parameters of target and draft as vLLM builds them. kv_cache_bytes: what its engine needs for one sequence of
    `max_model_len` tokens, without which it does not start; None: not known.
    """

    weight_bytes: int
    kv_cache_bytes: int | None
    max_model_len: int


class Replay(Record):
    """One checkpoint on one profile."""

    kind: Literal["replay"] = "replay"
    checkpoint: str
    profile: str
    gpu: str
    vllm: str
    """Version whose classes were run."""
    cuda_wheel: str
    """The published wheel for CUDA that has the same Python sources."""
    different_sources: tuple[str, ...]
    """Files of vLLM that were used and are not the same in that wheel."""
    flags: dict[str, Any]
    """Of the server, without those that name files and addresses."""
    undrafted: str | None
    """Why the server would not draft though that was asked for; None: it drafts, or was not asked to."""
    num_tensors: int
    num_shards: int
    parts: tuple[ReplayedPart, ...]
    findings: tuple[Finding, ...]
    """What stands against the whole: files, arguments, tensors that nothing takes."""
    memory: RankMemory | None = None
    """Not part of the outcome. None: it was refused before that was known, or by a version that did not ask."""
    asked: tuple[str, ...]
    """Compiled or missing functions that were asked for an answer and gave none: choices of kernels may rest on it."""
    cpu_s: float
    """Seconds of one core."""
    max_memory_bytes: int
    """Of the process that ran this replay and those before it."""

    @property
    def every_finding(self) -> tuple[Finding, ...]:
        return (*self.findings, *(finding for part in self.parts for finding in part.findings))

    @property
    def outcome(self) -> Outcome:
        """PASS says that it loads; not that it fits into memory, nor what kernels make of it."""
        kinds = {finding.kind for finding in self.every_finding}
        if kinds - {"unknown"}:
            return "FAIL"
        return "UNKNOWN" if kinds else "PASS"
