"""What is asked: one machine, several cells. Plain dataclasses: this environment has no other package of assay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Machine:
    """The GPU machine that vLLM is told it runs on. One to a process: vLLM asks once and remembers."""

    name: str
    """As the driver reports it: `NVIDIA H200`."""
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper, (10, 0) B200, (12, 0) RTX PRO 6000 Blackwell."""
    num_gpus: int
    memory_bytes: int
    """Of one GPU."""
    num_multiprocessors: int
    shared_memory_bytes: int
    """Per block, opted in."""
    cuda: str
    """Version of CUDA that torch was built with."""
    packages: dict[str, str]
    """Packages beside vLLM that choices of kernels depend on, and their versions: `flashinfer`. Absent: not installed."""

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "capability": tuple(map(int, data["capability"]))})


@dataclass(frozen=True)
class Cell:
    """One checkpoint, served in one way."""

    name: str
    folder: Path
    """Holds config.json, and the shards unless `headers` names a file."""
    arguments: tuple[str, ...]
    """Of `vllm serve`, as the server gets them."""
    headers: Path | None
    """JSON, shard -> tensor -> [dtype, shape]: what is planned. None: headers are read from the shards in `folder`."""
    schemes: dict[str, str | None] | None
    """Module of the checkpoint -> scheme of its weight, None for 16 or 32 bits. None: told from the names that are stored."""

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        headers = data.get("headers")
        return cls(
            name=data["name"],
            folder=Path(data["folder"]),
            arguments=tuple(data["arguments"]),
            headers=None if headers is None else Path(headers),
            schemes=data.get("schemes"),
        )


@dataclass(frozen=True)
class Request:
    machine: Machine
    cells: tuple[Cell, ...]
    num_processes: int
    """So many cells are replayed side by side."""


def read_request(path: Path) -> Request:
    """KeyError, TypeError or ValueError if it is not a request."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Request(Machine.parse(data["machine"]), tuple(map(Cell.parse, data["cells"])), int(data.get("num_processes", 1)))
