"""Everything a report says, computed once from the records: `report.json` is this, and the other two are printed from it.

No number is typed by hand and none is computed in a template. Differences are reference minus candidate: + is a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.quantities import capital, points
from assay.recipes.calibrated.methods import SCALED_BY
from assay.recipes.family_names import split_layer
from assay.records.base import Interval
from assay.records.declared import INTERPRETER, SPECULATION, variant_note
from assay.records.divergence import Drift, Estimate
from assay.records.measurement import Divergence, ItemResult, Measurement, TaskResult
from assay.records.plan import Plan, TensorPlan
from assay.records.serving import EXTERNAL
from assay.records.verdict import Verdict
from assay.records.verification import Verification
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.clustered import clustered_proportion
from assay_evaluate.statistics.drafts import acceptance_difference
from assay_evaluate.statistics.item_pairs import accuracy_of, compare_output_tokens, find_task, pair_items, truncation_share
from assay_reports.find_limits import find_limits
from assay_reports.run import Run
from assay_reports.schema import (
    LanguageNumbers,
    PlanNumbers,
    Report,
    RoleNumbers,
    Row,
    TaskFlips,
    TaskNumbers,
    TimesFloor,
    VerificationNumbers,
)
from assay_reports.sentences import page as english
from assay_reports.text import count_of

TIMED = (
    "kl_mean", "kl_median", "kl_p90", "kl_p95", "kl_p99", "kl_p999", "kl_max", "kl_cvar95", "kl_unbiased_mean",
    "probability_change_rms",
)  # fmt: skip
"""Statistics of a `Drift` that grow from 0, so that a multiple means something."""
GROUPS = ("by_span", "by_confidence", "by_domain", "by_language", "by_part")


# ------------------------------------------------------------------------------------------------ building
def build_report(run: Run) -> Report:
    """The numbers of a run that has a reference measurement (`load_run` and `write_report` see to that)."""
    reference, gates = run.reference, run.gates
    assert reference is not None
    level = float(gates.gate_recipe.get("level", 0.95)) if gates else 0.95
    measured = {m.label: m for m in run.measurements}
    return Report(
        model=run.model,
        run=run.name,
        reference=reference.label,
        level=level,
        suite=reference.suite,
        suite_sha256=reference.suite_sha256,
        suite_recipe=reference.suite_recipe,
        gate_recipe=gates.gate_recipe if gates else None,
        gates_chosen=gates.chosen if gates else None,
        gates_registered=gates.registered_name if gates else None,
        rows=tuple(_row(run, reference, measurement, level) for measurement in run.measurements),
        verdicts=gates.verdicts if gates else (),
        published=gates.published if gates else (),
        limits=find_limits(run),
        plans=tuple(plan_numbers(plan) for plan in sorted(run.plans.values(), key=lambda p: (-p.bytes_out, p.precision))),
        verifications=tuple(
            verification_numbers(name, record, measured.get(name)) for name, record in sorted(run.verifications.items())
        ),
        calibrations=run.calibrations,
        fingerprint=reference.fingerprint,
        probes=run.probes,
        deployments=run.deployments,
        sensitivity=run.sensitivity,
        upgrade=run.upgrade,
        long_context=gates.long_context if gates else (),
        rankings=gates.rankings if gates else (),
        effective_lengths=gates.effective_lengths if gates else (),
        speed=run.speed,
        choice=run.choice,
    )


def _row(run: Run, reference: Measurement, measured: Measurement, level: float) -> Row:
    is_reference = measured is reference
    measurement = without_faulty_scores(run, measured)
    label, divergence = measurement.label, measurement.divergence
    floor = run.noise_floor.divergence if run.noise_floor else None
    has_floor = divergence is not None and floor is not None and floor.kl_mean.value > 0
    reason = english.IS_REFERENCE if is_reference else english.NOT_JUDGED_YET
    if not is_reference and run.gates is not None and label in run.gates.overall:
        reason = f"{run.gates.reasons.get(label, english.JUDGED_BEFORE)}."
    variant = None
    if measurement.is_variant:
        variant = variant_note(reference.label, measurement.declared, is_stated=measurement.fingerprint.server == EXTERNAL)
        reason = f"{capital(variant)}: {reason}"
    sides = reference.acceptance, measurement.acceptance
    scored = {task.task for task in measurement.tasks if task.accuracy is not None}
    sizes = measurement.checkpoint_bytes, reference.checkpoint_bytes
    return Row(
        label=label,
        kind="reference" if is_reference else ("noise floor" if measurement.is_noise_floor else "candidate"),
        status=None if is_reference else run.status(label),
        sentence=reason,
        checkpoint=portable_name(measurement.checkpoint),
        checkpoint_sha256=measurement.checkpoint_sha256,
        checkpoint_bytes=measurement.checkpoint_bytes,
        share_of_reference=None if sizes[0] is None or sizes[1] is None else sizes[0] / max(sizes[1], 1),
        tasks=tuple(
            task_numbers(
                None if is_reference else find_task(reference, task.task), task, level, run.verdict(label, f"score {task.task}")
            )
            for task in measurement.tasks
        ),
        divergence=divergence,
        kl_times_floor=divergence.kl_mean.value / floor.kl_mean.value if has_floor and divergence and floor else None,
        times_floor=times_floor(divergence, floor),
        flips=() if is_reference else flips(reference, measurement, level),
        reached=tuple(reached for reached in run.reached if reached.label == label and reached.task in scored),
        acceptance=measurement.acceptance,
        acceptance_drop=None
        if is_reference
        or SPECULATION in measurement.declared
        or sides[0] is None
        or sides[1] is None
        or not all(side and side.num_draft_tokens for side in sides)
        else acceptance_difference(sides[0], sides[1], level),
        emulated=measurement.fingerprint.emulated,
        checkpoint_flags=measurement.fingerprint.checkpoint_flags,
        kernels=measurement.fingerprint.kernels,
        not_measured=measurement.not_measured,
        declared=portable_declared(measurement.declared) if measurement.is_variant else {},
        variant=variant,
        folder=run.places.get(label),
        started=measurement.started,
        seconds=measurement.seconds,
    )


def without_faulty_scores(run: Run, measurement: Measurement) -> Measurement:
    """The measurement without the scores of tasks whose serving is at fault: they say nothing of its weights.

    Of the reference those alone that its own serving spoilt.
    """
    notes: dict[str, str] = {}
    for finding in () if run.gates is None else run.gates.serving:
        if finding.candidate == measurement.label or finding.at_fault == (measurement.label,):
            notes.setdefault(finding.task, english.SERVING_FAULT.format(clause=finding.clause))
    no_score = {"accuracy": None, "mean_score": None, "pass_at_k": None, "items": (), "tools": None, "swe": None}
    tasks = (
        task.model_copy(update={**no_score, "note": notes[task.task]}) if task.task in notes else task
        for task in measurement.tasks
    )
    return measurement.model_copy(update={"tasks": tuple(tasks)})


def portable_name(path: str) -> str:
    """The end of a path that says which checkpoint it is, without the folders of the machine: w4a16/checkpoint."""
    parts = Path(path).parts
    return "/".join(parts[-2:]) if parts and parts[-1] == "checkpoint" else (parts[-1] if parts else path)


def portable_declared(declared: Mapping[str, Any]) -> dict[str, Any]:
    """What a variant declares, its Python without the folders of the machine: vllm-next/bin/python."""
    if INTERPRETER not in declared:
        return dict(declared)
    return {**declared, INTERPRETER: "/".join(Path(str(declared[INTERPRETER])).parts[-3:])}


# ------------------------------------------------------------------------------------------------ tasks
def task_numbers(reference: TaskResult | None, task: TaskResult, level: float, verdict: Verdict | None = None) -> TaskNumbers:
    """One task, compared with the reference's when there is one and both were scored. verdict: its gate's, if it has one."""
    comparison: dict[str, Any] = dict.fromkeys(
        (
            "num_pairs", "num_excluded", "drop", "discordant", "mcnemar_midp", "minimum_detectable_effect",
            "extra_output_tokens", "reference_truncation_share", "reference_num_truncated",
            "reference_mean_output_tokens",
        )
    )  # fmt: skip
    if reference is not None:
        pairs = pair_items(reference, task)
        comparison |= {
            "num_pairs": pairs.n,
            "num_excluded": pairs.num_excluded,
            "reference_truncation_share": truncation_share(reference),
            "reference_num_truncated": reference.num_truncated,
            "reference_mean_output_tokens": reference.mean_output_tokens,
        }
        if pairs.n:
            on_pairs = sum(pairs.shares[0]) / len(pairs.shares[0])
            is_its_score = reference.accuracy is not None and points(on_pairs) == points(reference.accuracy.value)
            comparison |= {
                "drop": pairs.drop(level),
                "reference_on_pairs": None if is_its_score else on_pairs,
                "discordant": pairs.discordant,
                "mcnemar_midp": pairs.p_difference,
                "minimum_detectable_effect": pairs.detectable(level),
                "extra_output_tokens": tokens.extra if (tokens := compare_output_tokens(reference, task, level)) else None,
            }
    if verdict is not None:
        if verdict.looks or verdict.estimand in {"these_items", "these_clusters"}:  # as judged: of all looks together
            comparison |= {"drop": verdict.observed, "discordant": verdict.discordant, "mcnemar_midp": verdict.p_value}
        judged = ("p_pass", "p_fail_holm", "p_value_holm", "items_needed")
        comparison |= {name: getattr(verdict, name) for name in judged} | {"margin": verdict.limit}
    if task.kind == "swe" and reference is not None and (paired := swe.pair_instances(reference, task)):
        these = verdict is not None and verdict.estimand == "these_clusters"
        trajectories = swe.difference(paired, level, of_these_repositories=these)
        comparison |= {"swe_difference": trajectories, "drop": trajectories.drop}
    copied = (
        "task", "kind", "num_items", "num_failed", "num_truncated", "max_tokens", "accuracy", "mean_output_tokens", "note",
        "swe", "tools", "title", "num_samples", "pass_at_k", "mean_score",
    )  # fmt: skip
    return TaskNumbers(
        truncation_share=truncation_share(task),
        num_wrong_script=sum(item.wrong_script for item in task.items),
        by_language=tuple(
            _language(reference, task, language, level)
            for language in (() if task.kind == "imported" else sorted({item.language for item in task.items}))
        ),
        **{name: getattr(task, name) for name in copied},
        **comparison,
    )


def _language(reference: TaskResult | None, task: TaskResult, language: str, level: float) -> LanguageNumbers:
    part = _in_language(task, language)
    pairs = None if reference is None else pair_items(_in_language(reference, language), part)
    return LanguageNumbers(
        language=language,
        num_items=len(part.items),
        accuracy=accuracy_of(part.items, level, is_graded=task.is_graded)[0],
        drop=pairs.drop(level) if pairs and pairs.n else None,
        discordant=pairs.discordant if pairs and pairs.n else None,
        num_wrong_script=sum(item.wrong_script for item in part.items),
    )


def _in_language(task: TaskResult, language: str) -> TaskResult:
    items: Sequence[ItemResult] = [item for item in task.items if item.language == language]
    return task.model_copy(update={"items": tuple(items)})


def flips(reference: Measurement, measurement: Measurement, level: float) -> tuple[TaskFlips, ...]:
    """Of every task that both were scored on: replies to the same item and sample that came on both sides."""
    flipped = []
    for task in measurement.tasks:
        if (other := find_task(reference, task.task)) is None:
            continue
        known = {(item.item, item.sample): item for item in other.items if item.correct is not None}
        pairs = [
            (known[key], item) for item in task.items if item.correct is not None and (key := (item.item, item.sample)) in known
        ]
        if pairs:
            flipped.append(
                TaskFlips(
                    task=task.task,
                    num_pairs=len(pairs),
                    num_lost=sum(bool(of_reference.correct) and not item.correct for of_reference, item in pairs),
                    num_gained=sum(bool(item.correct) and not of_reference.correct for of_reference, item in pairs),
                    num_other_wrong=sum(
                        not of_reference.correct and not item.correct and of_reference.answer != item.answer
                        for of_reference, item in pairs
                    ),
                    flip_rate=clustered_proportion(
                        [of_reference.correct != item.correct for of_reference, item in pairs],
                        [item.cluster or item.item for _, item in pairs],
                        level,
                    ),
                )
            )
    return tuple(flipped)


# ------------------------------------------------------------------------------------------------ divergence
def times_floor(divergence: Divergence | None, floor: Divergence | None) -> tuple[TimesFloor, ...]:
    """For every set of texts that both were measured on: multiples of the noise floor."""
    if divergence is None or floor is None:
        return ()
    floors = {drift.texts: drift for drift in floor.drift}
    return tuple(_multiples(drift, floors[drift.texts]) for drift in divergence.drift if drift.texts in floors)


def _multiples(drift: Drift, floor: Drift) -> TimesFloor:
    statistics = {name: (_value(getattr(drift, name)), _value(getattr(floor, name))) for name in TIMED}
    groups = {
        f"{kind}: {group.name}": (group.kl_mean, other.kl_mean)
        for kind in GROUPS
        for group in getattr(drift, kind)
        for other in getattr(floor, kind)
        if other.name == group.name
    }
    return TimesFloor(
        texts=drift.texts,
        statistics={name: value / least for name, (value, least) in statistics.items() if value is not None and least},
        groups={name: value / least for name, (value, least) in groups.items() if least},
    )


def _value(number: Interval | Estimate | float | None) -> float | None:
    return number.value if isinstance(number, Interval | Estimate) else number


# ------------------------------------------------------------------------------------------------ checkpoints
def plan_numbers(plan: Plan) -> PlanNumbers:
    """Bytes and treatment per role (and per treatment, where a role has several)."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in plan.tensors:
        group = groups[tensor.role, _treatment(plan, tensor)]
        group[0] += 1
        group[1] += tensor.num_bytes
        group[2] += sum(output.num_bytes for output in tensor.outputs)
    return PlanNumbers(
        precision=plan.precision,
        scheme=" + ".join(sorted({tensor.scheme for tensor in plan.tensors if tensor.scheme is not None})),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        calibrated=describe_calibration(plan),
        mixed=_describe_mix(plan),
        roles=tuple(
            RoleNumbers(role=role, what=what, num_tensors=group[0], bytes_in=group[1], bytes_out=group[2])
            for (role, what), group in sorted(groups.items(), key=lambda entry: (-entry[1][2], entry[0]))
        ),
    )


def describe_calibration(plan: Plan) -> str | None:
    """`gptq on 65,536 tokens of text, compared with the items of 12 tasks (3 texts left out)`. None: no text decided."""
    if (made := plan.calibrated) is None:
        return None
    num_tasks = sum(items.num_items is not None for items in made.withheld)
    dropped = sum(source.num_dropped for source in made.sources)
    withheld = english.WITHHELD.format(tasks=count_of(num_tasks, "task"), texts=count_of(dropped, "text")) if num_tasks else ""
    return english.CALIBRATED.format(method=made.method, tokens=made.num_tokens, withheld=withheld)


def _describe_mix(plan: Plan) -> str | None:
    """`attention fp8_block in 1 of 4 layers, w4a16_g32 in 3; dense_mlp w4a16`; None where one scheme, or none, is used."""
    layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and tensor.role != "mtp" and tensor.scheme is not None:
            layers[tensor.role][tensor.scheme].add(at.layer)
    if len({scheme for schemes in layers.values() for scheme in schemes}) < 2:
        return None
    parts = []
    for role, schemes in layers.items():
        total = len(set[int]().union(*schemes.values()))
        (first, num_first), *others = sorted(
            ((scheme, len(of)) for scheme, of in schemes.items()), key=lambda entry: (entry[1], entry[0])
        )
        template = english.SCHEME_OF_LAYERS if others else english.ONE_SCHEME
        more = (english.MORE_LAYERS.format(scheme=scheme, number=number) for scheme, number in others)
        parts.append(", ".join([template.format(role=role, scheme=first, number=num_first, layers=total), *more]))
    return "; ".join(parts)


def _treatment(plan: Plan, tensor: TensorPlan) -> str:
    """`quantized to w4a16`, `kept in BF16`, `cast to F32`, `dequantized to BF16`, `dropped`..."""
    action, scheme = tensor.action, tensor.scheme
    if action == "quantize":
        return english.QUANTIZED.format(scheme=scheme)
    treatment = english.TREATMENTS[action].format(dtypes="/".join(sorted({output.dtype for output in tensor.outputs})))
    if action in ("drop", "add", "consume"):
        return treatment
    if scheme is not None:
        return english.KEPT_AS_IN_SOURCE.format(scheme=scheme)
    is_scaled = plan.calibrated is not None and tensor.role in ("norm", "router")
    scales = SCALED_BY.get(plan.calibrated.method) if is_scaled and plan.calibrated else None
    return treatment if scales is None else treatment + english.SCALED.format(scales=scales)


def verification_numbers(name: str, record: Verification, measurement: Measurement | None) -> VerificationNumbers:
    copied = ("passed", "checks", "damages", "not_checked", "mean_relative_error", "worst_relative_error")
    return VerificationNumbers(
        precision=name,
        is_measured_checkpoint=None if measurement is None else measurement.checkpoint_sha256 == record.checkpoint_sha256,
        num_checked=sum(record.checks.values()),
        **{field: getattr(record, field) for field in copied},
    )
