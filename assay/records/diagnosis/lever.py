"""Records of `assay diagnose lever`: what failed under which setting, and which setting changes how it fails."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part, Record

LeverName = Literal[
    "concurrency", "n", "speculation", "kv_cache", "max_num_seqs", "prefix_caching", "chunked_prefill", "tensor_parallel",
    "eager",
]  # fmt: skip
"""Cheap ones first: those that need no restart."""
Effect = Literal["gone", "appears", "other kind", "moved", "size", "none", "not tried"]
"""What a lever does to a failure. Structure: gone, appears, other kind (of symptom), moved (other requests or positions).
size: as before, only more or less often. none: no difference that chance would not make."""
STRUCTURAL: tuple[Effect, ...] = ("gone", "appears", "other kind", "moved")


class Failure(Part):
    """One request that failed."""

    request: str
    kind: str
    """`not the most likely`, `recomputed otherwise`, `not a number`, `no reply`, or a sign of garbled text."""
    position: int | None
    """Of the first wrong token in the reply. None: not at one token."""
    detail: str


class Observation(Part):
    """The same requests, asked `num_passes` times under one setting."""

    setting: dict[str, str | int | bool | None]
    num_requests: int
    """Replies that were looked at, all passes together."""
    rate: Interval
    passes: tuple[tuple[Failure, ...], ...]
    seconds: float

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(failure for repeat in self.passes for failure in repeat)


class LeverEffect(Part):
    """One parameter changed, everything else as it was."""

    lever: str
    before: str
    after: str
    effect: Effect
    p_value: float | None
    """Of "nothing but chance", adjusted for the number of levers tried (Holm). None: not tried."""
    sentence: str
    observation: Observation | None = None


class LeverReport(Record):
    """Which parameter the failure depends on."""

    kind: Literal["levers"] = "levers"
    label: str
    baseline: Observation
    effects: tuple[LeverEffect, ...]
    lever: str | None
    """The one that changes the structure of the failure. None: none does, or nothing failed."""
    also: tuple[str, ...]
    """Others that do, each explained by `lever`."""
    smallest: tuple[str, ...]
    """Ids of the fewest requests that still fail together; empty: not looked for."""
    bundle: str | None
    """Folder of the reproduction. None: none was written."""
    sentence: str
    seconds: float
