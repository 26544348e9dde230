"""Are all experts there? vLLM fills one parameter from all experts of a layer, and cannot tell when one did not come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


class ExpertCensus:
    """Counts the experts of a stream: what one expert of a layer has, all must have."""

    def __init__(self) -> None:
        self._experts: dict[str, dict[str, set[int]]] = {}

    def watch(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            if match := _EXPERT.fullmatch(name):
                self._experts.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
            yield name, tensor

    def check(self, num_experts: int) -> None:
        """ValueError naming the first missing tensors. Every layer that has experts must have `num_experts`."""
        missing = [
            f"{layer}.{number}.{part}"
            for layer, parts in self._experts.items()
            for part, numbers in parts.items()
            for number in range(num_experts)
            if number not in numbers
        ]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"experts are incomplete in the checkpoint: {', '.join(missing[:3])}{more} missing")
