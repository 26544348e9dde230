"""Measurements + limits that were written down before the run -> verdicts.

The rules, in the order in which they are tried:

- **NOT MEASURED**: the number is missing, or cannot be believed (more items without a reply than allowed; too many replies cut
  off by the budget, on either side; positions without a finite log-probability). Missing is never zero and never a pass.
- **Score** gates are non-inferiority tests on paired items: with the interval of the drop (reference minus candidate, Tango),
  PASS if its upper end lies below the margin, FAIL if its *lower* end lies above it (Holm over the tasks of a candidate),
  UNDERPOWERED otherwise: a drop that looks too large but may be chance asks for more items, not for a verdict.
- **Divergence** gates (KL, agreement) can only fail a candidate: KL says how much two models differ, not which is better
  (arXiv 2606.19558), so PASS means "not failed". Without a measured score gate no candidate is PASS.
- **Overall** is the worst: FAIL, then NOT MEASURED, then UNDERPOWERED, then PASS.

The reference's own repeat (the noise floor) is judged like a candidate: if it does not pass, no other verdict means much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from assay.errors import MeasureError
from assay.gate_recipe import AcceptanceGate, DivergenceGate, GateRecipe, ProbesGate, ScoreGate, TruncationGate
from assay.measurement_records import Measurement
from assay.probe_records import ProbeReport
from assay.quantities import percent_short, points_short
from assay.records import Interval
from assay.verdict_records import GateReport, Status, Verdict
from assay_evaluate.divergence_gates import judge_divergence
from assay_evaluate.pairs import Pairs, find_task, pair_items
from assay_evaluate.probe_gate import judge_probes
from assay_evaluate.score_gates import judge_scores, points_lost, truncation_share
from assay_evaluate.statistics import independent_difference, wilson

__all__ = ["Pairs", "check_comparable", "find_reference", "find_task", "judge", "pair_items", "truncation_share"]
SEVERITY: tuple[Status, ...] = ("FAIL", "NOT MEASURED", "UNDERPOWERED", "PASS")
NOT_COMPARED = ("checkpoint_flags", "emulated", "kernels", "system_fingerprint")
"""Fields of a serving fingerprint in which reference and candidate may differ."""


# ------------------------------------------------------------------------------------------------ the judgement
def judge(
    measurements: Sequence[Measurement],
    gate_recipe: GateRecipe,
    *,
    model: str,
    registered_sha256: str | None = None,
    probes: Sequence[ProbeReport] = (),
) -> GateReport:
    """Every gate of the recipe on every candidate: the noise floor first, then from large to small, in whatever order given.

    `registered_sha256`: `GateRecipe.sha256` as it stood when measuring began; None if nobody wrote it down.
    `probes`: of the run's checkpoints, in any order.
    MeasureError: no reference or two of them, a label twice, another model's measurement, or a candidate that was not served
    or asked exactly as the reference was (the message names the fields).
    """
    reference = find_reference(measurements)
    for measurement in measurements:
        if measurement.model != model:
            raise MeasureError(
                f"measurement {measurement.label} is of model {measurement.model}, not of {model}; remove it from the run"
            )
    candidates = sorted(
        (m for m in measurements if m is not reference), key=lambda m: (not m.is_noise_floor, -m.checkpoint_bytes, m.label)
    )
    labels = [m.label for m in measurements]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise MeasureError(f"two measurements are labelled {twice[0]}; labels are keys of the verdicts")
    verdicts: list[Verdict] = []
    overall: dict[str, Status] = {}
    for candidate in candidates:
        check_comparable(reference, candidate)
        judged = _judge_candidate(gate_recipe, reference, candidate, probes)
        verdicts += judged
        overall[candidate.label] = _overall(judged, reference, candidate)
    return GateReport(
        model=model,
        reference=reference.label,
        gate_recipe=gate_recipe.model_dump(mode="json", by_alias=True),
        gate_recipe_sha256=gate_recipe.sha256,
        registered_sha256=registered_sha256,
        verdicts=tuple(verdicts),
        overall=overall,
    )


def _judge_candidate(
    recipe: GateRecipe, reference: Measurement, candidate: Measurement, probes: Sequence[ProbeReport]
) -> list[Verdict]:
    """The recipe's gates in its order; scores are judged together, for what can fail one of them is adjusted over all."""
    scores = judge_scores([gate for gate in recipe.gates if isinstance(gate, ScoreGate)], reference, candidate, recipe)
    beyond = frozenset(task for task, verdict in scores.items() if not verdict.has_say)
    verdicts = []
    for gate in recipe.gates:
        match gate:
            case ScoreGate():
                verdicts.append(scores[gate.task])
            case ProbesGate():
                verdicts.append(judge_probes(gate, probes, candidate))
            case _:
                verdicts.append(_judge_other(gate, reference, candidate, recipe.level, beyond))
    return verdicts


def find_reference(measurements: Iterable[Measurement]) -> Measurement:
    """The one measurement that the others are compared with."""
    found = [m for m in measurements if m.is_reference and not m.is_noise_floor]
    if len(found) != 1:
        names = ", ".join(m.label for m in found) or "none"
        raise MeasureError(f"a run needs exactly one reference measurement, found: {names}; run `assay evaluate` again")
    return found[0]


def _overall(verdicts: Sequence[Verdict], reference: Measurement, candidate: Measurement) -> Status:
    """The worst verdict; never PASS on divergence alone. Without speculation on both sides acceptance has no say."""
    no_speculation = reference.fingerprint.speculation is None and candidate.fingerprint.speculation is None
    counted = [v.status for v in verdicts if v.has_say and not (v.gate == "acceptance" and no_speculation)]
    if not any(v.gate.startswith("score ") and v.has_say for v in verdicts):
        counted.append("NOT MEASURED")
    return min(counted, key=SEVERITY.index)


def check_comparable(reference: Measurement, candidate: Measurement) -> None:
    """MeasureError naming every field in which the two were served, or asked, differently."""
    where = f"{candidate.label} cannot be compared with {reference.label}"
    if candidate.suite_sha256 != reference.suite_sha256:
        fields = _differences(reference.suite_recipe, candidate.suite_recipe, "suite")
        raise MeasureError(f"{where}: other questions: {'; '.join(fields) or 'another suite'}; measure both again")
    if candidate.fingerprint.comparable_sha256 != reference.fingerprint.comparable_sha256:
        fields = _differences(
            reference.fingerprint.model_dump(mode="json", exclude=set(NOT_COMPARED)),
            candidate.fingerprint.model_dump(mode="json", exclude=set(NOT_COMPARED)),
            "",
        )
        raise MeasureError(f"{where}: served differently: {'; '.join(fields)}; measure both again with one profile")
    if reference.asked_with is not None and candidate.asked_with is not None and reference.asked_with != candidate.asked_with:
        fields = _differences(reference.asked_with.model_dump(mode="json"), candidate.asked_with.model_dump(mode="json"), "")
        raise MeasureError(
            f"{where}: asked differently: {'; '.join(fields)}; the same questions gave other prompts; give both "
            "checkpoints one chat template and measure both again"
        )
    divergence = candidate.divergence
    if divergence is not None and divergence.reference_checkpoint_sha256 != reference.checkpoint_sha256:
        raise MeasureError(
            f"{where}: its divergence is from checkpoint {divergence.reference_checkpoint_sha256[:12]}, "
            f"the reference is {reference.checkpoint_sha256[:12]}; measure the candidate again"
        )


def _differences(reference: Any, candidate: Any, path: str) -> list[str]:
    """`flags.max-model-len (4096, candidate 2048)` for every leaf that differs."""
    if isinstance(reference, dict) and isinstance(candidate, dict):
        keys = sorted(reference.keys() | candidate.keys())
        prefix = f"{path}." if path else ""
        return [line for key in keys for line in _differences(reference.get(key), candidate.get(key), f"{prefix}{key}")]
    return [] if reference == candidate else [f"{path} ({reference}, candidate {candidate})"]


def _judge_other(
    gate: DivergenceGate | AcceptanceGate | TruncationGate, reference: Measurement, candidate: Measurement, level: float,
    beyond: frozenset[str],
) -> Verdict:  # fmt: skip
    """beyond: tasks that the reference cannot do, of optional gates: their cut replies are no reason to doubt the others."""
    match gate:
        case DivergenceGate():
            return judge_divergence(gate, candidate)
        case AcceptanceGate():
            return _judge_acceptance(gate, reference, candidate, level)
        case TruncationGate():
            return _judge_truncation(gate, reference, candidate, level, beyond)


# ------------------------------------------------------------------------------------------------ truncation
def _judge_truncation(
    gate: TruncationGate, reference: Measurement, candidate: Measurement, level: float, beyond: frozenset[str]
) -> Verdict:
    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        return Verdict(
            gate="truncation", candidate=candidate.label, status=status, observed=observed, limit=gate.max_share, detail=detail
        )  # fmt: skip

    shares = [
        (share, side.label, task)
        for side in (reference, candidate)
        for task in side.tasks
        if task.task not in beyond and (share := truncation_share(task)) is not None
    ]
    if not shares:
        return verdict("NOT MEASURED", "No reply to look at.")
    share, label, task = max(shares, key=lambda found: found[0])
    replies = task.num_items - task.num_failed
    detail = (
        f"At most {percent_short(share)} of the replies of a task were cut off"
        + (f" ({task.num_truncated} of {replies}, {label}, {task.task})" if task.num_truncated else "")
        + f"; allowed {percent_short(gate.max_share)}."
    )
    status: Status = "PASS" if share <= gate.max_share else "NOT MEASURED"
    return verdict(status, detail, wilson(task.num_truncated, replies, level))


# ------------------------------------------------------------------------------------------------ acceptance
def _judge_acceptance(gate: AcceptanceGate, reference: Measurement, candidate: Measurement, level: float) -> Verdict:
    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        return Verdict(
            gate="acceptance", candidate=candidate.label, status=status, observed=observed, limit=gate.max_drop, detail=detail
        )  # fmt: skip

    for side in (reference, candidate):
        if side.acceptance is None or side.acceptance.rate is None:
            if side.fingerprint.speculation is None:
                return verdict("NOT MEASURED", f"{side.label} was served without speculative decoding: nothing was drafted.")
            reason = side.not_measured.get("acceptance", "the server drafted nothing")
            return verdict("NOT MEASURED", f"No acceptance rate for {side.label}: {reason}.")
    ours, theirs = reference.acceptance, candidate.acceptance
    assert ours is not None and theirs is not None
    drop = independent_difference(
        ours.num_accepted_tokens, ours.num_draft_tokens, theirs.num_accepted_tokens, theirs.num_draft_tokens, level
    )
    seen = (
        f"{percent_short(ours.num_accepted_tokens / ours.num_draft_tokens)} of drafted tokens accepted in {reference.label}, "
        f"{percent_short(theirs.num_accepted_tokens / theirs.num_draft_tokens)} in {candidate.label}: {points_lost(drop)}"
    )
    margin = f"{points_short(gate.max_drop)} points"
    if drop.high < gate.max_drop:
        return verdict("PASS", f"{seen}, less than {margin}.", drop)
    if drop.low > gate.max_drop:
        return verdict("FAIL", f"{seen}, more than {margin}.", drop)
    return verdict("UNDERPOWERED", f"{seen}: {margin} can be neither excluded nor shown.", drop)
