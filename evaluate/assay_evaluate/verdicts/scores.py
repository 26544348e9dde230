"""Score gates: paired items of reference and candidate -> verdicts of all tasks of one candidate.

In the order in which they are tried: NOT MEASURED (no score, too many items excluded, too many replies cut off), then
`statistics.decide` on Tango's interval, with what can FAIL a candidate Holm-adjusted over its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.quantities import percent_short, points_short, points_signed, signed
from assay.recipes.gate import GateRecipe, ScoreGate, TruncationGate
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import POWER, PairedEvidence, clustered_values_needed, decide, holm, items_needed
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.item_pairs import (
    Pairs,
    TokenCost,
    accuracy_of,
    find_task,
    output_tokens,
    pair_items,
    truncation_share,
)

DEFAULT_MAX_TRUNCATED = 0.05
"""Where a gate file sets no limit: a score whose replies were cut off must not pass for want of a line in it."""


@dataclass(frozen=True)
class ComparedTask:
    """One task that both sides answered, held against its margin."""

    reference: TaskResult
    candidate: TaskResult
    pairs: Pairs
    evidence: PairedEvidence
    tokens: TokenCost | None


# ------------------------------------------------------------------------------------------------ the judgement
def judge_scores(
    gates: Sequence[ScoreGate], reference: Measurement, candidate: Measurement, recipe: GateRecipe
) -> dict[str, Verdict]:
    """Task -> verdict, for every score gate of the recipe."""
    verdicts: dict[str, Verdict] = {}
    scored: dict[str, ComparedTask] = {}
    unbelievable: dict[str, str] = {}
    for gate in gates:
        found = _score(gate, reference, candidate, recipe)
        if isinstance(found, str):
            verdicts[gate.task] = Verdict(
                gate=f"score {gate.task}", candidate=candidate.label, status="NOT MEASURED", observed=None,
                limit=gate.max_drop, detail=found, has_say=gate.required or _has_score(reference, gate.task),
            )  # fmt: skip
            continue
        scored[gate.task] = found
        why = (
            _too_many_excluded(gate, found.pairs, recipe)
            or _too_much_truncation(gate, recipe, (reference, found.reference), (candidate, found.candidate))
            or _nothing_to_lose(gate, recipe, reference, found)
        )
        if why is not None:
            unbelievable[gate.task] = why
    believed = [task for task in scored if task not in unbelievable]
    adjusted = _adjusted([scored[task].evidence.p_fail for task in believed], recipe)
    p_fail = dict(zip(believed, adjusted, strict=True))
    p_difference = dict(zip(believed, holm([scored[task].evidence.p_difference for task in believed]), strict=True))
    for gate in gates:
        if gate.task not in scored:
            continue
        one = scored[gate.task]
        if gate.task in unbelievable:
            verdict = _verdict(gate, one, candidate, recipe, "NOT MEASURED", unbelievable[gate.task], None)
            has_say = gate.required or _can_do(gate, recipe, reference, one)
            verdicts[gate.task] = verdict.model_copy(update={"has_say": has_say})
            continue
        status = decide(one.evidence, min_items=recipe.min_items, p_fail_adjusted=p_fail[gate.task])
        detail = _sentences(one, reference, candidate, recipe, status, p_difference[gate.task], len(believed))
        if one.reference.kind == "swe":
            detail += f" {swe.sentence(swe.pair_instances(one.reference, one.candidate), recipe.level)}"
        elif one.pairs.has_clusters:
            detail += f" {_by_cluster(one.pairs, recipe.level)}"
        verdicts[gate.task] = _verdict(gate, one, candidate, recipe, status, detail, p_difference[gate.task])
    return verdicts


def _has_score(measurement: Measurement, name: str) -> bool:
    task = find_task(measurement, name)
    return task is not None and task.accuracy is not None


def _can_do(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, one: ComparedTask) -> bool:
    """Whether the reference has something to lose, and room for its replies."""
    is_cut = _too_much_truncation(gate, recipe, (reference, one.reference)) is not None
    return _nothing_to_lose(gate, recipe, reference, one) is None and not is_cut


def _adjusted(p_values: list[float], recipe: GateRecipe) -> list[float]:
    return holm(p_values) if recipe.adjust == "holm" else p_values


def _score(gate: ScoreGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe) -> ComparedTask | str:
    """The task's evidence, or the sentence that says why there is none."""
    ours, theirs = find_task(reference, gate.task), find_task(candidate, gate.task)
    for side, task in ((reference, ours), (candidate, theirs)):
        if task is None or task.accuracy is None:
            note = task.note if task is not None else None
            reason = note or side.not_measured.get(gate.task) or "the suite did not ask it"
            return f"{gate.task} has no score for {side.label}: {reason}."
    assert ours is not None and theirs is not None
    pairs = pair_items(ours, theirs)
    if pairs.n == 0:
        return f"No item of {gate.task} was answered by both sides."
    evidence = pairs.evidence(gate.max_drop, level=recipe.level, claim=gate.claim)
    return ComparedTask(ours, theirs, pairs, evidence, output_tokens(ours, theirs, recipe.level))


def _verdict(
    gate: ScoreGate,
    one: ComparedTask,
    candidate: Measurement,
    recipe: GateRecipe,
    status: Status,
    detail: str,
    p_holm: float | None,
) -> Verdict:
    evidence, tokens = one.evidence, one.tokens
    return Verdict(
        gate=f"score {gate.task}",
        candidate=candidate.label,
        status=status,
        observed=evidence.drop,
        limit=gate.max_drop,
        detail=detail,
        minimum_detectable_effect=one.pairs.detectable(recipe.level),
        discordant=(evidence.b, evidence.c),
        num_wrong_to_other_wrong=one.pairs.flips.wrong_to_other_wrong,
        p_value=evidence.p_difference,
        p_value_holm=p_holm,
        items_needed=_items_needed(one, recipe),
        mean_output_tokens=None if tokens is None else (tokens.reference_mean, tokens.candidate_mean),
        extra_output_tokens=None if tokens is None else tokens.extra,
    )


def _items_needed(one: ComparedTask, recipe: GateRecipe) -> int:
    """TOST must pass on both sides: each may miss half as often."""
    power = POWER if one.evidence.claim == "non_inferior" else (1 + POWER) / 2
    return max(one.pairs.needed(one.evidence.margin, recipe.level, power), recipe.min_items)


# ------------------------------------------------------------------------------------------------ what it says
def _sentences(
    one: ComparedTask,
    reference: Measurement,
    candidate: Measurement,
    recipe: GateRecipe,
    status: Status,
    p_holm: float,
    family: int,
) -> str:
    """What was compared, with the numbers; whether there is a difference at all; what the replies cost."""
    evidence, flips = one.evidence, one.pairs.flips
    drop = evidence.drop
    found, right = f"over {drop.n} paired items", "right"
    if one.pairs.is_sampled:
        found, right = f"{found}, {one.pairs.n} pairs of replies", "more often right"
    seen = (
        f"{one.reference.task}: {points_lost(drop)} {found}, {evidence.b} {right} in {reference.label} only and {evidence.c} "
        f"in {candidate.label} only"
        + (f", {flips.wrong_to_other_wrong} wrong in another way" if flips.wrong_to_other_wrong else "")
        + (f", {one.pairs.num_excluded} without a reply left out" if one.pairs.num_excluded else "")
    )
    test = "bootstrap p" if one.pairs.is_sampled else "McNemar mid-p"
    tests = f"{test} {evidence.p_difference:.2g}" + (f", Holm over {family} tasks {p_holm:.2g}" if family > 1 else "")
    return f"{seen}: {_conclusion(one, recipe, status, family)}. {tests}.{_token_sentence(one.tokens, reference.label)}"


def points_lost(drop: Interval) -> str:
    """+1.5 points lost (95 % interval -0.3 to +3.3)."""
    low, high = points_signed(drop.low), points_signed(drop.high)
    return f"{points_signed(drop.value)} points lost ({percent_short(drop.level)} interval {low} to {high})"


def _conclusion(one: ComparedTask, recipe: GateRecipe, status: Status, family: int) -> str:
    evidence = one.evidence
    margin = f"{points_short(evidence.margin)} points"
    equivalent = evidence.claim == "equivalent"
    if status == "PASS":
        return f"equivalent within {margin}" if equivalent else f"less than {margin}"
    beyond = evidence.p_fail < (1 - evidence.drop.level) / 2
    if status == "FAIL":
        return f"differs by more than {margin}" if equivalent else f"more than {margin}"
    if beyond:
        return f"more than {margin} by itself, but among {family} tasks that may be chance (Holm)"
    needed = _items_needed(one, recipe)
    if evidence.drop.n < recipe.min_items:
        seen = "a loss, and " if evidence.drop.low > 0 else ""
        return f"{seen}fewer than {recipe.min_items} items never pass; about {needed} would decide if nothing was lost"
    seen = open_question(evidence.drop, evidence.margin)
    if needed > evidence.drop.n:
        return f"{seen}; about {needed} items would decide if nothing was lost"
    return f"{seen}{_if_the_loss_is_real(one)}"


def open_question(drop: Interval, margin: float) -> str:
    """What an interval leaves open that neither passed nor failed a margin."""
    limit = f"{points_short(margin)} points"
    if drop.low > margin:
        return f"more than {limit} by itself, but among several tasks that may be chance (Holm)"
    if -margin <= drop.low and drop.high < margin:
        return f"{'a loss' if drop.low > 0 else 'a difference'} of less than {limit}, but of too few items"
    if drop.low > 0 or drop.high < 0:
        return f"a {'loss' if drop.low > 0 else 'gain'}, but whether it stays within {limit} is open"
    if drop.high < margin:
        return f"may be no difference at all, or a gain of more than {limit}"
    return f"may be no loss at all, or more than {limit}"


def _if_the_loss_is_real(one: ComparedTask) -> str:
    """Items so that the loss that was seen, taken for the true one, would pass; nothing close to the margin or beyond it."""
    evidence, drop = one.evidence, one.evidence.drop
    if one.pairs.is_sampled or not 0 < drop.value < 0.9 * evidence.margin:
        return ""
    needed = items_needed(evidence.margin, (evidence.b + evidence.c) / drop.n, loss=drop.value, level=drop.level)
    if (clustered := one.pairs.clustered) is not None:
        needed = max(needed, clustered_values_needed(clustered, drop.n, evidence.margin, drop.level, loss=drop.value))
    return f"; about {needed} items would decide if what is seen is the true loss"


def _by_cluster(pairs: Pairs, level: float) -> str:
    """How the interval of items came about that share questions or texts."""
    clustered, by_item = pairs.clustered, pairs.drop_by_item(level)
    low, high = points_signed(by_item.low), points_signed(by_item.high)
    groups = f"{len(set(pairs.items))} items share {len(set(pairs.clusters))} questions or texts"
    if clustered is None:
        return f"{groups}, which differ in nothing: the interval takes items for independent."
    found = clustered.interval(level)
    return (
        f"{groups}: by item {low} to {high} points, by question or text {points_signed(found.low)} to "
        f"{points_signed(found.high)}; the wider end counts."
    )


def _token_sentence(tokens: TokenCost | None, reference: str) -> str:
    if tokens is None:
        return ""
    extra = tokens.extra
    return (
        f" {tokens.candidate_mean:.1f} tokens a reply, {tokens.reference_mean:.1f} in {reference} "
        f"({signed(extra.value)}, {percent_short(extra.level)} interval {signed(extra.low)} to {signed(extra.high)})."
    )


def truncation_limit(recipe: GateRecipe, task: str) -> float:
    """Share of a task's replies that may be cut off: its own limit, or that for all, or DEFAULT_MAX_TRUNCATED."""
    own = [one.max_truncated for one in recipe.gates if isinstance(one, ScoreGate) and one.task == task]
    shared = [one.max_share for one in recipe.gates if isinstance(one, TruncationGate)]
    return own[0] if own and own[0] is not None else min(shared, default=DEFAULT_MAX_TRUNCATED)


def _too_many_excluded(gate: ScoreGate, pairs: Pairs, recipe: GateRecipe) -> str | None:
    if pairs.excluded_share <= recipe.max_excluded:
        return None
    return (
        f"{pairs.num_excluded} of {pairs.n + pairs.num_excluded} items of {gate.task} have no reply on one side or both "
        f"({percent_short(pairs.excluded_share)}, allowed {percent_short(recipe.max_excluded)}): what is left may not be a "
        "fair sample; run the evaluation again, it asks only what is missing."
    )


def _too_much_truncation(gate: ScoreGate, recipe: GateRecipe, *sides: tuple[Measurement, TaskResult]) -> str | None:
    limit = truncation_limit(recipe, gate.task)
    for measurement, task in sides:
        share = truncation_share(task)
        if share is not None and share > limit:
            return (
                f"{task.num_truncated} of {task.num_items - task.num_failed} replies of {measurement.label} to {task.task} "
                f"were cut off at {task.max_tokens} tokens ({percent_short(share)}, allowed {percent_short(limit)}): "
                "the score would measure the budget, not the model; raise max_tokens."
            )
    return None


def _nothing_to_lose(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, one: ComparedTask) -> str | None:
    """A model that is hardly ever right, or no more often than guessing, cannot lose the margin: whatever was done to it, the
    gate would pass."""
    chance = one.reference.chance or 0.0
    share = sum(one.pairs.reference) / one.pairs.n
    seen = f"{reference.label} itself is right in {sum(one.pairs.reference)} of {one.pairs.n} replies to {gate.task}"
    accuracy, _, _ = accuracy_of(one.reference.items, recipe.level)
    assert accuracy is not None  # there are pairs
    if 0 < chance >= accuracy.low:
        return (
            f"{seen} ({percent_short(share)}, {percent_short(accuracy.level)} interval {percent_short(accuracy.low)} to "
            f"{percent_short(accuracy.high)}), by guessing {percent_short(chance)}: it may only be guessing, so nothing is "
            "shown; ask something easier, or more items."
        )
    if share - chance > gate.max_drop:
        return None
    guessed = f", by guessing {percent_short(chance)}" if chance else ""
    return (
        f"{seen} ({percent_short(share)}{guessed}): it cannot lose {points_short(gate.max_drop)} points, so nothing is shown; "
        "ask something easier, or for more of the context or budget it needs."
    )
