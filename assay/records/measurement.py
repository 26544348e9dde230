"""What a suite measured on one checkpoint: items, tasks, divergence, acceptance; and whether its budgets suffice."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from assay.records.base import Interval, Part, Record, RecordedRecipe
from assay.records.declared import is_variant
from assay.records.divergence import Drift, ExactDivergence, Structural, TextMean
from assay.records.served.evidence import AskedTwice, ServedEvidence
from assay.records.serving import Fingerprint, Signature
from assay.records.swe import SweFigures

Truncation = Literal["length", "budget", "context", "empty", "reasoning_only"]
"""Why a reply counts as cut off. budget, context: it reached its budget, or the model's longest text, whatever the server
says. length: only the server says so. empty: the end came inside thinking, no answer was begun. reasoning_only: the answer was
given, and stands in what the server calls thinking: its reasoning parser's fault, or that of a model that does not end its
thinking."""


class ToolItem(Part):
    """What a reply did with the tools it was offered."""

    num_tools: int
    prompt_tokens: int | None
    """Length that the prompt was filled up to with other dialogue. None: not filled."""
    expected_tool: str | None
    """The one that is right. None: a plain answer is."""
    called: tuple[str, ...]
    """Names of the calls the server's parser found, in order; empty for a plain reply."""
    left_in_text: bool
    """A call stands in the reply's text: the parser missed it, or it was malformed."""
    schema_valid: bool | None
    """Every call names a tool that was offered, with arguments of its JSON schema. None: nothing was called."""
    arguments_equal: bool | None
    """The first call of the right tool has exactly the arguments asked for. None: the right tool was not called."""


class TriggerFidelity(Part):
    """Does the candidate call a tool where the reference does? The reference is the truth here, right or wrong."""

    num_both: int
    num_reference_only: int
    num_candidate_only: int
    num_neither: int
    precision: Interval | None
    """Of the candidate's triggers, those where the reference triggers too. None: it triggered nowhere."""
    recall: Interval | None
    f1: float | None
    p_value: float
    """Two-sided mid-p McNemar: does one side trigger more often?"""


class ToolFigures(Part):
    """Shares over the answered items of one cell, or of all. None: nothing to take a share of."""

    num_items: int
    trigger_precision: Interval | None
    """Of the replies that call a tool, those where a tool is right."""
    trigger_recall: Interval | None
    """Of the items where a tool is right, those where one is called."""
    right_tool: Interval | None
    """Of the items where a tool is right and one is called, those with one call, of that tool."""
    schema_valid: Interval | None
    """Of the replies that call a tool, those where every call is valid."""
    arguments_equal: Interval | None
    """Of the replies that call the right tool, those with exactly the arguments asked for."""
    num_left_in_text: int


class ToolCell(ToolFigures):
    """Items with so many tools in a prompt of so many tokens."""

    num_tools: int
    prompt_tokens: int | None
    """None: as long as it is."""


class ToolCalls(Part):
    """How well tools are called, over all items and by number of tools and length of the prompt."""

    overall: ToolFigures
    cells: tuple[ToolCell, ...]
    against_reference: TriggerFidelity | None
    """None: this is the reference, or the journal does not have its replies."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ItemResult:
    """One question, one sample. `correct` is None when infrastructure failed: never counted as wrong.

    No `Part`: of this record there may be a hundred thousand, and with slots each takes 0.3 kB instead of 1.4.
    """

    item: str
    language: str
    correct: bool | None
    truncated: bool
    wrong_script: bool
    """The reply is written in a script that neither the prompt nor the answer uses."""
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    answer: str | None
    error: str | None = None
    tool: ToolItem | None = None
    """Of tasks that offer tools."""
    truncated_by: Truncation | None = None
    """None: not truncated, or recorded before reasons were."""
    thinking_tokens: int | None = None
    """Part of `output_tokens`. None: the server does not say."""
    score: float | None = None
    """0..1, of tasks with partial credit; `correct` is then whether it is 1. None: right or wrong is all there is."""
    sample: int = 0
    """Which of `TaskResult.num_samples` replies to the item."""
    loops: bool | None = None
    """The reply repeats itself until it is cut off, or its thinking until its budget ended it. None: no reply, or recorded
    before this was."""
    cluster: str | None = None
    """Items of one cluster (a repository) rise and fall together. None: each stands for itself."""
    subtask: str | None = None
    """Part of the task: RULER's task, or the number of tools. None: the task has one part, or recorded before this was."""
    length_tokens: int | None = None
    """Length that the suite names for it, which the prompt was filled up to. None: it names none, or as above."""
    depth: float | None = None
    """Where in the context lies what was asked for: 0 the front, 1 the end. None: at several places, nowhere, or as above."""
    drafted_tokens: int | None = None
    """Tokens that speculative decoding drafted for the reply. None: nothing was drafted, the server says totals only, or
    recorded before this was."""
    accepted_tokens: int | None = None
    """Of these, those that were accepted. None: as above."""
    reply_key: int | None = None
    """48 bits of a hash of the id that the server gave the reply. None: it gave none, or recorded before this was."""
    text_key: int | None = None
    """The same of all that the reply says: text, thinking, calls. None: no reply, or recorded before this was."""
    text_chars: int | None = None
    """Characters of the answer, without thinking. None: as above."""
    reasoning_chars: int | None = None
    """Characters of thinking apart from the answer; 0: there is none. None: as above."""
    ends_open: bool | None = None
    """The answer, or the thinking if there is none, ends without a mark that ends a sentence. None: as above."""
    answer_in_reasoning: bool | None = None
    """There is no answer, the server says that the reply ended by itself, and at the end of the thinking stands the right
    answer, or one in the form that was asked for. None: as above."""
    expected: str | None = None
    """The right answer as the task has it, of a longer one its end; strings of RULER one a line. None: the task has none, no
    reply came, or recorded before this was."""


class Round(Part):
    """What a task was asked in one round, beyond what it had been asked before."""

    started: str
    num_samples: int
    """Replies to each item, with those of earlier rounds."""
    limit: int | None
    """Items of each task behind a name of lm-eval, with those of earlier rounds. None: as many as the suite says."""
    why: str
    """One clause: of a later round, what was undecided, with its numbers."""


class TaskResult(Part):
    """One task of a suite on one checkpoint."""

    task: str
    kind: Literal["arithmetic", "needle", "lm_eval", "ruler", "tools", "swe", "imported"]
    """imported: another harness asked and scored it; the suite's task says which, by what metric and with which settings."""
    num_items: int
    num_failed: int
    """Items without a reply (infrastructure): excluded, and shown."""
    num_truncated: int
    accuracy: Interval | None
    mean_output_tokens: float | None
    max_tokens: int | None
    """None: imported, and its log does not say."""
    items: tuple[ItemResult, ...]
    note: str | None = None
    """Why it was not measured, when it was not."""
    tools: ToolCalls | None = None
    """Of tasks that offer tools."""
    truncated_by: dict[Truncation, int] = Field(default_factory=dict)
    """Truncated items by reason; adds up to `num_truncated`."""
    num_loops: int | None = None
    """Replies that repeat themselves until they are cut off. None: recorded before this was, or nobody looked."""
    thinking_budget_tokens: int | None = None
    """Tokens of `max_tokens` after which the server ends the thinking. None: thinking and answer share the budget."""
    num_thinking_cut: int | None = None
    """Replies whose thinking was ended so; they are not truncated if an answer follows. None: no such budget, or not known."""
    mean_score: Interval | None = None
    """Of `ItemResult.score`. None: no partial credit."""
    num_samples: int = 1
    """Replies to each item. Above 1 `accuracy` is avg@k: the mean of the items' means, with an interval over items."""
    pass_at_k: Interval | None = None
    """Share of items that at least one of `num_samples` replies got right. None: one reply each."""
    chance: float | None = None
    """Share of the items that guessing gets right. None: recorded before this was."""
    title: str | None = None
    """What sentences call the task. None: its name."""
    swe: SweFigures | None = None
    """Of SWE-bench tasks: how the trajectories ended and what they cost."""
    rounds: tuple[Round, ...] = ()
    """Of tasks that are asked again while undecided, in order. Empty: asked once."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Of RULER: essays, squad, hotpotqa -> `published`, `generated`, or the path of a file of one's own."""
    is_second_replies: bool = False
    """The reference's own second replies, which stand against its first: the noise floor of a task that is sampled."""
    served: ServedEvidence | None = None
    """What the replies say of who gave them. None: recorded before this was, or its replies are not kept (SWE-bench)."""
    is_graded: bool = False
    """Imported scores with partial credit: `accuracy` and every comparison are of `ItemResult.score`, not of how many are
    right."""
    knows_cuts: bool = True
    """False: imported from a log that does not say which replies were cut off; nothing is counted in `num_truncated` then."""

    @property
    def usual_error(self) -> str | None:
        """What the server, or the client, said most often of requests that had no reply. None: nothing is recorded.

        That a request was not sent any more comes last: the errors before it say why.
        """
        errors = Counter(item.error for item in self.items if item.error)
        return max(errors, key=lambda error: (not error.startswith("not asked"), errors[error]), default=None)


class PositionBucket(Part):
    """Divergence of the reply's tokens at positions [first, last] of the text."""

    first: int
    last: int
    n: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float


SAMPLING_GAP_NATS = 0.05
"""A gap below this changes no KL that is shown, whether or not it is significant."""
SURER = 1.7
"""Half an interval of 95 % so many times is one of 99.9 %: a sound server is doubted in one run of a thousand."""


class Divergence(Part):
    """Candidate against reference on text the reference wrote, token by token (teacher forcing); all in nats.

    `kl_*` are lumped-tail KL: the top-k of the reference plus one bucket for the rest; a lower bound of the true KL.
    """

    reference_checkpoint_sha256: str
    top_k: int
    num_documents: int
    num_positions: int
    num_non_finite: int
    kl_mean: TextMean
    """Interval: over texts, with their kinds as strata."""
    kl_median: float
    kl_p90: float
    kl_p99: float
    kl_max: float
    kl_corrected_mean: TextMean
    """Unbiased estimate of the full-vocabulary KL (text sampled from the reference at T=1)."""
    tail_mass_mean: float
    """Probability the reference puts outside its top-k, mean over positions."""
    sampling_gap: TextMean | None = None
    """Surprise of the text's tokens under the reference minus its own entropy, nats per token, both over its top-k: 0 on
    average when the text really was sampled from the reference at T=1. None: not computed."""
    top1_agreement: TextMean
    by_position: tuple[PositionBucket, ...]
    by_language: dict[str, TextMean]
    drift: tuple[Drift, ...] = ()
    """Of each set of texts, and of all sampled ones first. Empty: recorded before this was."""
    structural: Structural | None = None
    """None: recorded before this was, or `no_structural` says why."""
    no_structural: str | None = None
    exact: ExactDivergence | None = None
    """None: exact mode was not asked for, or could not be (the measurement's `not_measured` says why)."""
    scored_by: Literal["top_k", "exact_ids"] = "top_k"
    """exact_ids: the server gave the candidate's log-probability of every id of the reference's top k."""

    @property
    def gap_of_unsampled(self) -> Interval | None:
        """`sampling_gap` where it shows that the texts were not sampled from the reference's log-probabilities at T=1. None: it
        does not, or was not computed."""
        gap = self.sampling_gap
        if not isinstance(gap, Interval) or abs(gap.value) < max(SAMPLING_GAP_NATS, SURER * (gap.high - gap.low) / 2):
            return None
        return gap


class Acceptance(Part):
    """Speculative decoding: how much of what the MTP head drafted was accepted, by vLLM's own counts."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    rate: float | None
    """accepted / drafted tokens; None when nothing was drafted."""
    mean_length: float | None
    """1 + accepted / drafts: tokens per verification step."""
    num_replies: int | None = None
    """Replies that something was drafted for. None: the server told totals only."""
    rate_standard_error: float | None = None
    """Of `rate` from one sample of replies to another. None: totals only, or a single reply."""


class AskedWith(Part):
    """What stands between a question and the tokens the model sees."""

    is_chat: bool
    chat_template_sha256: str | None
    """Of the template's text. None: none was found in the checkpoint."""
    chat_template_kwargs: dict[str, Any]
    reasoning_parser: str | None
    tool_call_parser: str | None
    sends_seeds: bool


class ImportedFrom(Part):
    """Where scores come from that another harness computed."""

    harnesses: tuple[str, ...]
    """With version where the files say it: `lm-eval 0.4.13`."""
    files: dict[str, str]
    """Path under what was named -> SHA-256."""
    model: str | None
    """As the harness calls it. None: the files do not say."""
    not_known: tuple[str, ...]
    """What of serving and asking no file says, in the words of a report."""


class Measurement(Record):
    """Everything one suite measured on one checkpoint under one fingerprint."""

    schema_version: Literal[3] = 3  # type: ignore[assignment]
    kind: Literal["measurement"] = "measurement"
    model: str
    label: str
    """Precision name, `bf16` for the source, `<reference>-repeat` for the noise floor."""
    is_reference: bool
    is_noise_floor: bool
    checkpoint: str
    """Its folder, or the URL of a server of which no folder was named. Imported: the file or folder of results."""
    checkpoint_sha256: str
    """Without a folder: of what its server says it loaded, and of the first signature. Imported: of the files."""
    checkpoint_bytes: int | None
    """None: no folder was named."""
    weight_bits: int | None = None
    """Fewest bits of its quantized weights, by config.json; 16: none is quantized. None: not known, or not recorded yet."""
    weight_shares: dict[int, float] = Field(default_factory=dict)
    """Bits -> share of the layers' weights that are stored with so many, by the headers of its files; embeddings, output head
    and MTP block do not count. Empty: not known, or not recorded yet."""
    suite: str
    suite_sha256: str
    suite_recipe: RecordedRecipe
    fingerprint: Fingerprint
    tasks: tuple[TaskResult, ...]
    divergence: Divergence | None
    acceptance: Acceptance | None
    not_measured: dict[str, str]
    """What the suite asked for and was not measured -> why."""
    started: str
    seconds: float | None
    """None: imported."""
    reference_checkpoint_sha256: str | None = None
    """Whose texts and haystacks were used; the checkpoint's own hash for the reference."""
    notes: tuple[str, ...] = ()
    """How it was measured, where that is not the usual way (no chat template, how an lm-eval task was scored...)."""
    asked_with: AskedWith | None = None
    """None: recorded before this was."""
    requests_in_flight_share: float | None = None
    """Part of the wall time of the suite with at least one request in flight. None: the journal had it all."""
    mean_requests_in_flight: float | None = None
    """Over the same time."""
    signature: Signature | None = None
    """Which weights answered, when the measurement began. None: recorded before this was, or the server gives no
    log-probabilities."""
    replies_sha256: str | None = None
    """With checkpoint and suite the key of its replies in the journal. None: recorded before this was."""
    asked_twice: tuple[AskedTwice, ...] = ()
    """One for each kind of temperature that its tasks ask for. Empty: recorded before this was, a repeat, or nothing to ask."""
    imported: ImportedFrom | None = None
    """None: its questions were asked here."""
    declared: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda declared: not declared)
    """Of a variant, another way of serving: path in the fingerprint -> the value that it was to have there, as said before it
    was served (`records/declared.py`). It differs from the reference in exactly these. Empty: it is served alike, or recorded
    before this was."""

    @property
    def is_variant(self) -> bool:
        """Whether it is another way of serving, and not other weights beside the reference's."""
        return is_variant(self.declared)


class TaskBudget(Part):
    """Whether one task's token budget suffices, by a few of its items on the reference."""

    task: str
    max_tokens: int
    thinking_budget_tokens: int | None
    num_replies: int
    num_truncated: int
    truncated_by: dict[Truncation, int]
    num_thinking_cut: int | None
    truncated_share: Interval | None
    """Clopper-Pearson. None: no reply came."""
    max_truncated_share: float
    """What the gates allow."""
    longest_reply_tokens: int | None
    suffices: bool
    """Whether no more replies were cut off by the budget or the context than the gates allow."""
    is_required: bool = True
    """False: the task's gate is not required, so a model that cannot do the task may fail here."""
    detail: str
    """One sentence, with the numbers."""


class BudgetCheck(Record):
    """Before a run: a few items of every task of a suite, on the reference."""

    kind: Literal["budget_check"] = "budget_check"
    model: str
    label: str
    checkpoint_sha256: str
    suite: str
    suite_sha256: str
    tasks: tuple[TaskBudget, ...]

    @property
    def suffices(self) -> bool:
        return all(task.suffices for task in self.tasks if task.is_required)
