"""The limits the engine is compared with, as data, and how the value that was seen follows from the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from measured import Result, Results

Status = Literal["ok", "short", "failed", "not measured"]
SAME_MEMORY = 1.02
"""Peak memory that differs by no more than this is the same: the allocator and the page size make such differences."""
TWO_WORKERS_SCHEMES = ("w4a16", "fp8_block", "nvfp4a16")


@dataclass(frozen=True)
class Target:
    """One limit. needs: results it is computed from, by name. at_least: False for an upper limit. unit: after the number."""

    what: str
    limit: float
    unit: str
    needs: tuple[str, ...]
    compute: Callable[..., float]
    at_least: bool = True


@dataclass(frozen=True)
class Seen:
    """A target and what came of it. value: None when something it needs failed or was not measured."""

    target: Target
    value: float | None
    status: Status


def speed_ratio(left: Result, right: Result) -> float:
    """How many times faster, in bytes per second, `left` is."""
    assert left.gb_per_s and right.gb_per_s
    return left.gb_per_s / right.gb_per_s


def time_ratio(left: Result, right: Result) -> float:
    """How many times as long `left` takes."""
    assert left.best_s and right.best_s
    return left.best_s / right.best_s


def peak_gib(result: Result) -> float:
    assert result.peak_bytes
    return result.peak_bytes / 2**30


def peak_ratio(left: Result, right: Result) -> float:
    assert left.peak_bytes and right.peak_bytes
    return left.peak_bytes / right.peak_bytes


def rate(result: Result) -> float:
    assert result.gb_per_s
    return result.gb_per_s


def against_llmcompressor(scheme: str, limit: float, *, ours: str | None = None, what: str | None = None) -> Target:
    return Target(
        what or f"{scheme} against llm-compressor", limit, "x",
        (f"part: assay {ours or scheme}", f"part: llm-compressor {scheme}"), speed_ratio,
    )  # fmt: skip


def targets(giant_gigabytes: list[float], memory_schemes: tuple[str, ...], two_workers: str) -> list[Target]:
    """All of them; which ones a run can answer depends on what it measured.

    two_workers: end of the names of results with two workers; empty where two are all there are.
    """
    found = [against_llmcompressor(scheme, 10) for scheme in ("w4a16", "fp8_block", "fp8_channel")]
    found += [against_llmcompressor(scheme, 20) for scheme in ("nvfp4a16", "mxfp4")]
    found.append(
        against_llmcompressor("w4a16", 2, ours="w4a16 mse", what="w4a16 with scale search against llm-compressor without")
    )
    for state in ("", ", cold"):
        name = f"w4a16, time against cp{', source not in the page cache' if state else ', source in the page cache'}"
        found.append(Target(name, 3, "x", (f"assay w4a16{state}", f"cp{state}"), time_ratio, at_least=False))
    for scheme in memory_schemes:
        names = [f"memory: assay {scheme}, {size:g} GB shard" for size in giant_gigabytes]
        if names:
            found.append(
                Target(f"{scheme}, peak RSS, {giant_gigabytes[0]:g} GB shard", 1.5, " GiB", (names[0],), peak_gib, False)
            )
        found += [
            Target(f"{scheme}, peak RSS, {size:g} GB shard against {giant_gigabytes[0]:g} GB", SAME_MEMORY, "x",
                   (name, names[0]), peak_ratio, False)
            for size, name in zip(giant_gigabytes[1:], names[1:], strict=True)
        ]  # fmt: skip
    found += [
        Target(f"{scheme}, 2 workers against 1", 1.8, "x", (f"assay {scheme}{two_workers}", f"assay {scheme}, 1 worker"),
               speed_ratio)
        for scheme in TWO_WORKERS_SCHEMES
    ]  # fmt: skip
    found.append(Target("verify with errors, 1 worker, BF16 of the source", 0.5, " GB/s", ("verify, 1 worker",), rate))
    needs = ("verify, hashes only, cold", "read the checkpoint, cold")
    found.append(Target("verify with hashes only against reading, both from the disk", 1, "x", needs, speed_ratio))
    return found


def judge(target: Target, results: Results) -> Seen:
    """The target's value from results; a failed process is a failed target, never a missing line."""
    needed = [results.get(name) for name in target.needs]
    if any(result is not None and result.error is not None for result in needed):
        return Seen(target, None, "failed")
    there = [result for result in needed if result is not None and result.seconds]
    if len(there) < len(needed):
        return Seen(target, None, "not measured")
    value = target.compute(*there)
    return Seen(target, value, "ok" if (value >= target.limit) == target.at_least or value == target.limit else "short")
