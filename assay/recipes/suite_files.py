"""Local files that a suite names: task files of one's own, essays, question files. Other contents are another suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.errors import RecipeError, did_you_mean
from assay.foreign_text import shown
from assay.recipes.model import Sampling
from assay.recipes.suite import AnyTask, LmEvalTask, Range, RulerTask, SuiteRecipe, SweTask
from assay.records.base import sha256_of, sha256_of_file

DATA_SUFFIXES = frozenset({".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst"})
"""What is looked at in a folder. Anything below a folder called `cache` or `__pycache__`, or hidden, is not."""


def with_files_hashed(suite: SuiteRecipe) -> SuiteRecipe:
    """The suite with the hash of every local file and folder that its tasks name.

    A measurement is found again by its suite's hash: without this, changed questions would get old answers. RecipeError for
    a path that is not there; paths are relative to the working directory.
    """
    return suite.model_copy(update={"files_sha256": {path: _hash(suite, path) for path in named_files(suite)}})


def as_model_asks(suite: SuiteRecipe, sampling: Sampling | None) -> SuiteRecipe:
    """The suite with the model's own sampling and length of replies where its tasks ask for them.

    They are values of the suite from then on, in its hash and in every measurement: otherwise sampled is otherwise measured.
    A model that is asked greedily gives one reply to a question, however often: such tasks ask once.
    """
    tasks = []
    for task in suite.tasks:
        changes: dict[str, float] = {}
        if task.sampling == "model" and sampling is not None:
            changes = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        if task.sampling == "model" and changes.get("temperature", task.temperature) == 0:
            changes["num_samples"] = 1
        if task.budget == "model" and sampling is not None and sampling.max_tokens is not None:
            changes["max_tokens"] = sampling.max_tokens
        tasks.append(task.model_copy(update=changes))
    return suite.model_copy(update={"tasks": tuple(tasks)})


def with_swe_options(
    suite: SuiteRecipe, *, slice_: str | None = None, filter_: str | None = None, num_repeats: int | None = None
) -> SuiteRecipe:
    """The suite with other instances or repeats in its SWE-bench tasks; None leaves what the file says.

    RecipeError if it has no such task, or an option makes no sense.
    """
    changes = {"slice": slice_, "filter": filter_, "num_repeats": num_repeats}
    changes = {key: value for key, value in changes.items() if value is not None}
    if not changes:
        return suite
    if not any(isinstance(task, SweTask) for task in suite.tasks):
        raise RecipeError(f"suite {suite.name} has no SWE-bench task: --slice, --filter and --repeats have nothing to act on")
    try:
        tasks = tuple(
            SweTask.model_validate(task.model_dump() | changes) if isinstance(task, SweTask) else task for task in suite.tasks
        )
    except ValidationError as error:
        raise RecipeError("; ".join(_of_option(fault) for fault in error.errors())) from None
    return suite.model_copy(update={"tasks": tasks})


def with_selection(suite: SuiteRecipe, tasks: Sequence[str] | None = None, limit: int | None = None) -> SuiteRecipe:
    """The suite with some of its tasks, and at most `limit` items of each part of them; None leaves what the file says.

    Another suite by its hash, and it says so in its name and description. RecipeError: it has no such task.
    """
    if tasks is None and limit is None:
        return suite
    known = {task.name: task for task in suite.tasks}
    for name in tasks or ():
        if name not in known:
            raise RecipeError(f"--tasks {shown(name)}: {did_you_mean(name, known)}suite {suite.name} has {', '.join(known)}")
    chosen = [task for name, task in known.items() if tasks is None or name in tasks]
    if limit is not None:
        chosen = [_limited(task, limit) for task in chosen]
    if tuple(chosen) == suite.tasks:
        return suite
    words = [f"only {', '.join(task.name for task in chosen)}" if chosen else "no task"] if len(chosen) < len(known) else []
    words += [f"at most {limit} items of each part"] if limit is not None else []
    told = ", ".join(words)
    return suite.model_copy(
        update={
            "name": f"{suite.name} (part)",
            "tasks": tuple(chosen),
            "description": f"{told[0].upper()}{told[1:]}. {suite.description}",
        }
    )  # fmt: skip


def _limited(task: AnyTask, limit: int) -> AnyTask:
    """With at most so many items of each part; SWE-bench has --slice for it."""
    if task.items_field is None:
        return task
    most = task.items.max if isinstance(task.items, Range) else task.items
    return task if most is not None and most <= limit else task.model_copy(update={task.items_field: limit})


def _of_option(fault: Mapping[str, Any]) -> str:
    where = "".join(f"--{str(step).removeprefix('num_')}: " for step in fault["loc"])
    return where + "; ".join(str(fault["msg"]).removeprefix("Value error, ").split("\n"))


def named_files(suite: SuiteRecipe) -> list[str]:
    """Paths as the suite writes them, sorted."""
    paths: set[str | None] = set()
    for task in suite.tasks:
        if isinstance(task, LmEvalTask):
            paths.add(task.include_path)
        elif isinstance(task, RulerTask):
            paths |= {task.essays, task.squad, task.hotpotqa}
        elif isinstance(task, SweTask):
            paths |= set(task.local_paths)
    if suite.divergence is not None:
        paths.add(suite.divergence.held_out)
    return sorted(path for path in paths if path is not None)


def _hash(suite: SuiteRecipe, name: str) -> str:
    path = Path(name)
    if path.is_file():
        return sha256_of_file(path)
    if not path.is_dir():
        raise RecipeError(
            f"suite {suite.name}: {name}: no such file or folder; paths are relative to the working directory, {Path.cwd()}"
        )
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if _is_data(file, path)}
    return sha256_of({where: sha256_of_file(file) for where, file in sorted(files.items())})


def _is_data(file: Path, folder: Path) -> bool:
    inside = file.relative_to(folder).parts
    hidden = any(part.startswith(".") or part in {"cache", "__pycache__"} for part in inside)
    return not hidden and file.suffix in DATA_SUFFIXES and file.is_file()
