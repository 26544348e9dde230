"""What the gates said: one verdict per gate and candidate, and the one word for each candidate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record, RecordedRecipe
from assay.records.divergence import Ranking
from assay.records.long_context import EffectiveLength, LongContext

Status = Literal["PASS", "FAIL", "UNDERPOWERED", "NOT MEASURED"]
"""Of one gate."""
Overall = Literal["PASS", "FAIL", "UNDERPOWERED", "NOT MEASURED", "not failed"]
"""Of a candidate. not failed: the suite asks no task, and the divergence surely lies within its limits, which passes nobody;
the word of a screening. Added without another schema version: no record that was written before has it."""
Chosen = Literal["before the run", "after the run", "not recorded"]


class LookSeen(Part):
    """A task of one candidate, looked at once: what was asked by then, and what it said."""

    reference_samples: int
    """Replies to each item."""
    candidate_samples: int
    num_items: int
    share: float
    """Planned share of all that may be asked; alpha is spent by it."""
    alpha_spent: float
    """One-sided, by this look and those before, for PASS."""
    level: float
    """One-sided level at which this look decides PASS: where its p lies below."""
    p_pass: float
    """One-sided, of the margin: how compatible a loss of at least the margin is with this look by itself."""
    p_fail: float
    """The same of a loss of at most the margin."""
    drop: float
    """Reference minus candidate."""
    information: float
    """1 / variance of `drop`."""
    fail_level: float | None = None
    """The same for FAIL, before Holm. None: that of PASS, in records from before they differed."""


class Verdict(Part):
    """One gate on one candidate."""

    gate: str
    candidate: str
    status: Status
    observed: Interval | None
    limit: float | None
    detail: str
    """What was seen and what is allowed, in one clause; then what an undecided verdict would need."""
    title: str | None = None
    """What sentences call the task of a score gate. None: its name, or no task."""
    clause: str | None = None
    """What was seen and what is allowed, as the headline says it: without the statistics, and no capital. None: there is only
    `detail`, or judged before it was recorded."""
    minimum_detectable_effect: float | None = None
    discordant: tuple[int, int] | None = None
    """Paired items: (right in reference only, right in candidate only)."""
    num_wrong_to_other_wrong: int | None = None
    """Paired items that both sides got wrong with different answers."""
    p_value: float | None = None
    """Two-sided mid-p McNemar: is one side right more often?"""
    p_value_holm: float | None = None
    """The same, adjusted over the scored tasks of the candidate."""
    p_pass: float | None = None
    """One-sided, of the hypothesis that the loss is the margin or more: the gate passes where it is below (1 - level) / 2.
    With the claim `equivalent` the larger of the two one-sided tests. None: judged before it was recorded, or no score gate."""
    p_fail: float | None = None
    """One-sided, of the hypothesis that the loss is the margin or less (`equivalent`: the gain as well)."""
    p_fail_holm: float | None = None
    """The same, adjusted as the gates say over the scored tasks of the candidate: the gate fails where it is below
    (1 - level) / 2."""
    items_needed: int | None = None
    """Paired items with which a candidate that loses nothing would pass, at the discordant rate seen, 4 times in 5."""
    items_needed_at_loss: int | None = None
    """The same if the loss that was seen is the true one. None: there is none, it is not below the margin, or no number of
    items up to a million would do."""
    mean_output_tokens: tuple[float, float] | None = None
    """Over items whose tokens both sides report: (reference, candidate)."""
    extra_output_tokens: Interval | None = None
    """Candidate minus reference per such item: + means longer replies. BCa interval."""
    looks: tuple[LookSeen, ...] = ()
    """Of a task that is asked again while undecided, in order. Empty: looked at once."""
    estimand: Literal["these_items", "these_clusters", "such_items"] | None = None
    """What the interval of a score is for: these very items, with other replies to them; such items of these very clusters; or
    such items. The first two only where the gates say so, and there are replies enough, or clusters. None: no score, or judged
    before it was recorded."""
    worst_case: Interval | None = None
    """Of a score: the drop with every cut reply of the candidate wrong and of the reference right; a PASS holds for it too.
    None: nothing was cut off, or judged before this was."""
    faults: tuple[str, ...] = ()
    """Rules by which the serving is at fault for the task, so that its replies say nothing of the weights. Empty: none is, or
    judged before this was."""
    has_say: bool = True
    """False: shown, but not part of the overall verdict. An optional gate on what the reference itself cannot do, acceptance
    where nothing was served with speculative decoding, or a task undecided alone where the claim about the whole decides."""


class ServingFinding(Part):
    """One rule that one task of one candidate breaks: by its serving, or the reference's."""

    candidate: str
    task: str
    rule: str
    """By name, of `assay_evaluate.serving_faults.rules`."""
    at_fault: tuple[str, ...]
    """Labels of the checkpoints whose serving is at fault; both where that cannot be told."""
    clause: str
    num: int
    """Replies (or questions) at fault."""
    of: int


class TaskUse(Part):
    """One task in the claim about the whole. use: drop / margin, with the interval of the drop."""

    task: str
    use: Interval
    word: Literal["within its margin", "beyond its margin", "undecided alone"]
    within_max: bool
    """Shown to have lost less than `max_task` margins."""


class WholeClaim(Part):
    """What is claimed of a candidate over all its score gates together, beside the verdicts of the single tasks."""

    candidate: str
    status: Status
    mean_use: Interval | None
    """Mean over the tasks of drop / margin; n counts the tasks. None: a task was not measured."""
    max_mean_use: float
    max_task: float
    """In margins."""
    p_value: float | None
    """One-sided, of H0: the mean use is `max_mean_use` or more."""
    tasks: tuple[TaskUse, ...]
    left_out: tuple[str, ...]
    """Tasks of optional gates that the reference cannot do."""
    detail: str
    clause: str | None = None
    """The same without the statistics, as the headline says it. None: NOT MEASURED, or judged before it was recorded."""


class Attempt(Part):
    """An earlier evaluation of the same candidate against the same reference."""

    run: str
    """Name of its folder."""
    label: str
    started: str
    suite_sha256: str
    """Of the questions: another seed or number of items makes another."""
    status: Overall


SubgroupWord = Literal["beyond", "loses, and its limit is not excluded", "loses", "no loss shown"]


class SubgroupLoss(Part):
    """Paired items of one language, part or length of a task, or of one language over several tasks, on one candidate."""

    candidate: str
    by: Literal["language", "part", "length"]
    name: str
    tasks: tuple[str, ...]
    title: str
    """What sentences call it."""
    num_items: int
    drop: Interval
    """Reference minus candidate, + is a loss. Over all replies there are, also of a task that was asked in rounds."""
    limit: float
    """Of the loss: so many margins of the task as the gate says."""
    p_loss: float
    """One-sided, of no loss."""
    p_loss_adjusted: float
    """By Benjamini and Hochberg over the candidate's subgroups."""
    p_beyond: float
    """One-sided, of a loss of `limit` or less."""
    p_beyond_adjusted: float
    minimum_detectable_effect: float
    """Loss that these items would show with a chance of 80 %, if nothing were adjusted."""
    word: SubgroupWord


PublishedOutcome = Literal["agrees", "missed", "above", "not comparable"]


class PublishedComparison(Part):
    """The reference's score of one task beside the one that was published for the model."""

    task: str
    outcome: PublishedOutcome
    """missed: by more than the interval, so no verdict of the task is believed. above: said, not judged."""
    score: float
    difference: Interval | None
    """Published minus measured. None: not comparable."""
    detail: str
    given: dict[str, Any]
    """As the model's recipe has it: value, items, protocol, source."""


class RegisteredGates(Record):
    """`RUN/gates.registered.json`: the limits as they stood when measuring began."""

    kind: Literal["registered_gates"] = "registered_gates"
    named: str
    """Name of a shipped recipe, or path of a file, that they came from."""
    recipe: dict[str, Any]
    """As it applies to the run's suite: every task that has a margin is named."""
    sha256: str
    """Of `recipe` as it stands here: other limits written into the file later do not pass for these."""


class GateReport(Record):
    """All verdicts of a run, and the one word for each candidate."""

    kind: Literal["gates"] = "gates"
    model: str
    reference: str
    gate_recipe: RecordedRecipe
    gate_recipe_sha256: str | None = None
    """Identity of the limits that were applied. None: written before hashes were."""
    registered_sha256: str | None = None
    """Identity of the limits as they stood when measuring began. None: not recorded, so nobody can say they came first."""
    registered_name: str | None = None
    """Name of those limits. None: as above."""
    verdicts: tuple[Verdict, ...]
    overall: dict[str, Overall]
    published: tuple[PublishedComparison, ...] = ()
    """Empty: the model's recipe has no published score of a task that was asked, or judged before they were."""
    wholes: tuple[WholeClaim, ...] = ()
    """One for each candidate, where the gates claim something of the whole."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Candidate -> why it has its overall verdict, one line with the numbers. Empty: judged before reasons were written."""
    long_context: tuple[LongContext, ...] = ()
    """Of every candidate and task of several lengths or depths. Empty: there is none, or judged before this was."""
    effective_lengths: tuple[EffectiveLength, ...] = ()
    """Of every candidate and gate of that kind."""
    subgroups: tuple[SubgroupLoss, ...] = ()
    """Of every candidate that gates on subgroups look at. Empty: there is no such gate, or judged before there were."""
    serving: tuple[ServingFinding, ...] = ()
    """Tasks whose replies are not those of the weights, or not to the same questions. Empty: none, or judged before this."""
    not_looked_at: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Candidate -> rules of `serving` for which its record, or the reference's, is too old to have evidence."""
    rankings: tuple[Ranking, ...] = ()
    """Of candidates by their divergence, where the suite asks no task. Empty: it asks some, or judged before this was."""
    attempts: dict[str, tuple[Attempt, ...]] = Field(default_factory=dict)
    """Candidate -> evaluations of the same weights with a suite of the same name that were judged before, in this folder of
    runs. Empty: there is none, or judged before they were counted."""

    @property
    def chosen(self) -> Chosen:
        """When the limits that were applied were chosen."""
        if self.registered_sha256 is None:
            return "not recorded"
        return "before the run" if self.registered_sha256 == self.gate_recipe_sha256 else "after the run"

    @property
    def late(self) -> str | None:
        """A clause about limits that may have been chosen for the scores; None: they were written down before the run."""
        name = self.gate_recipe.get("name")
        if self.chosen == "not recorded":
            return f"when gates {name} were chosen is not recorded, so it may have been after the scores were known"
        if self.chosen == "before the run":
            return None
        if name == self.registered_name:
            return f"gates {name} were changed after the run; others of that name were registered before it"
        return f"gates {name} were chosen after the run; gates {self.registered_name} were registered before it"
