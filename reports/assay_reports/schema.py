"""`report.json`: the types of everything a report says. Differences are reference minus candidate: + is a loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record, RecordedRecipe
from assay.records.calibration import Calibration
from assay.records.deployment.record import Deployment
from assay.records.diagnosis.sensitivity import Sensitivity
from assay.records.divergence import Ranking
from assay.records.long_context import EffectiveLength, LongContext
from assay.records.measurement import Acceptance, Divergence, ToolCalls
from assay.records.probe import ProbeReport
from assay.records.reached import Reached
from assay.records.serving import Fingerprint
from assay.records.speed import SpeedRecord
from assay.records.swe import SweDifference, SweFigures
from assay.records.upgrade import UpgradeCheck
from assay.records.verdict import Chosen, Overall, PublishedComparison, Verdict
from assay.records.verification import Damage


class Limit(Part):
    """One thing the reader must know before believing a number; it is there only while its condition holds."""

    key: str
    text: str


class LanguageNumbers(Part):
    """One language of a task."""

    language: str
    num_items: int
    accuracy: Interval | None
    drop: Interval | None
    discordant: tuple[int, int] | None
    num_wrong_script: int


class TaskNumbers(Part):
    """One task on one checkpoint, beside the reference. What compares is None for the reference itself."""

    task: str
    kind: str
    num_items: int
    num_failed: int
    num_truncated: int
    truncation_share: float | None
    max_tokens: int | None
    accuracy: Interval | None
    mean_output_tokens: float | None
    num_wrong_script: int
    note: str | None
    num_pairs: int | None
    num_excluded: int | None
    drop: Interval | None
    discordant: tuple[int, int] | None
    mcnemar_midp: float | None
    minimum_detectable_effect: float | None
    reference_truncation_share: float | None
    reference_num_truncated: int | None
    reference_mean_output_tokens: float | None
    extra_output_tokens: Interval | None
    """Candidate minus reference, per paired item: + means longer replies."""
    by_language: tuple[LanguageNumbers, ...]
    reference_on_pairs: float | None = None
    """The reference's score over the pairs, where that is another one than its score: it answered more items."""
    swe: SweFigures | None = None
    """Of SWE-bench tasks."""
    swe_difference: SweDifference | None = None
    """Of SWE-bench tasks, against the reference; its drop is the task's."""
    tools: ToolCalls | None = None
    """Of tasks that offer tools."""
    margin: float | None = None
    """The loss its gate allows. None: no gate asks for it."""
    title: str | None = None
    """What sentences call the task. None: its name."""
    p_pass: float | None = None
    """Of a loss of the margin or more; decides a PASS. None: not judged, or before it was recorded."""
    p_fail_holm: float | None = None
    """Of a loss of the margin or less, adjusted over the candidate's scored tasks; decides a FAIL. None: as above."""
    p_value_holm: float | None = None
    """`mcnemar_midp`, adjusted over the candidate's scored tasks. None: not judged."""
    items_needed: int | None = None
    """With which a candidate that loses nothing would pass the margin, 4 times in 5."""
    num_samples: int = 1
    """Replies to each item; above 1, `accuracy` is avg@k."""
    pass_at_k: Interval | None = None
    mean_score: Interval | None = None
    """With partial credit."""


class TimesFloor(Part):
    """One set of texts: its statistics over those of the reference against itself. What is 0 there is left out."""

    texts: str
    statistics: dict[str, float]
    """Name in `Drift` -> multiple."""
    groups: dict[str, float]
    """`by_span: 512 to 1023` -> multiple of the mean KL of the same group."""


class TaskFlips(Part):
    """One task: items whose answer changed, against the reference."""

    task: str
    num_pairs: int
    num_lost: int
    """Right in the reference only."""
    num_gained: int
    num_other_wrong: int
    """Wrong on both sides with different answers."""
    flip_rate: Interval
    """Lost and gained, of all pairs (arXiv 2407.09141); n counts items, or clusters of them."""


class Row(Part):
    """One served checkpoint."""

    label: str
    kind: Literal["reference", "noise floor", "candidate"]
    status: Overall | None
    """None for the reference, which is not judged."""
    sentence: str
    checkpoint: str
    checkpoint_sha256: str
    checkpoint_bytes: int | None
    """None: of its checkpoint only a server is known."""
    share_of_reference: float | None
    """Bytes, against the reference's."""
    tasks: tuple[TaskNumbers, ...]
    divergence: Divergence | None
    kl_times_floor: float | None
    """Mean KL / mean KL of the reference's repeat; None without a floor, or if the floor is exactly 0."""
    times_floor: tuple[TimesFloor, ...] = ()
    """Every other statistic of drift as such a multiple."""
    flips: tuple[TaskFlips, ...] = ()
    reached: tuple[Reached, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Wrong answers whose thinking had stated the right one, by task. Empty: no reply was read."""
    acceptance: Acceptance | None
    acceptance_drop: Interval | None
    emulated: bool | None
    checkpoint_flags: dict[str, Any]
    kernels: tuple[str, ...]
    not_measured: dict[str, str]
    declared: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda declared: not declared)
    """Of a variant: what it is declared to differ in from the reference, as `Measurement.declared` has it."""
    variant: str | None = Field(default=None, exclude_if=lambda variant: variant is None)
    """The same in words: `the checkpoint of fp8 itself, served with kv-cache-dtype fp8`. None: it is other weights."""
    folder: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of its checkpoint, as seen from the folder of runs. None: it lies elsewhere, or only a server is known."""
    started: str
    seconds: float | None


class RoleNumbers(Part):
    """What a plan does with the tensors of one role."""

    role: str
    what: str
    num_tensors: int
    bytes_in: int
    bytes_out: int


class PlanNumbers(Part):
    precision: str
    scheme: str
    bytes_in: int
    bytes_out: int
    roles: tuple[RoleNumbers, ...]
    calibrated: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """How text that went through the model took part in rounding weights. None: it did not."""
    mixed: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """Which roles have which scheme, in which layers. None: all have one."""


class VerificationNumbers(Part):
    precision: str
    passed: bool
    is_measured_checkpoint: bool | None
    """The hash is that of the checkpoint that was measured; None if that was not measured."""
    num_checked: int
    checks: dict[str, int]
    damages: tuple[Damage, ...]
    not_checked: tuple[str, ...]
    mean_relative_error: dict[str, float]
    worst_relative_error: dict[str, float]


class ChoiceWords(Part):
    """What was recommended, in sentences."""

    sentence: str
    """The recommendation: `Deploy w4a16 with MTP up to about 20 streams, then nvfp4`."""
    picks: tuple[str, ...] = ()
    """One for each operating point."""
    reasons: tuple[str, ...] = ()
    """What was within the noise, what else may be chosen and has no speed, what would change if something undecided passed."""
    not_known: tuple[str, ...] = ()
    """What was missing or predicted."""
    next_steps: tuple[str, ...] = ()


class Report(Record):
    """`report.json`."""

    schema_version: Literal[3] = 3  # type: ignore[assignment]
    kind: Literal["report"] = "report"
    model: str
    run: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """Name of the run's folder. None: recorded before this was."""
    reference: str
    level: float
    suite: str
    suite_sha256: str
    suite_recipe: RecordedRecipe
    gate_recipe: RecordedRecipe | None
    gates_chosen: Chosen | None = None
    """When these limits were chosen. None: the run was not judged."""
    gates_registered: str | None = None
    """Name of the limits that were written down before the run."""
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    published: tuple[PublishedComparison, ...] = ()
    """The reference beside the scores that were published for the model."""
    limits: tuple[Limit, ...]
    plans: tuple[PlanNumbers, ...]
    verifications: tuple[VerificationNumbers, ...]
    calibrations: dict[str, Calibration] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Precision -> the calibration that its checkpoint was made with."""
    fingerprint: Fingerprint
    probes: tuple[ProbeReport, ...] = ()
    """Of every checkpoint that was probed."""
    deployments: tuple[Deployment, ...] = ()
    """Candidates on other hardware than they were judged on."""
    long_context: tuple[LongContext, ...] = ()
    effective_lengths: tuple[EffectiveLength, ...] = ()
    rankings: tuple[Ranking, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Of candidates by their divergence, where the suite asks no task."""
    speed: SpeedRecord | None = None
    """`speed.json`. None: `assay speed` has not run."""
    choice: ChoiceWords | None = None
    """Of `choice.json`. None: `assay choose` has not run."""
    upgrade: UpgradeCheck | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of `upgrade.json`. None: the run compares no engines."""
    sensitivity: Sensitivity | None = None
    """Of `sensitivity.json`. None: `assay sensitivity --run` has not run."""
