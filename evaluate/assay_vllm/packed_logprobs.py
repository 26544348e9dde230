"""Prompt log-probabilities as one array instead of a Python object per id.

vLLM turns the K log-probabilities of every prompt token into dictionaries of objects, and those into JSON of 4.4 kB a token (K
= 64); that costs several times the forward pass of a small model. A request to /inference/v1/generate that asks for
`flat_logprobs` (which that endpoint has no other use for) gets them here as vLLM has them, in the reply's field
`prompt_token_id_logprobs`: base64 of a .npy of float32 [tokens - 1, 2, K + 1]: ids, then log-probabilities, of the token that
stands there and of the K likeliest. Ids below 2^24 are exact. The numbers are vLLM's own; nothing is computed here. NaN and
-infinity are kept, where JSON would refuse the one and clamp the other.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Put `update` in front of vLLM's own; requests that do not ask for it go there. Nothing happens where there is none."""
    try:
        from vllm.logprobs import FlatLogprobs
        from vllm.v1.engine.logprobs import LogprobsProcessor
    except ImportError:
        return
    import numpy as np

    original = LogprobsProcessor._update_prompt_logprobs

    def update(processor: Any, tensors: Any) -> None:
        if not isinstance(processor.prompt_logprobs, FlatLogprobs):
            original(processor, tensors)
            return
        ids_PK, logprobs_PK = tensors[0].numpy(), tensors[1].numpy()
        processor.prompt_token_id_logprobs = np.stack([ids_PK, logprobs_PK], axis=1).astype(np.float32)
        processor.prompt_logprobs = None

    LogprobsProcessor._update_prompt_logprobs = update
