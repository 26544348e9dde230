"""Accepted drafts against a limit: of a candidate beside the reference, or of one checkpoint on two kinds of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from assay.quantities import percent_short, points_short
from assay.recipes.gate import AcceptanceGate
from assay.records.base import Interval
from assay.records.measurement import Acceptance, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.drafts import acceptance_difference, is_of_replies, paired_acceptance_difference
from assay_evaluate.statistics.item_pairs import find_task
from assay_evaluate.statistics.uneven.clusters import chance_of_none, effective_number
from assay_evaluate.verdicts.score_sentences import allowed, change, interval_of, open_question

FEWEST_PROMPTS = 60
"""That both sides answered, for an interval over them."""


class DraftCounts(NamedTuple):
    """Tokens of all replies to one prompt."""

    drafted_before: int
    accepted_before: int
    drafted_after: int
    accepted_after: int


@dataclass(frozen=True)
class DraftingSide:
    """One side of the comparison. acceptance: None, or without a rate: `why_not`."""

    name: str
    drafts: bool
    """Served with speculative decoding."""
    acceptance: Acceptance | None
    why_not: str = "the server drafted nothing"


def judge_acceptance(gate: AcceptanceGate, reference: Measurement, candidate: Measurement, level: float) -> Verdict:
    """The candidate's acceptance rate beside the reference's, over the suite's tasks."""
    sides = [
        DraftingSide(
            one.label,
            reference.fingerprint.speculation is not None,  # of both: other speculation is refused
            one.acceptance,
            one.not_measured.get("acceptance", "the server drafted nothing"),
        )
        for one in (reference, candidate)
    ]
    return compare_acceptance(gate, sides[0], sides[1], candidate.label, level, paired=drafts_by_prompt(reference, candidate))


def drafts_by_prompt(reference: Measurement, candidate: Measurement) -> list[DraftCounts]:
    """Of every prompt of the suite's tasks for whose replies both sides recorded it. Against second replies of the reference
    itself only its first count."""
    found = []
    for ours in reference.tasks:
        theirs = find_task(candidate, ours.task)
        if theirs is None:
            continue
        before, after = _by_item(ours, first_only=theirs.is_second_replies), _by_item(theirs)
        found += [DraftCounts(*before[item], *after[item]) for item in before if item in after]
    return found


def _by_item(task: TaskResult, *, first_only: bool = False) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of all replies to each item."""
    found: dict[str, tuple[int, int]] = {}
    for one in task.items:
        if one.drafted_tokens is None or one.accepted_tokens is None or (first_only and one.sample > 0):
            continue
        drafted, accepted = found.get(one.item, (0, 0))
        found[one.item] = drafted + one.drafted_tokens, accepted + one.accepted_tokens
    return {item: counts for item, counts in found.items() if counts[0]}


def compare_acceptance(
    gate: AcceptanceGate, before: DraftingSide, after: DraftingSide, candidate: str, level: float,
    *, paired: Sequence[DraftCounts] = (),
) -> Verdict:  # fmt: skip
    """The drop of the acceptance rate from one side to the other. candidate: label that the verdict is on. paired: of prompts
    that both sides answered; with enough of them the interval is theirs, else each side's replies are a sample of its own."""

    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        clause = None
        if observed is not None:
            clause = f"{change(observed)} of accepted drafts; {allowed(observed, gate.max_drop)}"
            clause += f": {open_question(observed, gate.max_drop)}" if status == "UNDERPOWERED" else ""
        return Verdict(
            gate="acceptance", candidate=candidate, status=status, observed=observed, limit=gate.max_drop, detail=detail,
            clause=clause,
        )  # fmt: skip

    if not before.drafts and not after.drafts:
        neither = (
            f"Neither {before.name} nor {after.name} was served with speculative decoding, so nothing was drafted. "
            "This does not count in the overall verdict."
        )
        return verdict("NOT MEASURED", neither).model_copy(update={"has_say": False})
    if (nothing := _no_drafts_to_lose(gate, before)) is not None:
        return verdict("NOT MEASURED", nothing).model_copy(update={"has_say": False})
    for side in (before, after):
        if side.acceptance is None or side.acceptance.rate is None:
            why = side.why_not if side.drafts else "it was served without speculative decoding"
            return verdict("NOT MEASURED", f"No acceptance rate for {side.name}: {why}.")
    ours, theirs = before.acceptance, after.acceptance
    assert ours is not None and theirs is not None
    rates = [one.num_accepted_tokens / one.num_draft_tokens for one in (ours, theirs)]
    drop = acceptance_difference(ours, theirs, level)
    lost, too_few_prompts = _lost(ours, theirs, drop), ""
    if len(paired) >= FEWEST_PROMPTS:
        drop = paired_acceptance_difference(paired, level)
        rates = [sum(prompt.accepted_before for prompt in paired) / sum(prompt.drafted_before for prompt in paired)]
        rates.append(rates[0] - drop.value)
        lost = f"{change(drop)} ({interval_of(drop)}, over {drop.n} prompts that both answered)"
        too_few_prompts = _too_few_prompts(paired, level)
    seen = (
        f"{percent_short(rates[0])} of drafted tokens accepted in {before.name}, {percent_short(rates[1])} in {after.name}: "
        f"{lost}; {allowed(drop, gate.max_drop)}"
    )
    if drop.high < gate.max_drop:
        return verdict("PASS", f"{seen}.", drop)
    if drop.low > gate.max_drop:
        return verdict("FAIL", f"{seen}.", drop)
    return verdict("UNDERPOWERED", f"{seen}: {open_question(drop, gate.max_drop)}{too_few_prompts}.", drop)


def _too_few_prompts(paired: Sequence[DraftCounts], level: float) -> str:
    """Why the upper end of the interval is 1, where it is."""
    sizes = [prompt.drafted_before + prompt.drafted_after for prompt in paired]
    if chance_of_none(sizes) < (1 - level) / 2:
        return ""
    return (
        f"; a few prompts have most of the drafted tokens, so that {len(sizes)} count as {effective_number(sizes):.1f} of "
        f"equal length: a drop in one prompt of five is in none of them with a chance of {percent_short(chance_of_none(sizes))}"
    )


def _lost(before: Acceptance, after: Acceptance, drop: Interval) -> str:
    if is_of_replies(before, after):
        return f"{change(drop)} ({interval_of(drop)}, over {drop.n} replies)"
    return (
        f"{change(drop)} ({interval_of(drop)} if drafted tokens were independent; the server reports totals only, so how much "
        "replies differ is not known)"
    )


def _no_drafts_to_lose(gate: AcceptanceGate, before: DraftingSide) -> str | None:
    """A draft head that is hardly ever right (random, or lost) cannot lose the margin: it would always pass."""
    ours = before.acceptance
    if ours is None or ours.rate is None or ours.rate > gate.max_drop:
        return None
    return (
        f"{percent_short(ours.rate)} of drafted tokens accepted in {before.name} itself: it has less than "
        f"{points_short(gate.max_drop)} points to lose, so a damaged draft head would not show. This does not count in the "
        "overall verdict."
    )
