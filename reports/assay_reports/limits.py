"""Honest limits: what the records of a run do *not* show, each found by looking at them.

A limit is a function `Run -> sentence or None`; it speaks only while its condition holds in the records, and never from
goodwill. `LIMITS` is the order in which a reader meets them: first what weakens the numbers that are there, then what is
missing altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

from assay.quantities import percent_of_events, percent_short, points
from assay.records.divergence import FEWEST_TEXTS
from assay.records.measurement import ItemResult, Measurement, TaskResult, Truncation
from assay_evaluate.statistics.item_pairs import find_task, pair_items
from assay_reports.deployment_limits import deployments_left_out, nothing_scored_there
from assay_reports.probe_limits import no_load, probes_not_judged, probes_not_run, rare_faults
from assay_reports.run import UNQUANTIZED_LABELS, Run
from assay_reports.schema import Limit
from assay_reports.serving_limits import serving_faults, serving_not_looked_at
from assay_reports.speed_limits import (
    choice_outdated,
    speed_conditions,
    speed_from_elsewhere,
    speed_outdated,
    speed_unmeasured,
)

GENERATED_KINDS = ("arithmetic", "needle", "tools")


E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"


def find_limits(run: Run) -> tuple[Limit, ...]:
    """Every limit whose condition holds, in the order of `LIMITS`."""
    found = ((key, function(run)) for key, function in LIMITS.items())
    return tuple(Limit(key=key, text=text) for key, text in found if text is not None)


# ------------------------------------------------------------------------------------------------ nothing there at all
def unmeasured(run: Run) -> str | None:
    if run.measurements:
        return None
    return "Nothing was measured: there is no score, no divergence and no verdict for any checkpoint of this run."


def not_measured(run: Run) -> str | None:
    found: dict[tuple[str, str], list[str]] = {}
    for m in run.measurements:
        for what, why in sorted(m.not_measured.items()):
            found.setdefault((what, why), []).append(m.label)
        for task in m.tasks:
            if task.accuracy is None and task.task not in m.not_measured:
                found.setdefault((task.task, task.note or "no reason recorded"), []).append(m.label)
    gaps = [f"{what} of {_and(labels)} ({why})" for (what, why), labels in found.items()]
    return f"Asked for and not measured: {'; '.join(gaps)}." if gaps else None


def gates_not_before(run: Run) -> str | None:
    """Who chooses the limits after the scores are known can let anything pass."""
    late = run.gates.late if run.gates is not None else None
    return f"{late[0].upper()}{late[1:]}." if late else None


# ------------------------------------------------------------------------------------------------ how sure the scores are
def sample_sizes(run: Run) -> str | None:
    reference = run.reference
    if reference is None:
        return None
    parts = []
    for task in reference.tasks:
        effects = [effect for candidate in run.candidates if (effect := _detectable(task, candidate)) is not None]
        if effects:
            n, smallest = max(effects, key=lambda found: found[1])
            parts.append(f"{task.task}: {n} paired items, {_missed(task, reference.label, smallest)}")
    return f"Sample sizes (of the worst candidate): {'; '.join(parts)}." if parts else None


def selection(run: Run) -> str | None:
    """What comparing several candidates does to the one that looks best. None: there is one, or none was scored."""
    labels, reference = [one.label for one in run.candidates], run.reference
    if len(labels) < 2 or reference is None or run.gates is None:
        return None
    drops = [
        v.observed
        for v in run.gates.verdicts
        if v.gate.startswith("score ") and v.candidate in labels and v.observed is not None and v.status != "NOT MEASURED"
    ]
    if not drops:
        return None
    errors = sorted((drop.high - drop.low) / 2 / NormalDist().inv_cdf(0.5 + drop.level / 2) for drop in drops)
    middle, number = errors[len(errors) // 2] / math.sqrt(2), len(labels)  # they share the reference's replies: half of it
    alpha = (1 - drops[0].level) / 2
    return (
        f"{number} candidates were compared. If all were alike, the one that looks best on a task would look "
        f"{points(best_of(number) * middle)} points too good there (the middle of all tasks and candidates), and one of "
        f"{number} that each lost the margin would pass in up to {percent_short(min(1.0, number * alpha))}."
    )


def best_of(number: int) -> float:
    """Expected maximum of so many standard normal values, by the mean of its quantiles."""
    steps = 2000
    return sum(NormalDist().inv_cdf(((step + 0.5) / steps) ** (1 / number)) for step in range(steps)) / steps


def _missed(task: TaskResult, reference: str, effect: float) -> str:
    """Which loss goes unnoticed; any, where the reference has less than that to lose."""
    score = None if task.accuracy is None else task.accuracy.value
    if score is not None and score - (task.chance or 0.0) < effect:
        return f"no loss can be seen, for {reference} is right in {percent_short(score)} itself"
    return f"a loss of {points(effect)} points is missed 1 time in 5"


def _detectable(reference: TaskResult, candidate: Measurement) -> tuple[int, float] | None:
    task = find_task(candidate, reference.task)
    pairs = pair_items(reference, task) if task is not None else None
    if pairs is None or pairs.n == 0:
        return None
    return len(set(pairs.items)), pairs.detectable()


def one_seed(run: Run) -> str | None:
    scored = [task for m in run.measurements for task in m.tasks if task.accuracy is not None]
    once = list(dict.fromkeys(task.task for task in scored if task.num_samples == 1))
    if not once:
        return None
    is_all = all(task.num_samples == 1 for task in scored)
    seeds = sorted({str(m.suite_recipe.get("seed")) for m in run.measurements})
    item = "each item" if is_all else f"each item of {_and(once)}"
    return (
        f"Each checkpoint answered {item} once (seed {', '.join(seeds)}): the intervals cover other items and other replies "
        "to them, but nothing that all replies of a run share, such as a fault of the server."
    )


def which_items(run: Run) -> str | None:
    """None: no score was judged, or before verdicts recorded it."""
    scores = [] if run.gates is None else [one for one in run.gates.verdicts if one.estimand is not None]
    names = {one.gate: one.title or one.gate.removeprefix("score ") for one in scores}
    these = list(dict.fromkeys(names[one.gate] for one in scores if one.estimand == "these_items"))
    of_clusters = list(dict.fromkeys(names[one.gate] for one in scores if one.estimand == "these_clusters"))
    such = list(dict.fromkeys(name for name in names.values() if name not in {*these, *of_clusters}))
    if not (these or of_clusters):
        return "Intervals of score changes are for questions like these, and other replies to them." if such else None
    what = [
        (these, "for these questions only, and other replies to them"),
        (of_clusters, "for questions like these of the same groups (repositories, shared texts), not for other groups"),
        (such, "for questions like these"),
    ]
    parts = [f"on {_and(some)} are {claim}" for some, claim in what if some]
    return f"Intervals of score changes {'; those '.join(parts)}."


def truncation(run: Run) -> str | None:
    cut = [
        f"{task.num_truncated} of {task.num_items} for {m.label} in {task.task} "
        f"(budget {task.max_tokens} tokens{_reasons(task)})"
        for m in run.measurements
        for task in m.tasks
        if task.num_truncated
    ]
    return f"Replies cut off by the token budget are scored as they stand: {'; '.join(cut)}." if cut else None


def _reasons(task: TaskResult) -> str:
    """Cuts that a greater budget would not mend, or that the server did not admit."""
    words: dict[Truncation, str] = {
        "context": "ended by the context",
        "empty": "ended inside thinking",
        "reasoning_only": "with the answer in what the server calls thinking",
    }
    seen = [f"{task.truncated_by[reason]} {said}" for reason, said in words.items() if reason in task.truncated_by]
    return "".join(f", {one}" for one in seen)


def failures(run: Run) -> str | None:
    failed = [
        f"{t.num_failed} of {t.num_items} for {m.label} in {t.task}"
        + (f" (most often: {t.usual_error})" if t.usual_error else "")
        for m in run.measurements
        for t in m.tasks
        if t.num_failed
    ]
    return f"Items without a reply (infrastructure) are left out on both sides: {'; '.join(failed)}." if failed else None


# ------------------------------------------------------------------------------------------------ what was served
def quantized_reference(run: Run) -> str | None:
    reference = run.reference
    if reference is None or reference.label in UNQUANTIZED_LABELS:
        return None
    measured = [m.label for m in run.measurements if m.divergence is not None or any(task.accuracy for task in m.tasks)]
    source = next((label for label in measured if label in UNQUANTIZED_LABELS), None)
    beyond = (
        f"{source}, measured as well, shows how far that is from it" if source else "how far that is from it was not measured"
    )
    return (
        f"The reference is {reference.label}, not the unquantized model: a loss is a loss against {reference.label}; {beyond}."
    )


def emulated(run: Run) -> str | None:
    labels = _labels(m for m in run.measurements if m.fingerprint.emulated)
    return labels and (
        f"{labels} ran emulated (dequantized weights, plain arithmetic): this scores the number format, not a kernel that "
        "would be deployed, and says nothing about its speed or its bugs."
    )


def native_kernels(run: Run) -> str | None:
    """What `assay gpu-check` found, where native kernels ran. It served a small model: of this one it says nothing directly."""
    check, labels = run.gpu_check, _labels(m for m in run.measurements if m.fingerprint.emulated is False)
    if check is None or check.gpu is None or labels is None:
        return None
    if any(check.gpu not in m.fingerprint.hardware.get("gpus", "") for m in run.measurements):
        return f"Native kernels were compared with emulation on {check.gpu}, which is not the GPU that answered here."
    found: dict[str, list[str]] = {}
    for one in check.formats:
        found.setdefault(one.outcome, []).append(one.precision)
    said = "; ".join(f"{outcome}: {_and(names)}" for outcome, names in found.items())
    return (
        f"Native kernels were compared with emulation on one {check.gpu} and a small model only ({check.started[:10]}; {said})."
    )


def second_rounding(run: Run) -> str | None:
    """vLLM's `requant_weight_ue8m0_inplace`: with the variable at its default, 1, it changes what was in the files."""
    labels = _labels(
        m
        for m in run.measurements
        if m.fingerprint.emulated is False
        and "gpus" in m.fingerprint.hardware
        and m.fingerprint.environment.get(E8M0, "1") != "0"
    )
    return labels and (
        f"{labels} ran with {E8M0} on: weights in FP8 blocks that DeepGEMM takes are rounded once more when they are loaded, "
        "to scales that are powers of two. A divergence from such a reference holds that rounding of the reference, too."
    )


def unknown_kernels(run: Run) -> str | None:
    labels = _labels(m for m in run.measurements if m.fingerprint.emulated is not True and not m.fingerprint.kernels)
    return labels and f"Which kernels ran is not known for {labels}: the server's log named none."


def external_server(run: Run) -> str | None:
    labels = _labels(m for m in run.measurements if m.fingerprint.server == "external")
    return labels and f"{labels} ran on a server that assay did not start: its flags and versions are as told, not as seen."


def unclean_versions(run: Run) -> str | None:
    found = {
        f"{name} {version}"
        for m in run.measurements
        for name, version in m.fingerprint.versions.items()
        if not version or any(word in version.lower() for word in ("dirty", "unknown", "dev"))
    }
    return f"Not released versions, hard to reproduce: {', '.join(sorted(found))}." if found else None


def speculation_off(run: Run) -> str | None:
    with_mtp = {name for name, plan in run.plans.items() if plan.keeps_mtp}
    labels = _labels(m for m in run.measurements if m.label in with_mtp and m.fingerprint.speculation is None)
    return labels and f"{labels} carries an MTP head that was not used while measuring: nothing shows that it drafts well."


# ------------------------------------------------------------------------------------------------ divergence
def no_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor
    if not run.measurements or (floor is not None and floor.divergence is not None):
        return None
    if floor is None:
        return "The reference was not compared with its own repeat: how much of a difference is mere noise is not known."
    if all(m.divergence is None for m in run.candidates):
        return None
    why = floor.not_measured.get("divergence", "no reason recorded")
    return f"The divergence of the reference's repeat was not measured ({why}): how much divergence is mere noise is not known."


def zero_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor.divergence if run.noise_floor else None
    if floor is None or floor.kl_mean.value > 0:
        return None
    return (
        "The reference repeats itself exactly on this machine (noise floor 0 nats), so divergence is not given as a multiple "
        "of it; on GPUs under load the floor is above zero."
    )


def kl_lower_bound(run: Run) -> str | None:
    found = [m.divergence for m in run.candidates if m.divergence is not None]
    tail = max((d.tail_mass_mean for d in found), default=0.0)
    if tail <= 0:
        return None
    return (
        f"KL, lower bound: what lies outside the reference's top {min(d.top_k for d in found)} tokens is one bucket, with up "
        f"to {percent_of_events(tail)} of the probability on average; it can fail a checkpoint and passes none. KL, unbiased, "
        "has no such bias and more noise; on held-out text and structural tokens there is none."
    )


def divergence_direction(run: Run) -> str | None:
    if all(m.divergence is None for m in run.candidates):
        return None
    return (
        "KL and agreement say how much a candidate differs from the reference, not whether it is worse: a large divergence "
        "fails it, one that is not shown to be small keeps it from a PASS, and a small one does not show that its answers are "
        "as good."
    )


SAMPLED = "sampled text"


def few_texts(run: Run) -> str | None:
    found = [
        (drift.num_documents, "held-out text" if drift.texts == "held_out" else SAMPLED)
        for m in run.measurements
        for drift in (() if m.divergence is None else m.divergence.drift)
        if drift.texts in {"all", "held_out"} and drift.num_documents < FEWEST_TEXTS
    ]
    if not found:
        return None
    counted = [f"{number} {what}{'' if number == 1 else 's'}" for number, what in dict.fromkeys(found)]
    unchecked = " Whether so few were sampled from the reference is not checked either."
    return (
        f"Divergence over {_and(counted)} has no interval, and no gate "
        f"judges it: that takes {FEWEST_TEXTS} texts.{unchecked if any(what == SAMPLED for _, what in found) else ''}"
    )


def not_sampled(run: Run) -> str | None:
    found = [m.divergence.gap_of_unsampled for m in run.measurements if m.divergence is not None]
    worst = max((gap for gap in found if gap is not None), key=lambda gap: abs(gap.value), default=None)
    if worst is None:
        return None
    return (
        f"The texts are not what the reference samples: their tokens are {worst.value:+.2f} nats ({worst.low:+.2f} to "
        f"{worst.high:+.2f}) more surprising to it than its own entropy. The server's sampler is at fault, or it does not give "
        "natural logarithms of its probabilities; the unbiased mean is not an estimate of anything, and no KL passes a gate."
    )


def measurement_notes(run: Run) -> str | None:
    found: dict[str, list[str]] = {}
    for measurement in run.measurements:
        for note in measurement.notes:
            found.setdefault(note, []).append(measurement.label)
    notes = [f"{note} ({', '.join(labels)})" for note, labels in found.items()]
    return f"Measured in another way than usual: {'; '.join(notes)}." if notes else None


def non_finite(run: Run) -> str | None:
    found = [
        f"{d.num_non_finite} of {d.num_positions} positions for {m.label}"
        for m in run.measurements
        if (d := m.divergence) is not None and d.num_non_finite
    ]
    return f"Positions without a finite log-probability are outside the means: {'; '.join(found)}." if found else None


def acceptance_interval(run: Run) -> str | None:
    labels = _labels(
        m
        for m in run.measurements
        if m.acceptance is not None and m.acceptance.num_draft_tokens and m.acceptance.rate_standard_error is None
    )
    return labels and (
        f"The MTP acceptance of {labels} is known in total only, not by reply: intervals take its drafted tokens for "
        "independent and are too narrow if replies differ; they are not intervals of replies."
    )


# ------------------------------------------------------------------------------------------------ checkpoints
def precisions_by_shape(run: Run) -> str | None:
    if not run.choices:
        return None
    return f"Precisions were chosen by what the checkpoint's shapes allow: {'; '.join(run.choices)}."


def verification_gaps(run: Run) -> str | None:
    gaps = [f"{name}: {what}" for name, record in sorted(run.verifications.items()) for what in record.not_checked]
    gaps += [f"{name}: not verified at all" for name in sorted(run.plans) if name not in run.verifications]
    return f"Not checked in the checkpoints: {'; '.join(gaps)}." if gaps else None


def verification_stale(run: Run) -> str | None:
    labels = _labels(
        m
        for m in run.measurements
        if m.label in run.verifications and run.verifications[m.label].checkpoint_sha256 != m.checkpoint_sha256
    )
    return labels and f"What was verified is not what was measured (other hashes): {labels}."


# ------------------------------------------------------------------------------------------------ what was not asked
def generated_questions(run: Run) -> str | None:
    names = sorted({task.task for m in run.measurements for task in m.tasks if task.kind in GENERATED_KINDS})
    if not names:
        return None
    return (
        f"The items of {_and(names)} are generated by assay: scores compare checkpoints with each other, and with no public "
        "benchmark or leaderboard."
    )


def languages(run: Run) -> str | None:
    seen = sorted({item.language for item in _answered(run)})
    return f"Languages measured: {', '.join(seen)}; nothing is known of any other." if seen else None


def _answered(run: Run) -> list[ItemResult]:
    return [item for m in run.measurements for task in m.tasks for item in task.items if item.correct is not None]


def context_length(run: Run) -> str | None:
    lengths = [(item.prompt_tokens or 0) + (item.output_tokens or 0) for item in _answered(run)]
    longest = max(lengths, default=0)
    allowed = max((_max_positions(plan.config) for plan in run.plans.values()), default=0)
    if not longest or longest >= allowed:
        return None
    return (
        f"The longest text seen has {longest:,} tokens; the model accepts {allowed:,}, and nothing is known beyond {longest:,}."
    )


def _max_positions(config: dict[str, object]) -> int:
    value = config.get("max_position_embeddings", 0)
    return value if isinstance(value, int) else 0


def kinds_of_work(run: Run) -> str | None:
    if not run.measurements:
        return None
    kinds = {task.kind for m in run.measurements for task in m.tasks}
    names = " ".join(task.task.lower() for m in run.measurements for task in m.tasks)
    missing = [] if "lm_eval" in kinds else ["public benchmarks (GSM8K, MATH, GPQA...)"]
    missing += [what for word, what in (("ruler", "RULER"), ("swe", "SWE-bench"), ("tool", "tool calls")) if word not in names]
    return f"Not part of this suite: {', '.join(missing)}." if missing else None


def _labels(measurements: Iterable[Measurement]) -> str | None:
    found = [m.label for m in measurements]
    return _and(found) if found else None


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LIMITS: dict[str, Callable[[Run], str | None]] = {
    "unmeasured": unmeasured,
    "not_measured": not_measured,
    "serving_faults": serving_faults,
    "gates_not_before": gates_not_before,
    "emulated": emulated,
    "quantized_reference": quantized_reference,
    "second_rounding": second_rounding,
    "native_kernels": native_kernels,
    "sample_sizes": sample_sizes,
    "selection": selection,
    "which_items": which_items,
    "one_seed": one_seed,
    "measurement_notes": measurement_notes,
    "truncation": truncation,
    "failures": failures,
    "generated_questions": generated_questions,
    "kinds_of_work": kinds_of_work,
    "languages": languages,
    "context_length": context_length,
    "speed_unmeasured": speed_unmeasured,
    "speed_conditions": speed_conditions,
    "speed_from_elsewhere": speed_from_elsewhere,
    "speed_outdated": speed_outdated,
    "choice_outdated": choice_outdated,
    "no_load": no_load,
    "probes_not_judged": probes_not_judged,
    "probes_not_run": probes_not_run,
    "nothing_scored_there": nothing_scored_there,
    "deployments_left_out": deployments_left_out,
    "rare_faults": rare_faults,
    "divergence_direction": divergence_direction,
    "few_texts": few_texts,
    "kl_lower_bound": kl_lower_bound,
    "no_noise_floor": no_noise_floor,
    "zero_noise_floor": zero_noise_floor,
    "not_sampled": not_sampled,
    "non_finite": non_finite,
    "acceptance_interval": acceptance_interval,
    "speculation_off": speculation_off,
    "unknown_kernels": unknown_kernels,
    "serving_not_looked_at": serving_not_looked_at,
    "external_server": external_server,
    "unclean_versions": unclean_versions,
    "precisions_by_shape": precisions_by_shape,
    "verification_gaps": verification_gaps,
    "verification_stale": verification_stale,
}
