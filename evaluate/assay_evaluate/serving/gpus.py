"""Facts of GPUs that vLLM's choices of kernels depend on, for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from assay.errors import AssayError
from assay.recipes.profile import ProfileRecipe


class GpuFacts(NamedTuple):
    """driver_name: what the driver reports. shared_memory_bytes: per block, opted in."""

    driver_name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_memory_bytes: int
    memory_bytes: int


GPUS: Mapping[str, GpuFacts] = {
    "H100": GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 80_000_000_000),
    "H200": GpuFacts("NVIDIA H200", (9, 0), 132, 227 << 10, 141_000_000_000),
    "B200": GpuFacts("NVIDIA B200", (10, 0), 148, 227 << 10, 180_000_000_000),
    "RTX PRO 6000": GpuFacts("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 99 << 10, 96_000_000_000),
}
"""`gpu` of a profile -> facts. NVIDIA's data sheets; shared memory: CUDA C++ Programming Guide, "Compute Capabilities"."""


def facts_of(profile: ProfileRecipe) -> GpuFacts:
    """AssayError if the profile names no GPU that is known here."""
    named = profile.hardware.gpu
    if profile.hardware.device != "cuda" or named is None:
        raise AssayError(
            f"profile {profile.name}: names no GPU (`hardware.gpu`), so there is none whose loaders could be replayed"
        )
    by_name = {name.casefold(): facts for name, facts in GPUS.items()}
    if named.casefold() not in by_name:
        raise AssayError(
            f"profile {profile.name}: the replay knows {', '.join(GPUS)}, not {named}; add it in assay_evaluate/serving/gpus.py"
        )
    return by_name[named.casefold()]
