"""How fast checkpoints are served: measured here, measured by others (imported), or predicted. What `assay choose` reads.

One row is one operating point of one checkpoint: hardware, parallelism, speculation, prompts, requests in flight. Rows are
compared only if `SpeedRow.like` agrees: MTP on and MTP off, native and emulated, measured and predicted are never one ratio.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from assay.records.base import Part, Record

SPEED_RECORD = "speed.json"
"""In the folder of a run: everything that `assay speed` measured, imported and predicted for it."""
OTHER_BYTES = "measured of other bytes than the run's checkpoint has now; `assay speed` measures these"
Origin = Literal["measured", "imported", "predicted"]


MOST_RATE, MOST_TIME_S, MOST_COUNT = 1e12, 1e9, 10**9
"""Beyond them a number is no speed, no time and no count: it was damaged on its way, and would not survive arithmetic."""
_Time = Annotated[float, Field(ge=0, le=MOST_TIME_S)]
_Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]


class Quantiles(Part):
    """Of one quantity over the requests of a repeat, in seconds."""

    mean: _Time
    p50: _Time
    p90: _Time | None = None
    p99: _Time | None = None


class SpeedRepeat(Part):
    """One run of the benchmark at one operating point. None: it was not measured, or this tool does not say it."""

    duration_s: _Time | None = None
    num_completed: _Count | None = None
    num_failed: _Count | None = None
    output_tokens_s: float = Field(ge=1 / MOST_RATE, le=MOST_RATE)
    """Of all requests together."""
    total_tokens_s: float | None = Field(default=None, ge=0, le=MOST_RATE)
    """Prompts included."""
    ttft_s: Quantiles | None = None
    """From the request to the first token."""
    tpot_s: Quantiles | None = None
    """(end-to-end - TTFT) / (tokens - 1): under speculation the time between chunks says nothing."""
    end_to_end_s: Quantiles | None = None
    acceptance_length: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    """Tokens that a step of the target model yields: 1 + accepted drafts. None: no speculation, or not told."""
    goodput_requests_s: float | None = None
    """Requests a second that met `SpeedRow.objective`."""
    memory_bytes: int | None = None
    """Most that the server held: of one GPU, or of its processes on a CPU."""
    energy_j: float | None = None
    """Of all GPUs while it ran. None: the hardware does not tell."""


class SpeedRow(Part):
    """One operating point of one checkpoint. `repeats`: at least one; three or more where it was measured here."""

    checkpoint: str
    """Label in the run (`reference`, `w4a16`), or the name that the imported table gives it."""
    scheme: str | None = None
    """What its experts are stored as (`w4a16`, `fp8`, `nvfp4`, `bf16`), as precision recipes name it."""
    checkpoint_sha256: str | None = None
    """As the manifest and the measurements have it. None: imported or predicted."""
    origin: Origin
    source: str
    """Tool and version that measured or predicted it; of an imported row the file or page as well."""
    hardware: str
    """`8xH200`, or the CPU's name."""
    num_gpus: _Count
    """0: a CPU."""
    parallelism: dict[str, _Count] = Field(default_factory=dict)
    """`tensor`, `expert`, `data`, `pipeline` -> ranks; absent: 1, or not stated."""
    speculation: _Count | None = None
    """Tokens drafted a step; 0: off. None: nobody says, and such a row is compared with none."""
    prompts: str
    """Kind of prompts (`chat`, `code`, `long`), or what the imported table says (`random 1024/512`)."""
    prompt_tokens: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    output_tokens: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    """Mean number a request."""
    concurrency: int = Field(ge=1, le=MOST_COUNT)
    """Requests in flight."""
    emulated: bool | None = None
    """As `Fingerprint.emulated`: such a row says nothing about speed. None: unquantized, or unknown."""
    kernels: tuple[str, ...] = ()
    fingerprint_sha256: str | None = None
    """`Fingerprint.comparable_sha256` of the server. None: imported or predicted."""
    engine: str | None = None
    """`vllm 0.32.0`."""
    startup_s: _Time | None = None
    objective: dict[str, float] = Field(default_factory=dict)
    """Of goodput: `ttft_s`, `tpot_s`, `end_to_end_s` -> the most that a good request takes."""
    repeats: tuple[SpeedRepeat, ...] = Field(min_length=1)
    assumptions: tuple[str, ...] = ()
    """Of a prediction, one line each; of an import what it does not state."""

    @property
    def like(self) -> tuple[Hashable, ...]:
        """Rows may stand in one ratio only if this is equal, and `is_comparable` says that they may stand in one at all."""
        parallel = tuple(sorted(self.parallelism.items()))
        lengths = (self.prompts, self.origin, self.hardware, self.num_gpus, parallel, self.engine)
        return (*lengths, self.speculation, self.concurrency)

    @property
    def is_comparable(self) -> bool:
        """Not emulated, and speculation is stated."""
        return not self.emulated and self.speculation is not None


class NotMeasured(Part):
    """An operating point that was wanted and has no row, and why."""

    checkpoint: str
    speculation: int | None = None
    concurrency: int | None = None
    prompts: str | None = None
    reason: str


class SpeedRecord(Record):
    """All rows of a run, in the order they were made, and what was left out."""

    rows: tuple[SpeedRow, ...]
    not_measured: tuple[NotMeasured, ...] = ()
    seed: int | None = None
    """Of the order in which points were measured. None: nothing was measured here."""
    versions: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    """What was asked for: ladder, speculation, prompts, repeats, requests a point."""

    @model_validator(mode="after")
    def _one_row_a_point(self) -> Self:
        seen: set[tuple[Hashable, ...]] = set()
        for row in self.rows:
            point = (row.checkpoint, row.source, *row.like)
            if point in seen:
                at = f"concurrency {row.concurrency}, {row.prompts}, from {row.source}"
                raise ValueError(f"two rows of {row.checkpoint} at {at}")
            seen.add(point)
        return self

    def of_bytes(self, hashes: Mapping[str, str]) -> tuple[SpeedRecord, tuple[str, ...]]:
        """(the record without rows that were measured of other bytes, labels of those, each once).

        hashes: label -> `checkpoint_sha256` of what the label means now; of others nothing is known, and their rows stay.
        """
        kept: list[SpeedRow] = []
        other: dict[str, None] = {}
        for row in self.rows:
            if row.checkpoint_sha256 in (None, hashes.get(row.checkpoint, row.checkpoint_sha256)):
                kept.append(row)
            else:
                other[row.checkpoint] = None
        return self.model_copy(update={"rows": tuple(kept)}), tuple(other)
