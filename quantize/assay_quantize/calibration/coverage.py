"""Tokens that each routed expert saw, by layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from assay.records.calibration import LayerCoverage

_EXPERT = re.compile(r"(?:^|.*\.)layers\.(\d+)\..*\bexperts\.(\d+)\.down_proj\.weight")


class TokensByExpert:
    """The experts of a checkpoint. by_layer: layer -> expert -> its down projection, whose tokens are the expert's."""

    def __init__(self, weights: Iterable[str]) -> None:
        self.by_layer: dict[int, dict[int, str]] = defaultdict(dict)
        for name in weights:
            if found := _EXPERT.fullmatch(name):
                self.by_layer[int(found[1])][int(found[2])] = name

    def coverage(self, tokens: Callable[[str], int]) -> tuple[LayerCoverage, ...]:
        """tokens: of a weight."""
        return tuple(
            LayerCoverage(layer=layer, tokens=tuple(tokens(experts[number]) for number in sorted(experts)))
            for layer, experts in sorted(self.by_layer.items())
        )

    def least(self, tokens: Callable[[str], int]) -> int:
        """Of the expert that saw fewest."""
        return min(tokens(name) for experts in self.by_layer.values() for name in experts.values())

    def spread(self, tokens: Callable[[str], int]) -> tuple[int, int, int] | None:
        """Least, median and most tokens of an expert; None: there are none."""
        counts = sorted(tokens(name) for experts in self.by_layer.values() for name in experts.values())
        return (counts[0], counts[len(counts) // 2], counts[-1]) if counts else None
