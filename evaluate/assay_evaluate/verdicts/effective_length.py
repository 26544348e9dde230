"""How far into long context a candidate stays within a margin of the reference.

Length by length, from the shortest on, each tested for non-inferiority at the full level; the first length that is not shown to
be within the margin ends the sequence (fixed-sequence test: Maurer, Hothorn & Lehmacher 1995; Westfall & Krishen 2001, J. Stat.
Plan. Inference 99:25-40). To claim any length that is truly lost, the first lost one must be claimed: one test at its level, so
that the chance of a false claim is (1 - level) / 2 however many lengths there are. A FAIL needs one length of several: Holm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from assay.quantities import percent_short, points, points_short, tokens_short
from assay.recipes.gate import EffectiveLengthGate, GateRecipe
from assay.records.base import Interval
from assay.records.long_context import AtLength, EffectiveLength
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import POWER, PairedEvidence, holm
from assay_evaluate.statistics.item_pairs import Pairs, find_task
from assay_evaluate.verdicts.long_context import joined, lengths_of, pairs_where
from assay_evaluate.verdicts.replies.truncation import truncation_limit
from assay_evaluate.verdicts.score_sentences import allowed, change, interval_of, open_question


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


# ------------------------------------------------------------------------------------------------ what is compared
def compared_tasks(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement
) -> tuple[list[tuple[TaskResult, TaskResult]], list[str]]:
    """(both sides of every task of the gate that the reference has, why the candidate lacks others)."""
    names = gate.tasks or tuple(task.task for task in reference.tasks if lengths_of(task.items))
    found, lacking = [], []
    for name in names:
        ours, theirs = find_task(reference, name), find_task(candidate, name)
        if ours is None or not lengths_of(ours.items):
            continue
        if theirs is None or theirs.accuracy is None:
            note = (theirs.note if theirs is not None else None) or candidate.not_measured.get(name) or "it was not asked"
            lacking.append(f"{name} has no score for {candidate.label}: {note}")
            continue
        found.append((ours, theirs))
    return found, lacking


def by_length(tasks: Sequence[tuple[TaskResult, TaskResult]], recipe: GateRecipe) -> list[LengthPairs]:
    """All tasks together, from the shortest length on."""
    lengths = sorted({length for ours, _ in tasks for length in lengths_of(ours.items)})
    return [_at_length(length, tasks, recipe) for length in lengths]


def _at_length(length: int, tasks: Sequence[tuple[TaskResult, TaskResult]], recipe: GateRecipe) -> LengthPairs:
    def inside(item: ItemResult) -> bool:
        return item.length_tokens == length

    here = [(ours, theirs) for ours, theirs in tasks if any(map(inside, ours.items))]
    replies = [item for ours, _ in here for item in ours.items if inside(item) and item.correct is not None]
    return LengthPairs(
        length,
        joined([pairs_where(ours, theirs, inside) for ours, theirs in here]),
        joined([pairs_where(ours, _cut_is_wrong(theirs), inside) for ours, theirs in here]),
        sum(item.truncated for item in replies) / len(replies) if replies else 0.0,
        min(truncation_limit(recipe, ours.task) for ours, _ in here),
    )


def _cut_is_wrong(task: TaskResult) -> TaskResult:
    if not any(item.truncated and item.correct for item in task.items):
        return task
    items = tuple(_wrong(item) if item.truncated and item.correct else item for item in task.items)
    return task.model_copy(update={"items": items})


def _wrong(item: ItemResult) -> ItemResult:
    return dataclasses.replace(item, correct=False)


# ------------------------------------------------------------------------------------------------ the sequence
def measure_effective_length(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe
) -> EffectiveLength | None:
    """The tests of all lengths. None: no length was asked, or the candidate lacks a task."""
    tasks, lacking = compared_tasks(gate, reference, candidate)
    found = by_length(tasks, recipe)
    if lacking or not found:
        return None
    reasons = [_cannot(gate, one, reference.label) or _missing(one, recipe) for one in found]
    reached = next((number for number, why in enumerate(reasons) if why is not None), len(found))
    evidence = [one.pairs.evidence(gate.max_drop, level=recipe.level) for one in found[:reached]]
    strict = [one.strict.evidence(gate.max_drop, level=recipe.level).p_pass for one in found[:reached]]
    wanted = None if gate.at_least == "reference" else gate.at_least
    num_judged = sum(wanted is None or one.length_tokens <= wanted for one in found[:reached])
    p_fail = [one.p_fail for one in evidence]
    if recipe.adjust == "holm":
        p_fail = [*holm(p_fail[:num_judged]), *p_fail[num_judged:]]
    lengths = [
        *(_judged(one, seen, p, q, recipe) for one, seen, p, q in zip(found, evidence, strict, p_fail, strict=False)),
        *(_not_judged(one, why, number == reached) for number, (one, why) in enumerate(zip(found, reasons, strict=True))
          if number >= reached),
    ]  # fmt: skip
    stop = next((number for number, length in enumerate(lengths) if length.status != "within"), len(lengths))
    return EffectiveLength(
        candidate=candidate.label,
        tasks=tuple(ours.task for ours, _ in tasks),
        max_drop=gate.max_drop,
        at_least_tokens=wanted,
        lengths=tuple(lengths),
        effective_tokens=lengths[stop - 1].length_tokens if stop else None,
        reference_tokens=_reference_tokens(found, reasons, lengths),
    )


def _reference_tokens(found: list[LengthPairs], reasons: list[tuple[str, str] | None], lengths: list[AtLength]) -> int | None:
    cannot = next((number for number, why in enumerate(reasons) if why is not None and why[0] == "reference cannot"), None)
    able = lengths if cannot is None else lengths[:cannot]
    return able[-1].length_tokens if able else None


def _cannot(gate: EffectiveLengthGate, one: LengthPairs, reference: str) -> tuple[str, str] | None:
    """Why the reference has nothing to lose at a length."""
    right, n = sum(one.pairs.reference), one.pairs.n
    if one.cut_share > one.max_cut_share:
        limit = percent_short(one.max_cut_share)
        return "reference cannot", f"{percent_short(one.cut_share)} of its replies were cut off, allowed {limit}"
    if n and right / n <= gate.max_drop:
        return "reference cannot", f"{reference} itself is right in {right} of {n} replies"
    return None


def _missing(one: LengthPairs, recipe: GateRecipe) -> tuple[str, str] | None:
    pairs = one.pairs
    if pairs.n and pairs.excluded_share <= recipe.max_excluded:
        return None
    return "not measured", f"{pairs.num_excluded} of {pairs.n + pairs.num_excluded} items have no reply on one side or both"


def _judged(one: LengthPairs, evidence: PairedEvidence, p_within: float, p_beyond: float, recipe: GateRecipe) -> AtLength:
    alpha = (1 - recipe.level) / 2
    is_within = p_within < alpha and evidence.drop.n >= recipe.min_items
    pairs = one.pairs
    return AtLength(
        length_tokens=one.length_tokens,
        status="beyond" if p_beyond < alpha else "within" if is_within else "open",
        num_pairs=pairs.n,
        reference=sum(pairs.reference) / pairs.n,
        candidate=sum(pairs.candidate) / pairs.n,
        drop=evidence.drop,
        p_within=p_within,
        p_beyond=p_beyond,
    )


def _not_judged(one: LengthPairs, why: tuple[str, str] | None, is_first: bool) -> AtLength:
    pairs = one.pairs
    status, reason = ("not reached", None) if not is_first or why is None else why
    return AtLength.model_validate(
        {
            "length_tokens": one.length_tokens, "status": status, "num_pairs": pairs.n,
            "reference": sum(pairs.reference) / pairs.n if pairs.n else None,
            "candidate": sum(pairs.candidate) / pairs.n if pairs.n else None,
            "drop": None, "p_within": None, "p_beyond": None, "why_not": reason,
        }
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the verdict
def judge_effective_length(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe
) -> Verdict:
    """PASS: every length that the gate asks for is within the margin. FAIL: one is certainly beyond it."""
    found = measure_effective_length(gate, reference, candidate, recipe)
    name = " ".join(["effective length", *gate.tasks])
    if found is None:
        _, lacking = compared_tasks(gate, reference, candidate)
        why = "; ".join(lacking) or f"no task has items of stated lengths for {reference.label}"
        return Verdict(
            gate=name, candidate=candidate.label, status="NOT MEASURED", observed=None, limit=gate.max_drop,
            detail=f"{why[0].upper()}{why[1:]}.", has_say=gate.required or bool(lacking),
        )  # fmt: skip
    wanted = _wanted(found)
    status = _status(found, wanted)
    deciding = _deciding(found, wanted, status)
    can = found.reference_tokens is not None
    return Verdict(
        gate=name,
        candidate=candidate.label,
        status=status,
        observed=None if deciding is None else deciding.drop,
        limit=gate.max_drop,
        detail=sentence(found, status, reference.label, deciding, recipe.level),
        clause=_clause(found, deciding, status),
        items_needed=_items_needed(gate, reference, candidate, recipe, wanted) if status == "UNDERPOWERED" else None,
        has_say=status != "NOT MEASURED" or gate.required or can,
    )


def effective_lengths(recipe: GateRecipe, reference: Measurement, candidate: Measurement) -> list[EffectiveLength]:
    """Of every gate of this kind that could be judged: the numbers behind its verdict."""
    gates = [gate for gate in recipe.gates if isinstance(gate, EffectiveLengthGate)]
    measured = (measure_effective_length(gate, reference, candidate, recipe) for gate in gates)
    return [one for one in measured if one is not None]


def _wanted(found: EffectiveLength) -> list[AtLength]:
    """The lengths that the verdict is about."""
    if found.at_least_tokens is None:
        return [length for length in found.lengths if _within_ability(found, length)]
    return [length for length in found.lengths if length.length_tokens <= found.at_least_tokens]


def _within_ability(found: EffectiveLength, one: AtLength) -> bool:
    return found.reference_tokens is not None and one.length_tokens <= found.reference_tokens


def _status(found: EffectiveLength, wanted: Sequence[AtLength]) -> Status:
    if any(one.status == "beyond" for one in wanted):
        return "FAIL"
    is_too_short = found.at_least_tokens is not None and found.lengths[-1].length_tokens < found.at_least_tokens
    if not wanted or is_too_short or any(one.status not in {"within", "open"} for one in wanted):
        return "NOT MEASURED"
    return "PASS" if all(one.status == "within" for one in wanted) else "UNDERPOWERED"


def _deciding(found: EffectiveLength, wanted: Sequence[AtLength], status: Status) -> AtLength | None:
    """The length that decides: the first one lost, the first one open, or of a PASS the one nearest to the margin."""
    if status == "PASS":
        return max(wanted, key=lambda one: one.drop.high if one.drop else 0.0)
    word = {"FAIL": "beyond", "UNDERPOWERED": "open"}.get(status)
    return next((one for one in wanted if one.status == word), None)


def _items_needed(
    gate: EffectiveLengthGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe, wanted: Sequence[AtLength]
) -> int:
    """Items at each length with which a candidate that loses nothing would pass at every one of them."""
    tasks, _ = compared_tasks(gate, reference, candidate)
    lengths = {one.length_tokens for one in wanted}
    power = 1 - (1 - POWER) / len(lengths)
    needed = [
        one.strict.needed(gate.max_drop, recipe.level, power)
        for one in by_length(tasks, recipe)
        if one.length_tokens in lengths
    ]
    return max(*needed, recipe.min_items)


# ------------------------------------------------------------------------------------------------ what it says
def sentence(found: EffectiveLength, status: Status, reference: str, deciding: AtLength | None, level: float) -> str:
    """Up to where the margin holds, what comes after it, and what was not judged."""
    limit = f"{points_short(found.max_drop)} points of {reference}"
    reach = found.effective_tokens
    held = f"Within {limit} up to {tokens_short(reach)} tokens" if reach else f"Not shown to be within {limit} at any length"
    parts = [held]
    if status == "PASS" and deciding is not None and deciding.drop is not None:
        parts.append(f"with {percent_short((1 + level) / 2)} confidence at each length no more than "
                     f"{points(max(deciding.drop.high, 0))} points are lost")  # fmt: skip
    elif deciding is not None and deciding.drop is not None:
        parts.append(f"at {tokens_short(deciding.length_tokens)} {_loss(deciding.drop, found.max_drop, status)}")
    return f"{'; '.join([*parts, *_not_judged_words(found, reference)])}."


def _loss(drop: Interval, margin: float, status: Status) -> str:
    seen = f"it {change(drop)} ({interval_of(drop)})"
    return seen if status == "FAIL" else f"{seen}, so that a loss of {points_short(margin)} points is not excluded"


def _clause(found: EffectiveLength, deciding: AtLength | None, status: Status) -> str | None:
    """`loses 19.2 points at 64K tokens; 5 allowed; less up to 32K`. None: no length decides, or none loses the margin."""
    if deciding is None or deciding.drop is None or status == "PASS":
        return None
    seen = f"{change(deciding.drop)} at {tokens_short(deciding.length_tokens)} tokens; {allowed(deciding.drop, found.max_drop)}"
    if status == "UNDERPOWERED":
        seen += f": {open_question(deciding.drop, found.max_drop)}"
    return f"{seen}; within the margin up to {tokens_short(found.effective_tokens)}" if found.effective_tokens else seen


def _not_judged_words(found: EffectiveLength, reference: str) -> list[str]:
    said = []
    for length in found.lengths:
        if length.status == "reference cannot":
            said.append(f"{tokens_short(length.length_tokens)} is not judged: {length.why_not}")
        elif length.status == "not measured":
            said.append(f"{tokens_short(length.length_tokens)} is not measured: {length.why_not}")
    after = [tokens_short(length.length_tokens) for length in found.lengths if length.status == "not reached"]
    if after:
        said.append(f"nothing is said of {', '.join(after)}")
    longest = found.lengths[-1].length_tokens
    if found.at_least_tokens is not None and longest < found.at_least_tokens:
        said.append(f"{tokens_short(found.at_least_tokens)} are wanted, and the longest asked is {tokens_short(longest)}")
    return said
