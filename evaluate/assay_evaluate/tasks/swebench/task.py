"""One SWE-bench task of a suite on one served checkpoint: gold, agents, grading, figures.

RUN/swe/TASK-SHA/gold/                   the gold patches on this host, once for all checkpoints
RUN/swe/TASK-SHA/CHECKPOINT-SERVED/      repeat-0/{preds.json, INSTANCE/...}, grades of each, agents.log
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.suite import SuiteRecipe, SweTask
from assay.recipes.swe import OPERATIONAL
from assay.records.base import Interval, sha256_of
from assay.records.measurement import ItemResult, TaskResult
from assay.records.swe import SweFigures, Trajectory
from assay_evaluate.asking.session import InLine, Session
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity
from assay_evaluate.statistics import clopper_pearson, cluster_bootstrap_mean, wilson
from assay_evaluate.statistics.item_pairs import accuracy_of
from assay_evaluate.tasks.swebench.agents import AgentEndpoint, Finished, Pacing, run_agents
from assay_evaluate.tasks.swebench.container_runtime import ContainerRuntime, check_room, fetch_images, runtime_for
from assay_evaluate.tasks.swebench.dataset import DatasetRow, dataset_sha256, load_instances
from assay_evaluate.tasks.swebench.grading import Grade, check_harness, grade, grade_gold, versions
from assay_evaluate.tasks.swebench.predictions import exit_of, read_trajectory, trajectory_path
from assay_evaluate.tasks.swebench.settings import Settings, settings_for
from assay_evaluate.tasks.swebench.trajectories import measure
from assay_evaluate.tasks.swebench.worker_process import run_name

NOTHING_MEASURED: dict[str, Any] = dict.fromkeys(
    (
        "num_steps", "prompt_tokens", "output_tokens", "num_cut_off", "num_format_errors", "num_tool_calls",
        "num_valid_tool_calls", "longest_loop_steps", "looped", "patch_bytes", "patch_sha256",
    )
)  # fmt: skip
PACING = Pacing()


@dataclass(frozen=True)
class Prepared:
    """A task whose data set, container runtime and images were found in order."""

    task: SweTask
    rows: list[DatasetRow]
    settings: Settings
    runtime: ContainerRuntime | None


def prepare(task: SweTask, chat_template_kwargs: Mapping[str, Any] = {}) -> Prepared:
    """Look at everything that can be wrong before hours are spent. MeasureError, one line: what, where, what to do."""
    settings = settings_for(task, chat_template_kwargs)
    check_harness()
    rows = load_instances(task)
    runtime = runtime_for(task)
    if runtime is not None:
        check_room(runtime, task.min_free_disk_gb)
        missing = next((row["image"] for row in rows if not runtime.has_image(row["image"])), None)
        if missing is not None and (why := fetch_images(runtime, [missing], task.pull_timeout_s)):
            raise MeasureError(
                f"{task.name}: image {missing} is neither here nor in its registry ({why[missing]}); build it (`make "
                "swe-images` for those of examples/tiny_swe), or give this host access to the registry"
            )
    return Prepared(task, rows, settings, runtime)


def check_suite(suite: SuiteRecipe) -> None:
    """`prepare` every SWE-bench task of a suite; nothing if it has none."""
    for task in suite.tasks:
        if isinstance(task, SweTask):
            prepare(task)


def run_swe(
    prepared: Prepared,
    server: AgentEndpoint,
    who: Identity,
    run_dir: Path,
    *,
    sample: int = 0,
    concurrency: int = 8,
    on_progress: Say,
    pacing: Pacing = PACING,
) -> TaskResult:
    """Every trajectory of the task, graded. sample: 1 for the pass that measures the noise floor: other trajectories.

    NotMeasured if no gold patch passes here, or no trajectory could be finished; ServeError and MeasureError as `run_agents`.
    """
    task, rows = prepared.task, prepared.rows
    base = run_dir / "swe" / f"{task.name}-{task_sha256(prepared)[:12]}"
    gold = grade_gold(task, rows, base / "gold", runtime=prepared.runtime, on_progress=on_progress)
    failed = tuple(instance for instance, found in sorted(gold.items()) if found.outcome != "resolved")
    asked = [row for row in rows if row["instance_id"] not in failed]
    if not asked:
        first = gold[failed[0]]
        raise NotMeasured(f"no gold patch passes on this host ({failed[0]}: {first.outcome}, {first.why or 'see its log'})")
    mine = base / f"{who.checkpoint_sha256[:12]}-{who.fingerprint_sha256[:8]}{'-repeat' if sample else ''}"
    folders = [mine / f"repeat-{number}" for number in range(task.num_repeats)]
    finished = run_agents(
        task, asked, folders, server, settings=prepared.settings, runtime=prepared.runtime, run=run_name(str(mine.resolve())),
        model_name=mine.name, num_agents=min(task.num_agents, concurrency), on_progress=on_progress, pacing=pacing,
    )  # fmt: skip
    trajectories = []
    for number, (folder, one) in enumerate(zip(folders, finished, strict=True)):
        patches = {instance: kept["model_patch"] for instance, kept in one.predictions.items()}
        grades = grade(
            task, asked, patches, folder / "grading", mine.name, runtime=prepared.runtime, on_progress=on_progress
        )  # fmt: skip
        trajectories += [_trajectory(task, row, number, folder, one, grades) for row in asked]
    return task_result(prepared, trajectories, failed)


def run_swe_task(session: Session, task: SweTask) -> TaskResult:
    """`run_swe` for a suite: on the session's server, beside its journal. What cannot be measured is a result with a note."""
    if session.ahead.is_looking:
        raise InLine  # an agent's requests cannot be put in line: each follows from the reply before
    client = session.client
    try:
        return run_swe(
            prepare(task, session.dialect.chat_template_kwargs), client.endpoint, client.who, client.journal.path.parent,
            sample=session.sample, concurrency=client.concurrency, on_progress=client.tell,
        )  # fmt: skip
    except NotMeasured as error:
        return task_result_without_items(task, str(error))


def task_result_without_items(task: SweTask, note: str) -> TaskResult:
    """A task that could not be measured, and why."""
    return TaskResult(
        task=task.name, kind="swe", num_items=0, num_failed=0, num_truncated=0, accuracy=None, mean_output_tokens=None,
        max_tokens=task.max_tokens, items=(), note=note,
    )  # fmt: skip


def task_sha256(prepared: Prepared) -> str:
    """Identity of what is asked and how: rows, options that matter, prompts. What is asked otherwise lies in another folder."""
    options = prepared.task.model_dump(mode="json", exclude=set(OPERATIONAL | {"num_repeats"}))
    return sha256_of([options, dataset_sha256(prepared.rows), prepared.settings.sha256, versions()])


def _trajectory(
    task: SweTask, row: DatasetRow, repeat: int, folder: Path, finished: Finished, grades: Mapping[str, Grade]
) -> Trajectory:  # fmt: skip
    instance = row["instance_id"]
    failures = len(list((folder / instance).glob(f"{instance}.failed-*.traj.json")))
    data = read_trajectory(trajectory_path(folder, instance))
    common = {"instance": instance, "repository": row["repo"], "repeat": repeat}
    if data is None:
        reason = finished.failures.get(instance, "no trajectory was finished")
        return Trajectory(
            **common, **NOTHING_MEASURED, exit_status=reason.split(":")[0], fault="infrastructure", outcome="not_graded",
            num_attempts=max(1, failures), error=reason,
        )  # fmt: skip
    graded = grades[instance]
    return Trajectory(
        **common,
        **measure(data, native_tool_calls=task.tool_calls == "native"),
        exit_status=exit_of(data).status,
        fault="model",
        outcome=graded.outcome,
        num_attempts=failures + 1,
        error=graded.why or None,
    )


# ------------------------------------------------------------------------------------------------ figures
def task_result(prepared: Prepared, trajectories: Sequence[Trajectory], gold_failed: tuple[str, ...]) -> TaskResult:
    """Items for the gates (one a trajectory, right if it resolves its instance), figures for the report."""
    task = prepared.task
    items = tuple(_item(one) for one in trajectories)
    scored = [item for item in items if item.correct is not None]
    tokens = [item.output_tokens for item in scored if item.output_tokens is not None]
    figures = _figures(prepared, trajectories, gold_failed)
    accuracy, pass_at_k, num_samples = accuracy_of(items)
    first_error = next((one.error for one in trajectories if one.outcome == "not_graded"), None)
    return TaskResult(
        task=task.name,
        kind="swe",
        num_items=len(items),
        num_failed=len(items) - len(scored),
        num_truncated=0,
        accuracy=accuracy,
        num_samples=num_samples,
        pass_at_k=pass_at_k,
        mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
        max_tokens=task.max_tokens,
        items=items,
        note=None if scored else f"no trajectory could be finished and graded; the first error: {first_error}",
        swe=figures,
    )


def _item(one: Trajectory) -> ItemResult:
    return ItemResult(
        item=one.instance,
        sample=one.repeat,
        language="en",
        correct=None if one.outcome == "not_graded" else one.outcome == "resolved",
        truncated=False,  # a limit of the agent is part of what is measured
        wrong_script=False,
        finish_reason=one.exit_status,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        answer=one.patch_sha256,
        error=one.error if one.outcome == "not_graded" else None,
        cluster=one.repository,
    )


def _figures(prepared: Prepared, trajectories: Sequence[Trajectory], gold_failed: tuple[str, ...]) -> SweFigures:
    task = prepared.task
    count = [one for one in trajectories if one.fault == "model"]
    num_calls, num_valid = (_sum(getattr(one, key) for one in count) for key in ("num_tool_calls", "num_valid_tool_calls"))
    accepted, drafted = (_sum(getattr(one, key) for one in count) for key in ("accepted_tokens", "drafted_tokens"))
    patches = [one for one in count if one.patch_sha256 is not None and one.outcome != "not_graded"]
    runtime = {} if prepared.runtime is None else {"container_runtime": prepared.runtime.version}
    return SweFigures(
        dataset="/".join(Path(task.dataset).parts[-2:]),  # a hub id, or the end of a path that says which
        dataset_sha256=dataset_sha256(prepared.rows),
        num_instances=len({one.instance for one in trajectories}),
        num_repeats=task.num_repeats,
        gold_failed=gold_failed,
        num_resolved=sum(one.outcome == "resolved" for one in trajectories),
        num_infrastructure=sum(one.outcome == "not_graded" for one in trajectories),
        num_retried=sum(one.num_attempts > 1 for one in trajectories),
        exit_statuses=dict(sorted(Counter(one.exit_status for one in trajectories).items())),
        outcomes=dict(sorted(Counter(one.outcome for one in trajectories).items())),
        mean_steps=_mean([one.num_steps for one in count], count),
        mean_output_tokens=_mean([one.output_tokens for one in count], count),
        mean_prompt_tokens=_mean([one.prompt_tokens for one in count], count),
        num_format_errors=_sum(one.num_format_errors for one in count) or 0,
        tool_call_validity=clopper_pearson(num_valid, num_calls) if num_calls and num_valid is not None else None,
        looped=_proportion([bool(one.looped) for one in count]),
        context_overflow=_proportion([one.exit_status == "ContextWindowExceededError" for one in count]),
        patch_applies=_proportion([one.outcome != "patch_does_not_apply" for one in patches]),
        draft_acceptance=accepted / drafted if drafted and accepted is not None else None,
        versions=versions() | runtime | {"date": datetime.date.today().isoformat()},
        agent_config_sha256=prepared.settings.sha256,
        trajectories=tuple(trajectories),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[int | None], of: Sequence[Trajectory]) -> Interval | None:
    """With a bootstrap over repositories; None with fewer than two of them."""
    known = [(value, one.repository) for value, one in zip(values, of, strict=True) if value is not None]
    if len({repository for _, repository in known}) < 2:
        return None
    return cluster_bootstrap_mean([value for value, _ in known], [repository for _, repository in known])


def _proportion(values: Sequence[bool]) -> Interval | None:
    return wilson(sum(values), len(values)) if values else None
