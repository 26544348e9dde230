"""Who computes the passes of a screening: this process, or tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.errors import AssayError
from assay_pipeline.comparison.screen_sources import ScreenSource

if TYPE_CHECKING:
    from assay_quantize.screen.ray_pass import PassTasks


@dataclass(frozen=True)
class PassWorkers:
    """runner: `local`: this process; `ray`: the cluster that RAY_ADDRESS names, else one on this machine. num_threads: of this
    process, and of each Ray task; None: as many as torch takes by itself (of a task with a GPU: its share of those)."""

    runner: Literal["local", "ray"] = "local"
    num_threads: int | None = None

    def check(self) -> None:
        """Before anything is written. QuantizeError: Ray is not installed."""
        if self.runner == "ray":
            from assay_quantize.remote.ray_cluster import require_ray

            require_ray()

    def check_source(self, source: ScreenSource) -> None:
        """AssayError: not all nodes can read it."""
        if self.runner == "ray" and source.mirror is not None:
            raise AssayError(
                f"{source.location}: with --runner ray every node reads the checkpoint; download it to a folder that all of "
                f"them share (hf download {source.location} --local-dir DIR), and give that folder"
            )

    @contextmanager
    def ready(self, device: str) -> Iterator[PassTasks | None]:
        """With the threads that were asked for, and connected. None: passes are made here.

        QuantizeError: there is no such cluster, or it is too small.
        """
        import torch

        with ExitStack() as stack:
            if self.num_threads is not None:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(self.num_threads)
            if self.runner == "local":
                yield None
                return
            from assay_quantize.remote.ray_cluster import connected
            from assay_quantize.screen.ray_pass import PassTasks, needs_of

            needs = needs_of(device, self.num_threads)
            yield PassTasks(stack.enter_context(connected(needs)), needs)


HERE = PassWorkers()
"""This process alone."""
