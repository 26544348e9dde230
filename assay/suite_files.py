"""Local files that a suite names: task files of one's own, essays, question files. Other contents are another suite."""

from __future__ import annotations

from pathlib import Path

from assay.errors import RecipeError
from assay.recipes import LmEvalTask, RulerTask, SuiteRecipe, SweTask
from assay.records import sha256_of, sha256_of_file

DATA_SUFFIXES = frozenset({".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst"})
"""What is looked at in a folder. Anything below a folder called `cache` or `__pycache__`, or hidden, is not."""


def with_files_hashed(suite: SuiteRecipe) -> SuiteRecipe:
    """The suite with the hash of every local file and folder that its tasks name.

    A measurement is found again by its suite's hash: without this, changed questions would get old answers. RecipeError for
    a path that is not there; paths are relative to the working directory.
    """
    return suite.model_copy(update={"files_sha256": {path: _hash(suite, path) for path in named_files(suite)}})


def named_files(suite: SuiteRecipe) -> list[str]:
    """Paths as the suite writes them, sorted."""
    found: set[str | None] = set()
    for task in suite.tasks:
        if isinstance(task, LmEvalTask):
            found.add(task.include_path)
        elif isinstance(task, RulerTask):
            found |= {task.essays, task.squad, task.hotpotqa}
        elif isinstance(task, SweTask):
            found |= set(task.local_paths)
    if suite.divergence is not None:
        found.add(suite.divergence.held_out)
    return sorted(path for path in found if path is not None)


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
