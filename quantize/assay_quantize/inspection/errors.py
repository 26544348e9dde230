"""How far a decoded weight is from its base, and how far its form lets it be.

Rounding to the nearest in b bits, with one scale for a group, leaves a uniform error of a step: of a row the norm of the error
is sqrt(sum over groups of n_g * step_g^2 / 12), step_g the largest weight of the group over 2^(b-1) - 1/2. Steps of FP8 and FP4
shrink with the number: FP4's largest are these, FP8's are a 16th of the number. Methods that are calibrated stay within a small
multiple (GPTQ 2, arXiv 2210.17323; AutoRound moves no weight by more than a step, arXiv 2309.05516); FACTOR is twice that.
Weights of another layer are 1.41 times their norm away, a row of zeros 1.

AWQ and SmoothQuant multiply whole columns or rows and divide them out elsewhere: if most of these factors are not 1, what is
left after the best factor for each counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

FACTOR = 4.0
FP8_ROUNDING = 2.0**-4 / math.sqrt(3)
"""Root mean square of the relative error of E4M3, at most."""
FLOOR = 0.01
"""Relative error below which nothing is told: scales are rounded to BF16."""
IS_SCALED = 0.05
"""A factor this far from 1 is one; rounding alone moves them by 0.01."""


@dataclass
class Distance:
    """Sums over the rows of one weight. bits: of its codes; 8 with is_float: FP8. group: columns that share a scale."""

    bits: int
    is_float: bool
    group: int
    error_R: list[Tensor] = field(default_factory=list)
    norm_R: list[Tensor] = field(default_factory=list)
    allowed_R: list[Tensor] = field(default_factory=list)
    dot_R: list[Tensor] = field(default_factory=list)
    own_R: list[Tensor] = field(default_factory=list)
    dot_I: Tensor | None = None
    norm_I: Tensor | None = None
    own_I: Tensor | None = None

    def add(self, own_RI: Tensor, base_RI: Tensor) -> None:
        """Take in some rows, decoded and of the base, FP32."""
        own, base = own_RI.double(), base_RI.double()
        self.error_R.append(((own - base) ** 2).sum(1))
        self.norm_R.append((base**2).sum(1))
        self.own_R.append((own**2).sum(1))
        self.dot_R.append((own * base).sum(1))
        self.allowed_R.append(self._allowed(base))
        sums = [(own * base).sum(0), (base**2).sum(0), (own**2).sum(0)]
        before = [self.dot_I, self.norm_I, self.own_I]
        self.dot_I, self.norm_I, self.own_I = (s if b is None else b + s for b, s in zip(before, sums, strict=True))

    def _allowed(self, base: Tensor) -> Tensor:
        """Squared norm of the error of rounding to the nearest, by row."""
        if self.is_float and self.bits == 8:
            of_numbers: Tensor = (base**2).sum(1) * FP8_ROUNDING**2
            return of_numbers
        rows, columns = base.shape
        group = self.group if 0 < self.group <= columns else columns
        padded = torch.nn.functional.pad(base, (0, -columns % group)).reshape(rows, -1, group)
        steps = padded.abs().amax(2) / (2 ** (self.bits - 1) - 0.5)
        of_steps: Tensor = (steps**2).sum(1) * group / 12
        return of_steps

    def problem(self) -> str | None:
        """What is wrong with the weight, or with some of its rows; None: its form explains the distance."""
        error, norm, allowed = map(torch.cat, (self.error_R, self.norm_R, self.allowed_R))
        whole = math.sqrt(float(error.sum()) / max(float(norm.sum()), 1e-300))
        limit = max(FLOOR, FACTOR * math.sqrt(float(allowed.sum()) / max(float(norm.sum()), 1e-300)))
        if whole > limit and not self._is_scaled(limit):
            explained = f"its form explains {limit / FACTOR:.3f}, weights of another are 1.41"
            return f"is {whole:.3f} away from the base (relative); {explained}"
        relative = (error / norm.clamp_min(1e-300)).sqrt()
        limits = (FACTOR * (allowed / norm.clamp_min(1e-300)).sqrt()).clamp_min(FLOOR)
        far = torch.nonzero((relative > limits) & (norm > 0)).flatten()
        if len(far) and not self._is_scaled(limit):
            first = int(far[0])
            return (
                f"{len(far):,} of {len(relative):,} rows are farther from the base than their form explains; row {first} by "
                f"{float(relative[first]):.3f} where {float(limits[first]) / FACTOR:.3f} is"
            )
        return None

    def _is_scaled(self, limit: float) -> bool:
        """Whether columns, or rows, are the base's but for a factor each."""
        assert self.dot_I is not None and self.norm_I is not None and self.own_I is not None, "some rows were added"
        pairs = [(self.dot_I, self.norm_I, self.own_I), tuple(map(torch.cat, (self.dot_R, self.norm_R, self.own_R)))]
        for dot, norm, own in pairs:
            factors = dot / norm.clamp_min(1e-300)
            left = float((own - factors * dot).clamp_min(0).sum()) / max(float(own.sum()), 1e-300)
            most = float(((factors - 1).abs() > IS_SCALED).double().mean()) > 0.5
            if most and float((factors > 0).double().mean()) > 0.99 and math.sqrt(left) <= limit:
                return True
        return False
