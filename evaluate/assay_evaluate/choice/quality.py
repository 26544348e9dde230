"""Verdicts -> may a checkpoint be chosen. Underpowered quality is not quality: what would decide it is named."""

from __future__ import annotations

import math
from collections.abc import Mapping

from assay.records.choice.record import Quality
from assay.records.verdict import GateReport, Verdict
from assay_evaluate.choice import english
from assay_evaluate.statistics.proportions import normal_quantile

WHOLE = "whole"
"""Gate of the claim about all scores together (verdicts/whole.py)."""


def quality_of(gates: GateReport | None, label: str, variant: str | None = None) -> Quality:
    """Of a checkpoint that has rows. gates: None: quality is assumed. variant: what it is, if it is another way of serving."""
    quality = _judged(gates, label)
    if variant is None:
        return quality
    return quality.model_copy(update={"variant": variant, "detail": f"{variant}: {quality.detail}"})


def _judged(gates: GateReport | None, label: str) -> Quality:
    if gates is None:
        return Quality(checkpoint=label, word="ASSUMED", may_be_chosen=True, detail=english.ASSUMED)
    if label in ("reference", gates.reference):
        return Quality(checkpoint=label, word="REFERENCE", may_be_chosen=True, detail=english.REFERENCE)
    if label not in gates.overall:
        return Quality(
            checkpoint=label, word="NOT MEASURED", may_be_chosen=False,
            detail=english.NO_CANDIDATE.format(candidates=", ".join(gates.overall) or english.NO_CANDIDATES),
            to_run=(english.TO_EVALUATE.format(label=label),),
        )  # fmt: skip
    word = gates.overall[label]
    verdicts = [verdict for verdict in gates.verdicts if verdict.candidate == label and verdict.has_say]
    deciding = (english.TASKS_NEEDED,) if word == "not failed" else tuple(_to_run(v) for v in verdicts if v.status == word)
    return Quality(
        checkpoint=label,
        word=word,
        may_be_chosen=word == "PASS",
        detail=gates.reasons.get(label) or english.GATES_SAY.format(status=word),
        to_run=() if word in ("PASS", "FAIL") else deciding,
        chance_of_failing=_chance_of_failing(gates, label) if word == "PASS" else None,
    )


def _to_run(verdict: Verdict) -> str:
    """`GSM8K: 1,819 paired items (250 were asked)`."""
    what = verdict.title or verdict.gate.removeprefix("score ")
    if verdict.status == "NOT MEASURED":
        return english.TO_RUN.format(task=what, reason=verdict.clause or verdict.detail)
    asked = verdict.observed.n if verdict.observed is not None else 0
    if verdict.items_needed_at_loss is not None:
        return english.ITEMS_NEEDED.format(task=what, needed=verdict.items_needed_at_loss, asked=asked)
    if verdict.items_needed is not None and verdict.items_needed > asked:
        return english.ITEMS_NEEDED.format(task=what, needed=verdict.items_needed, asked=asked)
    return english.NO_ITEMS_DECIDE.format(task=what, asked=asked)


def _chance_of_failing(gates: GateReport, label: str) -> float | None:
    """Chance that a true loss is beyond what a PASS allows, were losses drawn from the intervals seen, each by itself.

    Of every score with its margin, also of one that is undecided alone: where the gates claim something of the whole, that one
    may lose as much as the claim allows a task. And of the whole with its limit. They share losses, so this is no less than the
    chance.
    """
    max_task = next((whole.max_task for whole in gates.wholes if whole.candidate == label), 1.0)
    chances = [
        chance
        for verdict in gates.verdicts
        if verdict.candidate == label and (verdict.has_say or verdict.status == "UNDERPOWERED")
        and (chance := _beyond(verdict, max_task if not verdict.has_say else 1.0)) is not None
    ]  # fmt: skip
    return 1 - math.prod(1 - chance for chance in chances) if chances else None


def _beyond(verdict: Verdict, num_limits: float) -> float | None:
    """Chance that what a gate limits is beyond `num_limits` times its limit. None: no score, or not measured."""
    drop = verdict.observed
    if not verdict.gate.startswith(("score ", WHOLE)) or drop is None or verdict.limit is None:
        return None
    limit, error = num_limits * verdict.limit, (drop.high - drop.low) / (2 * normal_quantile(drop.level))
    if error <= 0:
        return float(drop.value > limit)
    return 0.5 * math.erfc((limit - drop.value) / error / math.sqrt(2))


def mean_losses(gates: GateReport | None) -> Mapping[str, float]:
    """Checkpoint -> mean loss over its score gates, for the front; the reference's is 0. None measured: absent."""
    means: dict[str, float] = {}
    if gates is None:
        return means
    for label in gates.overall:
        drops = [
            verdict.observed.value
            for verdict in gates.verdicts
            if verdict.candidate == label and verdict.gate.startswith("score ") and verdict.observed is not None
        ]
        if drops:
            means[label] = sum(drops) / len(drops)
    return {**means, gates.reference: 0.0, "reference": 0.0}
