"""Score gates: paired items of reference and candidate -> verdicts of all tasks of one candidate.

In the order in which they are tried: NOT MEASURED (no score, too many items excluded, too many replies cut off), then
`statistics.decide` on Tango's interval, with what can FAIL a candidate Holm-adjusted over its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from assay.quantities import capital, interval_name, percent_short, points_short
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import ServingFinding, Status, Verdict
from assay_evaluate.serving_faults.rules import serving_fault
from assay_evaluate.statistics import PairedEvidence, decide, holm
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.item_pairs import (
    accuracy_of,
    find_task,
    output_tokens,
)
from assay_evaluate.verdicts.looks import asked_in_rounds, look_at
from assay_evaluate.verdicts.replies.truncation import too_much_truncation, worst_case
from assay_evaluate.verdicts.score_sentences import (
    ComparedTask,
    by_cluster,
    clause,
    estimand_of,
    if_cut_replies_were_wrong,
    items_needed_at_loss_seen,
    items_needed_for,
    of_which_items,
    remedy_of_cuts,
    sentences,
)


class AdjustedP(NamedTuple):
    """p values of one task, adjusted over the candidate's scored tasks: of any difference, of more than the margin lost."""

    difference: float
    fail: float


# ------------------------------------------------------------------------------------------------ the judgement
def judge_scores(
    gates: Sequence[ScoreGate], reference: Measurement, candidate: Measurement, recipe: GateRecipe,
    suspect: Mapping[str, str] = MappingProxyType({}),
    faults: Mapping[str, Sequence[ServingFinding]] = MappingProxyType({}),
) -> dict[str, Verdict]:  # fmt: skip
    """Task -> verdict, for every score gate of the recipe. suspect: task -> why no verdict of it is believed. faults: task ->
    what is at fault with its serving, so that it has no score at all."""
    verdicts: dict[str, Verdict] = {}
    scored: dict[str, ComparedTask] = {}
    unbelievable: dict[str, str] = {}
    for gate in gates:
        at_fault = faults.get(gate.task, ())
        title = title_of(gate, find_task(reference, gate.task))
        found = serving_fault(title, at_fault) if at_fault else _score(gate, reference, candidate, recipe)
        if isinstance(found, str):
            verdicts[gate.task] = Verdict(
                gate=f"score {gate.task}", candidate=candidate.label, status="NOT MEASURED", observed=None,
                limit=gate.max_drop, detail=found, title=_title(gate, reference, candidate),
                has_say=gate.required or _has_score(reference, gate.task), faults=tuple(one.rule for one in at_fault),
            )  # fmt: skip
            continue
        scored[gate.task] = found
        why = (
            suspect.get(gate.task)
            or _too_many_excluded(title_of(gate, found.reference), found, (reference.label, candidate.label), recipe)
            or too_much_truncation(recipe, reference, found.reference)
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
        detail = sentences(one, title_of(gate, one.reference), recipe, status, len(believed))
        if one.reference.kind == "swe":
            instances = swe.pair_instances(one.reference, one.candidate)
            detail += f" {swe.sentence(instances, recipe.level, of_these_repositories=one.pairs.of_these_clusters)}"
        elif one.pairs.has_clusters and one.pairs.fixed is None:
            detail += f" {by_cluster(one.pairs, recipe.level)}"
        if one.looks:
            detail += f" {asked_in_rounds(one.looks)}"
        if recipe.estimand == "these_items":
            detail += f" {of_which_items(one)}"
        worst = _worst_case(gate, recipe, reference, candidate, one)
        if worst is not None and status == "PASS" and decide(worst, min_items=recipe.min_items) != "PASS":
            status, detail = (
                "UNDERPOWERED",
                f"{detail} {capital(if_cut_replies_were_wrong(worst.drop))}; {remedy_of_cuts(one)}.",
            )
        ps = AdjustedP(p_difference[gate.task], p_fail[gate.task])
        found_here = _verdict(gate, one, candidate, recipe, status, detail, ps)
        verdicts[gate.task] = found_here.model_copy(update={"worst_case": None if worst is None else worst.drop})
    return verdicts


def _worst_case(
    gate: ScoreGate, recipe: GateRecipe, reference: Measurement, candidate: Measurement, one: ComparedTask
) -> PairedEvidence | None:
    """The evidence with every cut reply counted against the candidate. None: nothing was cut off."""
    sides = worst_case(one.reference, one.candidate)
    if sides is None:
        return None
    seen = look_at(gate, recipe, reference, sides[0], candidate, sides[1])
    assert seen is not None, "no reply was taken away"
    return seen.evidence


def title_of(gate: ScoreGate, task: TaskResult | None) -> str:
    """What sentences call the gate's task."""
    return gate.task if task is None or task.title is None else task.title


def _title(gate: ScoreGate, *sides: Measurement) -> str | None:
    """As the first side that asked the task recorded it."""
    found = [task.title for side in sides if (task := find_task(side, gate.task)) is not None]
    return found[0] if found else None


def _has_score(measurement: Measurement, name: str) -> bool:
    task = find_task(measurement, name)
    return task is not None and task.accuracy is not None


def _can_do(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, one: ComparedTask) -> bool:
    """Whether the reference has something to lose, and room for its replies."""
    is_cut = too_much_truncation(recipe, reference, one.reference) is not None
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
            return f"{title_of(gate, task)} has no score for {side.label}: {reason}."
    assert ours is not None and theirs is not None
    seen = look_at(gate, recipe, reference, ours, candidate, theirs)
    if seen is None:
        return f"No item of {title_of(gate, ours)} was answered by both sides."
    return ComparedTask(ours, theirs, seen.pairs, seen.evidence, output_tokens(ours, theirs, recipe.level), seen.looks)


def _verdict(
    gate: ScoreGate,
    one: ComparedTask,
    candidate: Measurement,
    recipe: GateRecipe,
    status: Status,
    detail: str,
    adjusted: AdjustedP | None,
) -> Verdict:
    evidence, tokens = one.evidence, one.tokens
    return Verdict(
        gate=f"score {gate.task}",
        candidate=candidate.label,
        status=status,
        observed=evidence.drop,
        limit=gate.max_drop,
        detail=detail,
        title=one.reference.title,
        clause=clause(one, title_of(gate, one.reference)),
        minimum_detectable_effect=one.pairs.detectable(recipe.level),
        discordant=(evidence.b, evidence.c),
        num_wrong_to_other_wrong=one.pairs.flips.wrong_to_other_wrong,
        p_value=evidence.p_difference,
        p_value_holm=None if adjusted is None else adjusted.difference,
        p_pass=evidence.p_pass,
        p_fail=evidence.p_fail,
        p_fail_holm=None if adjusted is None else adjusted.fail,
        items_needed=items_needed_for(one, recipe),
        items_needed_at_loss=items_needed_at_loss_seen(one, recipe),
        mean_output_tokens=None if tokens is None else (tokens.reference_mean, tokens.candidate_mean),
        extra_output_tokens=None if tokens is None else tokens.extra,
        looks=one.looks,
        estimand=estimand_of(one.pairs),
    )


def _too_many_excluded(title: str, one: ComparedTask, labels: tuple[str, str], recipe: GateRecipe) -> str | None:
    pairs = one.pairs
    if pairs.excluded_share <= recipe.max_excluded:
        return None
    return (
        f"{pairs.num_excluded} of {pairs.n + pairs.num_excluded} items of {title} have no reply on one side or both "
        f"({percent_short(pairs.excluded_share)}, allowed {percent_short(recipe.max_excluded)}): the others may not be a fair "
        f"sample{_failed(one, labels)}. Run the evaluation again; it asks only what is missing."
    )


def _failed(one: ComparedTask, labels: tuple[str, str]) -> str:
    """Which side lacks replies, and what its server said most often, in its own words."""
    sides = zip(labels, (one.reference, one.candidate), strict=True)
    told = [f"{label} lacks {task.num_failed}, most often: {task.usual_error}" for label, task in sides if task.usual_error]
    return "".join(f"; {found}" for found in told)


def _nothing_to_lose(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, one: ComparedTask) -> str | None:
    """A model that is hardly ever right, or no more often than guessing, cannot lose the margin: whatever was done to it, the
    gate would pass."""
    chance = one.reference.chance or 0.0
    share = sum(one.pairs.reference) / one.pairs.n
    title, num_right = title_of(gate, one.reference), sum(one.pairs.reference)
    seen = f"{reference.label} itself is right in {num_right} of {one.pairs.n} replies to {title}"
    accuracy, _, _ = accuracy_of(one.reference.items, recipe.level)
    assert accuracy is not None  # there are pairs
    name = interval_name(accuracy.level, accuracy.coverage)
    if 0 < chance >= accuracy.low:
        return (
            f"{seen} ({percent_short(share)}, {name}: {percent_short(accuracy.low)} to "
            f"{percent_short(accuracy.high)}), {percent_short(chance)} by guessing: it may only be guessing, "
            "so this task cannot show a loss; ask something easier, or more items."
        )
    if share - chance > gate.max_drop:
        return None
    guessed = f", {percent_short(chance)} by guessing" if chance else ""
    return (
        f"{seen} ({percent_short(share)}{guessed}): it has less than {points_short(gate.max_drop)} points to "
        "lose, so this task cannot show such a loss; ask something easier, or give it the context or budget it needs."
    )
