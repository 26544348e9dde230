"""lm-eval's `--log_samples`: `samples_TASK_DATE.jsonl`, with the `results_DATE.json` beside it that has its settings.

A line is one document under one filter: `doc_id`, the metrics' values by name, `metrics` (their names), and hashes of document,
prompt and target, which prove that two lines are about the same question. Files from before lm-eval wrote hashes have the
document itself. lm-eval never reads `finish_reason`, so nothing tells which replies were cut off. Read as lm-eval 0.4.13 writes
them (loggers/evaluation_tracker.py, evaluator.py).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay_evaluate.harnesses.files import json_lines, sha256_of_results
from assay_evaluate.harnesses.scores import (
    ScoredReply,
    TaskScores,
    answer_of,
    choose_metric,
    hash_of,
    name_of,
    score_of,
    settings_of,
    without_doubles,
    wrong,
)
from assay_evaluate.transport.foreign_json import object_in, text_in

HARNESS = "lm-eval"
FLEXIBLE = "flexible-extract"
"""The filter that is taken where a task has it, as `tasks/lm_eval` does."""
_SAMPLES = re.compile(r"samples_(?P<task>.+?)(_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+))?\.jsonl")
_OF_THE_RUN = ("fewshot_as_multiturn", "system_instruction_sha", "chat_template_sha")
_OF_THE_CONFIG = ("gen_kwargs", "fewshot_seed")


def is_samples(path: Path, first: Mapping[str, Any]) -> bool:
    """first: line of the file."""
    return "doc_id" in first and "metrics" in first and path.suffix == ".jsonl"


def is_results(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("results"), dict) and isinstance(data.get("configs"), dict)


def read_samples(files: Sequence[Path], results: Mapping[Path, Mapping[str, Any]], metric: str | None) -> list[TaskScores]:
    """Scores of all files of one side, groups as one task.

    results: files of settings -> what is in them. metric: `NAME` or `NAME,FILTER`, as lm-eval's tables call them.
    """
    parts = [_read_task(path, *_results_of(path, results), metric) for path in files]
    named: dict[str, TaskScores] = {}
    for part, _ in parts:
        if (other := named.get(part.task)) is not None:
            pair = " and ".join(str(next(iter(scores.files))) for scores in (other, part))
            raise wrong(pair, f"are both results of task {part.task}; name one of them, or leave one in the folder")
        named[part.task] = part
    groups = {name: leaves for _, data in parts for name, leaves in _groups(data).items()}
    grouped = {leaf: group for group, leaves in groups.items() for leaf in leaves}
    together: dict[str, list[TaskScores]] = {}
    for name, part in named.items():
        together.setdefault(grouped.get(name, name), []).append(part)
    return [_one_task(name, members) for name, members in together.items()]


def _results_of(path: Path, results: Mapping[Path, Mapping[str, Any]]) -> tuple[Path | None, Mapping[str, Any]]:
    """The settings of a file of samples: those of its date, or the only ones in its folder."""
    match = _SAMPLES.fullmatch(path.name)
    date = match["date"] if match else None
    beside = [other for other in results if other.parent == path.parent]
    same = [other for other in beside if date is not None and date in other.name] or (beside if len(beside) == 1 else [])
    return (same[0], results[same[0]]) if same else (None, {})


def _read_task(
    path: Path, settings_file: Path | None, results: Mapping[str, Any], metric: str | None
) -> tuple[TaskScores, Mapping[str, Any]]:
    match = _SAMPLES.fullmatch(path.name)
    task = name_of(match["task"] if match else path.stem, path, "the task's name")
    config = object_in(object_in(results, "configs"), task)
    lines = list(_lines(path))
    filters = list(dict.fromkeys(line.filter for line in lines))
    chosen = FLEXIBLE if FLEXIBLE in filters else filters[0]
    names = list(dict.fromkeys(name for line in lines for name in line.metrics))
    listed = [entry.get("metric") for entry in config.get("metric_list") or () if isinstance(entry, dict)]
    names.sort(key=lambda name: listed.index(name) if name in listed else len(listed))
    known = [*names, *(f"{name},{choice}" for choice in filters for name in names)]
    name = choose_metric(path, known, metric)
    if "," in name and name not in names:
        name, chosen = name.split(",", 1)
    others = [other for other in names if other != name]
    rows = [line for line in lines if line.filter == chosen]
    run = object_in(results, "config")
    settings = {
        "version": object_in(results, "versions").get(task),
        "num_fewshot": object_in(results, "n-shot").get(task, config.get("num_fewshot")),
        "generation_kwargs": config.get("generation_kwargs"),
        **{setting: results.get(setting) for setting in _OF_THE_RUN},
        **{setting: run.get(setting) for setting in _OF_THE_CONFIG},
    }
    generation = object_in(config, "generation_kwargs")
    budgets = [generation.get(key) for key in ("max_gen_toks", "max_tokens", "max_new_tokens")]
    date = results.get("date")
    files = [path] if settings_file is None else [path, settings_file]
    return TaskScores(
        task=task,
        harness=HARNESS,
        version=text_in(results, "lm_eval_version") or None,
        metric=name if len(filters) == 1 else f"{name},{chosen}",
        replies=without_doubles((row.reply(name, others) for row in rows), path),
        files={file: sha256_of_results(file) for file in files},
        settings=settings_of(path, settings),
        model=text_in(results, "model_name") or None,
        asked_through=text_in(run, "model") or None,
        max_tokens=next((budget for budget in budgets if type(budget) is int and 0 < budget < 2**53), None),
        chance=_chance(config, rows),
        started=datetime.datetime.fromtimestamp(date, datetime.UTC).isoformat(timespec="seconds")
        if isinstance(date, int | float) and 0 < date < 2**32
        else None,
    ), results


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    row: Mapping[str, Any]
    filter: str
    metrics: tuple[str, ...]
    num_requests: int

    def reply(self, metric: str, others: Sequence[str]) -> ScoredReply:
        """A line without the metric is of a reply whose scorer failed: it has no score."""
        row, where = self.row, self.where
        is_scored = metric in row
        prompt, target = row.get("prompt_hash"), row.get("target_hash", row.get("target"))
        return ScoredReply(
            item=name_of(row.get("doc_id"), where, "doc_id"),
            score=score_of(row[metric], where, others) if is_scored else None,
            error=None if is_scored else "lm-eval's scorer gave no value",
            question=hash_of(row.get("doc_hash", row.get("doc")), target),
            prompt=hash_of(prompt) if prompt is not None else None,
            answer=answer_of(next(iter(row.get("filtered_resps") or ()), None)),
        )


def _lines(path: Path) -> Iterator[_Line]:
    """What is needed of each: replies and prompts are not kept."""
    for where, row in json_lines(path):
        metrics = row.get("metrics")
        if not isinstance(metrics, list):
            raise wrong(where, "has no list `metrics`; lm-eval before 0.4.3 wrote none: evaluate again with a newer one")
        names = tuple(name_of(name, where, "a metric's name") for name in metrics)
        kept = ("doc_id", "doc_hash", "target_hash", "prompt_hash", *(() if "doc_hash" in row else ("doc", "target")))
        answers = row.get("filtered_resps")
        lean = {name: row[name] for name in (*kept, *names) if name in row}
        lean["filtered_resps"] = answers[:1] if isinstance(answers, list) else []
        asked = row.get("arguments")
        yield _Line(
            where,
            lean,
            name_of(row.get("filter", "none"), where, "filter"),
            names,
            len(asked) if isinstance(asked, list | dict) else 0,
        )
    return


def _chance(config: Mapping[str, Any], rows: Sequence[_Line]) -> float | None:
    """Of a multiple choice: one request is one choice."""
    if config.get("output_type") != "multiple_choice" or not all(row.num_requests > 1 for row in rows):
        return None
    return sum(1 / row.num_requests for row in rows) / len(rows)


# ------------------------------------------------------------------------------------------------ groups
def _groups(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Groups that no other group holds -> the tasks in them, at whatever depth."""
    children = {
        name: [child for child in members if isinstance(child, str)]
        for name, members in object_in(results, "group_subtasks").items()
        if isinstance(members, list)
    }
    inner = {child for members in children.values() for child in members}

    def leaves(name: str, above: tuple[str, ...] = ()) -> list[str]:
        members = () if name in above else children.get(name, ())
        return [leaf for child in members for leaf in leaves(child, (*above, name))] or [name]

    return {name: leaves(name) for name, members in children.items() if members and name not in inner}


def _one_task(name: str, parts: Sequence[TaskScores]) -> TaskScores:
    """A group as one task with a part for each of its tasks; a task by itself stays as it is."""
    first = parts[0]
    if len(parts) == 1 and first.task == name:
        return first
    where = " and ".join(str(next(iter(part.files))) for part in parts[:2])
    if len({part.metric for part in parts}) > 1:
        raise wrong(where, f"tasks of group {name} have several metrics; choose one with --metric")
    known = [part.chance for part in parts]
    sizes = [len(part.replies) for part in parts]
    chance = sum(c * n for c, n in zip(known, sizes, strict=True) if c is not None) / sum(sizes) if None not in known else None
    return TaskScores(
        task=name,
        harness=first.harness,
        version=first.version,
        metric=first.metric,
        replies=tuple(
            ScoredReply(
                item=f"{part.task}/{reply.item}", score=reply.score, error=reply.error, question=reply.question,
                prompt=reply.prompt, answer=reply.answer, subtask=part.task,
            )
            for part in parts
            for reply in part.replies
        ),
        files={file: sha256 for part in parts for file, sha256 in part.files.items()},
        settings={part.task: dict(part.settings) for part in parts if part.settings},
        model=first.model,
        asked_through=first.asked_through,
        max_tokens=first.max_tokens,
        chance=chance,
        started=first.started,
    )  # fmt: skip
