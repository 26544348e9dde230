"""Why a candidate has its overall verdict: one line for a table, from the verdicts of its gates."""

from __future__ import annotations

from collections.abc import Sequence

from assay.quantities import hundredfold, percent_plain, points, points_short
from assay.records.verdict import Status, Verdict
from assay_evaluate.verdicts.score_sentences import open_question, points_lost

WORDS: dict[Status, str] = {
    "PASS": "passed", "FAIL": "failed", "UNDERPOWERED": "underpowered", "NOT MEASURED": "not measured",
}  # fmt: skip


def reason_for(status: Status, verdicts: Sequence[Verdict]) -> str:
    """Of a PASS what passed, and what was not measured; else the first gate that decided, and the names of the others.

    status: overall. verdicts: of one candidate, in the order of its gates. No full stop at the end.
    """
    if status == "PASS":
        return "; ".join([_passed(verdicts), *_names("not measured", [v for v in verdicts if v.status == "NOT MEASURED"])])
    having_say = [v for v in verdicts if v.has_say]
    deciding = [v for v in having_say if v.status == status]
    first = _clause(deciding[0]) if deciding else "no score gate was measured, and divergence alone never certifies"
    parts = [first, *_names(f"also {WORDS[status]}", deciding[1:])]
    if status != "NOT MEASURED":
        parts += _names("not measured", [v for v in having_say if v.status == "NOT MEASURED"])
    return "; ".join(parts)


def _names(what: str, verdicts: Sequence[Verdict]) -> list[str]:
    names = [v.gate.removeprefix("score ") for v in verdicts]
    return [f"{what}: {', '.join(names)}"] if names else []


def _passed(verdicts: Sequence[Verdict]) -> str:
    measured = [v for v in verdicts if v.status != "NOT MEASURED"]
    seen = f"{sum(v.status == 'PASS' for v in measured)} of {len(measured)} measured gates passed"
    scores = [(v.observed.high, v) for v in measured if v.gate.startswith("score ") and v.observed is not None]
    high, worst = max(scores, key=lambda found: found[0])
    assert worst.observed is not None and worst.limit is not None
    return (
        f"{seen}; with {percent_plain(worst.observed.level)} confidence no gated score fell by more than {points(high)} points "
        f"({worst.gate.removeprefix('score ')}; margin {hundredfold(worst.limit)})"
    )


def _clause(verdict: Verdict) -> str:
    """What one gate saw: loss, interval and margin of a score, the sentence of any other."""
    drop, limit = verdict.observed, verdict.limit
    is_loss = verdict.gate.startswith("score ") or verdict.gate == "acceptance"
    if verdict.status == "NOT MEASURED" or not is_loss or drop is None or limit is None:
        return verdict.detail.removesuffix(".")
    seen = f"{verdict.gate.removeprefix('score ')}: {points_lost(drop)}"
    if verdict.status != "UNDERPOWERED":
        return f"{seen}, margin {points_short(limit)}"
    is_sure = drop.low > 0 or verdict.items_needed is None or verdict.items_needed <= drop.n
    needed = "" if is_sure else f"; about {verdict.items_needed} items would decide if nothing was lost"
    return f"{seen}: {open_question(drop, limit)}{needed}"
