"""What a lever turns, and servers that run as it says: the table of `assay diagnose lever`."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from assay.callbacks import Say
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.locate.reading import with_flags
from assay_evaluate.serving.external import get
from assay_evaluate.serving.hardware import find_gpus
from assay_evaluate.serving.server import ServerSpec, serve
from assay_evaluate.serving.vllm_command import bind_cores


@dataclass(frozen=True)
class Setting:
    """Everything a lever can change. None: as the profile or the server has it."""

    concurrency: int
    n: int = 1
    """Copies of every request, sent together; the first is looked at, the others are load."""
    kv_cache_blocks: int | None = None
    max_num_seqs: int | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    speculation: bool | None = None
    tensor_parallel_size: int | None = None
    eager: bool | None = None


Start = Callable[[Setting], AbstractContextManager[ProbedEndpoint]]


@dataclass(frozen=True)
class Facts:
    """What the baseline's server is, as far as it tells: what a lever turns depends on it."""

    kv_cache_blocks: int | None = None
    block_size: int | None = None
    longest_tokens: int = 0
    """Prompt and reply of the longest request."""
    max_model_len: int | None = None
    speculation: bool = False
    prefix_caching: bool | None = None
    can_restart: bool = False
    num_devices: int = 1


@dataclass(frozen=True)
class Lever:
    """One parameter. `turn`: the other setting to try, or why there is none."""

    field: str
    turn: Callable[[Setting, Facts], Any]
    needs_restart: bool = True


def _fewer_blocks(setting: Setting, facts: Facts) -> Any:
    """The smallest cache that still holds all requests in flight, and one as long as can be."""
    if not facts.kv_cache_blocks or not facts.block_size:
        return "the server does not tell the size of its cache"
    needed = setting.concurrency * setting.n * (math.ceil(facts.longest_tokens / facts.block_size) + 1) + 2
    needed = max(needed, math.ceil((facts.max_model_len or 0) / facts.block_size) + 1)  # or vLLM does not start
    if needed > facts.kv_cache_blocks * 0.8:
        return f"the cache has {facts.kv_cache_blocks} blocks, and {needed} are needed"
    return needed


LEVERS: dict[str, Lever] = {
    "concurrency": Lever("concurrency", lambda s, f: 1 if s.concurrency > 1 else "it is 1", False),
    "n": Lever("n", lambda s, f: 1 if s.n > 1 else 4, False),
    "speculation": Lever("speculation", lambda s, f: False if f.speculation else "the server does not speculate"),
    "kv_cache": Lever("kv_cache_blocks", _fewer_blocks),
    "max_num_seqs": Lever("max_num_seqs", lambda s, f: 1 if s.concurrency > 1 else "one request is in flight"),
    "prefix_caching": Lever("prefix_caching", lambda s, f: not f.prefix_caching),
    "chunked_prefill": Lever("chunked_prefill", lambda s, f: False),
    "tensor_parallel": Lever(
        "tensor_parallel_size",
        lambda s, f: 1 if (s.tensor_parallel_size or 1) > 1 else 2 if f.num_devices > 1 else "there is one device",
    ),
    "eager": Lever("eager", lambda s, f: True),
}
"""Cheap ones first: those that need no restart."""


# ------------------------------------------------------------------------------------------------ servers
def ask_running(endpoint: ProbedEndpoint) -> Start:
    """For a server that somebody else runs: every setting is asked of it as it is."""

    @contextmanager
    def start(setting: Setting) -> Iterator[ProbedEndpoint]:
        yield endpoint

    return start


def serve_here(spec: ServerSpec, on_progress: Say = lambda line: None) -> Start:
    """For a checkpoint folder: one server for every setting, with a log of its own beside the first."""
    number = itertools.count(1)

    @contextmanager
    def start(setting: Setting) -> Iterator[ProbedEndpoint]:
        speculate = spec.speculate if setting.speculation is None else setting.speculation
        log_path = spec.log_path.with_stem(f"{spec.log_path.stem}-{next(number)}")
        turned = replace(spec, profile=with_setting(spec.profile, setting), speculate=speculate, log_path=log_path)
        with serve(turned, on_progress) as server:
            yield find_endpoint(server.base_url, server.model, headers=server.headers)

    return start


def with_setting(profile: ProfileRecipe, setting: Setting) -> ProfileRecipe:
    """The profile under which vLLM runs as `setting` says."""
    flags: dict[str, Any] = {
        "num-gpu-blocks-override": setting.kv_cache_blocks,
        "max-num-seqs": setting.max_num_seqs,
        "enable-prefix-caching": setting.prefix_caching,
        "enable-chunked-prefill": setting.chunked_prefill,
        "tensor-parallel-size": setting.tensor_parallel_size,
        "enforce-eager": setting.eager,
    }
    flags = {name: value for name, value in flags.items() if value is not None}
    if setting.chunked_prefill is False and "max-model-len" in profile.vllm:  # a prompt must fit into one step then
        flags["max-num-batched-tokens"] = profile.vllm["max-model-len"]
    return bind_cores(with_flags(profile, flags), setting.tensor_parallel_size or 1)


def facts_of(endpoint: ProbedEndpoint, *, can_restart: bool) -> Facts:
    """What vLLM's metrics say of its cache; None where the server tells nothing."""
    cache: dict[str, str] = {}
    if endpoint.offer.metrics:  # labels of vLLM's gauge
        text = get(endpoint.base_url, "/metrics", what="the server's metrics", headers=endpoint.headers).text
        if line := re.search(r"^vllm:cache_config_info\{(.*)\} ", text, re.MULTILINE):
            cache = dict(re.findall(r'(\w+)="([^"]*)"', line[1]))
    blocks, size = cache.get("num_gpu_blocks", ""), cache.get("block_size", "")
    return Facts(
        kv_cache_blocks=int(blocks) if blocks.isdigit() else None,
        block_size=int(size) if size.isdigit() else None,
        max_model_len=endpoint.max_model_len,
        speculation=endpoint.offer.speculation,
        prefix_caching={"True": True, "False": False}.get(cache.get("enable_prefix_caching", "")),
        can_restart=can_restart,
        num_devices=len(find_gpus()) or os.cpu_count() or 1,
    )
