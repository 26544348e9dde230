"""Score gates: paired items of reference and candidate -> verdicts of all tasks of one candidate.

In the order in which they are tried: NOT MEASURED (no score, too many items excluded, too many replies cut off), then
`statistics.decisions.decide` on Tango's interval, with what can FAIL a candidate Holm-adjusted over its tasks.

A task that is asked in rounds is replayed look by look from the records alone. A look holds the first replies, or the first
drawn items, that it was planned to hold, whatever was asked later or for another candidate. What each look says is a test of
its own (`Pairs.evidence`); together they keep one alpha (`statistics.sequential`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from assay.quantities import capital, interval_name, percent_short, points_short
from assay.recipes.gate import GateRecipe, ScoreGate, Stopping
from assay.recipes.suite import GeneratedTask, LmEvalTask, SuiteRecipe, TaskBase
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import LookSeen, ServingFinding, Status, Verdict
from assay_evaluate.serving_faults.rules import serving_fault
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.decisions import Claim, PairedEvidence, decide, holm
from assay_evaluate.statistics.item_pairs import Pairs, accuracy_of, compare_output_tokens, find_task, pair_items
from assay_evaluate.statistics.sequential import Spending, nominal_levels, sequential_p
from assay_evaluate.tasks.looks import Look, items_at, planned_looks
from assay_evaluate.verdicts.score_sentences import (
    ComparedTask,
    change,
    cluster_sentence,
    estimand_sentence,
    if_cut_replies_were_wrong,
    items_needed_at_observed_loss,
    items_needed_without_loss,
    limit_of,
    remedy_of_cuts,
    score_sentence,
)
from assay_evaluate.verdicts.truncation import too_much_truncation, worst_case

RANGES = ("num_samples", *(kind.items_field for kind in (GeneratedTask, LmEvalTask)))
"""Fields of a task that may be a range."""


# ------------------------------------------------------------------------------------------------ the judgement
def judge_scores(
    gates: Sequence[ScoreGate], reference: Measurement, candidate: Measurement, recipe: GateRecipe,
    suspect: Mapping[str, str] = MappingProxyType({}),
    faults: Mapping[str, Sequence[ServingFinding]] = MappingProxyType({}),
) -> dict[str, Verdict]:  # fmt: skip
    """Task -> verdict, for every score gate of the recipe. suspect: task -> why no verdict of it is believed. faults: task ->
    what is at fault with its serving, so that it has no score at all."""
    verdicts: dict[str, Verdict] = {}
    compared: dict[str, ComparedTask] = {}
    unbelievable: dict[str, str] = {}
    for gate in gates:
        task_faults, reference_task = faults.get(gate.task, ()), find_task(reference, gate.task)
        title = title_of(gate, reference_task)
        task = serving_fault(title, task_faults) if task_faults else _compare(gate, reference, candidate, recipe)
        if isinstance(task, str):
            titles = [side.title for side in (reference_task, find_task(candidate, gate.task)) if side is not None]
            has_score = reference_task is not None and reference_task.accuracy is not None
            verdicts[gate.task] = Verdict(
                gate=f"score {gate.task}", candidate=candidate.label, status="NOT MEASURED", observed=None,
                limit=gate.max_drop, detail=task, title=titles[0] if titles else None,
                has_say=gate.required or has_score, faults=tuple(fault.rule for fault in task_faults),
            )  # fmt: skip
            continue
        compared[gate.task] = task
        reason = (
            suspect.get(gate.task)
            or _too_many_excluded(title, task, (reference.label, candidate.label), recipe)
            or too_much_truncation(recipe, reference, task.reference)
            or _nothing_to_lose(gate, recipe, reference, task)
        )
        if reason is not None:
            unbelievable[gate.task] = reason
    believed = {name: task for name, task in compared.items() if name not in unbelievable}
    p_values = [task.evidence.p_fail for task in believed.values()]
    p_fail = dict(zip(believed, holm(p_values) if recipe.adjust == "holm" else p_values, strict=True))
    p_difference = dict(zip(believed, holm([task.evidence.p_difference for task in believed.values()]), strict=True))
    for gate in gates:
        if gate.task not in compared:
            continue
        task = compared[gate.task]
        title, evidence, pairs = title_of(gate, task.reference), task.evidence, task.pairs
        has_say = True
        worst: PairedEvidence | None = None
        if gate.task in unbelievable:
            status: Status = "NOT MEASURED"
            detail = unbelievable[gate.task]
            is_too_hard = _nothing_to_lose(gate, recipe, reference, task) is not None
            has_say = gate.required or not (is_too_hard or too_much_truncation(recipe, reference, task.reference))
        else:
            status = decide(evidence, min_items=recipe.min_items, p_fail_adjusted=p_fail[gate.task])
            detail = score_sentence(task, title, recipe, status, len(believed))
            if task.reference.kind == "swe":
                instances = swe.pair_instances(task.reference, task.candidate)
                detail += f" {swe.sentence(instances, recipe.level, of_these_repositories=pairs.of_these_clusters)}"
            elif pairs.has_clusters and pairs.fixed is None:
                detail += f" {cluster_sentence(pairs, recipe.level)}"
            if task.looks:
                detail += f" {rounds_sentence(task.looks)}"
            if recipe.estimand == "these_items":
                detail += f" {estimand_sentence(task)}"
            if (sides := worst_case(task.reference, task.candidate)) is not None:
                worst_task = look_at(gate, recipe, reference, sides[0], candidate, sides[1])
                assert worst_task is not None, "no reply was taken away"
                worst = worst_task.evidence
                if status == "PASS" and decide(worst, min_items=recipe.min_items) != "PASS":
                    status = "UNDERPOWERED"
                    detail += f" {capital(if_cut_replies_were_wrong(worst.drop))}; {remedy_of_cuts(task)}."
        tokens = compare_output_tokens(task.reference, task.candidate, recipe.level)
        verdicts[gate.task] = Verdict(
            gate=f"score {gate.task}",
            candidate=candidate.label,
            status=status,
            observed=evidence.drop,
            limit=gate.max_drop,
            detail=detail,
            title=task.reference.title,
            clause=f"{change(evidence.drop)} on {title}; {limit_of(evidence)}",
            has_say=has_say,
            minimum_detectable_effect=pairs.detectable(recipe.level),
            discordant=(evidence.b, evidence.c),
            num_wrong_to_other_wrong=pairs.flips.wrong_to_other_wrong,
            p_value=evidence.p_difference,
            p_value_holm=p_difference.get(gate.task),
            p_pass=evidence.p_pass,
            p_fail=evidence.p_fail,
            p_fail_holm=p_fail.get(gate.task),
            items_needed=items_needed_without_loss(task, recipe),
            items_needed_at_loss=items_needed_at_observed_loss(task, recipe),
            mean_output_tokens=None if tokens is None else (tokens.reference_mean, tokens.candidate_mean),
            extra_output_tokens=None if tokens is None else tokens.extra,
            looks=task.looks,
            estimand=task.estimand,
            worst_case=None if worst is None else worst.drop,
        )
    return verdicts


def title_of(gate: ScoreGate, task: TaskResult | None) -> str:
    """What sentences call the gate's task."""
    return gate.task if task is None or task.title is None else task.title


def _compare(gate: ScoreGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe) -> ComparedTask | str:
    """The task's evidence, or the sentence that says why there is none."""
    reference_task, candidate_task = find_task(reference, gate.task), find_task(candidate, gate.task)
    for side, task in ((reference, reference_task), (candidate, candidate_task)):
        if task is None or task.accuracy is None:
            note = task.note if task is not None else None
            reason = note or side.not_measured.get(gate.task) or "the suite did not ask it"
            return f"{title_of(gate, task)} has no score for {side.label}: {reason}."
    assert reference_task is not None and candidate_task is not None
    compared = look_at(gate, recipe, reference, reference_task, candidate, candidate_task)
    return compared or f"No item of {title_of(gate, reference_task)} was answered by both sides."


def _too_many_excluded(title: str, task: ComparedTask, labels: tuple[str, str], recipe: GateRecipe) -> str | None:
    """With which side lacks replies, and what its server said most often, in its own words."""
    pairs = task.pairs
    if pairs.excluded_share <= recipe.max_excluded:
        return None
    sides = zip(labels, (task.reference, task.candidate), strict=True)
    failed = "".join(
        f"; {label} lacks {side.num_failed}, most often: {side.usual_error}" for label, side in sides if side.usual_error
    )
    return (
        f"{pairs.num_excluded} of {pairs.n + pairs.num_excluded} items of {title} have no reply on one side or both "
        f"({percent_short(pairs.excluded_share)}, allowed {percent_short(recipe.max_excluded)}): the others may not be a fair "
        f"sample{failed}. Run the evaluation again; it asks only what is missing."
    )


def _nothing_to_lose(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, task: ComparedTask) -> str | None:
    """A model that is hardly ever right, or no more often than guessing, cannot lose the margin: whatever was done to it, the
    gate would pass."""
    chance, num_right, n = task.reference.chance or 0.0, sum(task.pairs.reference), task.pairs.n
    is_graded = task.reference.is_graded
    share = sum(task.pairs.shares[0]) / len(task.pairs.shares[0]) if is_graded else num_right / n
    title = title_of(gate, task.reference)
    right = f"{reference.label} itself is right in {num_right} of {n} replies to {title}"
    if is_graded:
        right = f"{reference.label} itself has a mean score of {share:.3f} over {n} replies to {title}"
    accuracy, _, _ = accuracy_of(task.reference.items, recipe.level, is_graded=is_graded)
    assert accuracy is not None  # there are pairs
    if 0 < chance >= accuracy.low:
        return (
            f"{right} ({percent_short(share)}, {interval_name(accuracy.level, accuracy.coverage)}: "
            f"{percent_short(accuracy.low)} to {percent_short(accuracy.high)}), {percent_short(chance)} by guessing: it may "
            "only be guessing, so this task cannot show a loss; ask something easier, or more items."
        )
    if share - chance > gate.max_drop:
        return None
    guessed = f", {percent_short(chance)} by guessing" if chance else ""
    return (
        f"{right} ({percent_short(share)}{guessed}): it has less than {points_short(gate.max_drop)} points to "
        "lose, so this task cannot show such a loss; ask something easier, or give it the context or budget it needs."
    )


# ------------------------------------------------------------------------------------------------ several looks, one alpha
def look_at(
    gate: ScoreGate, recipe: GateRecipe, reference: Measurement, reference_task: TaskResult, candidate: Measurement,
    candidate_task: TaskResult,
) -> ComparedTask | None:  # fmt: skip
    """None: no item was answered by both sides."""
    sides = (reference_task, candidate_task)
    # SWE-bench has an interval by instance and one by repository, and says which counts.
    is_graded = any(side.is_graded for side in sides)
    of_these_items = recipe.estimand == "these_items" and reference_task.kind != "swe" and not is_graded
    of_these_clusters = recipe.estimand == "these_clusters"
    task, seed = _task_with_range(reference, gate.task), str(reference.suite_recipe.get("seed", ""))
    if task is None or candidate.is_noise_floor or not (reference_task.rounds and candidate_task.rounds):
        pairs = pair_items(*sides)._replace(of_these_items=of_these_items, of_these_clusters=of_these_clusters)
        if not pairs.n:
            return None
        return ComparedTask(*sides, pairs, pairs.evidence(gate.max_drop, level=recipe.level, claim=gate.claim))
    planned = planned_looks(task, recipe.stopping)
    last_rounds = [side.rounds[-1] for side in sides]
    reached = [
        look
        for look in planned
        if all(
            last.num_samples >= num_samples and (last.limit or 0) >= (look.limit or 0)
            for last, num_samples in zip(last_rounds, (look.reference_samples, look.candidate_samples), strict=True)
        )
    ]
    if not reached:  # it was asked by other looks than these gates have: all there is
        limits = [last.limit for last in last_rounds if last.limit is not None]
        reached = [Look(reference_task.num_samples, candidate_task.num_samples, min(limits, default=None))]

    def at(side: TaskResult, num_samples: int, look: Look) -> TaskResult:
        return side.model_copy(update={"items": items_at(task, side.items, num_samples, look.limit, seed)})

    of_these_items = of_these_items and reached[-1].limit is None  # of a range of items each look is about others
    pairs_at_looks = [
        pair_items(at(reference_task, look.reference_samples, look), at(candidate_task, look.candidate_samples, look))._replace(
            of_these_items=of_these_items, of_these_clusters=of_these_clusters
        )
        for look in reached
    ]
    if not all(pairs.n for pairs in pairs_at_looks):
        return None
    return ComparedTask(*sides, pairs_at_looks[-1], *combine_looks(gate, recipe, planned, reached, pairs_at_looks))


def _task_with_range(measurement: Measurement, name: str) -> TaskBase | None:
    """As the measurement's suite has it. None: another task, which is asked once."""
    for task in measurement.suite_recipe.get("tasks", ()):
        if task.get("name") == name and any(isinstance(task.get(field), dict) for field in RANGES):
            return SuiteRecipe.model_validate({"schema": 1, "name": "recorded", "seed": "eval", "tasks": [task]}).tasks[0]
    return None


def combine_looks(
    gate: ScoreGate, recipe: GateRecipe, planned: Sequence[Look], reached: Sequence[Look], pairs_at_looks: Sequence[Pairs]
) -> tuple[PairedEvidence, tuple[LookSeen, ...]]:
    """The evidence of all looks together, and each look."""
    for_pass, for_fail = spendings_of(recipe.stopping, gate.claim)
    alpha = (1 - recipe.level) / 2
    evidence = [pairs.evidence(gate.max_drop, level=recipe.level, claim=gate.claim) for pairs in pairs_at_looks]
    whole = planned[-1].planned_information
    shares = [min(look.planned_information / whole, 1.0) for look in reached]
    informations = [1 / pairs.variance for pairs in pairs_at_looks]
    levels, fail_levels = (nominal_levels(shares, informations, alpha, spending) for spending in (for_pass, for_fail))
    looks = tuple(
        LookSeen(
            reference_samples=look.reference_samples, candidate_samples=look.candidate_samples, num_items=len(set(pairs.items)),
            share=share, alpha_spent=alpha if shares == [1.0] else for_pass.spent(share, alpha), level=level,
            fail_level=fail_level, p_pass=at_look.p_pass, p_fail=at_look.p_fail, drop=at_look.drop.value,
            information=information,
        )
        for look, pairs, share, level, fail_level, at_look, information in zip(
            reached, pairs_at_looks, shares, levels, fail_levels, evidence, informations, strict=True
        )
    )  # fmt: skip
    if shares == [1.0]:
        return evidence[0], looks

    def over_looks(p_values: list[float], spending: Spending = for_pass) -> float:
        return sequential_p(p_values, shares, informations, spending)

    def intervals_at(tails: list[float]) -> list[Interval]:
        return [pairs.drop(1 - 2 * tail) for pairs, tail in zip(pairs_at_looks, tails, strict=True)]

    together = dataclasses.replace(
        evidence[-1],
        drop=repeated_interval(intervals_at(fail_levels), intervals_at(levels), recipe.level),
        p_pass=over_looks([at_look.p_pass for at_look in evidence]),
        p_fail=over_looks([at_look.p_fail for at_look in evidence], for_fail),
        p_difference=min(1.0, 2 * over_looks([at_look.p_difference / 2 for at_look in evidence])),
    )
    return together, looks


def spendings_of(stopping: Stopping, claim: Claim = "non_inferior") -> tuple[Spending, Spending]:
    """(for PASS, for FAIL); of equivalence, whose PASS needs both ends of the interval, one for both."""
    for_pass = Spending(stopping.spending, stopping.gamma, stopping.pass_part)
    return for_pass, for_pass if claim == "equivalent" else Spending(stopping.fail_spending, stopping.gamma)


def repeated_interval(for_fail: list[Interval], for_pass: list[Interval], level: float) -> Interval:
    """Of the last look, within those of the looks before: all of them cover the truth together with chance `level` (repeated
    confidence intervals; Jennison & Turnbull 1989, JRSS B 51:305-361). A word that was said at a look is not taken back.

    for_fail, for_pass: of each look, at its level for FAIL, whose low end counts, and for PASS, whose high end does.
    """
    last = for_pass[-1]
    low, high = max(interval.low for interval in for_fail), min(interval.high for interval in for_pass)
    ends = {"low": min(low, last.value), "high": max(high, last.value)}
    return last.model_copy(update={**ends, "level": level, "coverage": "at_least"})


def rounds_sentence(looks: Sequence[LookSeen]) -> str:
    """What was asked at each look, and its p values beside the level that would have decided."""
    levels = [
        f"{look.level:.2g} decides"
        if look.fail_level is None or look.fail_level == look.level
        else f"{look.level:.2g} and {look.fail_level:.2g} decide"
        for look in looks
    ]
    asked = [
        f"{look.reference_samples} + {look.candidate_samples} replies to {look.num_items} items (p {look.p_pass:.2g} for PASS, "
        f"{look.p_fail:.2g} for FAIL; {level})"
        for look, level in zip(looks, levels, strict=True)
    ]
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    return f"Looked at {times}: {', then '.join(asked)}; alpha spent {looks[-1].alpha_spent:.2g}."
