"""Which files of a path are results, and of which harness: told by what is in them, not by how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay_evaluate.harnesses import inspect_log, lm_eval, nemo, swebench, table
from assay_evaluate.harnesses.files import files_under, json_lines, parsed, read_whole
from assay_evaluate.harnesses.scores import TaskScores, wrong

SUFFIXES = frozenset({".eval", ".json", ".jsonl", ".csv", ".tsv", ".yml", ".yaml"})
FORMATS = (
    "lm-eval's samples_*.jsonl (`--log_samples`), inspect's .eval or .json logs, NeMo Evaluator's eval-*.json with "
    "results.jsonl, SWE-bench's report, or a table (CSV, TSV, JSON lines) of item and score"
)
ONE_TABLE = "scores"
"""Task of a table that was named by itself, where its rows name none; in a folder the file's name says it."""
TOTALS = "results.yml"
"""What NeMo Evaluator's containers write: totals of tasks."""


def read_results(path: Path, metric: str | None = None) -> dict[str | None, list[TaskScores]]:
    """Side -> scores of its tasks; the only side is None unless a table names sides.

    path: one file, or a folder with those of several tasks and harnesses; what is no result in it is passed over.
    metric: which score is taken, where files have several. MeasureError: there is none, or one cannot be read.
    """
    files = files_under(path, SUFFIXES)
    samples: list[Path] = []
    settings: dict[Path, Mapping[str, Any]] = {}
    sides: dict[str | None, list[TaskScores]] = {}
    for file in files:
        if file.suffix == ".json":
            data = parsed(read_whole(file), file)
            if isinstance(data, dict) and lm_eval.is_results(data):
                settings[file] = data
            elif isinstance(data, dict) and (scores := _read_object(file, data, metric)) is not None:
                sides.setdefault(None, []).append(scores)
        elif file.suffix == ".eval":
            sides.setdefault(None, []).append(inspect_log.read_archive(file, metric))
        elif file.suffix in table.DELIMITERS:
            _add(sides, table.read_table(file, file.stem if file != path else ONE_TABLE, metric))
        elif file.suffix == ".jsonl":
            first = next((row for _, row in json_lines(file)), {})
            if lm_eval.is_samples(file, first):
                samples.append(file)
            elif "problem_idx" in first and file == path:
                bundle = _bundle_beside(file)
                sides.setdefault(None, []).append(nemo.read_bundle(*bundle, metric))
            elif table.is_row(first):
                _add(sides, table.read_table(file, file.stem if file != path else ONE_TABLE, metric))
    if samples:
        if path in samples:  # named by itself: its settings lie beside it
            settings |= _settings_beside(path)
        sides.setdefault(None, []).extend(lm_eval.read_samples(samples, settings, metric))
    if not sides:
        raise wrong(path, _nothing(files, settings))
    for tasks in sides.values():
        _refuse_doubles(tasks)
    return sides


def _read_object(file: Path, data: Mapping[str, Any], metric: str | None) -> TaskScores | None:
    """A JSON file's scores. None: it is none of the formats."""
    if inspect_log.is_log(data):
        return inspect_log.read_log(file, data, inspect_log.samples_in(file, data), metric)
    if swebench.is_report(data):
        return swebench.read_report(file, data, metric)
    return nemo.read_bundle(file, data, metric) if nemo.is_bundle(data) else None


def _bundle_beside(results: Path) -> tuple[Path, Mapping[str, Any]]:
    bundles = [(path, data) for path, data in _objects_beside(results) if nemo.is_bundle(data)]
    if len(bundles) != 1:
        raise wrong(results, f"has {len(bundles)} bundles eval-*.json beside it, one says what it is of; name the folder")
    return bundles[0]


def _settings_beside(samples: Path) -> dict[Path, Mapping[str, Any]]:
    return {path: data for path, data in _objects_beside(samples) if lm_eval.is_results(data)}


def _objects_beside(file: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    paths = sorted(path for path in file.parent.glob("*.json") if path.is_file() and not path.is_symlink())
    read = [(path, parsed(read_whole(path), path)) for path in paths]
    return [(path, data) for path, data in read if isinstance(data, dict)]


def _add(sides: dict[str | None, list[TaskScores]], more: Mapping[str | None, list[TaskScores]]) -> None:
    for side, tasks in more.items():
        sides.setdefault(side, []).extend(tasks)


def _nothing(files: list[Path], settings: Mapping[Path, Any]) -> str:
    if settings:
        return "has lm-eval's totals only; evaluate with `--log_samples`"
    if any(file.name == TOTALS for file in files):
        return f"has totals only ({TOTALS}), which cannot be paired; import the items that the container's harness wrote"
    return f"holds no results that are known; give {FORMATS}"


def _refuse_doubles(tasks: list[TaskScores]) -> None:
    known: dict[str, TaskScores] = {}
    for scores in tasks:
        if (other := known.setdefault(scores.task, scores)) is not scores:
            pair = " and ".join(str(next(iter(same.files))) for same in (other, scores))
            raise wrong(pair, f"are both results of task {scores.task}; name one of them, or leave one in the folder")
