"""An estimate of time, disk and memory as a person reads it."""

from __future__ import annotations

from rich.console import Console

from assay_quantize.estimate.calibration_time import CalibrationEstimate
from assay_quantize.estimate.hardware_time import Estimate
from assay_quantize.estimate.sensitivity_time import SensitivityEstimate
from assay_quantize.plan.show import gigabytes


def print_estimate(made: Estimate, console: Console) -> None:
    """A few lines that say what is exact, what is extrapolated, and from what."""
    machine, rates, work = made.machine, made.rates, made.work
    console.print(f"[bold]extrapolated, not measured[/], for {machine.name} ({machine.source}):", soft_wrap=True)
    if made.workers < machine.cores:
        limit = f"{made.workers} of {machine.cores} cores; more do not fit into --memory {made.memory_bytes / 2**30:g}GiB"
    else:
        limit = f"{made.workers} core{'s' * (made.workers != 1)}"
    again = f", {gigabytes(work.read_twice)} of it twice" if work.read_twice else ""
    console.print(f"  read      {duration(made.read_s):>9}   {gigabytes(work.read)} at {machine.read:.2g} GB/s{again}")
    console.print(
        f"  compute   {duration(made.compute_s):>9}   {limit}, {rates.quantize:.2g} GB of BF16 per second each", soft_wrap=True
    )
    console.print(f"  write     {duration(made.write_s):>9}   {gigabytes(work.written)} at {machine.write:.2g} GB/s")
    console.print(f"  together  {duration(made.total_s):>9}   bound by {made.bound_by}; reading and writing share the disk")
    console.print("                        verification, while shards are made, is not in it: about as much again")
    if made.download_s is None:
        console.print("  download          ?   no network rate known; say network=1.2 (GB/s)")
    else:
        console.print(
            f"  download  {duration(made.download_s):>9}   {gigabytes(work.read)} at {machine.network:.2g} GB/s; "
            f"with --stream-from hub {duration(made.streamed_s or 0)} in all",
            soft_wrap=True,
        )
    console.print(
        f"  disk      {gigabytes(made.peak_disk_bytes):>9}   source and result; with --stream-from hub "
        f"{gigabytes(made.streamed_disk_bytes)}",
        soft_wrap=True,
    )
    console.print(f"  memory    {gigabytes(made.memory_bytes):>9}   at the most (--memory), whatever the size of shards")
    console.print(f"  rates of a core: {rates.source}", soft_wrap=True)


def print_calibration(made: CalibrationEstimate, console: Console) -> None:
    """What comes before the checkpoint is written: a line for each step, with the figures that it rests on."""
    console.print(
        f"[bold]calibration before that, extrapolated, not measured[/], on {made.device} of {made.machine}:", soft_wrap=True
    )
    _print_lines(made, "one step after the other; the start is not in it", console)
    console.print(
        f"  {'disk':<11} {gigabytes(made.disk_bytes):>7}   layers and states, beside source and result, until it is done"
    )
    if made.device_bytes is not None:
        what = "the largest layer in FP32, its statistics, a batch"
        console.print(f"  {'GPU memory':<11} {gigabytes(made.device_bytes):>7}   {what}")
    what = "without the layer, which is on the GPU" if made.device_bytes is not None else "the largest layer in FP32 among it"
    console.print(f"  {'memory':<11} {gigabytes(made.host_bytes):>7}   {what}")
    console.print(f"  rates: {made.rates.source}", soft_wrap=True)
    if made.device_bytes is not None:
        console.print("  one GPU computes, others of the machine wait; shares of its rates as measured on one H200")
    if made.problem is not None:
        console.print(f"  [red]does not fit[/]: {made.problem}", soft_wrap=True)


def print_sensitivity(made: SensitivityEstimate, console: Console) -> None:
    """A line for each step, with the figures that it rests on."""
    console.print(f"[bold]proxy {made.proxy}, extrapolated, not measured[/], on the cores of {made.machine}:", soft_wrap=True)
    _print_lines(made, "one step after the other", console)
    console.print(f"  {'disk':<11} {gigabytes(made.disk_bytes):>7}   states, beside the source")
    console.print(f"  {'memory':<11} {gigabytes(made.memory_bytes):>7}")


def _print_lines(made: CalibrationEstimate | SensitivityEstimate, how: str, console: Console) -> None:
    for line in made.lines:
        seconds = "" if line.seconds is None else duration(line.seconds)
        console.print(f"  {line.name:<11} {seconds:>7}   {line.text}", soft_wrap=True)
    console.print(f"  {'together':<11} {duration(made.total_s):>7}   {how}")


def duration(seconds: float) -> str:
    """`42 s`, `17 min`, `2.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
