"""Accepted drafts against a limit: of a candidate beside the reference, or of one checkpoint on two kinds of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from assay.quantities import percent_short, points_short
from assay.recipes.gate import AcceptanceGate
from assay.records.base import Interval
from assay.records.declared import SPECULATION
from assay.records.measurement import Acceptance, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.drafts import acceptance_difference, has_counts_by_reply, paired_acceptance_difference
from assay_evaluate.statistics.item_pairs import common_tasks
from assay_evaluate.statistics.uneven_clusters import chance_of_none, effective_number
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
    before, after = (
        DraftingSide(
            side.label,
            side.fingerprint.speculation is not None
            or (side.acceptance is not None and side.acceptance.num_draft_tokens > 0),  # given servers tell no settings
            side.acceptance,
            side.not_measured.get("acceptance", "the server drafted nothing"),
        )
        for side in (reference, candidate)
    )
    reason = None
    if before.drafts != after.drafts:
        drafting, other = (before, after) if before.drafts else (after, before)
        reason = (
            f"{drafting.name} was served with speculative decoding; {other.name} reports no drafted tokens, so there is "
            "nothing to compare"
        )
    elif before.drafts and SPECULATION in candidate.declared:
        reason = (
            f"{candidate.label} drafts otherwise than {reference.label}, as was declared; shares of other drafts are not "
            "compared"
        )
    if reason is not None:
        return Verdict(
            gate="acceptance", candidate=candidate.label, status="NOT MEASURED", observed=None, limit=gate.max_drop,
            detail=f"{reason}. This does not count in the overall verdict.", has_say=False,
        )  # fmt: skip
    return compare_acceptance(gate, before, after, candidate.label, level, paired=drafts_by_prompt(reference, candidate))


def drafts_by_prompt(reference: Measurement, candidate: Measurement) -> list[DraftCounts]:
    """Of every prompt of the suite's tasks for whose replies both sides recorded it. Against second replies of the reference
    itself only its first count."""
    counts = []
    for task, candidate_task in common_tasks(reference, candidate):
        before = _counts_by_item(task, first_only=candidate_task.is_second_replies)
        after = _counts_by_item(candidate_task)
        counts += [DraftCounts(*before[item], *after[item]) for item in before if item in after]
    return counts


def _counts_by_item(task: TaskResult, *, first_only: bool = False) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of all replies to each item."""
    counts: dict[str, tuple[int, int]] = {}
    for reply in task.items:
        if reply.drafted_tokens is None or reply.accepted_tokens is None or (first_only and reply.sample > 0):
            continue
        drafted, accepted = counts.get(reply.item, (0, 0))
        counts[reply.item] = drafted + reply.drafted_tokens, accepted + reply.accepted_tokens
    return {item: tokens for item, tokens in counts.items() if tokens[0]}


def compare_acceptance(
    gate: AcceptanceGate, before: DraftingSide, after: DraftingSide, candidate: str, level: float,
    *, paired: Sequence[DraftCounts] = (),
) -> Verdict:  # fmt: skip
    """The drop of the acceptance rate from one side to the other. candidate: label that the verdict is on. paired: of prompts
    that both sides answered; with enough of them the interval is theirs, else each side's replies are a sample of its own."""

    def verdict(status: Status, detail: str, observed: Interval | None = None, *, has_say: bool = True) -> Verdict:
        clause = None
        if observed is not None:
            clause = f"{change(observed)} of accepted drafts; {allowed(observed, gate.max_drop)}"
            clause += f": {open_question(observed, gate.max_drop)}" if status == "UNDERPOWERED" else ""
        return Verdict(
            gate="acceptance", candidate=candidate, status=status, observed=observed, limit=gate.max_drop, detail=detail,
            clause=clause, has_say=has_say,
        )  # fmt: skip

    if not before.drafts and not after.drafts:
        neither = (
            f"Neither {before.name} nor {after.name} was served with speculative decoding, so nothing was drafted. "
            "This does not count in the overall verdict."
        )
        return verdict("NOT MEASURED", neither, has_say=False)
    if before.acceptance is not None and before.acceptance.rate is not None and before.acceptance.rate <= gate.max_drop:
        # A draft head that is hardly ever right (random, or lost) cannot lose the margin: it would always pass.
        nothing_to_lose = (
            f"{percent_short(before.acceptance.rate)} of drafted tokens accepted in {before.name} itself: it has less than "
            f"{points_short(gate.max_drop)} points to lose, so a damaged draft head would not show. This does not count in the "
            "overall verdict."
        )
        return verdict("NOT MEASURED", nothing_to_lose, has_say=False)
    for side in (before, after):
        if side.acceptance is None or side.acceptance.rate is None:
            reason = side.why_not if side.drafts else "it was served without speculative decoding"
            return verdict("NOT MEASURED", f"No acceptance rate for {side.name}: {reason}.")
    assert before.acceptance is not None and after.acceptance is not None
    too_few_prompts = ""
    if len(paired) >= FEWEST_PROMPTS:
        drop = paired_acceptance_difference(paired, level)
        rate = sum(prompt.accepted_before for prompt in paired) / sum(prompt.drafted_before for prompt in paired)
        rates = [rate, rate - drop.value]
        lost = f"{change(drop)} ({interval_of(drop)}, over {drop.n} prompts that both answered)"
        sizes = [prompt.drafted_before + prompt.drafted_after for prompt in paired]
        if (none := chance_of_none(sizes)) >= (1 - level) / 2:  # why the upper end of the interval is 1
            too_few_prompts = (
                f"; a few prompts have most of the drafted tokens, so that {len(sizes)} count as {effective_number(sizes):.1f} "
                f"of equal length: a drop in one prompt of five is in none of them with a chance of {percent_short(none)}"
            )
    else:
        drop = acceptance_difference(before.acceptance, after.acceptance, level)
        rates = [side.num_accepted_tokens / side.num_draft_tokens for side in (before.acceptance, after.acceptance)]
        if has_counts_by_reply(before.acceptance, after.acceptance):
            lost = f"{change(drop)} ({interval_of(drop)}, over {drop.n} replies)"
        else:
            lost = (
                f"{change(drop)} ({interval_of(drop)} if drafted tokens were independent; the server reports totals only, so "
                "how much replies differ is not known)"
            )
    text = (
        f"{percent_short(rates[0])} of drafted tokens accepted in {before.name}, {percent_short(rates[1])} in {after.name}: "
        f"{lost}; {allowed(drop, gate.max_drop)}"
    )
    if drop.high < gate.max_drop:
        return verdict("PASS", f"{text}.", drop)
    if drop.low > gate.max_drop:
        return verdict("FAIL", f"{text}.", drop)
    return verdict("UNDERPOWERED", f"{text}: {open_question(drop, gate.max_drop)}{too_few_prompts}.", drop)
