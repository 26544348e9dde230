"""Gate recipes: limits, written down before the run, and how they apply to a suite."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from assay.errors import RecipeError, did_you_mean
from assay.recipes.base import Recipe, Section
from assay.recipes.imported import ImportedSuite
from assay.recipes.suite import SuiteRecipe, tasks_with_lengths
from assay.records.probe import ProbeName


class ScoreGate(Section):
    """Non-inferiority: the upper end of the paired interval of the drop must stay below `max_drop`."""

    kind: Literal["score"]
    task: str
    max_drop: float = Field(gt=0, lt=1)
    """In accuracy: 0.02 = two points."""
    claim: Literal["non_inferior", "equivalent"] = "non_inferior"
    """equivalent: a gain of `max_drop` must be excluded too (TOST)."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Share of the reference's replies cut off above which this task is NOT MEASURED. Default: the truncation gate's (without
    one, 5 %), at most a third of `max_drop`."""
    required: bool = True
    """False: where the *reference* cannot do the task (no score, hardly ever right, cut off), the gate is shown without a say
    in the overall verdict. A candidate that cannot do what the reference can is judged all the same."""


class DivergenceGate(Section):
    """A condition of a PASS, and never enough for one: KL says how far two models are apart, not which is better."""

    kind: Literal["divergence"]
    metric: Literal[
        "kl_mean", "kl_p99", "top1_agreement", "kl_unbiased_mean", "kl_p999", "kl_cvar95", "perplexity_ratio", "kl_exact_mean",
    ]  # fmt: skip
    """kl_mean: the unbiased mean, over tokens and over texts; its lower bound may fail, too. kl_unbiased_mean: without that.
    kl_p99, kl_p999, kl_cvar95: of the lower bound, so they pass by exact mode only."""
    max: float | None = None
    min: float | None = None
    expect: dict[Annotated[int, Field(ge=1, le=16)], float] = Field(default_factory=dict)
    """Bits of the weights -> the limit for such a checkpoint, stricter than `max` or `min`: what a good one of its format
    reaches. The entry of the most bits that are no more than the candidate's: 16 takes that of 8, 6 that of 4. One with fewer
    bits than any entry, or whose bits are not known, is compared with `max` or `min`."""
    times_noise_floor: float | None = Field(default=None, ge=1)
    """So many times the distance of the reference's own repeat is allowed where that is more, never beyond `max` or `min`."""
    texts: Literal["sampled", "held_out", "every"] = "sampled"
    """every: sampled and held-out ones, the worse of the two."""
    decides: Literal["pass_and_fail", "fail"] = "pass_and_fail"
    """pass_and_fail: a candidate passes only if it is shown to be within. fail: shown to be beyond fails; an interval that
    straddles the limit, or a lower bound within it, is shown and does not stand against a PASS."""
    max_unseen: float | None = Field(default=None, gt=0, lt=1)
    """PASS takes so many texts that damage in this share of such texts would be among them, but for 2.5 %: 0.02 takes 183."""
    over: Literal["all", "spans", "structural"] = "all"
    """spans: every span of positions by itself, the worst of them: short texts cannot dilute what goes wrong in long ones.
    structural: where the tokenizer's added tokens stand (thinking and tool tags, end of text), which other text would hide."""

    def _contradictions(self) -> Iterator[str]:
        if (self.max is None) == (self.min is None):
            yield "say either `max` or `min`"
        for bits, limit in self.expect.items():
            if self.max is not None and limit > self.max:
                yield f"expect {bits}: {limit:g} is above max {self.max:g}, the limit of every format"
            if self.min is not None and limit < self.min:
                yield f"expect {bits}: {limit:g} is below min {self.min:g}, the limit of every format"
        if self.times_noise_floor is not None and not self.expect:
            yield "times_noise_floor raises the limits of `expect`, and there are none"
        if self.metric == "perplexity_ratio" and self.times_noise_floor is not None:
            yield "times_noise_floor needs a metric that is a distance; perplexity_ratio is none"
        if self.max_unseen is not None and self.metric not in {"kl_mean", "kl_unbiased_mean", "kl_exact_mean"}:
            yield f"max_unseen is about a mean KL over texts, {self.metric} is none"
        if self.over == "spans" and self.metric != "kl_mean":
            yield "`over: spans` judges kl_mean"
        if self.over == "structural" and (self.metric not in {"kl_mean", "top1_agreement"} or self.texts != "sampled"):
            yield "`over: structural` judges kl_mean or top1_agreement of sampled texts"
        if self.texts != "sampled" and self.metric in {"kl_unbiased_mean", "kl_exact_mean"}:
            yield f"{self.metric} is of sampled texts"


class AcceptanceGate(Section):
    kind: Literal["acceptance"]
    max_drop: float = Field(gt=0, lt=1)
    """Of the acceptance rate, against the reference."""


class TruncationGate(Section):
    """Replies that are cut off or repeat themselves. More of them than the reference has fail a candidate."""

    kind: Literal["truncation"]
    max_share: float = Field(ge=0, le=1)
    """Of the reference's replies to a task; above it, or above a third of the task's margin, the budget is too small to
    compare: NOT MEASURED."""
    max_excess: float = Field(default=0.02, gt=0, lt=1)
    """FAIL if surely more replies of the candidate than of the reference are cut off, or loop, by more than this share."""


class VerbosityGate(Section):
    """Output tokens for what both sides get right, candidate / reference: a longer answer costs money."""

    kind: Literal["verbosity"]
    max_increase: float = Field(gt=0, lt=1)
    """0.05 = 5 % more tokens. Fewer are never a failure."""
    decides: Literal["pass_and_fail", "fail", "nothing"] = "fail"
    """pass_and_fail: a candidate passes only if the increase is surely below. fail: a sure increase fails, anything else is
    only shown. nothing: shown."""


class EffectiveLengthGate(Section):
    """Non-inferiority length by length, from the shortest on: how far into long context the margin holds."""

    kind: Literal["effective_length"]
    tasks: tuple[str, ...] = ()
    """Judged together at each length. Empty: every task that asks at stated lengths (RULER, needles, tools after dialogue)."""
    max_drop: float = Field(gt=0, lt=1)
    """At every single length."""
    at_least: Literal["reference"] | Annotated[int, Field(ge=1)] = "reference"
    """Tokens up to which the margin must hold. reference: as far as the reference itself can do the tasks."""
    required: bool = True
    """False: where the *reference* cannot do any length, the gate is shown without a say in the overall verdict."""


SubgroupBy = Literal["language", "part", "length"]


class SubgroupsGate(Section):
    """A language, a part (subject, RULER's kind, number of tools) or a length that is ruined while its task passes."""

    kind: Literal["subgroups"]
    by: tuple[SubgroupBy, ...] = Field(default=("language", "part", "length"), min_length=1)
    max_margins: float = Field(default=2.0, ge=1)
    """A subgroup that surely lost more than so many margins of its task fails the candidate."""
    false_discovery: float = Field(default=0.01, gt=0, le=0.2)
    """At which losses of subgroups are shown. One that is shown, and of which a loss of `max_margins` is not excluded, keeps
    the candidate from PASS."""
    min_items: int = Field(default=30, ge=2)
    """Subgroups with fewer are not looked at, and the verdict says so."""


class ProbesGate(Section):
    """Probes (`assay diagnose probe`, or `probes:` in the suite); fails on an alarm that is surely rarer with the reference."""

    kind: Literal["probes"]
    required: tuple[ProbeName, ...] = ()
    """Probes that must have run; one that could not makes the candidate NOT MEASURED."""
    max_rate: dict[ProbeName, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    """Probe -> rate of events that must be excluded; UNDERPOWERED while the upper bound is above it."""


SpendingName = Literal["obrien_fleming", "pocock", "hwang_shih_decani"]
Estimand = Literal["these_items", "these_clusters", "such_items"]
Gate = (
    ScoreGate | DivergenceGate | AcceptanceGate | TruncationGate | VerbosityGate | EffectiveLengthGate | SubgroupsGate |
    ProbesGate
)  # fmt: skip


class Stopping(Section):
    """When a task whose `num_samples` or `limit` is a range is looked at, and how alpha is spent on the looks.

    After each look a task that is undecided for some candidate is asked again, up to its max. Written down before the run.
    """

    spending: SpendingName = "pocock"
    """Of (1 - level) / 2, for PASS. pocock: about the same at every look, so that most tasks stop early. obrien_fleming: hardly
    any before the last one. Of a claim of equivalence for FAIL, too."""
    pass_part: float = Field(default=0.9, gt=0, le=1)
    """So much of (1 - level) / 2 is spent for PASS where there are several looks: tests of a few items are right in the limit
    only, and at all of it a lost margin would pass in up to 2.8 % instead of 2.5 % (decision 153)."""
    fail_spending: SpendingName = "hwang_shih_decani"
    """Of as much, for FAIL: most of it at the last look, since a loss that is not large needs all replies to be shown."""
    gamma: float = -2.0
    """Of hwang_shih_decani: -4 is close to obrien_fleming, 1 to pocock."""
    looks: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], ...] = ((2, 1), (2, 2), (3, 3), (5, 5))
    """(replies of the reference, of the candidate) to each item. More of the reference's need another start of its server."""
    until: Literal["overall", "every_task"] = "overall"
    """overall: with `whole`, undecided tasks are asked again only while the overall verdict of the scores can still change;
    without `whole` each of them counts. every_task: until each is decided by itself, for a table without open questions."""

    def _contradictions(self) -> Iterator[str]:
        if not self.looks:
            yield "looks is empty; say at least one, as [replies of the reference, replies of the candidate]"
        for before, after in pairwise(self.looks):
            if after == before or after[0] < before[0] or after[1] < before[1]:
                yield f"looks {list(before)} and then {list(after)}: each look must ask for more than the one before"


class WholeGate(Section):
    """The claim about the whole: the mean use of the margins, and the most that a single task may have lost.

    The use of a margin is drop / margin. With this claim a task that is undecided by itself does not stand against a PASS; one
    that fails its own margin does.
    """

    max_mean_use: float = Field(default=0.5, gt=0, le=1)
    """Below which the mean use over the score gates must be shown to lie."""
    max_task: float = Field(default=2.0, ge=1)
    """In margins: no task may have lost more, each shown by itself."""


class GateRecipe(Recipe):
    gates: tuple[Annotated[Gate, Field(discriminator="kind")], ...]
    level: float = Field(default=0.95, gt=0.5, lt=1)
    """Of every interval. The chance of a PASS when the margin is truly lost is about (1 - level) / 2 at most."""
    adjust: Literal["holm", "none"] = "holm"
    """Over the score gates of one candidate, for what can fail it. A PASS needs every gate, so nothing is adjusted there."""
    max_excluded: float = Field(default=0.01, ge=0, lt=1)
    """Share of items without a reply on either side above which a task is NOT MEASURED."""
    min_items: int = Field(default=30, ge=1)
    """Fewer paired items never PASS, whatever the margin."""
    whole: WholeGate | None = None
    """None: a candidate must pass every score gate by itself."""
    default_max_drop: float | None = Field(default=None, gt=0, lt=1)
    """Margin of every task of the suite without a score gate of its own. With it the recipe goes with any suite: its gates on
    divergence and acceptance apply where the suite measures these. None: what the gates name, and the suite must have that."""
    stopping: Stopping = Stopping()
    estimand: Estimand = "such_items"
    """What score intervals are for. such_items: questions like these; items and replies are both a sample. these_items: these
    questions only; replies are a sample. these_clusters: such questions of these clusters only (repositories, questions that
    are asked in several languages or lengths), of which a dozen allow no claim about others. That takes several replies of both
    sides to each item: where a task has one, and where items are drawn in rounds, the interval is the one for such items, and
    the verdict says so."""

    def _contradictions(self) -> Iterator[str]:
        tasks = [gate.task for gate in self.gates if isinstance(gate, ScoreGate)]
        for twice in sorted({task for task in tasks if tasks.count(task) > 1}):
            yield f"two score gates for task {twice}; write one margin and one claim per task"
        if self.whole is not None and not tasks and self.default_max_drop is None:
            yield "whole is about score gates, and there is none; write one, or default_max_drop"


# ------------------------------------------------------------------------------------------------ on a suite
def gates_on(recipe: GateRecipe, suite: SuiteRecipe | ImportedSuite) -> GateRecipe:
    """The recipe as it applies to a suite: with a score gate for every task if there is a `default_max_drop`, and without
    gates on what the suite does not measure. Applied twice it is the same.

    RecipeError, with everything that is wrong: a gate on a task that the suite does not ask; on divergence or acceptance that
    it does not measure, in a recipe without `default_max_drop`.
    """
    asked = [task.name for task in suite.tasks]
    named = [gate.task for gate in recipe.gates if isinstance(gate, ScoreGate)]
    known = ", ".join(asked)
    problems = [f"there is no task {task!r}; {did_you_mean(task, asked)}tasks: {known}" for task in named if task not in asked]
    lacking = [(gate, lack) for gate in recipe.gates if (lack := _not_measured(gate, suite)) is not None]
    if recipe.default_max_drop is None:
        problems += [f"a gate on {lack}; remove it from the gates, or ask for it in the suite" for _, lack in lacking]
    if problems := list(dict.fromkeys(problems)):
        listed = problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems:", *problems])
        raise RecipeError(f"gates {recipe.name} do not go with suite {suite.name}: {listed}")
    left_out = [gate for gate, _ in lacking]
    own = [gate for gate in recipe.gates if gate not in left_out]
    if recipe.default_max_drop is None:
        return recipe
    added = [ScoreGate(kind="score", task=task, max_drop=recipe.default_max_drop) for task in asked if task not in named]
    return recipe.model_copy(update={"gates": (*added, *own)})


def _not_measured(gate: Gate, suite: SuiteRecipe | ImportedSuite) -> str | None:
    """What a gate is on, if the suite does not measure it. Probes may be run by themselves (`assay diagnose probe`)."""
    if isinstance(suite, ImportedSuite):
        return _not_imported(gate, suite)
    if isinstance(gate, EffectiveLengthGate):
        asked = tasks_with_lengths(suite)
        if unknown := [task for task in gate.tasks if task not in asked]:
            return f"the effective length of {', '.join(unknown)}, which the suite does not ask at stated lengths"
        return None if asked else "the effective length, and no task of the suite asks at stated lengths"
    if isinstance(gate, SubgroupsGate | TruncationGate | VerbosityGate):
        return None if suite.tasks else f"{gate.kind}, which is about replies to tasks, and the suite asks none"
    if isinstance(gate, AcceptanceGate):
        return None if suite.acceptance else "acceptance, which the suite does not measure (`acceptance: false`)"
    if not isinstance(gate, DivergenceGate):
        return None
    if suite.divergence is None:
        return f"divergence {gate.metric}, which the suite does not measure (no `divergence:`)"
    if gate.metric == "kl_exact_mean" and not suite.divergence.exact:
        return "divergence kl_exact_mean, which needs `divergence: {exact: true}` in the suite"
    if gate.texts == "held_out" and not suite.divergence.held_out_documents:
        return f"divergence {gate.metric} of held-out texts, which the suite does not have (`held_out_documents: 0`)"
    return None


def _not_imported(gate: Gate, suite: ImportedSuite) -> str | None:
    """The same of scores that another harness computed."""
    match gate:
        case ScoreGate() | SubgroupsGate() | VerbosityGate():
            return None
        case TruncationGate():
            return (
                None if any(task.knows_cuts for task in suite.tasks) else "cut replies, which the imported results do not tell"
            )
        case _:
            return f"{gate.kind.replace('_', ' ')}, of which imported results say nothing"
