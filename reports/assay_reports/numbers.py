"""Everything a report says, computed once from the records: `report.json` is this, and the other two are printed from it.

No number is typed by hand and none is computed in a template. Differences are reference minus candidate: + is a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.quantities import points
from assay.recipes.calibrated.methods import SCALED_BY
from assay.recipes.families import split_layer
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.plan import Plan, TensorPlan
from assay.records.verdict import Verdict
from assay.records.verification import Verification
from assay_evaluate.statistics import swe_difference as swe
from assay_evaluate.statistics.drafts import acceptance_difference
from assay_evaluate.statistics.item_pairs import (
    Pairs,
    accuracy_of,
    compare_output_tokens,
    find_task,
    pair_items,
    truncation_share,
)
from assay_reports.drift import flips, times_floor
from assay_reports.limits import find_limits
from assay_reports.run import Run
from assay_reports.schema import LanguageNumbers, PlanNumbers, Report, RoleNumbers, Row, TaskNumbers, VerificationNumbers

NO_SCORE: dict[str, Any] = {
    "accuracy": None, "mean_score": None, "pass_at_k": None, "items": (), "tools": None, "swe": None,
}  # fmt: skip
"""Fields of a task whose replies say nothing of its weights."""


# ------------------------------------------------------------------------------------------------ building
def build_report(run: Run) -> Report:
    """The numbers of a run that has a reference measurement (`load_run` and `write_report` see to that)."""
    reference = run.reference
    assert reference is not None
    level = float(run.gates.gate_recipe.get("level", 0.95)) if run.gates else 0.95
    measured = {m.label: m for m in run.measurements}
    return Report(
        model=run.model,
        reference=reference.label,
        level=level,
        suite=reference.suite,
        suite_sha256=reference.suite_sha256,
        suite_recipe=reference.suite_recipe,
        gate_recipe=run.gates.gate_recipe if run.gates else None,
        gates_chosen=run.gates.chosen if run.gates else None,
        gates_registered=run.gates.registered_name if run.gates else None,
        rows=tuple(_row(run, reference, measurement, level) for measurement in run.measurements),
        verdicts=run.gates.verdicts if run.gates else (),
        published=run.gates.published if run.gates else (),
        limits=find_limits(run),
        plans=tuple(plan_numbers(plan) for plan in _by_size(run)),
        verifications=tuple(
            verification_numbers(name, record, measured.get(name)) for name, record in sorted(run.verifications.items())
        ),
        calibrations=run.calibrations,
        fingerprint=reference.fingerprint,
        probes=run.probes,
        deployments=run.deployments,
        sensitivity=run.sensitivity,
        long_context=run.gates.long_context if run.gates else (),
        effective_lengths=run.gates.effective_lengths if run.gates else (),
        speed=run.speed,
        choice=run.choice,
    )


def _by_size(run: Run) -> list[Plan]:
    return sorted(run.plans.values(), key=lambda plan: (-plan.bytes_out, plan.precision))


def _row(run: Run, reference: Measurement, measurement: Measurement, level: float) -> Row:
    is_reference = measurement is reference
    measurement = without_faulty_scores(run, measurement)
    return Row(
        label=measurement.label,
        kind="reference" if is_reference else ("noise floor" if measurement.is_noise_floor else "candidate"),
        status=None if is_reference else run.status(measurement.label),
        sentence="What the others are compared with." if is_reference else headline(run, measurement.label),
        checkpoint=portable_name(measurement.checkpoint),
        checkpoint_sha256=measurement.checkpoint_sha256,
        checkpoint_bytes=measurement.checkpoint_bytes,
        share_of_reference=_share(measurement.checkpoint_bytes, reference.checkpoint_bytes),
        tasks=tuple(
            task_numbers(
                None if is_reference else find_task(reference, task.task),
                task,
                level,
                run.verdict(measurement.label, f"score {task.task}"),
            )
            for task in measurement.tasks
        ),
        divergence=measurement.divergence,
        kl_times_floor=_times_floor(run, measurement),
        times_floor=times_floor(measurement.divergence, run.noise_floor.divergence if run.noise_floor else None),
        flips=() if is_reference else flips(reference, measurement, level),
        acceptance=measurement.acceptance,
        acceptance_drop=None if is_reference else _acceptance_drop(reference, measurement, level),
        emulated=measurement.fingerprint.emulated,
        checkpoint_flags=measurement.fingerprint.checkpoint_flags,
        kernels=measurement.fingerprint.kernels,
        not_measured=measurement.not_measured,
        started=measurement.started,
        seconds=measurement.seconds,
    )


def without_faulty_scores(run: Run, measurement: Measurement) -> Measurement:
    """The measurement without the scores of tasks whose serving is at fault: they say nothing of its weights.

    Of the reference those alone that its own serving spoilt.
    """
    label = measurement.label
    said: dict[str, str] = {}
    for one in () if run.gates is None else run.gates.serving:
        if one.candidate == label or one.at_fault == (label,):
            said.setdefault(one.task, f"serving fault: {one.clause}")
    tasks = [
        task if task.task not in said else task.model_copy(update={**NO_SCORE, "note": said[task.task]})
        for task in measurement.tasks
    ]
    return measurement.model_copy(update={"tasks": tuple(tasks)})


def _share(num_bytes: int | None, of_bytes: int | None) -> float | None:
    return None if num_bytes is None or of_bytes is None else num_bytes / max(of_bytes, 1)


def portable_name(path: str) -> str:
    """The end of a path that says which checkpoint it is, without the folders of the machine: w4a16/checkpoint."""
    parts = Path(path).parts
    return "/".join(parts[-2:]) if parts and parts[-1] == "checkpoint" else (parts[-1] if parts else path)


def headline(run: Run, label: str) -> str:
    """Why a candidate has its verdict, in one line."""
    if run.gates is None or label not in run.gates.overall:
        return "Not judged yet."
    return f"{run.gates.reasons.get(label, 'Judged by an older version: `assay gate` judges again')}."


def task_numbers(reference: TaskResult | None, task: TaskResult, level: float, verdict: Verdict | None = None) -> TaskNumbers:
    """One task, compared with the reference's when there is one and both were scored. verdict: its gate's, if it has one."""
    comparison: dict[str, Any] = dict.fromkeys(
        ("num_pairs", "num_excluded", "drop", "discordant", "mcnemar_midp", "minimum_detectable_effect", "extra_output_tokens")
    )  # fmt: skip
    if reference is not None:
        pairs = pair_items(reference, task)
        comparison |= {"num_pairs": pairs.n, "num_excluded": pairs.num_excluded}
        if pairs.n:
            comparison |= {
                "drop": pairs.drop(level),
                "reference_on_pairs": _on_pairs(reference, pairs),
                "discordant": pairs.discordant,
                "mcnemar_midp": pairs.p_difference,
                "minimum_detectable_effect": pairs.detectable(level),
                "extra_output_tokens": tokens.extra if (tokens := compare_output_tokens(reference, task, level)) else None,
            }
    if verdict is not None and (
        verdict.looks or verdict.estimand in {"these_items", "these_clusters"}
    ):  # as it was judged: of all looks together
        comparison |= {"drop": verdict.observed, "discordant": verdict.discordant, "mcnemar_midp": verdict.p_value}
    trajectories = None
    if task.kind == "swe" and reference is not None and (paired := swe.pair_instances(reference, task)):
        these = verdict is not None and verdict.estimand == "these_clusters"
        trajectories = swe.difference(paired, level, of_these_repositories=these)
        comparison["drop"] = trajectories.drop
    return TaskNumbers(
        task=task.task,
        kind=task.kind,
        num_items=task.num_items,
        num_failed=task.num_failed,
        num_truncated=task.num_truncated,
        truncation_share=truncation_share(task),
        max_tokens=task.max_tokens,
        accuracy=task.accuracy,
        mean_output_tokens=task.mean_output_tokens,
        num_wrong_script=sum(item.wrong_script for item in task.items),
        note=task.note,
        reference_truncation_share=truncation_share(reference) if reference else None,
        reference_num_truncated=reference.num_truncated if reference else None,
        reference_mean_output_tokens=reference.mean_output_tokens if reference else None,
        by_language=tuple(_languages(reference, task, level)),
        swe=task.swe,
        swe_difference=trajectories,
        tools=task.tools,
        margin=verdict.limit if verdict else None,
        title=task.title,
        p_pass=verdict.p_pass if verdict else None,
        p_fail_holm=verdict.p_fail_holm if verdict else None,
        p_value_holm=verdict.p_value_holm if verdict else None,
        items_needed=verdict.items_needed if verdict else None,
        num_samples=task.num_samples,
        pass_at_k=task.pass_at_k,
        mean_score=task.mean_score,
        **comparison,
    )


def _on_pairs(reference: TaskResult, pairs: Pairs) -> float | None:
    """None: as it is shown, it is the reference's score."""
    share, shown = sum(pairs.shares[0]) / len(pairs.shares[0]), reference.accuracy
    return None if shown is not None and points(share) == points(shown.value) else share


def _languages(reference: TaskResult | None, task: TaskResult, level: float) -> list[LanguageNumbers]:
    rows = []
    for language in sorted({item.language for item in task.items}):
        ours = _only(task, language)
        drop = discordant = None
        if reference is not None:
            pairs = pair_items(_only(reference, language), ours)
            if pairs.n:
                discordant, drop = pairs.discordant, pairs.drop(level)
        rows.append(
            LanguageNumbers(
                language=language,
                num_items=len(ours.items),
                accuracy=accuracy_of(ours.items, level)[0],
                drop=drop,
                discordant=discordant,
                num_wrong_script=sum(item.wrong_script for item in ours.items),
            )
        )
    return rows


def _only(task: TaskResult, language: str) -> TaskResult:
    items: Sequence[ItemResult] = [item for item in task.items if item.language == language]
    return task.model_copy(update={"items": tuple(items)})


def _times_floor(run: Run, measurement: Measurement) -> float | None:
    floor = run.noise_floor.divergence if run.noise_floor else None
    if measurement.divergence is None or floor is None or floor.kl_mean.value <= 0:
        return None
    return measurement.divergence.kl_mean.value / floor.kl_mean.value


def _acceptance_drop(reference: Measurement, measurement: Measurement, level: float) -> Interval | None:
    ours, theirs = reference.acceptance, measurement.acceptance
    if ours is None or theirs is None or not ours.num_draft_tokens or not theirs.num_draft_tokens:
        return None
    return acceptance_difference(ours, theirs, level)


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
        scheme=schemes_in_words(plan),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        calibrated=calibrated_in_words(plan),
        mixed=mixed_in_words(plan),
        roles=tuple(
            RoleNumbers(role=role, what=what, num_tensors=group[0], bytes_in=group[1], bytes_out=group[2])
            for (role, what), group in sorted(groups.items(), key=lambda entry: (-entry[1][2], entry[0]))
        ),
    )


def schemes_in_words(plan: Plan) -> str:
    """`w4a16`, or `fp8_block + nvfp4` of a mix."""
    return " + ".join(sorted({tensor.scheme for tensor in plan.tensors if tensor.scheme is not None}))


def calibrated_in_words(plan: Plan) -> str | None:
    """`gptq on 65,536 tokens of text, which was held against the items of 12 tasks (3 texts left out)`."""
    if (made := plan.calibrated) is None:
        return None
    known = [one for one in made.withheld if one.num_items is not None]
    dropped = sum(one.num_dropped for one in made.sources)
    tasks, texts = (f"{count:,} {what}{'' if count == 1 else 's'}" for count, what in ((len(known), "task"), (dropped, "text")))
    held = f", held against the items of {tasks} ({texts} left out)" if known else ""
    return f"{made.method} on {made.num_tokens:,} tokens of text{held}"


def mixed_in_words(plan: Plan) -> str | None:
    """`attention fp8_block in 1 of 4 layers, w4a16_g32 in 3; dense_mlp w4a16`; None where one scheme, or none, is used."""
    layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if at is not None and tensor.role != "mtp" and tensor.scheme is not None:
            layers[tensor.role][tensor.scheme].add(at.layer)
    if len({scheme for schemes in layers.values() for scheme in schemes}) < 2:
        return None
    return "; ".join(f"{role} {_of_layers(schemes)}" for role, schemes in layers.items())


def _of_layers(schemes: dict[str, set[int]]) -> str:
    """schemes: -> layers."""
    total = len(set[int]().union(*schemes.values()))
    if len(schemes) == 1:
        return next(iter(schemes))
    (first, of_first), *others = sorted(schemes.items(), key=lambda one: (len(one[1]), one[0]))
    return ", ".join([f"{first} in {len(of_first)} of {total} layers", *(f"{name} in {len(of)}" for name, of in others)])


def _treatment(plan: Plan, tensor: TensorPlan) -> str:
    """`quantized to w4a16`, `kept in BF16`, `cast to F32`, `dequantized to BF16`, `dropped`..."""
    action, scheme = tensor.action, tensor.scheme
    if action == "quantize":
        return f"quantized to {scheme}"
    if action == "drop":
        return "dropped"
    if action == "add":
        return "scales from the calibration"
    if action == "consume":
        return "scales folded into their weights"
    if scheme is not None:
        return f"kept in {scheme}, as the source has it"
    verb = {"keep": "kept in", "cast": "cast to", "dequantize": "dequantized to"}[action]
    scales = (
        SCALED_BY.get(plan.calibrated.method) if plan.calibrated is not None and tensor.role in ("norm", "router") else None
    )
    said = f"{verb} {'/'.join(sorted({output.dtype for output in tensor.outputs}))}"
    return said if scales is None else f"{said}, some scaled by {scales}"


def verification_numbers(name: str, record: Verification, measurement: Measurement | None) -> VerificationNumbers:
    return VerificationNumbers(
        precision=name,
        passed=record.passed,
        is_measured_checkpoint=(None if measurement is None else measurement.checkpoint_sha256 == record.checkpoint_sha256),
        num_checked=sum(record.checks.values()),
        checks=record.checks,
        damages=record.damages,
        not_checked=record.not_checked,
        mean_relative_error=record.mean_relative_error,
        worst_relative_error=record.worst_relative_error,
    )
