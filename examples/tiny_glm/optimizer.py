"""Muon: momentum orthogonalised by five Newton-Schulz steps (Jordan et al., 2024), for matrices and stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: fast towards singular values near 1, exactness is not needed."""
NUM_STEPS = 5
WEIGHT_DECAY = 0.01


class Muon(torch.optim.Optimizer):
    """For parameters [..., O, I]; everything else (embeddings, heads, norms, biases, routers) belongs to AdamW."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * WEIGHT_DECAY).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(gradient: Tensor) -> Tensor:
    """`gradient` [..., O, I] with its singular values pushed towards 1."""
    x = gradient.bfloat16()
    flipped = x.shape[-2] > x.shape[-1]
    if flipped:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if flipped else x).to(gradient.dtype)
