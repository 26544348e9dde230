"""How long a plan would take on some machine, and how much disk and memory: an extrapolation, never a measurement.

The work is known exactly from the plan: bytes read, rounded, hashed, written. What a core does per second was measured on one
core of one machine (`MEASURED`), or is measured here and now (`--hardware this`); what disks and networks carry is what is
written in `MACHINES`, each figure with where it comes from, or what the user says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from assay.errors import PlanError
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.shard_files import held_bytes, planned_shards
from assay_quantize.engine.budget import DEFAULT_MEMORY_BYTES, plan_budget
from assay_quantize.plan.slabs import amax_key, least_slab_bytes, observer_of

PROCESS_BYTES = 512 << 20
"""What the engine holds without slabs: interpreter, kernels, and a plan of 60,000 tensors (seen: 0.45 GB)."""

SCALING = 0.9
"""Speed of n workers over n times that of one, n > 1: two must be 1.8 times as fast as one, carried on to more."""

STAGED_SHARDS = 2
"""Shards of the source that lie on the disk at once with `--stream-from hub`."""


@dataclass(frozen=True)
class CoreRates:
    """What one core does, in GB (10^9 bytes) per second. source: who measured it where.

    quantize: BF16 weights rounded and packed. amax: BF16 weights searched for their largest magnitude. dequantize: BF16 weights
    made from FP8. copy_in, copy_out: bytes copied from the page cache, and handed to the disk past it. sha256: bytes hashed.
    """

    quantize: float
    amax: float
    dequantize: float
    copy_in: float
    copy_out: float
    sha256: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker publishes it; only calibration uses one. fp32: TFLOP per second outside tensor cores. memory: TB per
    second. bus: GB per second from the host, one way."""

    name: str
    memory_bytes: int
    fp32: float
    memory: float
    bus: float
    source: str


@dataclass(frozen=True)
class Machine:
    """A machine by its rates, in GB per second. network: None: not known. source: where the figures come from. gpu: None: none,
    or it does not count."""

    name: str
    cores: int
    read: float
    write: float
    network: float | None
    source: str
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    gpu: Gpu | None = None


_DRIVE = "one drive of PCIe 4.0 x4 (the link carries 7.9 GB/s; such drives are sold with about 7 GB/s read, 5 written)"
_DGX = "data drives of 8 x 3.84 TB as RAID 0, counted at a quarter of the drives' own rates; the way to the hub is not known"
_CENTRE = "64 cores, two data-centre drives of PCIe 4.0 (7 GB/s read, 4 written each), 10 Gbit/s"
_CLOUD = "32 cores, a network volume of 1 GB/s (what an AWS gp3 volume gives), 12.5 Gbit/s"
_ONE_OF_EIGHT = "an eighth of the cores of an NVIDIA DGX H200, one drive of PCIe 4.0 x4 (7 GB/s read, 5 written)"
H200 = Gpu("NVIDIA H200", 141_000_000_000, 67.0, 4.8, 64.0, "NVIDIA's data sheet of the H200 (SXM); PCIe 5.0 x16")
B200 = Gpu(
    "NVIDIA B200", 180_000_000_000, 75.0, 7.7, 64.0, "NVIDIA's data sheet of the HGX B200, an eighth of it; PCIe 5.0 x16"
)
MACHINES: dict[str, Machine] = {
    "workstation": Machine("workstation", 16, 7.0, 5.0, 0.12, f"16 cores, {_DRIVE}, 1 Gbit/s"),
    "server": Machine("server", 64, 14.0, 8.0, 1.2, _CENTRE),
    "cloud": Machine("cloud", 32, 1.0, 1.0, 1.5, _CLOUD),
    "8xh200": Machine("8xh200", 112, 12.0, 8.0, None, f"NVIDIA DGX H200: 2 x 56 cores (Xeon 8480C), {_DGX}", gpu=H200),
    "8xb200": Machine("8xb200", 112, 12.0, 8.0, None, f"NVIDIA DGX B200: 2 x 56 cores (Xeon 8570), {_DGX}", gpu=B200),
    "1xh200": Machine("1xh200", 14, 7.0, 5.0, None, _ONE_OF_EIGHT, gpu=H200),
}
"""Name for `--hardware` -> machine. GPUs count for calibration only: the fused kernels run on the CPU."""

MEASURED_ON = "one core of a two-core virtual machine, AMD EPYC (Zen 4, AVX-512, 2.6 GHz), 2026-11-21, CPU time of single slabs"
MEASURED: dict[str, tuple[float, float]] = {
    "w4a16": (3.7, 0.35), "w4a16_g64": (3.0, 0.32), "w4a16_g32": (2.1, 0.28), "w4a16_channel": (2.8, 0.27),
    "w4a16_asym": (2.9, 0.27), "fp8_block": (3.5, 0.21), "fp8_channel": (3.5, 0.20), "fp8_static": (3.5, 0.20),
    "nvfp4a16": (2.4, 0.28), "nvfp4": (2.4, 0.28), "mxfp4": (3.5, 0.71), "mxfp8": (3.3, 0.61), "w8a8": (5.4, 0.27),
}  # fmt: skip
"""Scheme -> GB of BF16 per second and core, with min-max scales and with searched ones (`observer: mse`).
`w4a16_g64` was measured later, on another machine, as 0.81 and 0.92 of `w4a16` there; `fp8_static` is `fp8_channel`, weight
for weight."""

AMAX, DEQUANTIZE, COPY_IN, COPY_OUT, SHA256 = 50.0, 3.0, 8.0, 2.4, 1.7
"""The other rates of `CoreRates`, measured in the same way."""


@dataclass(frozen=True)
class PlanWork:
    """What a plan has to do, in bytes.

    read: of the source, as stored. read_twice: read again for shared magnitudes, from the page cache. quantized: of logical
    BF16 weights. amax: likewise, searched for their magnitude. dequantized: likewise, made from FP8, once for every reading.
    """

    read: int
    read_twice: int
    quantized: int
    amax: int
    dequantized: int
    written: int


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes. total_s: reading and writing share the disk, and go on while the cores work.

    download_s, streamed_s: fetching the source from the hub, and the whole with `--stream-from hub`; None: no network rate.
    bound_by: what the total waits for. workers: threads that fit into memory_bytes.
    """

    machine: Machine
    rates: CoreRates
    work: PlanWork
    workers: int
    read_s: float
    compute_s: float
    write_s: float
    total_s: float
    bound_by: str
    download_s: float | None
    streamed_s: float | None
    peak_disk_bytes: int
    streamed_disk_bytes: int
    memory_bytes: int


def parse_hardware(text: str, here: Machine | None = None) -> Machine:
    """A name of `MACHINES`, `cores=64,read=6.5,write=3`, or a name followed by what differs: `server,network=0.5`.

    here: what the name `this` stands for. Rates in GB per second. Raises PlanError naming what is not understood.
    """
    known = MACHINES if here is None else {**MACHINES, "this": here}
    first, *rest = [part.strip() for part in text.split(",")]
    if "=" in first:
        machine, settings = None, [first, *rest]
    elif first in known:
        machine, settings = known[first], rest
    else:
        raise PlanError(f"--hardware {first}: say {', '.join(MACHINES)}, this, or cores=64,read=6.5,write=3,network=1.2 (GB/s)")
    values: dict[str, float] = {}
    for setting in settings:
        key, _, number = setting.partition("=")
        with suppress(ValueError):
            values[key] = float(number)
        if key not in ("cores", "read", "write", "network") or not 0 < values.get(key, 0) < math.inf:
            raise PlanError(
                f"--hardware {setting}: say cores, read, write or network = a number above 0 (rates in GB per second)"
            )
    if not float(values.get("cores", 1)).is_integer():
        raise PlanError(f"--hardware {text}: cores={values['cores']:g}; say a whole number of cores")
    if machine is None and (missing := [key for key in ("cores", "read", "write") if key not in values]):
        raise PlanError(f"--hardware {text}: {missing[0]} is missing; say cores=64,read=6.5,write=3 (rates in GB per second)")
    base = machine or Machine("as said", 1, 1.0, 1.0, None, "")
    stated = ", ".join(f"{key} {value:g}" for key, value in values.items())
    source = "; ".join(part for part in (base.source, f"as said: {stated}" if stated else "") if part)
    changed: dict[str, Any] = {**values, "cores": int(values.get("cores", base.cores))}
    return replace(base, source=source, **changed)


def measured_rates(plan: Plan) -> CoreRates:
    """`MEASURED`, for the schemes and the observer of a plan."""
    column = 0 if observer_of(plan) == "minmax" else 1
    rate = mean_rate(plan, {scheme: rates[column] for scheme, rates in MEASURED.items()})
    return CoreRates(rate, AMAX, DEQUANTIZE, COPY_IN, COPY_OUT, SHA256, MEASURED_ON)


def mean_rate(plan: Plan, rates: Mapping[str, float]) -> float:
    """Bytes per second over everything that a plan quantizes, where each scheme has its own. rates: scheme -> its rate."""
    num_bytes = bytes_by_scheme(plan)
    seconds = sum(count / rates[scheme] for scheme, count in num_bytes.items())
    return sum(num_bytes.values()) / seconds


def bytes_by_scheme(plan: Plan) -> Counter[str]:
    """Scheme -> bytes of logical BF16 weights that are stored in it."""
    num_bytes: Counter[str] = Counter()
    for tensor in plan.tensors:
        if tensor.scheme is not None:
            num_bytes[tensor.scheme] += _bf16_bytes(tensor)
    return num_bytes


def work_of(plan: Plan) -> PlanWork:
    """What a plan has to do; exact, but for magnitudes of groups that two shards share, which are taken once for each."""
    tensors = [tensor for tensor in plan.tensors if tensor.action != "drop"]
    quantized = [tensor for tensor in tensors if tensor.action == "quantize"]
    twice = [tensor for tensor in quantized if amax_key(tensor) is not None]
    dequantized = [t for t in tensors if t.scale is not None and t.action in ("quantize", "dequantize")]
    return PlanWork(
        read=sum(tensor.num_bytes for tensor in tensors),
        read_twice=sum(tensor.num_bytes for tensor in twice),
        quantized=sum(map(_bf16_bytes, quantized)),
        amax=sum(map(_bf16_bytes, twice)),
        dequantized=sum(map(_bf16_bytes, [*dequantized, *(t for t in twice if t.scale is not None)])),
        written=plan.bytes_out,
    )


def _bf16_bytes(tensor: TensorPlan) -> int:
    return 2 * math.prod(tensor.shape)


def estimate(plan: Plan, machine: Machine, rates: CoreRates) -> Estimate:
    """How long `plan` would take on `machine`, whose cores do `rates`. Raises QuantizeError when its memory is too little."""
    work = work_of(plan)
    workers = plan_budget(
        machine.memory_bytes,
        machine.cores,
        least_slab_bytes=least_slab_bytes(plan),
        held_bytes=max(map(held_bytes, planned_shards(plan).values()), default=0),
        kernels="fused",
        base_bytes=PROCESS_BYTES,
    ).workers
    core_s = (
        work.quantized / rates.quantize
        + work.amax / rates.amax
        + work.dequantized / rates.dequantize
        + (work.read + work.read_twice) / rates.copy_in
        + work.written / rates.copy_out
        + work.written / rates.sha256
    ) / 1e9
    compute_s = core_s / (workers * (SCALING if workers > 1 else 1.0))
    read_s, write_s = work.read / machine.read / 1e9, work.written / machine.write / 1e9
    total_s = max(compute_s, read_s + write_s)
    download_s = None if machine.network is None else work.read / machine.network / 1e9
    shard_bytes: Counter[str] = Counter()
    for tensor in plan.tensors:
        shard_bytes[tensor.shard_in] += tensor.num_bytes
    largest = sorted(shard_bytes.values())[-STAGED_SHARDS:]
    return Estimate(
        machine=machine,
        rates=rates,
        work=work,
        workers=workers,
        read_s=read_s,
        compute_s=compute_s,
        write_s=write_s,
        total_s=total_s,
        bound_by="compute" if compute_s >= read_s + write_s else "read" if read_s >= write_s else "write",
        download_s=download_s,
        # what is downloaded is written to the disk once, and read from there
        streamed_s=None if download_s is None else max(total_s, download_s, read_s + write_s + work.read / machine.write / 1e9),
        peak_disk_bytes=plan.bytes_in + work.written,
        streamed_disk_bytes=sum(largest) + work.written,
        memory_bytes=machine.memory_bytes,
    )
