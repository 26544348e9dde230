"""A vLLM plugin for tests only: while a file exists, the output of every attention layer is noisy beyond a position.

    DRIFT_NOISE="FILE 512 0.6"      while FILE exists, from position 512 on, 0.6 times the RMS of the output

The noise is a fixed function of layer and position, so that the same text is garbled in the same way however it is batched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LONGEST = 4096


def register() -> None:
    """Entry point of vllm.general_plugins."""
    import torch
    from vllm.model_executor.models.glm4_moe import Glm4MoeAttention

    if hasattr(Glm4MoeAttention, "drift_noise_TH"):
        return
    name, first, scale = os.environ["DRIFT_NOISE"].split()
    switch, original, made = Path(name), Glm4MoeAttention.forward, Glm4MoeAttention.__init__
    Glm4MoeAttention.drift_noise_TH = None
    numbers = iter(range(10_000))

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        seeded = torch.Generator().manual_seed(next(numbers))
        self.drift_noise_TH = torch.randn(LONGEST, self.hidden_size, generator=seeded)
        self.drift_noise_TH[: int(first)] = 0.0

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        output_TH = original(self, positions, hidden_states)
        if not switch.exists():
            return output_TH
        rms_T1 = output_TH.float().pow(2).mean(dim=-1, keepdim=True).sqrt()
        noise_TH = self.drift_noise_TH[positions.clamp(max=LONGEST - 1)]
        return output_TH + (float(scale) * rms_T1 * noise_TH).to(output_TH.dtype)

    Glm4MoeAttention.__init__, Glm4MoeAttention.forward = make, forward
