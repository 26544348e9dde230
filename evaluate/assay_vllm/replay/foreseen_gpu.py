"""vLLM's platform object of a GPU that is not there: the facts come from the request, every decision is vLLM's own."""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

import os
import tempfile
from typing import Any

from assay_vllm.replay import stand_ins
from assay_vllm.replay.request import Machine


def pretend(machine: Machine) -> None:
    """Let vLLM, not imported yet, find `machine`. For the rest of the process."""
    os.environ.update(
        VLLM_PLUGINS="",  # ours is registered by hand: its repairs are for CPUs
        VLLM_CACHE_ROOT=tempfile.mkdtemp(prefix="assay-replay-"),  # what vLLM keeps about model classes depends on the platform
        CUDA_VISIBLE_DEVICES="",  # Triton's answer without a driver: it is there, the device is not known yet
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    if "flashinfer" in machine.packages:
        os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # else vLLM looks for nvcc and ninja on this machine
    stand_ins.install(machine)

    import vllm.platforms

    vllm.platforms.vllm_version_matches_substr = lambda _: False  # the version of a CUDA wheel says neither cpu nor another
    vllm.platforms._current_platform = _platform(machine)

    import vllm.model_executor.models.registry
    import vllm.vllm_flash_attn.flash_attn_interface

    # vLLM inspects model classes in another process, which would find a CPU
    vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()
    # told from a file of kernels that only the CUDA wheel has
    vllm.vllm_flash_attn.flash_attn_interface.FA4_AVAILABLE = True


def _platform(machine: Machine) -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class ForeseenGpu(CudaPlatformBase):
        """What `NvmlCudaPlatform` asks the driver, answered from the request."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*machine.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return machine.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return machine.memory_bytes

        @classmethod
        def device_count(cls) -> int:
            return machine.num_gpus

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def get_all_device_numa_nodes(cls) -> None:
            return None

        @classmethod
        def import_kernels(cls) -> None:
            """They are not here (`stand_ins.py`)."""

    return ForeseenGpu()
