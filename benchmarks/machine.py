"""The machine in words: what a reader needs to judge the numbers, and nothing that identifies it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import date
from pathlib import Path

FLAGS = ("avx2", "f16c", "avx512f", "avx512bw", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_bf16", "sha_ni")
"""CPU flags that kernels, BF16 arithmetic or SHA-256 depend on."""
PACKAGES = ("numpy", "numba", "torch", "compressed-tensors", "llmcompressor", "safetensors")


def describe(folder: Path) -> dict[str, str]:
    """What -> in words. folder: where the benchmark works; its disk is described."""
    from assay_evaluate.serving.hardware import describe_hardware

    hardware = describe_hardware()
    described = {
        "date": date.today().isoformat(),
        "CPU": f"{hardware['cpu']}, {hardware['cores']} cores ({', '.join(flags())})",
        "memory": hardware["memory"],
        "disk": disk(folder),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("assay-quant", *PACKAGES)),
    }
    if "gpus" in hardware:
        described["GPU"] = f"{hardware['gpus']}, driver {hardware['driver']}"
    return described


def flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ["flags unknown"]
    there = next((line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    return [flag for flag in FLAGS if flag in there] or ["none of " + ", ".join(FLAGS)]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def disk(folder: Path) -> str:
    """File system and kind of disk under `folder`, e.g. `ext4 on an NVMe SSD`."""
    device = os.stat(folder).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    system = next((line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == numbers), "unknown file system")
    block = Path("/sys/dev/block") / numbers
    if not block.exists():
        return f"{system} (no block device)"
    name = block.resolve().name
    queue = next((p / "queue" for p in (block.resolve(), block.resolve().parent) if (p / "queue").is_dir()), None)
    spins = queue is not None and (queue / "rotational").read_text().strip() == "1"
    if name.startswith("vd"):
        return f"{system} on a virtual disk (virtio)"
    if name.startswith("nvme"):
        return f"{system} on an NVMe SSD"
    return f"{system} on a {'hard disk' if spins else 'SSD'}"
