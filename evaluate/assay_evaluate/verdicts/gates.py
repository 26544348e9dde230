"""Measurements + limits that were written down before the run -> verdicts.

The rules, in the order in which they are tried:

- **NOT MEASURED**: the number is missing, or cannot be believed (more items without a reply than allowed; too many
  replies of the reference cut off by the budget; positions without a finite log-probability; divergence over fewer than
  twenty texts; a reference that misses its published score). Missing is never zero and never a pass.
- **Serving**: before anything else every task is compared with the rules of `alike/rules.py`. What breaks one (a fallback
  that answers, prompts cut, a cache) has no score: NOT MEASURED, with the sentence that names the fault and whose it is.
- **Score** gates are non-inferiority tests on paired items: with the interval of the drop (reference minus candidate, Tango),
  PASS if its upper end lies below the margin, FAIL if its *lower* end lies above it (Holm over the tasks of a candidate),
  UNDERPOWERED otherwise: a drop that looks too large but may be chance asks for more items, not for a verdict.
- **Divergence** gates (KL, agreement) are conditions: PASS takes an unbiased KL whose interval lies within the limit, FAIL one
  beyond it (or its lower bound), Holm over the candidate's numbers. None is enough: KL says how much two models differ, not
  which is better (arXiv 2606.19558). Without a measured score gate no candidate is PASS.
- **The whole** (`whole:` in the gates) is a claim over all score gates together: the mean use of their margins, and the most
  that one task may have lost. With it a task that is undecided alone has no say; one that FAILs has.
- **Overall** is the worst of the verdicts that count: FAIL, then NOT MEASURED, then UNDERPOWERED, then PASS. Not counted are
  optional gates on what the reference cannot do, and acceptance where neither side was served with speculative decoding or
  the reference's own drafts are hardly ever accepted. Where the suite asks no task (`tasks: []`) it is **not failed** instead
  of PASS, as in a screening, and candidates are ranked by their divergence.

- **Subgroups** (a language, a subject, a length) can keep a candidate from PASS, or fail it, while their task passes
  (`subgroups`).
- **Truncation**: more replies cut off or looping than the reference has FAIL; a score passes only if it would with every cut
  reply counted against the candidate.

The reference's own repeat (the noise floor) is judged like a candidate: if it fails, every candidate is NOT MEASURED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from assay.errors import MeasureError
from assay.recipes.gate import (
    AcceptanceGate,
    DivergenceGate,
    EffectiveLengthGate,
    GateRecipe,
    ProbesGate,
    ScoreGate,
    SubgroupsGate,
    TruncationGate,
    VerbosityGate,
)
from assay.recipes.model import PublishedScore
from assay.records.comparable import check_measurements
from assay.records.long_context import EffectiveLength, LongContext
from assay.records.measurement import Divergence, Measurement
from assay.records.probe import ProbeReport
from assay.records.verdict import (
    Attempt,
    GateReport,
    Overall,
    RegisteredGates,
    ServingFinding,
    SubgroupLoss,
    Verdict,
    WholeClaim,
)
from assay_evaluate.serving_faults.rules import check_serving, without_tasks
from assay_evaluate.verdicts.acceptance import judge_acceptance
from assay_evaluate.verdicts.divergence import DIVERGENCE, SEVERITY, judge_divergences
from assay_evaluate.verdicts.long_context import effective_lengths, judge_effective_length, long_context
from assay_evaluate.verdicts.probes import judge_probes
from assay_evaluate.verdicts.published import compare_published
from assay_evaluate.verdicts.ranking import rank_candidates
from assay_evaluate.verdicts.reasons import attempt_of, reason_for, suspect_reason
from assay_evaluate.verdicts.scores import judge_scores
from assay_evaluate.verdicts.subgroups import judge_subgroups
from assay_evaluate.verdicts.truncation import judge_truncation
from assay_evaluate.verdicts.verbosity import judge_verbosity
from assay_evaluate.verdicts.whole import GATE as WHOLE
from assay_evaluate.verdicts.whole import judge_whole, settle_scores, verdict_of


# ------------------------------------------------------------------------------------------------ the judgement
def judge(
    measurements: Sequence[Measurement],
    gate_recipe: GateRecipe,
    *,
    model: str,
    registered: RegisteredGates | None = None,
    probes: Sequence[ProbeReport] = (),
    published: Mapping[str, PublishedScore] = MappingProxyType({}),
    earlier: Mapping[str, Sequence[Attempt]] = MappingProxyType({}),
) -> GateReport:
    """Every gate of the recipe on every candidate: the noise floor first, then from large to small, in whatever order given.

    `registered`: the limits as they stood when measuring began; None if nobody wrote them down.
    `probes`: of the run's checkpoints, in any order.
    `published`: task -> the model's published score; a reference that misses it makes the task's verdicts NOT MEASURED.
    `earlier`: candidate -> evaluations of the same weights that were judged before; they are said, and change no verdict.
    MeasureError: no reference or two of them, a label twice, another model's measurement, or a candidate that was not served
    or asked exactly as the reference was (the message names the fields).
    """
    reference = check_measurements(measurements)
    if reference.model != model:
        raise MeasureError(f"the measurements are of model {reference.model}, not of {model}; name the run that they belong to")
    candidates = sorted(
        (m for m in measurements if m is not reference),
        key=lambda m: (not m.is_noise_floor, -(m.checkpoint_bytes or 0), m.label),
    )
    repeat = next((candidate for candidate in candidates if candidate.is_noise_floor), None)
    floor = None if repeat is None else repeat.divergence
    comparisons = compare_published(published, reference, gate_recipe.level)
    suspect = {comparison.task: comparison.detail for comparison in comparisons if comparison.outcome == "missed"}
    serving = {candidate.label: check_serving(reference, candidate, repeat) for candidate in candidates}
    asks_tasks = reference.suite_recipe.get("tasks") != []
    verdicts: dict[str, list[Verdict]] = {}
    overall: dict[str, Overall] = {}
    reasons: dict[str, str] = {}
    wholes: list[WholeClaim] = []
    subgroups: list[SubgroupLoss] = []
    contexts: list[LongContext] = []
    lengths: list[EffectiveLength] = []
    for candidate in candidates:
        label, faults = candidate.label, serving[candidate.label].by_task
        verdicts[label], whole, losses = _judge_candidate(gate_recipe, reference, candidate, probes, suspect, floor, faults)
        wholes += [] if whole is None else [whole]
        subgroups += losses
        overall[label] = _overall(verdicts[label], asks_tasks=asks_tasks)
        reasons[label] = reason_for(overall[label], verdicts[label], asks_tasks=asks_tasks)
        sound_sides = without_tasks(reference, faults), without_tasks(candidate, faults)
        contexts += long_context(*sound_sides, gate_recipe.level)
        lengths += effective_lengths(gate_recipe, *sound_sides)
    for label in [candidate.label for candidate in candidates if candidate.is_noise_floor]:
        if overall[label] == "FAIL":
            reason = suspect_reason(reference.label, verdicts[label])
            for candidate in candidates:
                if not candidate.is_noise_floor:
                    overall[candidate.label], reasons[candidate.label] = "NOT MEASURED", reason
    for label, attempts in earlier.items():
        if label in reasons and attempts:
            reasons[label] += f"; {attempt_of(attempts, overall[label], (1 - gate_recipe.level) / 2)}"
    ranked = [] if asks_tasks else [candidate for candidate in candidates if overall[candidate.label] != "NOT MEASURED"]
    return GateReport(
        model=model,
        reference=reference.label,
        gate_recipe=gate_recipe.model_dump(mode="json", by_alias=True),
        gate_recipe_sha256=gate_recipe.sha256,
        registered_sha256=None if registered is None else GateRecipe.model_validate(registered.recipe).sha256,
        registered_name=None if registered is None else str(registered.recipe["name"]),
        verdicts=tuple(chain(*verdicts.values())),
        overall=overall,
        published=comparisons,
        wholes=tuple(wholes),
        reasons=reasons,
        long_context=tuple(contexts),
        effective_lengths=tuple(lengths),
        subgroups=tuple(subgroups),
        serving=tuple(finding for looked in serving.values() for finding in looked.findings),
        not_looked_at={label: looked.unchecked_rules for label, looked in serving.items() if looked.unchecked_rules},
        rankings=rank_candidates(ranked, gate_recipe.level),
        attempts={label: tuple(attempts) for label, attempts in earlier.items() if attempts},
    )


def _judge_candidate(
    recipe: GateRecipe, reference: Measurement, candidate: Measurement, probes: Sequence[ProbeReport],
    suspect: Mapping[str, str], floor: Divergence | None, faults: Mapping[str, Sequence[ServingFinding]],
) -> tuple[list[Verdict], WholeClaim | None, list[SubgroupLoss]]:  # fmt: skip
    """The whole, if the gates claim something of it, and the gates in their order; scores are judged together, for what can
    fail one of them is adjusted over all. Then what was seen of subgroups. faults: task -> what is at fault with its serving;
    no gate looks at its replies."""
    score_gates = [gate for gate in recipe.gates if isinstance(gate, ScoreGate)]
    scores = judge_scores(score_gates, reference, candidate, recipe, suspect, faults)
    reference, candidate = without_tasks(reference, faults), without_tasks(candidate, faults)
    beyond = frozenset(task for task, verdict in scores.items() if not verdict.has_say)
    whole = judge_whole(recipe, scores, candidate.label)
    scores = settle_scores(recipe, scores, whole)
    verdicts = [] if whole is None else [verdict_of(whole)]
    subgroups: list[SubgroupLoss] = []
    of_divergence = iter(
        judge_divergences([gate for gate in recipe.gates if isinstance(gate, DivergenceGate)], candidate, floor=floor)
    )
    for gate in recipe.gates:
        match gate:
            case ScoreGate():
                verdicts.append(scores[gate.task])
            case ProbesGate():
                verdicts.append(judge_probes(gate, probes, reference, candidate))
            case TruncationGate():
                verdicts.append(judge_truncation(gate, reference, candidate, recipe, beyond))
            case VerbosityGate():
                verdicts.append(judge_verbosity(gate, reference, candidate, recipe))
            case SubgroupsGate():
                verdict, losses = judge_subgroups(gate, recipe, reference, candidate, scores)
                verdicts += [] if verdict is None else [verdict]
                subgroups += losses
            case EffectiveLengthGate():
                verdicts.append(judge_effective_length(gate, reference, candidate, recipe))
            case DivergenceGate():
                verdicts.append(next(of_divergence))
            case AcceptanceGate():
                verdicts.append(judge_acceptance(gate, reference, candidate, recipe.level))
    return verdicts, whole, subgroups


def _overall(verdicts: Sequence[Verdict], *, asks_tasks: bool) -> Overall:
    """The worst verdict that counts; never PASS on divergence alone."""
    counted = [v.status for v in verdicts if v.has_say]
    deciding = ("score ", WHOLE) if asks_tasks else DIVERGENCE
    if not any(v.gate.startswith(deciding) and v.has_say for v in verdicts):
        counted.append("NOT MEASURED")
    worst = min(counted, key=SEVERITY.index)
    return "not failed" if worst == "PASS" and not asks_tasks else worst
