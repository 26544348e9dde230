"""Records of the serving-fidelity probes: how they were run, what each saw, and the bound that goes with every rate.

Missing is `None`, never 0: a probe that could not run is `not_run` with the reason, which is not the same as `ok`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record
from assay.records.declared import without_address
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint

ProbeName = Literal[
    "argmax", "recompute", "consensus", "routing", "determinism", "speculation", "acceptance", "temperature", "tools", "garble",
    "text", "nonfinite", "swapped",
]  # fmt: skip
"""In the order in which they run."""
ProbeStatus = Literal["ok", "alarm", "not_run"]
Value = str | int | float | bool | None
Detail = Value | tuple[Value, ...] | tuple[tuple[Value, ...], ...] | dict[str, Value]


class ProbeSettings(Part):
    """How hard the probes press. The defaults are a smoke test of a few minutes; rare faults need thousands of requests."""

    num_requests: int = Field(default=48, ge=2)
    """Replies whose log-probabilities are examined (half of them greedy, half sampled at T=1)."""
    num_garble_requests: int = Field(default=256, ge=1)
    """Replies of the garble scan. A fault of 4 in 10,000 requests needs 7,488 to be seen once with 95 %."""
    concurrency: int = Field(default=16, ge=1)
    """Requests in flight: the server's full batch (max_num_seqs), if you know it."""
    num_scored: int = Field(default=192, ge=0, exclude_if=lambda count: count == 192)
    """Replies of the garble scan that are scored although nothing in them is odd: a token that was lost on the way leaves ids
    that prefill would not have written."""
    most_suspects: int | None = Field(default=None, ge=0, exclude_if=lambda count: count is None)
    """Odd replies of the run that are scored and asked for again; the others are undecided. None: all are scored."""
    most_requests: int | None = Field(default=None, ge=1, exclude_if=lambda count: count is None)
    """Of all probes together, to which the numbers above were fitted. None: they were said one by one."""
    num_alone: int = Field(default=12, ge=1)
    """Requests that are repeated one at a time: enough to tell a server's noise from a fault, few enough to wait for."""
    short_tokens: int = Field(default=64, ge=1)
    """Length of short prompts, about, in tokens."""
    long_tokens: int = Field(default=768, ge=1)
    """Length of long prompts, about; cut to what the model takes."""
    max_tokens: int = Field(default=160, ge=8)
    """Budget of a reply; acceptance is judged after 128 tokens."""
    top_k: int = Field(default=20, ge=2)
    """Log-probabilities asked for per position; lowered to what the server allows."""
    abort_share: float = Field(default=0.1, ge=0, le=0.9)
    """Share of the garble scan's requests that are hung up on in the middle of the reply."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the garble scan. 0: a suspicious reply is asked for again, alone, which tells the model's habits from the server's."""
    num_neighbours: int = Field(default=4, ge=0, exclude_if=lambda count: count == 4)
    """Requests that are asked again among short and among long neighbours; each takes two full batches."""
    num_tools: tuple[int, ...] = (1, 8, 32, 128)
    """Rungs of the tool-count ladder."""
    num_tool_requests: int = Field(default=8, ge=1)
    """Questions per rung."""
    expected_acceptance_length: float | None = Field(default=None, ge=1)
    """Tokens per verification step that a healthy server of this model reaches. None: only the absolute alarms."""
    seed: str = "eval-probe"
    """Prompts are drawn from it."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time of a request with a short reply, and silence within a reply, after which it counts as failed."""
    level: float = Field(default=0.95, gt=0.5, lt=1)
    """Of every bound and interval."""


class Witness(Part):
    """One event: which request, where in it, what was expected and what came."""

    request: str
    """Id in the ledger of requests."""
    what: str
    position: int | None = None
    """Index of the token of the reply. None: the whole reply."""
    expected: Value = None
    seen: Value = None
    slot: int | None = None
    """Place in its wave of requests, 0 first: what the server's slot follows."""
    concurrency: int | None = None
    """Requests in flight with it."""
    text: str | None = None
    """The beginning of the reply, of replies whose text is at fault. None: it is not, or kept before texts were."""


class ProbeResult(Part):
    """What one probe saw. `events` of `trials` were wrong; `sentence` says what that bounds."""

    name: str
    status: ProbeStatus
    events: int | None
    trials: int | None
    unit: str
    """What is counted: `token`, `request`, `prompt`..."""
    rate: Interval | None
    """Clopper-Pearson. None: not run."""
    upper: float | None
    """One-sided upper bound of the rate at the settings' level. None: not run."""
    sentence: str
    """`0 of 2,000 requests at fault: below 0.15 % at 95 %; to see a fault of 4 in 10,000 requests takes 7,500`."""
    reason: str | None = None
    """Of an alarm: which threshold was crossed, with the numbers. Of not_run: what is missing."""
    details: dict[str, Detail] = Field(default_factory=dict)
    """The probe's own figures; docs/fidelity.md says what each means."""
    witnesses: tuple[Witness, ...] = ()
    """The first events, at most 20."""
    undecided: tuple[Witness, ...] = ()
    """Odd replies that could not be told from habits of the model, at most 20: neither events nor among the trials."""
    requests_hit: int | None = None
    """Requests with at least one event, of `num_requests`: events of one request are not independent of each other, requests
    nearly are. None: not counted, or not run."""
    stands_without_events: bool = False
    """Whether an alarm rests on all requests together, and would stand if the single events had not been."""
    first_event_at: int | None = None
    """Requests the probe had looked at when it saw the first event. None: no event."""
    num_requests: int = 0
    """Requests whose replies it looked at."""


class Offer(Part):
    """What an endpoint was found to offer."""

    is_vllm: bool
    version: str | None
    chat: bool
    completions: bool
    logprobs: int | None
    """Most log-probabilities per generated token. None: none."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens (vLLM). None: none; nothing can be recomputed then."""
    token_ids: bool
    """`return_token_ids` (vLLM): without the ids a reply cannot be scored again exactly."""
    extended_sampling: bool
    """top_k, min_p and repetition_penalty may be sent."""
    tokenize: bool
    detokenize: bool = False
    metrics: bool
    counts_nans: bool
    """`vllm:corrupted_requests_total` counts (VLLM_COMPUTE_NANS_IN_LOGITS=1)."""
    speculation: bool
    """Replies, or the counters, say how much of what was drafted was accepted."""
    routed_experts: bool
    """Replies tell the experts that were used (--enable-return-routed-experts)."""
    cache_salt: bool
    """A prompt can be made new to the prefix cache."""
    streams: bool
    no_logprobs: str | None = None
    """Why what it gives under the name of log-probabilities is not used: logits, say. None: nothing speaks against it."""


class ProbeReport(Record):
    """All probes on one endpoint."""

    schema_version: Literal[2] = 2  # type: ignore[assignment]
    kind: Literal["probes"] = "probes"
    label: str
    """Precision name when it is a checkpoint of a run, else the model's name at the endpoint."""
    base_url: str
    model: str
    checkpoint_sha256: str | None
    """None: an endpoint that somebody else runs."""
    max_model_len: int | None
    offer: Offer
    settings: ProbeSettings
    results: tuple[ProbeResult, ...]
    num_requests: int
    num_failed: int
    """Requests without a reply: infrastructure."""
    errors: dict[str, int]
    """HTTP status or transport error -> how often."""
    system_fingerprint: str | None
    fingerprint: Fingerprint | None = None
    """How it was served. None: somebody else's server."""
    declared: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda declared: not declared)
    """Of a variant: as `Measurement.declared`, without the address."""
    started: str
    seconds: float

    @property
    def alarms(self) -> tuple[ProbeResult, ...]:
        return tuple(result for result in self.results if result.status == "alarm")

    def result(self, name: str) -> ProbeResult | None:
        """The result of one probe; None: it was not asked for."""
        return next((result for result in self.results if result.name == name), None)


def load_probes(run_dir: Path) -> list[ProbeReport]:
    """All probe reports of a run, by label; empty if nothing was probed. AssayError: a file is not one."""
    return [ProbeReport.load(path) for path in sorted((run_dir / "probes").glob("*.json"))]


def probes_place(run_dir: Path, label: str) -> Path:
    """Where a report belongs."""
    return run_dir / "probes" / f"{label}.json"


def ledger_of(place: Path) -> Path:
    """Requests and replies beside a report (JSON lines)."""
    return place.with_suffix(".requests.jsonl")


def find_probes(reports: Sequence[ProbeReport], measured: Measurement) -> ProbeReport | None:
    """The report of the measured checkpoint: by its hash, or, of a server somebody else runs, by its label.

    The reference's repeat is the reference's checkpoint, so it has the same probes. Those of a variant are its own alone.
    """
    declared = without_address(measured.declared)
    reports = [report for report in reports if report.declared == declared]
    same = [report for report in reports if report.checkpoint_sha256 == measured.checkpoint_sha256]
    named = [report for report in reports if report.checkpoint_sha256 is None and report.label == measured.label]
    return next(iter([report for report in same if report.label == measured.label] + same + named), None)
