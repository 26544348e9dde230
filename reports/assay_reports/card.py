"""The model card, `README.md` of a checkpoint folder: metadata the hub understands, and the honest text.

Written twice: right after quantizing (no score yet: it says NOT MEASURED), and again after every judgement. The manifest does
not list it, so writing it changes no hash. A checkpoint may be measured in several runs: its card is about the last of them.
`model-index` holds absolute scores only; losses, intervals and verdicts are in the text. The same records give the same bytes.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from assay.errors import AssayError
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe
from assay.records.base import write_text_atomically
from assay.records.manifest import MANIFEST, Manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import CARD
from assay.records.serving import MODEL_FLAGS, Fingerprint, as_arguments
from assay_reports.limits import find_limits
from assay_reports.numbers import build_report, plan_numbers, verification_numbers
from assay_reports.report import environment, why_none
from assay_reports.run import UNQUANTIZED_LABELS, Run, load_checkpoint, load_run
from assay_reports.schema import Limit, Report, Row
from assay_reports.text import size

MEASURING_FLAGS = frozenset(
    {
        "enable-per-request-metrics", "per-request-spec-decode-metrics", "disable-uvicorn-access-log", "max-logprobs",
        "model-loader-extra-config",
    }
)  # fmt: skip
"""What only a measurement needs; a deployment does without."""


def write_card(run_dir: Path, label: str) -> Path:
    """Write the card of the checkpoint that is called `label` in the run, from the run's records; its path.

    AssayError if there is no plan or no manifest: what is not a finished checkpoint gets no card.
    """
    run = load_run(run_dir)
    if label not in run.plans or label not in run.manifests:
        raise AssayError(
            f"{run_dir / label}: no finished checkpoint there (plan.json and checkpoint/{MANIFEST} are needed); "
            f"make it with `assay quantize {run.model} --precision {label}`"
        )
    return _write(run, label)


def write_first_card(checkpoint: Path) -> None:
    """The card without scores, right after quantizing; a card of these very bytes that has scores stays."""
    run = load_checkpoint(checkpoint, checkpoint.name)
    if measured_in(checkpoint, run.manifests[checkpoint.name].checkpoint_sha256) is None:
        _write(run, checkpoint.name)


class Cards(NamedTuple):
    """Of a run: paths written, and a line for each card that was left as it is, and for each that could not be written."""

    written: list[Path]
    left: list[str]
    failed: list[str]


def write_cards(run_dir: Path) -> Cards:
    """Write the card of every checkpoint of the run.

    A checkpoint that another run measured later keeps that run's card.
    """
    run = load_run(run_dir)
    cards = Cards([], [], [])
    for label in sorted(run.plans.keys() & run.manifests.keys()):
        path, manifest = run.checkpoints[label] / CARD, run.manifests[label]
        there = measured_in(run.checkpoints[label], manifest.checkpoint_sha256)
        ours = _measurement_of(run, label, manifest)
        if there is not None and (ours is None or there.started > ours.started):
            cards.left.append(f"{path}: left as it is: it is about a later measurement, suite {there.suite} at {there.started}")
            continue
        try:
            cards.written.append(_write(run, label))
        except OSError as error:
            cards.failed.append(f"{path}: cannot be written: {error.strerror}")
    return cards


def _write(run: Run, label: str) -> Path:
    path = run.checkpoints[label] / CARD
    write_text_atomically(path, render_card(run, label, path.parent))
    return path


class MeasuredIn(NamedTuple):
    """What the card in a checkpoint's folder says in its last line; `started` in ISO 8601, UTC."""

    suite: str
    started: str


_MEASURED = re.compile(r"<!-- assay: checkpoint ([0-9a-f]{64}), suite (\S+), measured (\S+) -->\s*\Z")


def measured_in(checkpoint: Path, checkpoint_sha256: str) -> MeasuredIn | None:
    """Of the card that lies there. None: it has no scores, or those of another checkpoint."""
    path = checkpoint / CARD
    found = _MEASURED.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return MeasuredIn(found[2], found[3]) if found and found[1] == checkpoint_sha256 else None


def render_card(run: Run, label: str, checkpoint: Path) -> str:
    """The card's text. `checkpoint` is looked at for a licence file only."""
    plan, manifest = run.plans[label], run.manifests[label]
    measured = _measurement_of(run, label, manifest)
    report = build_report(run) if measured is not None and run.reference is not None else None
    row = next((row for row in report.rows if row.label == label), None) if report else None
    recipe = _model_recipe(plan.model)
    base_model = _base_model(plan, recipe)
    data = _metadata(plan, row, report, base_model, _licence(checkpoint))
    verification = run.verifications.get(label)
    verification = verification if verification and verification.checkpoint_sha256 == manifest.checkpoint_sha256 else None
    own = _about(run, label)
    beside = [one for one in report.rows if _stands_beside(one, row)] if report and row else []
    text = environment(html=False).get_template("card.md.j2")
    return text.render(
        metadata=data.to_yaml(),
        plan=plan,
        numbers=plan_numbers(plan),
        manifest=manifest,
        row=row,
        measured=measured if row else None,
        report=report,
        verdicts=[verdict for verdict in report.verdicts if verdict.candidate == label] if report else [],
        verification=verification_numbers(label, verification, measured) if verification else None,
        base_model=base_model,
        command=serve_command(measured.fingerprint if measured else None, recipe, has_mtp=plan.keeps_mtp),
        emulated=bool(measured and measured.fingerprint.emulated),
        beside=beside,
        scores_beside={one.label: {task.task: task for task in one.tasks} for one in beside},
        sampling=sampling_of(report) if report else (),
        instead=_instead(report, row) if report and row else None,
        limits=_limits(run, own) if row else (),
        no_divergence=why_none(report, "divergence", [row]) if report and row else "",
        no_acceptance=why_none(report, "acceptance", [row]) if report and row else "",
        licence=_licence(checkpoint),
        deployments=[one for one in run.deployments if one.label == label and one.outcome != "NOT MEASURED"] if row else [],
    )


def _about(run: Run, label: str) -> Run:
    """The run as if this checkpoint were its only candidate: a card does not list what happened to others."""
    kept = tuple(m for m in run.measurements if m.label == label or m.is_reference or m.is_noise_floor)
    hashes = {m.label for m in kept}
    return replace(
        run,
        measurements=kept,
        plans={name: plan for name, plan in run.plans.items() if name == label},
        verifications={name: found for name, found in run.verifications.items() if name == label},
        probes=tuple(one for one in run.probes if one.label in hashes),
        deployments=tuple(one for one in run.deployments if one.label == label),
        old_deployments=tuple(one for one in run.old_deployments if one.label == label),
    )


def _limits(run: Run, own: Run) -> tuple[Limit, ...]:
    """Those of this checkpoint; how far a quantized reference is from the source is said by the whole run."""
    whole = {limit.key: limit for limit in find_limits(run)}
    return tuple(whole[one.key] if one.key == "quantized_reference" else one for one in find_limits(own))


def _stands_beside(other: Row, row: Row) -> bool:
    """The reference and the unquantized source have a column of their own."""
    return other.label != row.label and (other.kind == "reference" or other.label in UNQUANTIZED_LABELS)


def sampling_of(report: Report) -> tuple[str, ...]:
    """`temperature 1, top_p 0.95: gsm8k, aime`: how the suite asked, tasks of one kind together."""
    found: dict[str, list[str]] = {}
    for task in report.suite_recipe.get("tasks", ()):
        temperature = task.get("temperature", 0.0)
        how = f"temperature {temperature:g}, top_p {task.get('top_p', 1.0):g}" if temperature else "greedy (temperature 0)"
        if temperature and task.get("top_k", -1) != -1:
            how += f", top_k {task['top_k']}"
        found.setdefault(how, []).append(task["name"])
    return tuple(f"{how}: {', '.join(names)}" for how, names in found.items())


def _instead(report: Report, row: Row) -> str | None:
    """What to use where this checkpoint did not pass: the smallest that did, and the reference. None: it passed."""
    if row.kind != "candidate" or row.status == "PASS":
        return None
    passed = [
        one for one in report.rows if one.kind == "candidate" and one.status == "PASS" and one.checkpoint_bytes is not None
    ]
    smallest = min(passed, key=lambda one: one.checkpoint_bytes or 0, default=None)
    if smallest is None:
        return f"{report.reference}, the reference; no candidate of this run passed"
    return (
        f"{smallest.label} ({size(smallest.checkpoint_bytes)}), the smallest that passed, or {report.reference}, the reference"
    )


def _measurement_of(run: Run, label: str, manifest: Manifest) -> Measurement | None:
    """The measurement of these very bytes: one of an older checkpoint with this name does not count."""
    return next((m for m in run.measurements if m.label == label and m.checkpoint_sha256 == manifest.checkpoint_sha256), None)


# ------------------------------------------------------------------------------------------------ metadata
def _metadata(plan: Plan, row: Row | None, report: Report | None, base_model: str | None, licence: str | None) -> ModelCardData:
    schemes = {tensor.scheme.replace("_", "-") for tensor in plan.tensors if tensor.scheme is not None}
    known: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "quantized" if base_model else None,
        "license": licence,
    }
    if licence == "other":
        known |= {"license_name": "see-license-file", "license_link": "LICENSE"}
    results = _eval_results(row, report) if row and report else []
    if results:
        known |= {"model_name": f"{plan.model}-{plan.precision}", "eval_results": results}
    return ModelCardData(
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=sorted({"assay", "compressed-tensors", "quantized", *schemes}),
        **{key: value for key, value in known.items() if value is not None},
    )


def _eval_results(row: Row, report: Report) -> list[EvalResult]:
    """Absolute scores, one per task that was measured; the interval is an argument of the metric.

    A score that its gate calls NOT MEASURED (cut off, nothing to lose), or that the reference does not repeat, is none; of the
    reference one that no candidate could be judged by.
    """
    unmeasured = _unmeasured_tasks(row, report)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"assay-{report.suite}-{task.task}",
            dataset_name=f"{task.task} (assay suite {report.suite})",
            metric_type="accuracy",
            metric_name="share correct",
            metric_value=round(task.accuracy.value, 4),
            metric_args={
                "items": task.accuracy.n,
                "interval": [round(task.accuracy.low, 4), round(task.accuracy.high, 4)],
                "level": task.accuracy.level,
            },
        )
        for task in row.tasks
        if task.accuracy is not None and task.task not in unmeasured
    ]


def _unmeasured_tasks(row: Row, report: Report) -> set[str]:
    """Tasks whose gate says NOT MEASURED of this checkpoint; of the reference, of every candidate. And those on which the
    reference's own repeat failed: their scores show the run."""
    found: dict[str, list[bool]] = {}
    repeats = [one.label for one in report.rows if one.kind == "noise floor"]
    unsteady = set()
    for verdict in report.verdicts:
        task = verdict.gate.removeprefix("score ")
        if verdict.gate == task:
            continue
        if verdict.candidate in repeats and verdict.status == "FAIL":
            unsteady.add(task)
        if row.kind == "reference" or verdict.candidate == row.label:
            found.setdefault(task, []).append(verdict.status == "NOT MEASURED")
    return unsteady | {task for task, missing in found.items() if all(missing)}


def _model_recipe(model: str) -> ModelRecipe | None:
    return load_recipe(ModelRecipe, model) if model in recipe_names("models") else None


def _base_model(plan: Plan, recipe: ModelRecipe | None) -> str | None:
    """The hub id of what was quantized: the recipe's, or the plan's source if it was read from the hub. None: a folder."""
    if recipe is not None and recipe.source.hub is not None:
        return recipe.source.hub
    return plan.source if plan.source_revision is not None else None


def _licence(checkpoint: Path) -> str | None:
    """`other` when the source came with a licence file; else unknown, and left out rather than guessed."""
    return "other" if (checkpoint / "LICENSE").is_file() else None


# ------------------------------------------------------------------------------------------------ how to serve it
def serve_command(fingerprint: Fingerprint | None, recipe: ModelRecipe | None, *, has_mtp: bool) -> str:
    """`vllm serve .` with the flags it was measured with; emulated or unmeasured, with the model's own flags only.

    has_mtp: the checkpoint can draft.
    """
    if fingerprint is not None and not fingerprint.emulated:
        flags = {name: value for name, value in fingerprint.flags.items() if name not in MEASURING_FLAGS}
        flags |= fingerprint.checkpoint_flags
        speculation = fingerprint.speculation
    elif fingerprint is not None:
        flags = {name: value for name, value in fingerprint.flags.items() if name in MODEL_FLAGS}
        speculation = fingerprint.speculation
    else:
        flags, speculation = _recipe_flags(recipe, has_mtp)
    if speculation:
        flags |= {"speculative-config": speculation}
    words = ["vllm", "serve", "PATH_OF_THIS_FOLDER", *as_arguments(flags)]
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def _recipe_flags(recipe: ModelRecipe | None, has_mtp: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    if recipe is None:
        return {}, None
    serving = recipe.serving
    flags: dict[str, Any] = {"reasoning-parser": serving.reasoning_parser, "tool-call-parser": serving.tool_call_parser}
    flags = {name: value for name, value in flags.items() if value} | serving.vllm
    count = serving.num_speculative_tokens if has_mtp else None
    return flags, {"method": "mtp", "num_speculative_tokens": count} if count else None
