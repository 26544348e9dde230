"""Accepted drafts against a limit: of a candidate beside the reference, or of one checkpoint on two kinds of hardware."""

from __future__ import annotations

from dataclasses import dataclass

from assay.quantities import percent_short, points_short
from assay.recipes.gate import AcceptanceGate
from assay.records.base import Interval
from assay.records.measurement import Acceptance, Measurement
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.drafts import acceptance_difference, is_of_replies
from assay_evaluate.verdicts.score_sentences import allowed, change, interval_of, open_question


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
    return compare_acceptance(gate, sides[0], sides[1], candidate.label, level)


def compare_acceptance(
    gate: AcceptanceGate, before: DraftingSide, after: DraftingSide, candidate: str, level: float
) -> Verdict:  # fmt: skip
    """The drop of the acceptance rate from one side to the other. candidate: label that the verdict is on."""

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
    drop = acceptance_difference(ours, theirs, level)
    seen = (
        f"{percent_short(ours.num_accepted_tokens / ours.num_draft_tokens)} of drafted tokens accepted in {before.name}, "
        f"{percent_short(theirs.num_accepted_tokens / theirs.num_draft_tokens)} in {after.name}: {_lost(ours, theirs, drop)}; "
        f"{allowed(drop, gate.max_drop)}"
    )
    if drop.high < gate.max_drop:
        return verdict("PASS", f"{seen}.", drop)
    if drop.low > gate.max_drop:
        return verdict("FAIL", f"{seen}.", drop)
    return verdict("UNDERPOWERED", f"{seen}: {open_question(drop, gate.max_drop)}.", drop)


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
