"""GPUs by what bounds them: memory bandwidth and arithmetic."""

from __future__ import annotations

from typing import Literal, NamedTuple

Architecture = Literal["sm90", "sm100", "sm120"]
"""NVIDIA's: Hopper, Blackwell of data centres, Blackwell of workstations."""


class Device(NamedTuple):
    """Of one GPU: bytes read, and BF16 operations without sparsity, a second."""

    bytes_s: float
    operations_s: float
    architecture: Architecture | None = None


DEVICES = {
    "H100": Device(3.35e12, 0.99e15, "sm90"),
    "H200": Device(4.8e12, 0.99e15, "sm90"),
    "B200": Device(8.0e12, 2.25e15, "sm100"),
    "RTX PRO 6000": Device(1.79e12, 0.5e15, "sm120"),
}
"""GPU as profiles name it -> NVIDIA's data sheet (SXM, one GPU): nvidia.com/en-us/data-center/{h100,h200,dgx-b200}, and
nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000."""


def device_named(gpu: str | None) -> Device | None:
    """The profile's `gpu` is a part of the name that a driver reports. None: not in the table."""
    return next((device for name, device in DEVICES.items() if gpu is not None and name.lower() in gpu.lower()), None)
