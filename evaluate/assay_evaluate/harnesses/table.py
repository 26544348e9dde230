"""A table of scores, for any harness: CSV or TSV with a header, or JSON lines with the same names.

`item` and `score` are needed. `score` lies between 0 and 1, or is true or false; it is empty (null) where no reply came or
nothing could be graded, and a row with an `error` has none, whatever stands there. Optional: `task`, `side` (both sides in one
file), `sample` (several replies to an item), `cluster`, `subtask`, `answer`, `question` (text or hash that proves that items of
one name are one question), `output_tokens`, `cut`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.foreign_text import shown
from assay_evaluate.harnesses.files import json_lines, sha256_of_results, text_lines
from assay_evaluate.harnesses.scores import (
    MOST_SAMPLES,
    ScoredReply,
    TaskScores,
    answer_of,
    hash_of,
    name_of,
    score_of,
    whole_number,
    without_doubles,
    wrong,
)

HARNESS = "table"
METRIC = "score"
OPTIONAL = ("task", "side", "sample", "cluster", "subtask", "answer", "question", "output_tokens", "cut", "error")
WORDS = {"true": True, "false": False}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
MOST_FIELD = 10_000_000
"""Characters of one field of CSV."""


def is_row(row: Mapping[str, Any]) -> bool:
    return "item" in row


def read_table(path: Path, task: str, metric: str | None) -> dict[str | None, list[TaskScores]]:
    """Side -> its tasks; None: the table names no sides. task: of rows that name none. metric: another column than `score`."""
    column = metric or METRIC
    by_side: dict[str | None, dict[str, list[ScoredReply]]] = {}
    for where, row in _rows(path, column):
        side, given = row.get("side"), row.get("task")
        key = None if side in (None, "") else name_of(side, where, "side")
        name = task if given in (None, "") else name_of(given, where, "task")
        by_side.setdefault(key, {}).setdefault(name, []).append(_reply(where, row, column))
    if not by_side:
        raise wrong(path, "has no row; write one for each item")
    if None in by_side and len(by_side) > 1:
        raise wrong(path, "has rows with a side and rows without; name the side in every row")
    sha256 = sha256_of_results(path)
    return {
        side: [
            TaskScores(
                task=name, harness=HARNESS, version=None, metric=column, files={path: sha256},
                replies=without_doubles(replies, f"{path}, task {name}"),
            )
            for name, replies in tasks.items()
        ]
        for side, tasks in by_side.items()
    }  # fmt: skip


def _rows(path: Path, column: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix not in DELIMITERS:
        for where, row in json_lines(path):
            if column not in row:
                raise wrong(where, f"has no {shown(column)}; write null where no reply came")
            yield where, row
        return
    csv.field_size_limit(MOST_FIELD)
    reader = csv.DictReader(text_lines(path), delimiter=DELIMITERS[path.suffix], strict=True)
    try:
        columns = list(reader.fieldnames or ())
        if missing := [name for name in ("item", column) if name not in columns]:
            raise wrong(
                path, f"has no column {' and '.join(map(shown, missing))}; it has {', '.join(map(shown, columns)) or 'none'}"
            )
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise wrong(path, f"has two columns {shown(twice[0])}; leave one of them")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if None in row or None in row.values():
                raise wrong(where, f"has another number of fields than the header ({len(columns)})")
            yield where, row
    except csv.Error as error:
        raise wrong(f"{path} line {reader.line_num}", f"cannot be read: {error}; export it again") from None


def _reply(where: str, row: Mapping[str, Any], column: str) -> ScoredReply:
    """Text of a table and values of JSON alike; empty is missing."""
    given = {name: value for name in (column, "item", *OPTIONAL) if (value := row.get(name)) not in (None, "")}
    error = given.get("error")
    score, cut = None if error is not None else _value(given.get(column)), _value(given.get("cut"))
    if cut not in (None, 0, 1):
        raise wrong(where, f"cut is {shown(repr(cut), 60)}; true or false was expected")
    tokens = _value(given.get("output_tokens"))
    return ScoredReply(
        item=name_of(given.get("item"), where, "item"),
        sample=whole_number(_value(given.get("sample", 0)), where, "sample", MOST_SAMPLES),
        score=None if score is None else score_of(score, where),
        error=None if score is not None else shown(error or "no score stands there"),
        question=hash_of(given["question"]) if "question" in given else None,
        answer=answer_of(given.get("answer")),
        cluster=name_of(given["cluster"], where, "cluster") if "cluster" in given else None,
        subtask=name_of(given["subtask"], where, "subtask") if "subtask" in given else None,
        cut=None if cut is None else bool(cut),
        output_tokens=None if tokens is None else whole_number(tokens, where, "output_tokens", 2**53),
    )


def _value(text: Any) -> Any:
    """A number or truth value that stands as text, as what it is; other text stays."""
    if not isinstance(text, str):
        return text
    word = text.strip().lower()
    if word in WORDS:
        return WORDS[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return text
