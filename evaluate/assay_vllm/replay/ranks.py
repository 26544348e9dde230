"""Process groups of one rank, without processes: vLLM's layers ask how many ranks there are and which one they are."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import vllm.distributed.parallel_state as state


@dataclass(frozen=True)
class Rank:
    """One process of the server. `number`: its place among all, in vLLM's order: data, pipeline, then tensor parallel."""

    number: int
    data: int
    pipeline: int
    tensor: int


class _Group:
    """Of vLLM's `GroupCoordinator` what layers and loaders ask for; it cannot communicate."""

    device_communicator = None
    mq_broadcaster = None

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.rank, self.local_rank = world_size, rank, rank, rank
        self.ranks = list(range(world_size))
        self.unique_name = "replay"
        # of torch's group what layers ask for while they are built
        self.device_group = self.cpu_group = types.SimpleNamespace(size=lambda: world_size, rank=lambda: rank)

    first_rank = 0
    is_first_rank = property(lambda self: self.rank_in_group == 0)
    is_last_rank = property(lambda self: self.rank_in_group == self.world_size - 1)
    last_rank = property(lambda self: self.world_size - 1)


def ranks_of(parallel: Any) -> Iterator[Rank]:
    """All ranks of vLLM's parallel config, number 0 first."""
    sizes = (getattr(parallel, f"{kind}_parallel_size") for kind in ("data", "pipeline", "tensor"))
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        yield Rank(number, *place)


def unknown_parallelism(parallel: Any) -> str | None:
    """What of the parallel config is not replayed; None: all of it is."""
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} {getattr(parallel, name)}"
    return None


def become_rank(rank: Rank, parallel: Any) -> None:
    """This process is `rank` from now on."""
    tensor, pipeline, data = (getattr(parallel, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
    parallel.rank = rank.number
    parallel.data_parallel_rank = rank.data
    tensor_group = _Group(tensor, rank.tensor)
    experts = _Group(data * tensor, rank.data * tensor + rank.tensor)
    for name, group in (
        ("_WORLD", _Group(data * pipeline * tensor, rank.number)),
        ("_INNER_DP_WORLD", _Group(pipeline * tensor, rank.pipeline * tensor + rank.tensor)),
        ("_TP", tensor_group),
        ("_PP", _Group(pipeline, rank.pipeline)),
        ("_DP", _Group(data, rank.data)),
        ("_EP", experts),
        ("_EPLB", experts),
        ("_ETP", tensor_group),
        ("_DCP", _Group(1, 0)),
        ("_PCP", _Group(1, 0)),
        ("_NODE_COUNT", 1),
    ):
        assert hasattr(state, name), f"vllm.distributed.parallel_state has no {name}"
        setattr(state, name, group)
