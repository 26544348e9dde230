"""Limits: what the records of a run do *not* show, each found by looking at them.

A limit is a function `Run -> sentence or None`; it speaks only while its condition holds in the records, and never from
goodwill. `LIMITS` is the order in which a reader meets them: first what weakens the numbers that are there, then what is
missing altogether. Their English is in `sentences/limits.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from statistics import NormalDist

from assay.quantities import capital, percent_of_events, percent_short, points
from assay.records.divergence import FEWEST_TEXTS
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.probe import find_probes
from assay.records.speed import SpeedRow
from assay_evaluate.statistics.item_pairs import find_task, pair_items
from assay_evaluate.statistics.rates import TYPICAL_FAULT, trials_needed
from assay_reports.run import UNQUANTIZED_LABELS, Run
from assay_reports.schema import Limit
from assay_reports.sentences import limits as english
from assay_reports.text import and_list, count_of, grouped

GENERATED_KINDS = ("arithmetic", "needle", "tools")
UNQUANTIZED_BITS = 16
"""`Measurement.weight_bits` of what is not quantized."""
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"


def find_limits(run: Run) -> tuple[Limit, ...]:
    """Every limit whose condition holds, in the order of `LIMITS`."""
    texts = ((key, function(run)) for key, function in LIMITS.items())
    return tuple(Limit(key=key, text=text) for key, text in texts if text is not None)


def _with_entries(template: str, entries: Iterable[str]) -> str | None:
    """None: there is no entry."""
    joined = "; ".join(entries)
    return template.format(entries=joined) if joined else None


def _with_labels(template: str, measurements: Iterable[Measurement]) -> str | None:
    """None: there is no measurement."""
    labels = [m.label for m in measurements]
    return template.format(labels=and_list(labels)) if labels else None


# ------------------------------------------------------------------------------------------------ nothing there at all
def unmeasured(run: Run) -> str | None:
    return None if run.measurements else english.UNMEASURED


def screened_out(run: Run) -> str | None:
    """What was excluded and never measured after all."""
    measured = {measurement.label for measurement in run.measurements}
    entries = [
        english.SCREENED_OUT_ENTRY.format(label=label, reason=reason)
        for label, reason in run.screened_out.items()
        if label not in measured
    ]
    return _with_entries(english.SCREENED_OUT, entries)


def not_measured(run: Run) -> str | None:
    gaps = []
    for m in run.measurements:
        gaps += [((what, reason), m.label) for what, reason in sorted(m.not_measured.items())]
        gaps += [
            ((task.task, task.note or english.NO_REASON), m.label)
            for task in m.tasks
            if task.accuracy is None and task.task not in m.not_measured
        ]
    return _with_entries(
        english.NOT_MEASURED,
        (
            english.NOT_MEASURED_ENTRY.format(what=what, labels=and_list(labels), reason=reason)
            for (what, reason), labels in grouped(gaps).items()
        ),
    )


def gates_not_before(run: Run) -> str | None:
    """Who chooses the limits after the scores are known can let anything pass."""
    late = run.gates.late if run.gates is not None else None
    return english.GATES_NOT_BEFORE.format(late=capital(late)) if late else None


def serving_faults(run: Run) -> str | None:
    """Every finding, once: of the reference it stands in every candidate's verdicts."""
    findings = () if run.gates is None else run.gates.serving
    return _with_entries(english.SERVING_FAULTS, dict.fromkeys(f"{finding.task} ({finding.clause})" for finding in findings))


def serving_not_looked_at(run: Run) -> str | None:
    """Of records from before replies kept what they say of their serving."""
    if run.gates is None or not run.gates.not_looked_at:
        return None
    rules = dict.fromkeys(rule for rules in run.gates.not_looked_at.values() for rule in rules)
    return english.SERVING_NOT_LOOKED_AT.format(labels=", ".join(run.gates.not_looked_at), rules=", ".join(rules))


# ------------------------------------------------------------------------------------------------ how sure the scores are
def sample_sizes(run: Run) -> str | None:
    reference = run.reference
    if reference is None:
        return None
    entries = []
    for task in reference.tasks:
        pairs = [pair_items(task, other) for m in run.candidates if (other := find_task(m, task.task)) is not None]
        effects = [(len(set(pair.items)), pair.detectable()) for pair in pairs if pair.n]
        if effects:
            num_items, effect = max(effects, key=lambda entry: entry[1])
            missed = _missed(task, reference.label, effect)
            entries.append(english.SAMPLE_SIZE.format(task=task.task, num_items=num_items, missed=missed))
    return _with_entries(english.SAMPLE_SIZES, entries)


def _missed(task: TaskResult, reference: str, effect: float) -> str:
    """Which loss goes unnoticed; any, where the reference has less than that to lose."""
    score = None if task.accuracy is None else task.accuracy.value
    if score is not None and score - (task.chance or 0.0) < effect:
        return english.NO_LOSS_SEEN.format(reference=reference, score=percent_short(score))
    return english.LOSS_MISSED.format(points=points(effect))


def selection(run: Run) -> str | None:
    """What comparing several candidates does to the one that looks best. None: there is one, or none was scored."""
    labels, reference = [m.label for m in run.candidates], run.reference
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
    return english.SELECTION.format(
        number=number, points=points(best_of(number) * middle), share=percent_short(min(1.0, number * alpha))
    )


def best_of(number: int) -> float:
    """Expected maximum of so many standard normal values, by the mean of its quantiles."""
    steps = 2000
    return sum(NormalDist().inv_cdf(((step + 0.5) / steps) ** (1 / number)) for step in range(steps)) / steps


def one_seed(run: Run) -> str | None:
    scored = [task for m in run.measurements for task in m.tasks if task.accuracy is not None]
    once = list(dict.fromkeys(task.task for task in scored if task.num_samples == 1))
    if not once:
        return None
    is_all = all(task.num_samples == 1 for task in scored)
    seeds = sorted({str(seed) for m in run.measurements if (seed := m.suite_recipe.get("seed")) is not None})
    items = english.EACH_ITEM if is_all else english.EACH_ITEM_OF.format(tasks=and_list(once))
    return english.ONE_SEED.format(items=items, seeds=english.SEED.format(seeds=", ".join(seeds)) if seeds else "")


def which_items(run: Run) -> str | None:
    """None: no score was judged, or before verdicts recorded it."""
    scores = [] if run.gates is None else [v for v in run.gates.verdicts if v.estimand is not None]
    names = {v.gate: v.title or v.gate.removeprefix("score ") for v in scores}
    these = list(dict.fromkeys(names[v.gate] for v in scores if v.estimand == "these_items"))
    of_clusters = list(dict.fromkeys(names[v.gate] for v in scores if v.estimand == "these_clusters"))
    such = list(dict.fromkeys(name for name in names.values() if name not in {*these, *of_clusters}))
    if not (these or of_clusters):
        return english.SUCH_ITEMS_ONLY if such else None
    claims = [(these, english.THESE_ITEMS), (of_clusters, english.THESE_CLUSTERS), (such, english.SUCH_ITEMS)]
    parts = [english.WHICH_ITEMS_PART.format(tasks=and_list(tasks), claim=claim) for tasks, claim in claims if tasks]
    return english.WHICH_ITEMS.format(parts=english.WHICH_ITEMS_BETWEEN.join(parts))


def truncation(run: Run) -> str | None:
    return _with_entries(
        english.TRUNCATION,
        (
            english.TRUNCATED.format(
                number=task.num_truncated,
                total=task.num_items,
                label=m.label,
                task=task.task,
                budget=english.NO_BUDGET if task.max_tokens is None else english.BUDGET.format(tokens=task.max_tokens),
                reasons=reasons_of_cuts(task),
            )
            for m in run.measurements
            for task in m.tasks
            if task.num_truncated
        ),
    )


def reasons_of_cuts(task: TaskResult) -> str:
    """Cuts that a greater budget would not mend, or that the server did not admit."""
    counts = {reason: number for reason, number in task.truncated_by.items() if reason in english.TRUNCATED_BY}
    return "".join(f", {counts[reason]} {words}" for reason, words in english.TRUNCATED_BY.items() if reason in counts)


def failures(run: Run) -> str | None:
    return _with_entries(
        english.FAILURES,
        (
            english.FAILED.format(number=task.num_failed, total=task.num_items, label=m.label, task=task.task)
            + (english.USUAL_ERROR.format(error=task.usual_error) if task.usual_error else "")
            for m in run.measurements
            for task in m.tasks
            if task.num_failed
        ),
    )


# ------------------------------------------------------------------------------------------------ what was served
def foreign_reference(run: Run) -> str | None:
    if run.foreign_reference is None or run.reference is None:
        return None
    return english.FOREIGN_REFERENCE.format(reference=run.reference.label, how=run.foreign_reference)


def quantized_reference(run: Run) -> str | None:
    """Of one that is quantized as its family is, or was made here. A folder whose weights are in 16 bits is not quantized."""
    reference = run.reference
    if reference is None or reference.label in UNQUANTIZED_LABELS or run.foreign_reference is not None:
        return None
    if reference.weight_bits == UNQUANTIZED_BITS or reference.imported is not None:
        return None
    measured = [m.label for m in run.measurements if m.divergence is not None or any(task.accuracy for task in m.tasks)]
    source = next((label for label in measured if label in UNQUANTIZED_LABELS), None)
    distance = english.SOURCE_MEASURED.format(source=source) if source else english.SOURCE_NOT_MEASURED
    return english.QUANTIZED_REFERENCE.format(reference=reference.label, distance=distance)


def emulated(run: Run) -> str | None:
    return _with_labels(english.EMULATED, (m for m in run.measurements if m.fingerprint.emulated))


def native_kernels(run: Run) -> str | None:
    """What `assay diagnose gpu-check` found, where native kernels ran. It served a small model: of this one it says nothing."""
    check = run.gpu_check
    if check is None or check.gpu is None or not any(m.fingerprint.emulated is False for m in run.measurements):
        return None
    if any(check.gpu not in m.fingerprint.hardware.get("gpus", "") for m in run.measurements):
        return english.NATIVE_KERNELS_ELSEWHERE.format(gpu=check.gpu)
    by_outcome = grouped((result.outcome, result.precision) for result in check.formats)
    outcomes = "; ".join(f"{outcome}: {and_list(names)}" for outcome, names in by_outcome.items())
    return english.NATIVE_KERNELS.format(gpu=check.gpu, date=check.started[:10], outcomes=outcomes)


def second_rounding(run: Run) -> str | None:
    """vLLM's `requant_weight_ue8m0_inplace`: with the variable at its default, 1, it changes what was in the files."""
    return _with_labels(
        english.SECOND_ROUNDING,
        (
            m
            for m in run.measurements
            if m.fingerprint.emulated is False
            and "gpus" in m.fingerprint.hardware
            and m.fingerprint.environment.get(E8M0, "1") != "0"
        ),
    )


def unknown_kernels(run: Run) -> str | None:
    asked_here = (m for m in run.measurements if m.imported is None)
    unnamed = (m for m in asked_here if m.fingerprint.emulated is not True and not m.fingerprint.kernels)
    return _with_labels(english.UNKNOWN_KERNELS, unnamed)


def imported(run: Run) -> str | None:
    """What no file of another harness says of how its scores came about."""
    sides = [(m.label, m.imported) for m in run.measurements if m.imported is not None]
    if not sides:
        return None
    harnesses = dict.fromkeys(harness for _, source in sides for harness in source.harnesses)
    by_what = grouped((what, label) for label, source in sides for what in source.not_known)
    not_known = (
        what if len(labels) == len(sides) else english.IMPORTED_NOT_KNOWN.format(what=what, labels=and_list(labels))
        for what, labels in by_what.items()
    )
    return english.IMPORTED.format(harnesses=", ".join(harnesses), not_known=", ".join(not_known))


def external_server(run: Run) -> str | None:
    return _with_labels(english.EXTERNAL_SERVER, (m for m in run.measurements if m.fingerprint.server == "external"))


def unclean_versions(run: Run) -> str | None:
    versions = {
        f"{name} {version}"
        for m in run.measurements
        for name, version in m.fingerprint.versions.items()
        if not version or any(word in version.lower() for word in ("dirty", "unknown", "dev"))
    }
    return english.UNCLEAN_VERSIONS.format(versions=", ".join(sorted(versions))) if versions else None


def speculation_off(run: Run) -> str | None:
    with_mtp = {name for name, plan in run.plans.items() if plan.keeps_mtp}
    idle = (m for m in run.measurements if m.label in with_mtp and m.fingerprint.speculation is None)
    return _with_labels(english.SPECULATION_OFF, idle)


# ------------------------------------------------------------------------------------------------ divergence
def no_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor
    if not run.measurements or (floor is not None and floor.divergence is not None):
        return None
    if floor is None:
        return english.NO_REPEAT
    if all(m.divergence is None for m in run.candidates):
        return None
    return english.NO_NOISE_FLOOR.format(reason=floor.not_measured.get("divergence", english.NO_REASON))


def zero_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor.divergence if run.noise_floor else None
    return english.ZERO_NOISE_FLOOR if floor is not None and floor.kl_mean.value <= 0 else None


def kl_lower_bound(run: Run) -> str | None:
    divergences = [m.divergence for m in run.candidates if m.divergence is not None]
    tail = max((d.tail_mass_mean for d in divergences), default=0.0)
    if tail <= 0:
        return None
    return english.KL_LOWER_BOUND.format(top_k=min(d.top_k for d in divergences), share=percent_of_events(tail))


def divergence_direction(run: Run) -> str | None:
    return english.DIVERGENCE_DIRECTION if any(m.divergence is not None for m in run.candidates) else None


def few_texts(run: Run) -> str | None:
    few = dict.fromkeys(
        (drift.num_documents, english.HELD_OUT_TEXT if drift.texts == "held_out" else english.SAMPLED_TEXT)
        for m in run.measurements
        for drift in (() if m.divergence is None else m.divergence.drift)
        if drift.texts in {"all", "held_out"} and drift.num_documents < FEWEST_TEXTS
    )
    if not few:
        return None
    texts = and_list([count_of(number, kind) for number, kind in few])
    sentence = english.FEW_TEXTS.format(texts=texts, least=FEWEST_TEXTS)
    return sentence + (english.FEW_SAMPLED if any(kind == english.SAMPLED_TEXT for _, kind in few) else "")


def not_sampled(run: Run) -> str | None:
    gaps = [m.divergence.gap_of_unsampled for m in run.measurements if m.divergence is not None]
    worst = max((gap for gap in gaps if gap is not None), key=lambda gap: abs(gap.value), default=None)
    return None if worst is None else english.NOT_SAMPLED.format(gap=worst.value, low=worst.low, high=worst.high)


def measurement_notes(run: Run) -> str | None:
    by_note = grouped((note, m.label) for m in run.measurements for note in m.notes)
    return _with_entries(
        english.MEASUREMENT_NOTES,
        (english.MEASUREMENT_NOTE.format(note=note, labels=", ".join(labels)) for note, labels in by_note.items()),
    )


def non_finite(run: Run) -> str | None:
    return _with_entries(
        english.NON_FINITE,
        (
            english.NON_FINITE_ENTRY.format(number=d.num_non_finite, total=d.num_positions, label=m.label)
            for m in run.measurements
            if (d := m.divergence) is not None and d.num_non_finite
        ),
    )


def acceptance_interval(run: Run) -> str | None:
    return _with_labels(
        english.ACCEPTANCE_INTERVAL,
        (
            m
            for m in run.measurements
            if m.acceptance is not None and m.acceptance.num_draft_tokens and m.acceptance.rate_standard_error is None
        ),
    )


# ------------------------------------------------------------------------------------------------ checkpoints
def precisions_by_shape(run: Run) -> str | None:
    return _with_entries(english.PRECISIONS_BY_SHAPE, run.choices)


def verification_gaps(run: Run) -> str | None:
    gaps = [f"{name}: {what}" for name, record in sorted(run.verifications.items()) for what in record.not_checked]
    gaps += [english.NOT_VERIFIED.format(label=name) for name in sorted(run.plans) if name not in run.verifications]
    return _with_entries(english.VERIFICATION_GAPS, gaps)


def verification_stale(run: Run) -> str | None:
    return _with_labels(
        english.VERIFICATION_STALE,
        (
            m
            for m in run.measurements
            if m.label in run.verifications and run.verifications[m.label].checkpoint_sha256 != m.checkpoint_sha256
        ),
    )


# ------------------------------------------------------------------------------------------------ what was not asked
def generated_questions(run: Run) -> str | None:
    names = sorted({task.task for m in run.measurements for task in m.tasks if task.kind in GENERATED_KINDS})
    return english.GENERATED_QUESTIONS.format(tasks=and_list(names)) if names else None


def languages(run: Run) -> str | None:
    spoken = sorted({item.language for item in _answered(run, but=("imported",))})
    return english.LANGUAGES.format(languages=", ".join(spoken)) if spoken else None


def _answered(run: Run, but: Collection[str] = ()) -> list[ItemResult]:
    """but: kinds of tasks that are left out."""
    tasks = (task for m in run.measurements for task in m.tasks if task.kind not in but)
    return [item for task in tasks for item in task.items if item.correct is not None]


def context_length(run: Run) -> str | None:
    longest = max(((item.prompt_tokens or 0) + (item.output_tokens or 0) for item in _answered(run)), default=0)
    positions = [plan.config.get("max_position_embeddings") for plan in run.plans.values()]
    allowed = max((value for value in positions if isinstance(value, int)), default=0)
    return english.CONTEXT_LENGTH.format(longest=longest, allowed=allowed) if 0 < longest < allowed else None


def kinds_of_work(run: Run) -> str | None:
    if not run.measurements:
        return None
    names = " ".join(task.task.lower() for m in run.measurements for task in m.tasks)
    is_public = any(task.kind in {"lm_eval", "imported"} for m in run.measurements for task in m.tasks)
    missing = [] if is_public else [english.PUBLIC_BENCHMARKS]
    missing += [kind for word, kind in english.OTHER_KINDS.items() if word not in names]
    return english.KINDS_OF_WORK.format(kinds=", ".join(missing)) if missing else None


# ------------------------------------------------------------------------------------------------ speed and the choice
def speed_unmeasured(run: Run) -> str | None:
    """Of everybody, or of those that have no row that may be compared."""
    if not run.measurements:
        return None
    known = {row.checkpoint for row in _comparable(run) if row.origin != "predicted"}
    measured = [m for m in run.measurements if not m.is_noise_floor]
    missing = [m.label for m in measured if m.label not in known and not (m.is_reference and "reference" in known)]
    if not missing:
        return None
    if not known:
        return english.NO_SPEED.format(what=english.NOTHING_SAYS if run.choice is None else english.CHOSEN_BY)
    reasons = {} if run.speed is None else {gap.checkpoint: gap.reason for gap in run.speed.not_measured}
    by_reason = grouped((reasons.get(label, english.NOBODY_MEASURED), label) for label in missing)
    return _with_entries(
        english.SPEED_UNMEASURED,
        (english.SPEED_UNMEASURED_ENTRY.format(labels=and_list(labels), reason=reason) for reason, labels in by_reason.items()),
    )


def speed_conditions(run: Run) -> str | None:
    """What the measured rows do not reach beyond."""
    rows = [row for row in _comparable(run) if row.origin == "measured"]
    if not rows:
        return None
    conditions = [
        and_list(sorted({row.hardware for row in rows})),
        english.PROMPT_KINDS.format(kinds=and_list(sorted({row.prompts for row in rows}))),
    ]
    for template, lengths in (
        (english.PROMPT_LENGTH, [row.prompt_tokens for row in rows]),
        (english.REPLY_LENGTH, [row.output_tokens for row in rows]),
    ):
        if known := [length for length in lengths if length is not None]:
            conditions.append(template.format(lengths=_range(f"{min(known):,.0f}", f"{max(known):,.0f}")))
    streams = [row.concurrency for row in rows]
    repeats = [len(row.repeats) for row in rows]
    starts = [len({repeat.server_start for repeat in row.repeats}) for row in rows]
    return english.SPEED_CONDITIONS.format(
        conditions=", ".join(conditions),
        in_flight=_range(f"{min(streams)}", f"{max(streams)}"),
        starts=(english.SEVERAL_STARTS if min(starts) > 1 else english.ONE_START).format(
            repeats=_at_least(repeats), starts=_at_least(starts)
        ),
        cpu=english.ON_A_CPU if any(row.num_gpus == 0 for row in rows) else "",
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _at_least(counts: list[int]) -> str:
    return f"{min(counts)}{english.OR_MORE if len(set(counts)) > 1 else ''}"


def speed_from_elsewhere(run: Run) -> str | None:
    by_origin = grouped(
        (f"{row.origin} ({row.source})", row.checkpoint) for row in _comparable(run) if row.origin != "measured"
    )
    return _with_entries(
        english.SPEED_FROM_ELSEWHERE,
        (f"{and_list(list(dict.fromkeys(labels)))}: {origin}" for origin, labels in by_origin.items()),
    )


def speed_outdated(run: Run) -> str | None:
    return english.SPEED_OUTDATED.format(labels=and_list(run.old_speeds)) if run.old_speeds else None


def choice_outdated(run: Run) -> str | None:
    return None if run.choice_outdated is None else english.CHOICE_OUTDATED.format(reason=run.choice_outdated)


def _comparable(run: Run) -> list[SpeedRow]:
    return [row for row in (() if run.speed is None else run.speed.rows) if row.is_comparable]


# ------------------------------------------------------------------------------------------------ probes and deployments
def no_load(run: Run) -> str | None:
    if not run.measurements or any("load" in m.suite_recipe for m in run.measurements):
        return None
    requests = min(sum(task.num_items - task.num_failed for task in m.tasks) for m in run.measurements)
    unprobed = [m.label for m in run.measurements if find_probes(run.probes, m) is None]
    if not unprobed:
        return None
    rate = percent_of_events(min(1.0, 3 / max(requests, 1)))
    return english.NO_LOAD.format(
        of="" if len(unprobed) == len(run.measurements) else english.NO_LOAD_OF.format(labels=", ".join(unprobed)),
        bound=english.NO_LOAD_BOUND.format(requests=requests, rate=rate) if requests else "",
    )


def probes_not_run(run: Run) -> str | None:
    return _with_entries(
        english.PROBES_NOT_RUN,
        (
            english.PROBE.format(probe=result.name, label=report.label, reason=result.reason)
            for report in run.probes
            for result in report.results
            if result.status == "not_run"
        ),
    )


def probes_not_judged(run: Run) -> str | None:
    if run.gates is not None and any(gate["kind"] == "probes" for gate in run.gates.gate_recipe.get("gates", ())):
        return None
    return _with_entries(
        english.PROBES_NOT_JUDGED,
        (
            english.PROBE.format(probe=alarm.name, label=report.label, reason=alarm.reason)
            for report in run.probes
            for alarm in report.alarms
        ),
    )


def rare_faults(run: Run) -> str | None:
    needed = trials_needed(TYPICAL_FAULT)
    few = [
        f"{result.trials:,} of {report.label}"
        for report in run.probes
        if (result := report.result("garble")) is not None and result.trials is not None and result.trials < needed
    ]
    if not few:
        return None
    return english.RARE_FAULTS.format(rate=TYPICAL_FAULT * 1e4, needed=needed, made=", ".join(few))


def nothing_scored_there(run: Run) -> str | None:
    places = [english.DEPLOYED.format(label=record.label, profile=record.profile) for record in run.deployments]
    return english.NOTHING_SCORED_THERE.format(places=", ".join(places)) if places else None


def deployments_left_out(run: Run) -> str | None:
    places = [english.DEPLOYED.format(label=record.label, profile=record.profile) for record in run.old_deployments]
    return english.DEPLOYMENTS_LEFT_OUT.format(places=", ".join(places)) if places else None


LIMITS: dict[str, Callable[[Run], str | None]] = {
    function.__name__: function
    for function in (
        unmeasured, screened_out, not_measured, serving_faults, gates_not_before, imported, emulated, foreign_reference,
        quantized_reference, second_rounding,
        native_kernels, sample_sizes, selection, which_items, one_seed, measurement_notes, truncation, failures,
        generated_questions, kinds_of_work, languages, context_length, speed_unmeasured, speed_conditions,
        speed_from_elsewhere, speed_outdated, choice_outdated, no_load, probes_not_judged, probes_not_run,
        nothing_scored_there, deployments_left_out, rare_faults, divergence_direction, few_texts, kl_lower_bound,
        no_noise_floor, zero_noise_floor, not_sampled, non_finite, acceptance_interval, speculation_off, unknown_kernels,
        serving_not_looked_at, external_server, unclean_versions, precisions_by_shape, verification_gaps, verification_stale,
    )
}  # fmt: skip
"""Key -> limit, in a reader's order."""
