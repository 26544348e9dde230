"""The records between stages: frozen, typed, versioned, written as JSON by rename.

Rules: missing is `None`, never 0; every size is in bytes, every time in seconds; a record says what it was made from
(hashes, versions), so that two records can be compared or refused. `Plan` is what quantize *and* verify consume.
Only the standard library and pydantic are needed to read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError

from assay.divergence_records import Drift, ExactDivergence
from assay.errors import AssayError
from assay.record_base import Interval as Interval
from assay.record_base import Part as Part
from assay.swe_records import SweFigures

Role = Literal[
    "embedding", "lm_head", "norm", "attention", "indexer", "dense_mlp", "shared_expert", "routed_expert", "router",
    "router_bias", "mtp",
]  # fmt: skip
Action = Literal["keep", "cast", "dequantize", "quantize", "consume", "drop"]
Status = Literal["PASS", "FAIL", "UNDERPOWERED", "NOT MEASURED"]


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(data: Any) -> str:
    """`data` as JSON with sorted keys and no spaces: the text that is hashed."""
    return _CANONICAL.encode(data)


def sha256_of(data: Any) -> str:
    """SHA-256 (hex) of `data` in canonical JSON."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read in 8 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary neighbour, fsync, rename: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Record(Part):
    """Base of what is written to a file. `schema_version` grows with every breaking change."""

    schema_version: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Write as indented JSON by rename. NaN and infinity are refused: an unmeasured value is `None`."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record back; `AssayError` names the file and the first thing that is wrong."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise AssayError(f"{path}: no such file (a {cls.__name__.lower()} record was expected)") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise AssayError(f"{path}: not a {cls.__name__} record of schema 1: {where}: {first['msg']}") from None


# ------------------------------------------------------------------------------------------------ plan
class OutputTensor(NamedTuple):
    """One tensor of the new checkpoint. `dtype` is a safetensors name (BF16, F32, F8_E4M3, I32, U8...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorPlan(NamedTuple):
    """What will happen to one tensor of the source.

    role: what it is for; `mtp` for everything inside the MTP block.
    part: its role inside the block (equal to `role` outside MTP; `mtp_projection` for eh_proj).
    module: its name without the last component: what an ignore pattern is matched against.
    action: `keep`: the same bytes, maybe under another name; `cast`: another float dtype; `dequantize`: an FP8 weight to 16 or
        32 bits; `quantize`; `consume`: scales that are folded into the weight they belong to; `drop`: left out.
    scheme: the scheme in which the weight is stored in the new checkpoint; None: unquantized. With action `keep`, the source
        stores it in that scheme already.
    fused_group: vLLM loads all members of a group into one parameter; NVFP4 members share one global scale. None: alone.
    dtype: as it is stored in the source.
    scale: the tensor of the source that holds the scales of an FP8 weight. None: it has none.
    """

    name: str
    role: str
    part: str
    module: str
    action: Action
    scheme: str | None
    fused_group: str | None
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    shard_in: str
    shard_out: str | None
    outputs: tuple[OutputTensor, ...]
    scale: str | None = None

    @property
    def logical_dtype(self) -> str:
        """What its weights are read as: BF16 for FP8 with scales, else as stored."""
        return self.dtype if self.scale is None else "BF16"


class Plan(Record):
    """What will happen to every tensor of a checkpoint; made from headers, config and recipe, without reading weights."""

    kind: Literal["plan"] = "plan"
    model: str
    precision: str
    family: str
    source: str
    source_sha256: str
    """Hash of names, dtypes, shapes and shard names (not of the data): what a resume is checked against."""
    recipe_sha256: str
    precision_recipe: dict[str, Any]
    config: dict[str, Any]
    """The source's config.json."""
    source_revision: str | None = None
    """Commit of a source on the hub; None for a folder."""
    mtp_layers: tuple[int, ...]
    """Decoder-layer indexes of inlined MTP blocks; empty if there are none or they are named `mtp.*`."""
    ignore: tuple[str, ...]
    """Patterns for vLLM: modules that stay unquantized."""
    importance_sha256: str | None = None
    """Of the channel weights that the scale search uses. None: it uses none."""
    tensors: tuple[TensorPlan, ...]

    @property
    def bytes_in(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(output.num_bytes for tensor in self.tensors for output in tensor.outputs)


# ------------------------------------------------------------------------------------------------ manifest, verify
class ShardRecord(Part):
    """One finished shard: its hash while written, and the weight error of what was quantized in it."""

    name: str
    num_bytes: int
    sha256: str
    relative_error: dict[str, float]
    """Per quantized tensor: ||dequantized - source|| / ||source|| (Frobenius)."""
    seconds: float


class Manifest(Record):
    """What did happen; written last, by rename: without it there is no checkpoint."""

    kind: Literal["manifest"] = "manifest"
    model: str
    precision: str
    source: str
    source_sha256: str
    recipe_sha256: str
    plan_sha256: str
    importance_sha256: str | None = None
    """Of the channel weights that the scale search used. None: it used none."""
    precision_recipe: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    files: dict[str, str]
    """Every other file of the folder (config, index, tokenizer...) -> SHA-256."""
    bytes_in: int
    bytes_out: int
    versions: dict[str, str]
    seconds: float

    @property
    def checkpoint_sha256(self) -> str:
        """Identity of the checkpoint: its shards and files, not when or how fast it was made."""
        return sha256_of({"shards": {s.name: s.sha256 for s in self.shards}, "files": self.files})


class Damage(Part):
    """One thing that is wrong in a checkpoint."""

    check: str
    where: str
    """Tensor, file or config key."""
    what: str


class Verification(Record):
    """Result of reopening a checkpoint and trusting nothing."""

    kind: Literal["verification"] = "verification"
    checkpoint: str
    checkpoint_sha256: str
    source: str | None
    passed: bool
    damages: tuple[Damage, ...]
    checks: dict[str, int]
    """Check name -> how many things it looked at."""
    not_checked: tuple[str, ...]
    """What could not be checked and why (no source given, ...)."""
    worst_relative_error: dict[str, float]
    """Role -> largest relative weight error seen."""
    mean_relative_error: dict[str, float]
    bytes_by_role: dict[str, int]
    seconds: float


# ------------------------------------------------------------------------------------------------ serving
class Fingerprint(Part):
    """How a checkpoint was served. Two measurements compare only if their `comparable_sha256` agree."""

    engine: str
    """"vllm 0.32.0" or "external" for a base URL that was given."""
    versions: dict[str, str]
    hardware: dict[str, str]
    profile: str
    flags: dict[str, Any]
    """vLLM flags but for model, port, and those of the next group."""
    environment: dict[str, str]
    speculation: dict[str, Any] | None
    checkpoint_flags: dict[str, Any]
    """Flags that depend on the checkpoint's format (quantization, load-format)."""
    emulated: bool | None
    """True: dequantized weights, BF16/FP32 arithmetic. False: native kernels. None: unquantized checkpoint or unknown."""
    kernels: tuple[str, ...]
    """Lines of the server's log that name the kernels chosen."""
    system_fingerprint: str | None = None

    @property
    def comparable_sha256(self) -> str:
        """Hash of everything that must be alike between reference and candidate."""
        return sha256_of(
            self.model_dump(mode="json", exclude={"checkpoint_flags", "emulated", "kernels", "system_fingerprint"})
        )


# ------------------------------------------------------------------------------------------------ measurements
Truncation = Literal["length", "budget", "context", "empty"]
"""Why a reply counts as cut off. budget, context: it reached its budget, or the model's longest text, whatever the server
says. length: only the server says so. empty: the end came inside thinking, no answer was begun."""


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


class ItemResult(Part):
    """One question, one sample. `correct` is None when infrastructure failed: never counted as wrong."""

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
    cluster: str | None = None
    """Items of one cluster (a repository) rise and fall together. None: each stands for itself."""


class TaskResult(Part):
    """One task of a suite on one checkpoint."""

    task: str
    kind: Literal["arithmetic", "needle", "lm_eval", "ruler", "tools", "swe"]
    num_items: int
    num_failed: int
    """Items without a reply (infrastructure): excluded, and shown."""
    num_truncated: int
    accuracy: Interval | None
    mean_output_tokens: float | None
    max_tokens: int
    items: tuple[ItemResult, ...]
    note: str | None = None
    """Why it was not measured, when it was not."""
    tools: ToolCalls | None = None
    """Of tasks that offer tools."""
    truncated_by: dict[Truncation, int] = Field(default_factory=dict)
    """Truncated items by reason; adds up to `num_truncated`."""
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
    swe: SweFigures | None = None
    """Of SWE-bench tasks: how the trajectories ended and what they cost."""


class PositionBucket(Part):
    """Divergence of the reply's tokens at positions [first, last] of the text."""

    first: int
    last: int
    n: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float


class Divergence(Part):
    """Candidate against reference on text the reference wrote, token by token (teacher forcing); all in nats.

    `kl_*` are lumped-tail KL: the top-k of the reference plus one bucket for the rest; a lower bound of the true KL.
    """

    reference_checkpoint_sha256: str
    top_k: int
    num_documents: int
    num_positions: int
    num_non_finite: int
    kl_mean: Interval
    """Interval: cluster bootstrap by document."""
    kl_median: float
    kl_p90: float
    kl_p99: float
    kl_max: float
    kl_corrected_mean: Interval
    """Unbiased estimate of the full-vocabulary KL (text sampled from the reference at T=1)."""
    tail_mass_mean: float
    """Probability the reference puts outside its top-k, mean over positions."""
    sampling_gap: Interval | None = None
    """Surprise of the text's tokens under the reference minus its own entropy, nats per token, both over its top-k: 0 on
    average when the text really was sampled from the reference at T=1. None: not computed."""
    top1_agreement: Interval
    by_position: tuple[PositionBucket, ...]
    by_language: dict[str, Interval]
    drift: tuple[Drift, ...] = ()
    """Of each set of texts, and of all sampled ones first. Empty: recorded before this was."""
    exact: ExactDivergence | None = None
    """None: exact mode was not asked for, or could not be (the measurement's `not_measured` says why)."""
    scored_by: Literal["top_k", "exact_ids"] = "top_k"
    """exact_ids: the server gave the candidate's log-probability of every id of the reference's top k."""


class Acceptance(Part):
    """Speculative decoding: how much of what the MTP head drafted was accepted, from vLLM's own counters."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    rate: float | None
    """accepted / drafted tokens; None when nothing was drafted."""
    mean_length: float | None
    """1 + accepted / drafts: tokens per verification step."""


class AskedWith(Part):
    """What stands between a question and the tokens the model sees."""

    is_chat: bool
    chat_template_sha256: str | None
    """Of the template's text. None: none was found in the checkpoint."""
    chat_template_kwargs: dict[str, Any]
    reasoning_parser: str | None
    tool_call_parser: str | None
    sends_seeds: bool


class Measurement(Record):
    """Everything one suite measured on one checkpoint under one fingerprint."""

    kind: Literal["measurement"] = "measurement"
    model: str
    label: str
    """Precision name, `bf16` for the source, `<reference>-repeat` for the noise floor."""
    is_reference: bool
    is_noise_floor: bool
    checkpoint: str
    checkpoint_sha256: str
    checkpoint_bytes: int
    suite: str
    suite_sha256: str
    suite_recipe: dict[str, Any]
    fingerprint: Fingerprint
    tasks: tuple[TaskResult, ...]
    divergence: Divergence | None
    acceptance: Acceptance | None
    not_measured: dict[str, str]
    """What the suite asked for and was not measured -> why."""
    started: str
    seconds: float
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
        return all(task.suffices for task in self.tasks)


# ------------------------------------------------------------------------------------------------ verdicts
class Verdict(Part):
    """One gate on one candidate."""

    gate: str
    candidate: str
    status: Status
    observed: Interval | None
    limit: float | None
    detail: str
    """One sentence: what was compared, with the numbers."""
    minimum_detectable_effect: float | None = None
    discordant: tuple[int, int] | None = None
    """Paired items: (right in reference only, right in candidate only)."""
    num_wrong_to_other_wrong: int | None = None
    """Paired items that both sides got wrong with different answers."""
    p_value: float | None = None
    """Two-sided mid-p McNemar: is one side right more often?"""
    p_value_holm: float | None = None
    """The same, adjusted over the scored tasks of the candidate."""
    items_needed: int | None = None
    """Paired items with which a candidate that loses nothing would pass, at the discordant rate seen, 4 times in 5."""
    mean_output_tokens: tuple[float, float] | None = None
    """Over items whose tokens both sides report: (reference, candidate)."""
    extra_output_tokens: Interval | None = None
    """Candidate minus reference per such item: + means longer replies. BCa interval."""
    has_say: bool = True
    """False: shown, but not part of the overall verdict; the reference itself cannot do what an optional gate asks."""


class GateReport(Record):
    """All verdicts of a run, and the one word for each candidate."""

    kind: Literal["gates"] = "gates"
    model: str
    reference: str
    gate_recipe: dict[str, Any]
    gate_recipe_sha256: str | None = None
    """Identity of the limits that were applied. None: written before hashes were."""
    registered_sha256: str | None = None
    """Identity of the limits as they stood when measuring began. None: not recorded, so nobody can say they came first."""
    verdicts: tuple[Verdict, ...]
    overall: dict[str, Status]
