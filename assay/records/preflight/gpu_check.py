"""What `assay diagnose gpu-check` found: native kernels against emulation."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record
from assay.records.serving import Fingerprint

CheckOutcome = Literal["PASS", "FAIL", "NOT SERVED", "NOT MEASURED"]
"""`NOT SERVED`: vLLM refuses the format on this GPU, as the replay of its loaders foresaw. `NOT MEASURED`: no time, or no
means."""
CHECK_NAME = "gpu-check.json"
"""Name of the record in a run's folder, where the report finds it."""


class ForeseenKernel(Part):
    """A kernel that the replay named for quantized modules, and the log's line that names it. line None: no line does."""

    what: str
    kernel: str
    line: str | None


class Kernels(Part):
    """foreseen: None, and `unknown` says why, if nothing could be foreseen. chosen: all lines of the log that name a kernel."""

    foreseen: tuple[ForeseenKernel, ...] | None
    unknown: str | None
    chosen: tuple[str, ...]


class Greedy(Part):
    """Greedy replies to the same prompts, native and emulated, until they part.

    num_ties: replies that part where emulation holds both tokens for equally likely, within `tie_bound` nats. first: where the
    first reply parts that is no tie, in words.
    """

    num_replies: int
    num_tokens: int
    """Of all replies, up to where they part."""
    num_equal: int
    num_ties: int
    tie_bound: float
    first: str | None


class Logprobs(Part):
    """Log-probabilities of the same tokens of the same texts, native against emulated, in nats."""

    num_tokens: int
    mean_difference: float
    max_difference: float
    """Over tokens to which emulation gives at least a probability of 0.001."""
    mean_bound: float
    max_bound: float


class Drafts(Part):
    """Tokens that the MTP head drafted, and the share that was accepted; the emulated share beside it."""

    num_drafted: int
    accepted_share: float
    emulated_share: float
    least_share: float


class ExactIds(Part):
    """`prompt_logprob_token_ids` against the server's own likeliest tokens of the same prompts, in nats."""

    num_values: int
    max_difference: float
    bound: float


class Speed(Part):
    """Generated tokens per second; it is recorded, not judged. alone: one request; together: `num_together` at once."""

    alone: float
    together: float
    num_together: int
    num_tokens: int
    """Of each reply."""


class FormatCheck(Part):
    """One precision. What is None was not measured; `reasons` says why the outcome is not PASS, a line each."""

    precision: str
    outcome: CheckOutcome
    reasons: tuple[str, ...]
    kernels: Kernels | None = None
    greedy: Greedy | None = None
    logprobs: Logprobs | None = None
    drafts: Drafts | None = None
    exact_ids: ExactIds | None = None
    speed: Speed | None = None
    fingerprint: Fingerprint | None = None
    """Of the native server."""


class GpuCheck(Record):
    """One run of `assay diagnose gpu-check`. self_test: both sides were emulated on a CPU, which shows nothing about a GPU."""

    schema_version: Literal[2] = 2  # type: ignore[assignment]
    kind: Literal["gpu-check"] = "gpu-check"
    started: str
    """ISO 8601 with time zone."""
    seconds: float
    hardware: dict[str, str]
    gpu: str | None
    """As the driver names it; None: a self-test."""
    self_test: bool
    model: str
    """What was served, in words."""
    formats: tuple[FormatCheck, ...]

    @property
    def outcome(self) -> CheckOutcome:
        """FAIL if one fails; NOT MEASURED if none does and one was not measured. A format that is not served, as foreseen, is
        no failure, but where none is served nothing was shown."""
        outcomes = {check.outcome for check in self.formats}
        if "FAIL" in outcomes:
            return "FAIL"
        return "PASS" if "PASS" in outcomes and "NOT MEASURED" not in outcomes else "NOT MEASURED"
