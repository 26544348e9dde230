"""What the hub reads of a card: its YAML metadata with `model-index`, and the files under `.eval_results/`.

Absolute scores only: the hub compares them across models; losses, intervals and verdicts are in the card's text. A score that
its own gate calls NOT MEASURED, or that the reference does not repeat, is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from assay.quantities import interval_name
from assay.recipes.model import ModelRecipe
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay_reports.cards.licence import Licence
from assay_reports.schema import Report, Row, TaskNumbers
from assay_reports.sentences import card as english
from assay_reports.text import grouped

EVAL_RESULTS = ".eval_results/assay.yaml"
"""Beside the card; the hub reads every YAML file of that folder (https://huggingface.co/docs/hub/eval-results)."""


class Benchmark(NamedTuple):
    """A data set that the hub keeps a leaderboard of. num_items: all it has; a score over fewer is another figure."""

    dataset_id: str
    task_id: str
    num_items: int


LM_EVAL_BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k_cot_zeroshot": Benchmark("openai/gsm8k", "gsm8k", 1319),
    "gpqa_diamond_cot_zeroshot": Benchmark("Idavidrein/gpqa", "gpqa_diamond", 198),
}
"""Task of lm-eval -> benchmark. Ids as in the `.eval_results` that are on the hub: its `eval.yaml` decides what is one."""
SWE_BENCHMARKS: dict[str, Benchmark] = {"verified": Benchmark("SWE-bench/SWE-bench_Verified", "swe_bench_%_resolved", 500)}
"""Data set of SWE-bench tasks -> benchmark. https://huggingface.co/zai-org/GLM-5/tree/main/.eval_results has this one."""


# ------------------------------------------------------------------------------------------------ YAML in front of the card
def card_metadata(
    plan: Plan, row: Row | None, report: Report | None, base_model: str | None, licence: Licence | None, repo: str | None
) -> ModelCardData:
    """repo: `owner/name` where it is published; None: not known yet, and then nobody is named as who quantized it."""
    schemes = {tensor.scheme.replace("_", "-") for tensor in plan.tensors if tensor.scheme is not None}
    known: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "quantized" if base_model else None,
        "quantized_by": repo.partition("/")[0] if repo else None,
    }
    if licence is not None:
        known |= {"license": licence.id, "license_name": licence.name, "license_link": licence.link}
    if row and report and (results := model_index(row, report)):
        known |= {"model_name": f"{plan.model}-{plan.precision}", "eval_results": results}
    return ModelCardData(
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=sorted({"assay", "compressed-tensors", "quantized", *schemes}),
        **{key: value for key, value in known.items() if value is not None},
    )


def base_model_of(plan: Plan, recipe: ModelRecipe | None) -> str | None:
    """The hub id of what was quantized: of a folder what somebody said, the recipe's, or the plan's source if it was read from
    the hub. None: a folder of which nobody said it."""
    if plan.base_model is not None:
        return plan.base_model
    if recipe is not None and recipe.source.hub is not None:
        return recipe.source.hub
    return plan.source if plan.source_revision is not None else None


def model_index(row: Row, report: Report) -> list[EvalResult]:
    """One entry per task that was measured; the interval is an argument of the metric."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"assay-{report.suite}-{task.task}",
            dataset_name=english.DATASET.format(task=task.task, suite=report.suite),
            metric_type="accuracy",
            metric_name=english.METRIC,
            metric_value=round(task.accuracy.value, 4),
            metric_args={
                "items": task.accuracy.n,
                "interval": [round(task.accuracy.low, 4), round(task.accuracy.high, 4)],
                "level": task.accuracy.level,
            },
        )
        for task in measured_tasks(row, report)
        if task.accuracy is not None
    ]


def measured_tasks(row: Row, report: Report) -> list[TaskNumbers]:
    """Tasks whose score is one: not those whose gate says NOT MEASURED of this checkpoint (of the reference, of every
    candidate), nor those on which the reference's own repeat failed: their scores show the run."""
    scores = [v for v in report.verdicts if v.gate.startswith("score ")]
    judged = grouped(
        (v.gate.removeprefix("score "), v.status == "NOT MEASURED")
        for v in scores
        if row.kind == "reference" or v.candidate == row.label
    )
    repeats = {other.label for other in report.rows if other.kind == "noise floor"}
    unsteady = {v.gate.removeprefix("score ") for v in scores if v.candidate in repeats and v.status == "FAIL"}
    unmeasured = unsteady | {task for task, missing in judged.items() if all(missing)}
    return [task for task in row.tasks if task.accuracy is not None and task.task not in unmeasured]


# ------------------------------------------------------------------------------------------------ .eval_results
def eval_results(row: Row, report: Report, measured: Measurement, repo: str | None) -> str | None:
    """The text of `EVAL_RESULTS`: scores on benchmarks of the hub, of all their items. None: there is no such score.

    Values are percentages, as those that the hub shows. repo: where the report can be read; None: no source is named.
    """
    entries = [
        EvalResultEntry(
            dataset_id=benchmark.dataset_id,
            task_id=benchmark.task_id,
            value=round(100 * task.accuracy.value, 2),
            date=measured.started[:10],
            source_url=f"https://huggingface.co/{repo}" if repo else None,
            source_name=english.SOURCE if repo else None,
            notes=_notes(task, report, measured),
        )
        for task in measured_tasks(row, report)
        if task.accuracy is not None
        and (benchmark := _benchmark_of(task, report)) is not None
        and task.num_items == benchmark.num_items
        and not task.num_failed
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True) if entries else None


def _benchmark_of(task: TaskNumbers, report: Report) -> Benchmark | None:
    recipes: list[dict[str, Any]] = list(report.suite_recipe.get("tasks", ()))
    recipe = next((recipe for recipe in recipes if recipe.get("name") == task.task), {})
    if recipe.get("kind") == "swe":
        return SWE_BENCHMARKS.get(str(recipe.get("dataset")))
    names: list[str] = list(recipe.get("tasks") or ())
    return LM_EVAL_BENCHMARKS.get(names[0]) if recipe.get("kind") == "lm_eval" and len(names) == 1 else None


def _notes(task: TaskNumbers, report: Report, measured: Measurement) -> str:
    assert task.accuracy is not None
    low, high = (round(100 * bound, 1) for bound in (task.accuracy.low, task.accuracy.high))
    interval = interval_name(task.accuracy.level, task.accuracy.coverage)
    parts = [english.NOTE_ITEMS.format(number=task.num_items), f"{interval}: {low} to {high}"]
    if task.num_samples > 1:
        parts.append(english.NOTE_SAMPLES.format(number=task.num_samples))
    server = measured.fingerprint.server
    parts.append(english.NOTE_SERVED.format(server=server, suite=report.suite, tokens=task.max_tokens))
    if measured.fingerprint.emulated:
        parts.append(english.NOTE_EMULATED)
    return "; ".join(parts)
