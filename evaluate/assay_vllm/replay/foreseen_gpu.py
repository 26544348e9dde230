"""vLLM's platform object of a GPU that is not there: the facts come from the request, every decision is vLLM's own."""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

import os
import sys
import tempfile
import types
from typing import Any

import torch

from assay_vllm.replay import stand_ins
from assay_vllm.replay.request import Machine


def pretend_gpu(machine: Machine) -> None:
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
    # MiniMax-M2's norms map memory of other GPUs while they are built; nothing that is loaded lies in it.
    shared_memory = types.ModuleType("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace")
    shared_memory.__dict__["get_allreduce_workspace"] = lambda **_: None
    sys.modules[shared_memory.__name__] = shared_memory
    stand_ins.install_beside()

    from vllm.model_executor.model_loader import register_model_loader

    from assay_vllm import STRICT
    from assay_vllm.loader import StrictLoader

    register_model_loader(STRICT)(StrictLoader)


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
        def current_device(cls) -> torch.device:
            """To which models move what they have built: where everything is (`stand_ins.OnMeta`)."""
            return torch.device("meta")

        @classmethod
        def import_kernels(cls) -> None:
            """They are not here (`stand_ins.py`)."""

    return ForeseenGpu()
