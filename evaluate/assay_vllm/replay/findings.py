"""What stands against a checkpoint, as data: what kind, where, what vLLM says, what to do."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from assay_vllm.replay.stand_ins import NotHere

Kind = Literal[
    "arguments", "group size", "shape", "missing tensor", "missing expert", "unused tensor", "unknown tensor", "quantization",
    "ignore list", "kernel", "shard", "refused", "unknown",
]  # fmt: skip
"""`refused`: vLLM raises for another reason; `unknown`: the replay cannot tell."""

_SMALLEST_GROUP = 32
_NO_GROUPS = "serve it on fewer tensor-parallel ranks, or keep this role in 16 bits"
_MOST_SHOWN = 600
_OTHER_CONFIG = "the config declares this module otherwise than the tensors are stored: compare `quantization_config`"
_MESSAGES: tuple[tuple[str, Kind, str | None], ...] = (
    (r"has no class of its own", "unknown", None),
    (r"[Mm]eta tensor|register_meta|meta device|device meta", "unknown", None),
    (r"There is no module or parameter named", "unknown tensor", _OTHER_CONFIG),
    (r"experts are incomplete in the checkpoint", "missing expert", "make the checkpoint again from a whole source"),
    (r"were not initialized from checkpoint", "missing tensor", "the checkpoint must store it, or the config not declare it"),
    (r"group.?size|not divisible by (the )?group|multiple of group", "group size", _NO_GROUPS),
    (r"weight_block_size|block_n|block_k|block size", "group size", _NO_GROUPS),
    (r"different quantization schemes|Found different", "ignore list", "the ignore list must name all members or none"),
    (r"No valid attention backend|no kernel|Failed to find a kernel|No \w+ MoE backend|does not support the deployment",
     "kernel", "vLLM has no kernel for this on this GPU: another profile or another precision"),
    (r"size of tensor|shape|[Aa]ttempted to load weight|narrow|exceeds dimension|divisible", "shape", None),
)  # fmt: skip
"""Pattern of what vLLM says -> kind, remedy."""
_PER_RANK = re.compile(
    r"(?:input_size_per_partition ?= ?|per tensor-parallel partition \(|in_features per partition |output_partition_size ?= ?|"
    r"weight ?= ?)(?P<size>\d+).*?(?:group_size ?=? ?\(?|block_[nk] ?= ?)(?P<group>\d+)"
)
"""Where vLLM says how many rows or columns one rank holds, and in what groups or blocks."""


@dataclass(frozen=True)
class Finding:
    """One thing that stands against a checkpoint, or that could not be told (`kind` unknown).

    where: the module of vLLM or the tensor of the checkpoint; None: the checkpoint as a whole.
    """

    kind: Kind
    message: str
    where: str | None
    remedy: str | None
    count: int = 1
    """How many modules or tensors it concerns; `where` is the first."""


def finding_of(error: Exception, tensor: str | None) -> Finding:
    """tensor: the one that was being loaded; None while the model is built."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, NotHere):
        return Finding("unknown", f"vLLM asks {message}", where=module_in(error.__traceback__), remedy=None)
    if isinstance(error, KeyError):
        name = str(error.args[0]) if error.args else "?"
        return Finding("unknown tensor", f"{tensor}: vLLM has no parameter {name}", where=tensor or name, remedy=_OTHER_CONFIG)
    kind, remedy = next(
        ((kind, remedy) for pattern, kind, remedy in _MESSAGES if re.search(pattern, message)), ("refused", None)
    )
    if kind == "missing tensor":
        names = sorted(ast.literal_eval(message.partition(": ")[2]))
        shown = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        lacking = f"not initialized from the checkpoint: {shown}"
        return Finding(kind, lacking, where=names[0], remedy=remedy, count=len(names))
    where = tensor if tensor is not None else module_in(error.__traceback__)
    if kind == "missing expert":
        where = message.partition(": ")[2].partition(" ")[0].rstrip(",")
    if kind == "group size" and (numbers := _PER_RANK.search(message)):
        remedy = _smaller_groups(int(numbers["size"]), int(numbers["group"]))
    cut = message[:_MOST_SHOWN] + ("…" if len(message) > _MOST_SHOWN else "")
    return Finding(kind, f"{type(error).__name__}: {cut}", where=where, remedy=remedy)


def _smaller_groups(size: int, group: int) -> str:
    """size: rows or columns of one rank, which `group` does not divide."""
    times = math.lcm(size, group) // size
    ranks = f"{times} times fewer tensor-parallel ranks"
    fits = math.gcd(size, group)
    if fits >= _SMALLEST_GROUP:
        return f"one rank holds {size}, in groups of {group}: {ranks}, or groups of at most {fits}, or this role in 16 bits"
    return f"one rank holds {size}, in groups of {group}; only {fits} divides both: {ranks}, or this role in 16 bits"


def module_in(traceback: TracebackType | None) -> str | None:
    """The module that was being built when an error was raised: vLLM's layers call its name `prefix`."""
    module = None
    while traceback is not None:
        prefix = traceback.tb_frame.f_locals.get("prefix")
        if isinstance(prefix, str) and prefix:
            module = prefix
        traceback = traceback.tb_next
    return module


def merge_findings(findings: Iterable[tuple[int, Finding]]) -> list[tuple[tuple[int, ...], Finding]]:
    """(rank, finding) -> equal findings once, with the ranks that have them."""
    ranks: dict[Finding, list[int]] = {}
    for rank, finding in findings:
        ranks.setdefault(finding, []).append(rank)
    return [(tuple(of), finding) for finding, of in ranks.items()]
