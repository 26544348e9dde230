"""Kernels that the replay of vLLM's loaders foresaw, against the lines of a real server's log."""

from __future__ import annotations

import re
from collections.abc import Sequence

from assay.records.preflight.gpu_check import ForeseenKernel, Kernels
from assay.records.preflight.replay import Replay

_EXPERTS, _LINEAR = re.compile(r"\S+ \w+ MoE backend|for \w+ MoE$"), re.compile("Linear|GEMM")
_OF_PLAIN_WEIGHTS = re.compile(r"Unquantized|Using \w+ MoE backend")
"""What vLLM says of experts in 16 bits, such as those of an MTP head that was kept."""
_MARLIN = re.compile("marlin", re.IGNORECASE)


def compare_kernels(foreseen: Replay | str, lines: Sequence[str]) -> Kernels:
    """foreseen: the replay's record, or why there is none. lines: of the server's log (`kernels_in`)."""
    if isinstance(foreseen, str):
        return Kernels(foreseen=None, unknown=foreseen, chosen=tuple(lines))
    unknown = [finding.message for finding in foreseen.every_finding if finding.kind == "unknown"]
    named: dict[tuple[str, str], ForeseenKernel] = {}
    for part in foreseen.parts:
        for row in part.modules:
            if row.scheme is None:
                continue
            if row.kernel is None:
                unknown.append(f"{row.method}: {row.why}")
            else:
                line = next((line for line in lines if names(line, row.kernel)), None)
                named[row.what, row.kernel] = ForeseenKernel(what=row.what, kernel=row.kernel, line=line)
    if not named and not unknown:
        unknown = ["the replay found no quantized module"]
    return Kernels(foreseen=tuple(named.values()) or None, unknown="; ".join(unknown) or None, chosen=tuple(lines))


def names(line: str, kernel: str) -> bool:
    """Whether a line names a kernel: `MARLIN (MarlinExperts)` is named by its backend or by its class."""
    words = re.findall(r"\w+", kernel)
    return not _OF_PLAIN_WEIGHTS.search(line) and any(re.search(rf"\b{re.escape(word)}\b", line) for word in words)


def refusal(foreseen: Replay | str) -> str | None:
    """Why vLLM will not serve it, as the replay says; None: it will, or nobody knows."""
    if isinstance(foreseen, str) or foreseen.outcome != "FAIL":
        return None
    return next(finding.message for finding in foreseen.every_finding if finding.kind != "unknown")


def keeps_activations(lines: Sequence[str]) -> bool | None:
    """Whether every quantized matrix product keeps activations in 16 bits: Marlin's do, whatever the checkpoint declares.

    None: some do and some do not, or the lines do not tell of both.
    """
    found = [
        {bool(_MARLIN.search(line)) for line in lines if kind.search(line) and not _OF_PLAIN_WEIGHTS.search(line)}
        for kind in (_EXPERTS, _LINEAR)
    ]
    said = set().union(*found)
    return said.pop() if len(said) == 1 and all(found) else None
