"""How fast checkpoints are served: measured here, measured by others (imported), or predicted. What `assay choose` reads.

One row is one operating point of one checkpoint: hardware, parallelism, speculation, prompts, requests in flight. Rows are
compared only if `SpeedRow.like` agrees: MTP on and MTP off, native and emulated, measured and predicted are never one ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping
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
_Rate = Annotated[float, Field(ge=0, le=MOST_RATE)]
MOST_BYTES, MOST_JOULE = 2**60, 1e18

MOST_FAILED = 0.01
"""Share of failed requests beyond which a row is shown and never chosen: the server that drops requests is the faster one."""
REFUSED_FAILED = 0.05
"""Share of them beyond which a row is not imported at all."""
MOST_INCOMPLETE, REFUSED_INCOMPLETE = 0.10, 0.50
"""The same of requests that the end of the run cut off. A tool that stops after a time cuts off what is in flight, so some are
usual; their tokens are in no throughput."""
LEAST_IN_FLIGHT = 0.25
"""Share of its concurrency that a row has in flight on average; below it the row says nothing of that concurrency."""


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
    num_incomplete: _Count | None = None
    """Cut off by the end of the run, or asked for and never told of."""
    in_flight: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    """Mean number of requests in flight: completed requests a second by their mean time (Little's law)."""
    peak_in_flight: _Count | None = None
    """Most at once, as the tool counted. vLLM counts per whole second, so short requests count twice."""
    server_start: _Count | None = None
    """Which start of the server it was measured in, from 0. None: not told; such repeats count as of one start."""
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
    goodput_requests_s: _Rate | None = None
    """Requests a second that met `SpeedRow.objective`."""
    memory_bytes: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    """Most that the server held: of one GPU, or of its processes on a CPU."""
    energy_j: float | None = Field(default=None, ge=0, le=MOST_JOULE)
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
    """`tensor`, `expert`, `data`, `pipeline` -> ranks; of imported rows also `data attention`, `prefill GPUs`, `decode GPUs`,
    `prefill tensor`, ... Absent: 1, or not stated."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Of an imported file: other settings in which its rows differ. Rows that differ in one are no repeats."""
    speculation: _Count | None = None
    """Tokens drafted a step; 0: off. None: nobody says, and such a row is compared with none."""
    prompts: str
    """Kind of prompts (`chat`, `code`, `long`), or what the imported table says (`random 1024/512`)."""
    prompt_tokens: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    output_tokens: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    """Mean number a request."""
    concurrency: int = Field(ge=1, le=MOST_COUNT)
    """Requests in flight, at most: the limit that was set, or fewer where fewer requests were sent."""
    request_rate: _Rate | None = None
    """Requests a second at which they were sent, where that held them back: the tokens/s are the rate's, not the server's."""
    emulated: bool | None = None
    """As `Fingerprint.emulated`: such a row says nothing about speed. None: unquantized, or unknown."""
    kernels: tuple[str, ...] = ()
    fingerprint_sha256: str | None = None
    """`Fingerprint.comparable_sha256` of the server. None: imported or predicted."""
    engine: str | None = None
    """`vllm 0.32.0`."""
    startup_s: _Time | None = None
    objective: dict[str, _Time] = Field(default_factory=dict)
    """Of goodput: `ttft_s`, `tpot_s`, `end_to_end_s` -> the most that a good request takes."""
    repeats: tuple[SpeedRepeat, ...] = Field(min_length=1)
    assumptions: tuple[str, ...] = ()
    """Of a prediction, one line each; of an import what it does not state."""
    doubt: str | None = None
    """Which of its numbers contradict each other, in a clause. None: none does."""

    @property
    def tokens_s(self) -> float:
        """Output tokens a second: the geometric mean over server starts of the geometric means of their repeats.

        The one estimate of a row's speed: tables, pictures, picks, flips and ratios all use it.
        """
        starts: dict[int | None, list[float]] = {}
        for repeat in self.repeats:
            starts.setdefault(repeat.server_start, []).append(math.log(repeat.output_tokens_s))
        return math.exp(statistics.fmean(statistics.fmean(logs) for logs in starts.values()))

    @property
    def failed_share(self) -> float | None:
        """Of the requests of all repeats that ended. None: a repeat does not say how many failed."""
        return self._share("num_failed", lambda repeat: (repeat.num_completed or 0) + (repeat.num_failed or 0))

    @property
    def incomplete_share(self) -> float | None:
        """Of all requests. None: a repeat does not say how many were cut off."""
        return self._share(
            "num_incomplete",
            lambda repeat: (repeat.num_completed or 0) + (repeat.num_failed or 0) + (repeat.num_incomplete or 0),
        )

    def _share(self, name: str, of: Callable[[SpeedRepeat], int]) -> float | None:
        counts = [getattr(repeat, name) for repeat in self.repeats]
        asked = sum(map(of, self.repeats))
        return None if None in counts or not asked else sum(counts) / asked

    @property
    def in_flight(self) -> float | None:
        """Mean over the repeats. None: a repeat does not tell it."""
        told = [repeat.in_flight for repeat in self.repeats if repeat.in_flight is not None]
        return statistics.fmean(told) if len(told) == len(self.repeats) else None

    @property
    def why_refused(self) -> str | None:
        """Why it is no speed, in a clause: too many requests lost, or numbers that contradict each other. None: it is one."""
        failed, incomplete = self.failed_share or 0.0, self.incomplete_share or 0.0
        if failed > REFUSED_FAILED:
            return self._lost("num_failed", "failed", failed)
        if incomplete > REFUSED_INCOMPLETE:
            return self._lost("num_incomplete", "were not completed", incomplete)
        return self.doubt

    @property
    def why_not_chosen(self) -> str | None:
        """Why it is shown and never compared or chosen by, in a clause that follows `it`. None: it may be."""
        if self.emulated:
            return "was emulated, which says nothing about speed"
        if self.speculation is None:
            return "does not say whether it drafted"
        if self.why_refused is not None:
            return f"is not believed: {self.why_refused}"
        failed, incomplete = self.failed_share or 0.0, self.incomplete_share or 0.0
        if failed > MOST_FAILED:
            return (
                f"lost requests: {self._lost('num_failed', 'failed', failed)}; more than {100 * MOST_FAILED:g} % are too many"
            )
        if incomplete > MOST_INCOMPLETE:
            lost = self._lost("num_incomplete", "were cut off by the end of the run", incomplete)
            return f"lacks requests: {lost}, and their tokens are not counted"
        if self.request_rate is not None:
            each = f"{self.request_rate:g} request{'s' * (self.request_rate != 1)} a second"
            mean = "" if self.in_flight is None else f" ({self.in_flight:.1f} in flight on average)"
            return f"was asked {each}{mean}, so its tokens/s are those of the rate"
        if self.in_flight is not None and self.in_flight < LEAST_IN_FLIGHT * self.concurrency:
            return f"had {self.in_flight:.1f} requests in flight on average, not {self.concurrency:,}"
        return None

    def _lost(self, name: str, how: str, share: float) -> str:
        lost = sum(getattr(repeat, name) or 0 for repeat in self.repeats)
        asked = sum((repeat.num_completed or 0) + (repeat.num_failed or 0) for repeat in self.repeats)
        asked += sum(repeat.num_incomplete or 0 for repeat in self.repeats) if name == "num_incomplete" else 0
        return f"{lost:,} of {asked:,} requests {how} ({100 * share:.3g} %)"

    @property
    def point(self) -> tuple[Hashable, ...]:
        """Rows are repeats of one another only if this is equal."""
        apart = tuple(sorted(self.settings.items()))
        return (self.checkpoint, self.source, self.scheme, apart, self.request_rate, *self.like)

    @property
    def like(self) -> tuple[Hashable, ...]:
        """Rows may stand in one ratio only if this is equal, and `is_comparable` says that they may stand in one at all."""
        parallel = tuple(sorted(self.parallelism.items()))
        lengths = (self.prompts, self.origin, self.hardware, self.num_gpus, parallel, self.engine)
        return (*lengths, self.speculation, self.concurrency)

    @property
    def is_comparable(self) -> bool:
        """Whether its speed may be compared and chosen by; `why_not_chosen` says why not."""
        return self.why_not_chosen is None


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
        earlier: set[tuple[Hashable, ...]] = set()
        for row in self.rows:
            if row.point in earlier:
                at = f"concurrency {row.concurrency}, {row.prompts}, from {row.source}"
                raise ValueError(f"two rows of {row.checkpoint} at {at}")
            earlier.add(row.point)
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
