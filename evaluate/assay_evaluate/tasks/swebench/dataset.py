"""Instances of a SWE-bench data set, in the schema that swebench 5 grades by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from assay.errors import MeasureError
from assay.foreign_text import shown
from assay.hub_session import guard_hub
from assay.recipes.swe import LOCAL_SUFFIXES, NAMED_DATASETS, SweOptions
from assay.records.base import sha256_of

REQUIRED = (
    "instance_id", "repo", "base_commit", "problem_statement", "patch", "version", "FAIL_TO_PASS", "PASS_TO_PASS",
    "image", "eval_script", "log_parser", "eval_type",
)  # fmt: skip
OF_CURRENT_SCHEMA = ("image", "eval_script", "log_parser", "eval_type")
EVAL_TYPES = ("pass_and_fail", "fail_only")
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DatasetRow = dict[str, Any]
Row = TypeVar("Row")


def load_instances(options: SweOptions) -> list[DatasetRow]:
    """The rows that are asked, sorted by instance id: `filter`, then `slice`.

    MeasureError if the data set is not there, is in the old schema (no `image`, `eval_script`, ...), or nothing is left.
    """
    name = NAMED_DATASETS.get(options.dataset, options.dataset)
    rows = check_rows(_read(name, options.split), name)
    rows.sort(key=lambda row: str(row["instance_id"]))
    if options.filter is not None:
        rows = [row for row in rows if re.match(options.filter, row["instance_id"])]
    rows = sliced(rows, options.slice)
    if not rows:
        raise MeasureError(
            f"{name}: no instance is left (filter {options.filter!r}, slice {options.slice!r}); widen them"
        )  # fmt: skip
    return rows


def sliced(rows: list[Row], text: str | None) -> list[Row]:
    """Python's slice, as the suite writes it: `0:50`. None: all."""
    if text is None:
        return rows
    first, last = (int(end) if end else None for end in text.split(":"))
    return rows[first:last]


def dataset_sha256(rows: Iterable[DatasetRow]) -> str:
    """Identity of the instances: what is asked and how it is graded; other columns do not count."""
    return sha256_of([{key: row[key] for key in REQUIRED} for row in rows])


def check_rows(rows: list[DatasetRow], where: str) -> list[DatasetRow]:
    """`rows` as they are. MeasureError names the first that cannot be run or graded, and what it lacks."""
    instances: set[str] = set()
    for number, row in enumerate(rows):
        instance = str(row.get("instance_id", f"row {number}"))
        missing = [key for key in REQUIRED if row.get(key) is None]
        if set(missing) & set(OF_CURRENT_SCHEMA):
            old = " (as in the princeton-nlp data sets)" if "FAIL_TO_PASS" in row else ""
            raise MeasureError(
                f"{where}: {instance} is in the old schema{old}: it lacks {', '.join(missing)}; take the data set of the "
                f"same name under SWE-bench/ on the hub ({', '.join(NAMED_DATASETS)} stand for them), or add the columns"
            )
        if missing:
            raise MeasureError(f"{where}: {instance} lacks {', '.join(missing)}; a row needs {', '.join(REQUIRED)}")
        if not _SAFE_ID.fullmatch(instance):
            raise MeasureError(f"{where}: {instance!r} cannot be an instance id: letters, digits, `.`, `_` and `-` only")
        if instance in instances:
            raise MeasureError(f"{where}: instance {instance} occurs twice; ids are keys of the results")
        if row["eval_type"] not in EVAL_TYPES:
            raise MeasureError(f"{where}: {instance}: eval_type {row['eval_type']!r}; allowed: {', '.join(EVAL_TYPES)}")
        instances.add(instance)
    return rows


def tests_of(row: Mapping[str, Any], key: str) -> list[str]:
    """FAIL_TO_PASS or PASS_TO_PASS, which some data sets ship as JSON text. MeasureError: it is no list."""
    value = row[key]
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tests = None
    if not isinstance(tests, list | tuple):
        raise MeasureError(f"{row.get('instance_id')}: {key} is no list of tests, nor one as JSON text: {shown(value, 60)}")
    return [str(name) for name in tests]


def _read(name: str, split: str) -> list[DatasetRow]:
    path = Path(name)
    if path.is_dir():
        files = [file for suffix in LOCAL_SUFFIXES if (file := path / f"{split}{suffix}").is_file()]
        if not files:
            raise MeasureError(
                f"{name}: no {split}.jsonl, {split}.json or {split}.parquet in it; name the file, or another split"
            )
        path = files[0]
    if path.suffix in LOCAL_SUFFIXES:
        return _read_file(path)
    if name.startswith((".", "/")):
        raise MeasureError(f"{name}: no such data set; paths are relative to the working directory, {Path.cwd()}")
    return _read_hub(name, split)


def _read_file(path: Path) -> list[DatasetRow]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            table: list[DatasetRow] = pyarrow.parquet.read_table(path).to_pylist()
            return table
        text = path.read_text(encoding="utf-8")
        # not `splitlines`: a string in JSON may hold other ends of lines
        data = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        hint = "; `make swe-images` makes the small one of this repository" if "tiny_swe" in path.parts else ""
        raise MeasureError(f"{path}: cannot be read ({error.strerror or error}){hint}") from None
    except ValueError as error:
        raise MeasureError(f"{path}: not {path.suffix[1:]} ({error})") from None
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise MeasureError(f"{path}: not a list of instances")
    return data


def _read_hub(name: str, split: str) -> list[DatasetRow]:
    from datasets import load_dataset  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetNotFoundError  # type: ignore[import-untyped]

    guard_hub()
    try:
        return [dict(row) for row in load_dataset(name, split=split)]
    except (DatasetNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise MeasureError(
            f"{name}: cannot be loaded, split {split} ({reason}); name a local .jsonl or .parquet file, "
            "or a data set of the hub"
        ) from None
