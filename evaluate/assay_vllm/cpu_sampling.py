"""A repair of vLLM 0.32's CPU build: temperature, top-k and top-p of sampled requests while MTP speculates.

`vllm.utils.cpu_triton_utils._expand_kernel_impl` hands its C++ kernel an INT64 *copy* of the floating-point output and never
copies the result back, so every sampled token is drawn with whatever temperature the uninitialised memory happens to hold:
text "at T=1" comes out near uniform (4.8 nats a token where the model's own entropy was 0.7). Greedy requests are not touched.
Only the Triton-less CPU path has the fault; on GPUs nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """output[t] = input_val[request of token t], with `replace_from` replaced; in the dtype of `output`.

    cu_num_tokens: running sum of tokens per request. What `expand_kernel` of vllm/v1/sample/rejection_sampler.py does.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, counts))


def repair() -> None:
    """Put `expand` in the place of the faulty function, before vLLM takes it; nothing happens where there is none."""
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:
        return
    if hasattr(cpu_triton_utils, "_expand_kernel_impl"):
        cpu_triton_utils._expand_kernel_impl = expand
