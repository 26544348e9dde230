"""The repair of vLLM's CPU sampler: what `expand` writes, against vLLM's own description of it."""

from __future__ import annotations

import torch

from assay_vllm.cpu_sampling import expand


def test_floats_and_integers_are_spread_over_the_tokens_of_their_request() -> None:
    running = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # the third request has no draft token
    out = torch.full((6,), 7e8)
    expand(out, torch.tensor([0.7, 0.0, 9.0, 1.3]), running, replace_from=0, replace_to=1)
    assert out.tolist() == torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0, 1.3]).tolist()
    top_k = torch.full((6,), -5, dtype=torch.int32)
    expand(top_k, torch.tensor([50, 3, 8, 0], dtype=torch.int32), running, replace_from=0, replace_to=0, MAX_NUM_TOKENS=32)
    assert top_k.tolist() == [50, 50, 3, 3, 3, 0]
