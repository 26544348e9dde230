"""Long context: losses by length, depth and part of a task, and how far a candidate stays within a margin of the reference.

Length by length, from the shortest on, each tested for non-inferiority at the full level; the first length that is not shown to
be within the margin ends the sequence (fixed-sequence test: Maurer, Hothorn & Lehmacher 1995; Westfall & Krishen 2001, J. Stat.
Plan. Inference 99:25-40). To claim any length that is truly lost, the first lost one must be claimed: one test at its level, so
that the chance of a false claim is (1 - level) / 2 however many lengths there are. A FAIL needs one length of several: Holm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, points, points_short, tokens_short
from assay.recipes.gate import EffectiveLengthGate, GateRecipe
from assay.records.long_context import AtLength, CellLoss, EffectiveLength, LongContext
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.item_pairs import Pairs, find_task, join_pairs, pair_some_items
from assay_evaluate.statistics.power import POWER
from assay_evaluate.verdicts.score_sentences import allowed, change, interval_of, open_question
from assay_evaluate.verdicts.truncation import truncation_limit, with_cut_wrong

QUARTERS = 4
"""Depths are shown in quarters, as the needle grid asks for them: 0, 0.25, 0.5, 0.75, 1."""


def lengths_of(items: Iterable[ItemResult]) -> list[int]:
    """Lengths that the items have, ascending."""
    return sorted({item.length_tokens for item in items if item.length_tokens is not None})


# ------------------------------------------------------------------------------------------------ what a heat map shows
def long_context(reference: Measurement, candidate: Measurement, level: float) -> list[LongContext]:
    """Of every task whose items have several lengths or depths, in the order of the reference's tasks. Nothing is judged."""
    contexts = []
    for task in reference.tasks:
        candidate_task, lengths = find_task(candidate, task.task), lengths_of(task.items)
        items = [item for item in task.items if item.length_tokens is not None]
        depths = sorted({depth for item in items if (depth := _quarter(item)) is not None})
        if candidate_task is None or (len(lengths) < 2 and len(depths) < 2):
            continue
        parts = list(dict.fromkeys(item.subtask for item in items if item.subtask is not None))
        cells = [
            tuple(
                cell
                for part, length, depth in places
                if (cell := _cell(task, candidate_task, part, length, depth, level)) is not None
            )
            for places in (
                [(part, length, None) for part in parts for length in lengths] if len(parts) > 1 else [],
                [(None, length, None) for length in lengths],
                [(None, length, depth) for length in lengths for depth in depths],
            )
        ]
        contexts.append(
            LongContext(candidate=candidate.label, task=task.task, by_subtask=cells[0], by_length=cells[1], by_depth=cells[2])
        )
    return contexts


def _quarter(item: ItemResult) -> float | None:
    """Its depth to the nearest quarter."""
    return None if item.depth is None else round(item.depth * QUARTERS) / QUARTERS


def _cell(
    reference: TaskResult, candidate: TaskResult, subtask: str | None, length_tokens: int, depth: float | None, level: float
) -> CellLoss | None:
    """None: no item of it was answered by both sides."""
    names = {
        item.item
        for item in reference.items
        if item.length_tokens == length_tokens
        and (subtask is None or item.subtask == subtask)
        and (depth is None or _quarter(item) == depth)
    }
    pairs = pair_some_items(reference, candidate, names)
    if pairs.n == 0:
        return None
    return CellLoss(
        subtask=subtask,
        length_tokens=length_tokens,
        depth=depth,
        num_pairs=pairs.n,
        reference=sum(pairs.reference) / pairs.n,
        candidate=sum(pairs.candidate) / pairs.n,
        drop=pairs.drop(level),
    )


# ------------------------------------------------------------------------------------------------ what is compared
@dataclass(frozen=True)
class LengthPairs:
    """What both sides answered at one length. `strict`: each cut-off reply of the candidate counted as wrong."""

    length_tokens: int
    pairs: Pairs
    strict: Pairs
    cut_share: float
    """Of the reference's replies."""
    max_cut_share: float
    """What the gates allow; of several tasks the least."""


def compared_tasks(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement
) -> tuple[list[tuple[TaskResult, TaskResult]], list[str]]:
    """(both sides of every task of the gate that the reference has, why the candidate lacks others)."""
    names = gate.tasks or tuple(task.task for task in reference.tasks if lengths_of(task.items))
    tasks, lacking = [], []
    for name in names:
        reference_task, candidate_task = find_task(reference, name), find_task(candidate, name)
        if reference_task is None or not lengths_of(reference_task.items):
            continue
        if candidate_task is None or candidate_task.accuracy is None:
            note = (candidate_task and candidate_task.note) or candidate.not_measured.get(name) or "it was not asked"
            lacking.append(f"{name} has no score for {candidate.label}: {note}")
            continue
        tasks.append((reference_task, candidate_task))
    return tasks, lacking


def by_length(tasks: Sequence[tuple[TaskResult, TaskResult]], recipe: GateRecipe) -> list[LengthPairs]:
    """All tasks together, from the shortest length on."""
    all_pairs = []
    for length in sorted({length for reference, _ in tasks for length in lengths_of(reference.items)}):
        pairs, strict, limits, replies = [], [], [], []
        for reference, candidate in tasks:
            items = [item for item in reference.items if item.length_tokens == length]
            if items:
                names = {item.item for item in items}
                pairs.append(pair_some_items(reference, candidate, names))
                strict.append(pair_some_items(reference, with_cut_wrong(candidate), names))
                limits.append(truncation_limit(recipe, reference.task))
                replies += [item for item in items if item.correct is not None]
        cut_share = sum(item.truncated for item in replies) / len(replies) if replies else 0.0
        all_pairs.append(LengthPairs(length, join_pairs(pairs), join_pairs(strict), cut_share, min(limits)))
    return all_pairs


# ------------------------------------------------------------------------------------------------ the sequence
def measure_effective_length(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe
) -> EffectiveLength | None:
    """The tests of all lengths. None: no length was asked, or the candidate lacks a task."""
    tasks, lacking = compared_tasks(gate, reference, candidate)
    pairs_by_length = by_length(tasks, recipe)
    if lacking or not pairs_by_length:
        return None
    reasons = [_why_not(gate, at_length, reference.label, recipe) for at_length in pairs_by_length]
    reached = next((number for number, reason in enumerate(reasons) if reason is not None), len(reasons))
    tested = pairs_by_length[:reached]
    evidence = [at_length.pairs.evidence(gate.max_drop, level=recipe.level) for at_length in tested]
    p_within = [at_length.strict.evidence(gate.max_drop, level=recipe.level).p_pass for at_length in tested]
    at_least = None if gate.at_least == "reference" else gate.at_least
    num_judged = sum(at_least is None or at_length.length_tokens <= at_least for at_length in tested)
    p_beyond = [at_length.p_fail for at_length in evidence]
    if recipe.adjust == "holm":
        p_beyond = [*holm(p_beyond[:num_judged]), *p_beyond[num_judged:]]
    alpha = (1 - recipe.level) / 2
    lengths = []
    for number, at_length in enumerate(pairs_by_length):
        pairs, is_tested = at_length.pairs, number < reached
        status, why_not = "not reached", None
        if is_tested:
            is_within = p_within[number] < alpha and evidence[number].drop.n >= recipe.min_items
            status = "beyond" if p_beyond[number] < alpha else "within" if is_within else "open"
        elif number == reached:
            status, why_not = reasons[number] or (status, None)
        lengths.append(
            AtLength.model_validate(
                {
                    "length_tokens": at_length.length_tokens, "status": status, "num_pairs": pairs.n, "why_not": why_not,
                    "reference": sum(pairs.reference) / pairs.n if pairs.n else None,
                    "candidate": sum(pairs.candidate) / pairs.n if pairs.n else None,
                    "drop": evidence[number].drop if is_tested else None,
                    "p_within": p_within[number] if is_tested else None,
                    "p_beyond": p_beyond[number] if is_tested else None,
                }
            )
        )  # fmt: skip
    stop = next((number for number, at_length in enumerate(lengths) if at_length.status != "within"), len(lengths))
    is_beyond_reference = [reason is not None and reason[0] == "reference cannot" for reason in reasons]
    num_able = is_beyond_reference.index(True) if any(is_beyond_reference) else len(lengths)
    return EffectiveLength(
        candidate=candidate.label,
        tasks=tuple(task.task for task, _ in tasks),
        max_drop=gate.max_drop,
        at_least_tokens=at_least,
        lengths=tuple(lengths),
        effective_tokens=lengths[stop - 1].length_tokens if stop else None,
        reference_tokens=lengths[num_able - 1].length_tokens if num_able else None,
    )


def _why_not(
    gate: EffectiveLengthGate, at_length: LengthPairs, reference: str, recipe: GateRecipe
) -> tuple[str, str] | None:  # fmt: skip
    """(status, reason) of a length that is not judged: the reference has nothing to lose there, or replies are missing."""
    pairs, right, n = at_length.pairs, sum(at_length.pairs.reference), at_length.pairs.n
    if at_length.cut_share > at_length.max_cut_share:
        limit = percent_short(at_length.max_cut_share)
        return "reference cannot", f"{percent_short(at_length.cut_share)} of its replies were cut off, allowed {limit}"
    if n and right / n <= gate.max_drop:
        return "reference cannot", f"{reference} itself is right in {right} of {n} replies"
    if n and pairs.excluded_share <= recipe.max_excluded:
        return None
    return "not measured", f"{pairs.num_excluded} of {n + pairs.num_excluded} items have no reply on one side or both"


# ------------------------------------------------------------------------------------------------ the verdict
def judge_effective_length(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe
) -> Verdict:
    """PASS: every length that the gate asks for is within the margin. FAIL: one is certainly beyond it."""
    measured = measure_effective_length(gate, reference, candidate, recipe)
    tasks, lacking = compared_tasks(gate, reference, candidate)
    name = " ".join(["effective length", *gate.tasks])
    if measured is None:
        reason = "; ".join(lacking) or f"no task has items of stated lengths for {reference.label}"
        return Verdict(
            gate=name, candidate=candidate.label, status="NOT MEASURED", observed=None, limit=gate.max_drop,
            detail=f"{capital(reason)}.", has_say=gate.required or bool(lacking),
        )  # fmt: skip
    at_least, most_able, longest = measured.at_least_tokens, measured.reference_tokens, measured.lengths[-1].length_tokens
    most = (most_able or 0) if at_least is None else at_least
    required = [at_length for at_length in measured.lengths if at_length.length_tokens <= most]
    # The length that decides: the first one lost, the first one open, or of a PASS the one nearest to the margin.
    deciding = next((at_length for at_length in required if at_length.status == "beyond"), None)
    status: Status = "FAIL"
    if deciding is None:
        is_measured = all(at_length.status in {"within", "open"} for at_length in required)
        deciding = next((at_length for at_length in required if at_length.status == "open"), None)
        if not required or not is_measured or (at_least is not None and longest < at_least):
            status, deciding = "NOT MEASURED", None
        elif deciding is not None:
            status = "UNDERPOWERED"
        else:
            status = "PASS"
            deciding = max(required, key=lambda at_length: at_length.drop.high if at_length.drop else 0.0)
    needed = None
    if status == "UNDERPOWERED":  # at each length, so that a candidate that loses nothing would pass at every one of them
        lengths = {at_length.length_tokens for at_length in required}
        power = 1 - (1 - POWER) / len(lengths)
        pairs = [at_length.strict for at_length in by_length(tasks, recipe) if at_length.length_tokens in lengths]
        needed = max(*(strict.needed(gate.max_drop, recipe.level, power) for strict in pairs), recipe.min_items)
    return Verdict(
        gate=name,
        candidate=candidate.label,
        status=status,
        observed=None if deciding is None else deciding.drop,
        limit=gate.max_drop,
        detail=_sentence(measured, status, reference.label, deciding, recipe.level),
        clause=_clause(measured, deciding, status),
        items_needed=needed,
        has_say=status != "NOT MEASURED" or gate.required or most_able is not None,
    )


def effective_lengths(recipe: GateRecipe, reference: Measurement, candidate: Measurement) -> list[EffectiveLength]:
    """Of every gate of this kind that could be judged: the numbers behind its verdict."""
    gates = [gate for gate in recipe.gates if isinstance(gate, EffectiveLengthGate)]
    all_measured = (measure_effective_length(gate, reference, candidate, recipe) for gate in gates)
    return [measured for measured in all_measured if measured is not None]


def _sentence(measured: EffectiveLength, status: Status, reference: str, deciding: AtLength | None, level: float) -> str:
    """Up to where the margin holds, what comes after it, and what was not judged."""
    limit, reach = f"{points_short(measured.max_drop)} points of {reference}", measured.effective_tokens
    parts = [f"Within {limit} up to {tokens_short(reach)} tokens" if reach else f"Not shown to be within {limit} at any length"]
    if deciding is not None and deciding.drop is not None:
        drop = deciding.drop
        if status == "PASS":
            confidence, most = percent_short((1 + level) / 2), points(max(drop.high, 0))
            parts.append(f"with {confidence} confidence at each length no more than {most} points are lost")
        else:
            text = f"at {tokens_short(deciding.length_tokens)} it {change(drop)} ({interval_of(drop)})"
            excluded = f", so that a loss of {points_short(measured.max_drop)} points is not excluded"
            parts.append(text if status == "FAIL" else f"{text}{excluded}")
    for at_length in measured.lengths:
        if at_length.status in {"reference cannot", "not measured"}:
            verb = "judged" if at_length.status == "reference cannot" else "measured"
            parts.append(f"{tokens_short(at_length.length_tokens)} is not {verb}: {at_length.why_not}")
    after = [tokens_short(at_length.length_tokens) for at_length in measured.lengths if at_length.status == "not reached"]
    if after:
        parts.append(f"nothing is said of {', '.join(after)}")
    at_least, longest = measured.at_least_tokens, measured.lengths[-1].length_tokens
    if at_least is not None and longest < at_least:
        parts.append(f"{tokens_short(at_least)} are wanted, and the longest asked is {tokens_short(longest)}")
    return f"{'; '.join(parts)}."


def _clause(measured: EffectiveLength, deciding: AtLength | None, status: Status) -> str | None:
    """`loses 19.2 points at 64K tokens; 5 allowed; less up to 32K`. None: no length decides, or none loses the margin."""
    if deciding is None or deciding.drop is None or status == "PASS":
        return None
    drop, margin = deciding.drop, measured.max_drop
    text = f"{change(drop)} at {tokens_short(deciding.length_tokens)} tokens; {allowed(drop, margin)}"
    if status == "UNDERPOWERED":
        text += f": {open_question(drop, margin)}"
    return f"{text}; within the margin up to {tokens_short(measured.effective_tokens)}" if measured.effective_tokens else text
