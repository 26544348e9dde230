"""What one GPU holds by vLLM's own account: parameters as built, and the KV cache that its engine needs for one sequence.

The engine refuses to start when a whole sequence of `max-model-len` does not fit beside the weights. How much that is follows
from every layer's own `KVCacheSpec`: windows, states, padding to one page size. Activations, CUDA graphs and communication are
measured by a server and are in neither number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from assay_vllm.replay.findings import Finding, finding_of


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank. kv_cache_bytes: of one sequence of `max_model_len` tokens, block 0 included, which vLLM never
    gives out; None: vLLM makes no such cache, and a finding says why, or pipeline stages have caches of their own."""

    weight_bytes: int
    kv_cache_bytes: int | None
    max_model_len: int


def parameter_bytes(model: torch.nn.Module, without: Collection[str] = ()) -> int:
    """All parameters of a model but those called `without`; one of several names is counted once."""
    kept = (parameter for name, parameter in model.named_parameters() if name not in without)
    return sum(parameter.numel() * parameter.element_size() for parameter in kept)


def taken_over(draft: torch.nn.Module) -> set[str]:
    """Parameters of a draft in whose place vLLM puts the target's once all is loaded, before it measures what is left:
    `load_eagle_model` and `maybe_share_target_embed` (vllm/v1/worker/gpu/spec_decode/eagle/utils.py)."""
    given_up: tuple[str, ...] = ()
    if not getattr(draft, "has_own_lm_head", False):
        given_up += (".shared_head.head.weight", "lm_head.weight")
    if not getattr(draft, "has_own_embed_tokens", False):
        given_up += ("model.embed_tokens.weight",)
    return {name for name, _ in draft.named_parameters() if name.endswith(given_up)} if given_up else set()


def kv_cache_bytes(config: VllmConfig, findings: list[Finding]) -> int | None:
    """What `EngineCore._initialize_kv_caches` (vllm/v1/engine/core.py) needs for one sequence, target and draft together.

    config: with the layers of one rank, as they were built, in its `static_forward_context`. What vLLM says against it goes
    into `findings`.
    """
    cache = config.cache_config
    before = dict(vars(cache))  # block size and layout are written into it, and layers of other ranks are built from it
    try:
        with set_current_vllm_config(config):
            current_platform.update_block_size_for_backend(config)
            register_all_kvcache_specs(config)
            specs = get_kv_cache_spec(config)
            layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
            resolve_kv_cache_layout(config, [layouts], list(specs.values()))
            return _of_one_sequence(config, specs)
    except Exception as error:  # noqa: BLE001 (whatever vLLM says against a checkpoint is an answer)
        finding = finding_of(error, None)
        kind = finding.kind if finding.kind == "unknown" else "refused"
        findings.append(Finding(kind, f"KV cache: {finding.message}", where=finding.where, remedy=None))
        return None
    finally:
        vars(cache).update(before)


def _of_one_sequence(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """As `get_kv_cache_configs` (vllm/v1/core/kv_cache_utils.py) compares it with the memory that is left."""
    if not specs:
        return 0
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    needed: int = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    block_0: int = kv_cache_utils._pool_bytes_per_block(config, groups)
    return needed + block_0
