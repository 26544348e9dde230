"""What machine is this, and which profile of a model recipe fits it? Asks driver and kernel; needs neither torch nor vllm."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import Hardware, ProfileRecipe

_MEMORY_TOLERANCE = 0.97
"""A driver keeps some memory for itself: a "141 GB" GPU may report a little less than that."""


class Gpu(NamedTuple):
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    driver: str


@functools.cache
def find_gpus() -> tuple[Gpu, ...]:
    """GPUs that a process started now would see (`CUDA_VISIBLE_DEVICES` counts), in the driver's order; () without a driver."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(answer.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if answer.returncode == 0 else ()


def parse_gpus(csv: str, visible: str | None) -> tuple[Gpu, ...]:
    """Lines `index, uuid, name, MiB, driver` -> GPUs; `visible` as in CUDA_VISIBLE_DEVICES (None: all)."""
    entries = None if visible is None else [entry.strip() for entry in visible.split(",") if entry.strip()]
    gpus = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5 or not fields[3].isdigit():
            continue
        index, uuid, name, memory_mib, driver = fields
        if entries is None or any(entry == index or uuid.startswith(entry) for entry in entries):
            gpus.append(Gpu(name, int(memory_mib) << 20, driver))
    return tuple(gpus)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_hardware() -> dict[str, str]:
    """`cpu`, `cores`, `memory`, and with GPUs `gpus`, `driver`: short texts for fingerprints and for people."""
    described = {
        "cpu": _cpu_name(),
        "cores": str(num_cores()),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
    }
    if gpus := find_gpus():
        kinds = Counter(f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in gpus)
        described["gpus"] = ", ".join(f"{count}x {kind}" for kind, count in kinds.items())
        described["driver"] = gpus[0].driver
    return described


def fits(needed: Hardware, gpus: tuple[Gpu, ...]) -> bool:
    """Whether `gpus` are what a profile needs. A CPU profile fits every machine."""
    if needed.device == "cpu":
        return True
    fitting = [
        gpu
        for gpu in gpus
        if (needed.gpu is None or needed.gpu.casefold() in gpu.name.casefold())
        and gpu.memory_bytes >= (needed.memory_bytes_each or 0) * _MEMORY_TOLERANCE
    ]
    return len(fitting) >= max(1, needed.num_gpus)


def choose_profile(
    recipe: ModelRecipe,
    problem_on: Callable[[ProfileRecipe], str | None] | None = None,
    tensor_parallel_size: int | None = None,
) -> ProfileRecipe:
    """The first of the recipe's profiles whose hardware is present and that holds what is to be served.

    problem_on: why it does not; None: it does. tensor_parallel_size: instead of the profile's. AssayError names
    what is here, what was looked for, and what does not fit.
    """
    gpus = find_gpus()
    profiles = [load_recipe(ProfileRecipe, name).with_tensor_parallel(tensor_parallel_size) for name in recipe.profiles]
    problems: dict[str, str] = {}
    for profile in profiles:
        if fits(profile.hardware, gpus):
            problem = None if problem_on is None else problem_on(profile)
            if problem is None:
                return profile
            problems[profile.name] = problem
    if problems:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise AssayError(
            f"model recipe {recipe.name}: this machine has the GPUs of {', '.join(problems)}, which cannot serve it "
            f"({reasons}); `assay preflight` says what would, with --profile NAME for one of them"
        )
    here = describe_hardware()
    only_deployed = next(
        (name for name in recipe.deployment_profiles if fits(load_recipe(ProfileRecipe, name).hardware, gpus)), None
    )
    hint = "write one under recipes/profiles/ and name it with --profile"
    if only_deployed is not None:
        hint = f"{only_deployed} is here, but only the candidates fit it, not the reference: measure on one of the others"
    raise AssayError(
        f"model recipe {recipe.name}: none of its profiles ({', '.join(map(describe_needs, profiles))}) fits this machine "
        f"({here.get('gpus', 'no GPU')}, {here['memory']}); {hint}"
    )


def describe_needs(profile: ProfileRecipe) -> str:
    """`4xh200: 4x H200 of 150 GB`."""
    needed = profile.hardware
    if needed.device == "cpu":
        return profile.name
    memory = "" if needed.memory_bytes_each is None else f" of {needed.memory_bytes_each / 1e9:.0f} GB"
    return f"{profile.name}: {max(1, needed.num_gpus)}x {needed.gpu or 'NVIDIA GPU'}{memory}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Of this machine, or of the container that this process is in."""
    limits = [_memory_bytes()]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        limits += [int(text)] if text.isdecimal() else []  # `max`: none
    return min(limits)
