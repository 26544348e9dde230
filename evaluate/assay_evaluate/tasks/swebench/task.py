"""One SWE-bench task of a suite on one served checkpoint: gold, agents, grading, figures.

RUN/swe/TASK-SHA/gold/                   the gold patches on this host, once for all checkpoints
RUN/swe/TASK-SHA/CHECKPOINT-SERVED/      repeat-0/{preds.json, INSTANCE/...}, grades of each, agents.log
"""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
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
from assay_evaluate.client.client import Endpoint, NotMeasured
from assay_evaluate.client.journal import Identity
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean
from assay_evaluate.statistics.item_pairs import accuracy_of
from assay_evaluate.statistics.proportions import clopper_pearson, wilson
from assay_evaluate.tasks.swebench.agents import Finished, Pacing, run_agents
from assay_evaluate.tasks.swebench.container_runtime import ContainerRuntime, check_room, runtime_for
from assay_evaluate.tasks.swebench.dataset import DatasetRow, dataset_sha256, load_instances
from assay_evaluate.tasks.swebench.grading import GOLD, Grade, check_harness, grade, versions
from assay_evaluate.tasks.swebench.settings import Settings, settings_for
from assay_evaluate.tasks.swebench.trajectories import exit_of, measure, read_trajectory, trajectory_path
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
        if missing is not None and (reason := runtime.pull(missing, task.pull_timeout_s)) is not None:
            raise MeasureError(
                f"{task.name}: image {missing} is neither here nor in its registry ({reason}); build it (`make "
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
    server: Endpoint,
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
    graded = functools.partial(grade, task, runtime=prepared.runtime, on_progress=on_progress)
    gold = graded(rows, {row["instance_id"]: row["patch"] for row in rows}, base / "gold", GOLD)
    failed = tuple(instance for instance, grade_of_gold in sorted(gold.items()) if grade_of_gold.outcome != "resolved")
    rows = [row for row in rows if row["instance_id"] not in failed]
    if not rows:
        first = gold[failed[0]]
        raise NotMeasured(f"no gold patch passes on this host ({failed[0]}: {first.outcome}, {first.reason or 'see its log'})")
    own = base / f"{who.checkpoint_sha256[:12]}-{who.fingerprint_sha256[:8]}{'-repeat' if sample else ''}"
    folders = [own / f"repeat-{number}" for number in range(task.num_repeats)]
    finished = run_agents(
        task, rows, folders, server, settings=prepared.settings, runtime=prepared.runtime, run=run_name(str(own.resolve())),
        model_name=own.name, num_agents=min(task.num_agents, concurrency), on_progress=on_progress, pacing=pacing,
    )  # fmt: skip
    trajectories = []
    for number, (folder, repeat) in enumerate(zip(folders, finished, strict=True)):
        patches = {instance: prediction["model_patch"] for instance, prediction in repeat.predictions.items()}
        grades = graded(rows, patches, folder / "grading", own.name)
        trajectories += [_trajectory(task, row, number, folder, repeat, grades) for row in rows]
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
        return TaskResult(
            task=task.name, kind="swe", num_items=0, num_failed=0, num_truncated=0, accuracy=None, mean_output_tokens=None,
            max_tokens=task.max_tokens, items=(), note=str(error),
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
    grade_of_patch = grades[instance]
    return Trajectory(
        **common,
        **measure(data, native_tool_calls=task.tool_calls == "native"),
        exit_status=exit_of(data).status,
        fault="model",
        outcome=grade_of_patch.outcome,
        num_attempts=failures + 1,
        error=grade_of_patch.reason or None,
    )


# ------------------------------------------------------------------------------------------------ figures
def task_result(prepared: Prepared, trajectories: Sequence[Trajectory], gold_failed: tuple[str, ...]) -> TaskResult:
    """Items for the gates (one a trajectory, right if it resolves its instance), figures for the report."""
    task = prepared.task
    items = tuple(_item(trajectory) for trajectory in trajectories)
    scored = [item for item in items if item.correct is not None]
    tokens = [item.output_tokens for item in scored if item.output_tokens is not None]
    accuracy, pass_at_k, num_samples = accuracy_of(items)
    first_error = next((trajectory.error for trajectory in trajectories if trajectory.outcome == "not_graded"), None)
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
        swe=_figures(prepared, trajectories, gold_failed),
    )


def _item(trajectory: Trajectory) -> ItemResult:
    return ItemResult(
        item=trajectory.instance,
        sample=trajectory.repeat,
        language="en",
        correct=None if trajectory.outcome == "not_graded" else trajectory.outcome == "resolved",
        truncated=False,  # a limit of the agent is part of what is measured
        wrong_script=False,
        finish_reason=trajectory.exit_status,
        prompt_tokens=trajectory.prompt_tokens,
        output_tokens=trajectory.output_tokens,
        answer=trajectory.patch_sha256,
        error=trajectory.error if trajectory.outcome == "not_graded" else None,
        cluster=trajectory.repository,
    )


def _figures(prepared: Prepared, trajectories: Sequence[Trajectory], gold_failed: tuple[str, ...]) -> SweFigures:
    task = prepared.task
    counted = [trajectory for trajectory in trajectories if trajectory.fault == "model"]
    num_calls, num_valid = _sum(counted, "num_tool_calls"), _sum(counted, "num_valid_tool_calls")
    accepted, drafted = _sum(counted, "accepted_tokens"), _sum(counted, "drafted_tokens")
    patches = [
        trajectory for trajectory in counted if trajectory.patch_sha256 is not None and trajectory.outcome != "not_graded"
    ]
    runtime = {} if prepared.runtime is None else {"container_runtime": prepared.runtime.version}
    return SweFigures(
        dataset="/".join(Path(task.dataset).parts[-2:]),  # a hub id, or the end of a path that says which
        dataset_sha256=dataset_sha256(prepared.rows),
        num_instances=len({trajectory.instance for trajectory in trajectories}),
        num_repeats=task.num_repeats,
        gold_failed=gold_failed,
        num_resolved=sum(trajectory.outcome == "resolved" for trajectory in trajectories),
        num_infrastructure=sum(trajectory.outcome == "not_graded" for trajectory in trajectories),
        num_retried=sum(trajectory.num_attempts > 1 for trajectory in trajectories),
        exit_statuses=dict(sorted(Counter(trajectory.exit_status for trajectory in trajectories).items())),
        outcomes=dict(sorted(Counter(trajectory.outcome for trajectory in trajectories).items())),
        mean_steps=_mean(counted, "num_steps"),
        mean_output_tokens=_mean(counted, "output_tokens"),
        mean_prompt_tokens=_mean(counted, "prompt_tokens"),
        num_format_errors=_sum(counted, "num_format_errors") or 0,
        tool_call_validity=clopper_pearson(num_valid, num_calls) if num_calls and num_valid is not None else None,
        looped=_proportion([bool(trajectory.looped) for trajectory in counted]),
        context_overflow=_proportion([trajectory.exit_status == "ContextWindowExceededError" for trajectory in counted]),
        patch_applies=_proportion([trajectory.outcome != "patch_does_not_apply" for trajectory in patches]),
        draft_acceptance=accepted / drafted if drafted and accepted is not None else None,
        versions=versions() | runtime | {"date": datetime.date.today().isoformat()},
        agent_config_sha256=prepared.settings.sha256,
        trajectories=tuple(trajectories),
    )


def _sum(trajectories: Sequence[Trajectory], name: str) -> int | None:
    known = [value for trajectory in trajectories if (value := getattr(trajectory, name)) is not None]
    return sum(known) if known else None


def _mean(trajectories: Sequence[Trajectory], name: str) -> Interval | None:
    """With a bootstrap over repositories; None with fewer than two of them."""
    known = [(value, trajectory.repository) for trajectory in trajectories if (value := getattr(trajectory, name)) is not None]
    if len({repository for _, repository in known}) < 2:
        return None
    return cluster_bootstrap_mean([value for value, _ in known], [repository for _, repository in known])


def _proportion(values: Sequence[bool]) -> Interval | None:
    return wilson(sum(values), len(values)) if values else None
