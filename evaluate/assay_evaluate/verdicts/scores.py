"""Score gates: paired items of reference and candidate -> verdicts of all tasks of one candidate.

In the order in which they are tried: NOT MEASURED (no score, too many items excluded, too many replies cut off), then
`statistics.decide` on Tango's interval, with what can FAIL a candidate Holm-adjusted over its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from assay.quantities import percent_short, points_short
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.records.measurement import Measurement
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import decide, holm
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.item_pairs import (
    Pairs,
    accuracy_of,
    find_task,
    output_tokens,
)
from assay_evaluate.verdicts.compared_task import ComparedTask, items_needed_for
from assay_evaluate.verdicts.looks import asked_in_rounds, look_at
from assay_evaluate.verdicts.score_sentences import by_cluster, sentences
from assay_evaluate.verdicts.truncation import too_much_truncation


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
            or too_much_truncation(gate, recipe, (reference, found.reference), (candidate, found.candidate))
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
        detail = sentences(one, reference, candidate, recipe, status, p_difference[gate.task], len(believed))
        if one.reference.kind == "swe":
            detail += f" {swe.sentence(swe.pair_instances(one.reference, one.candidate), recipe.level)}"
        elif one.pairs.has_clusters:
            detail += f" {by_cluster(one.pairs, recipe.level)}"
        if one.looks:
            detail += f" {asked_in_rounds(one.looks)}"
        verdicts[gate.task] = _verdict(gate, one, candidate, recipe, status, detail, p_difference[gate.task])
    return verdicts


def _has_score(measurement: Measurement, name: str) -> bool:
    task = find_task(measurement, name)
    return task is not None and task.accuracy is not None


def _can_do(gate: ScoreGate, recipe: GateRecipe, reference: Measurement, one: ComparedTask) -> bool:
    """Whether the reference has something to lose, and room for its replies."""
    is_cut = too_much_truncation(gate, recipe, (reference, one.reference)) is not None
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
    seen = look_at(gate, recipe, reference, ours, candidate, theirs)
    if seen is None:
        return f"No item of {gate.task} was answered by both sides."
    return ComparedTask(ours, theirs, seen.pairs, seen.evidence, output_tokens(ours, theirs, recipe.level), seen.looks)


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
        items_needed=items_needed_for(one, recipe),
        mean_output_tokens=None if tokens is None else (tokens.reference_mean, tokens.candidate_mean),
        extra_output_tokens=None if tokens is None else tokens.extra,
        looks=one.looks,
    )


def _too_many_excluded(gate: ScoreGate, pairs: Pairs, recipe: GateRecipe) -> str | None:
    if pairs.excluded_share <= recipe.max_excluded:
        return None
    return (
        f"{pairs.num_excluded} of {pairs.n + pairs.num_excluded} items of {gate.task} have no reply on one side or both "
        f"({percent_short(pairs.excluded_share)}, allowed {percent_short(recipe.max_excluded)}): what is left may not be a "
        "fair sample; run the evaluation again, it asks only what is missing."
    )


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
