"""Logs of inspect_ai, `.eval` (a zip) and `.json`.

A sample has `id`, `epoch`, what was asked, `scores` by scorer, and how it ended. `C`, `P`, `I` and `N` are 1, 0.5, 0 and 0, as
inspect's own `value_to_float` has them. A sample that an error halted, that was invalidated, or that no scorer scored has no
score. A reply counts as cut off where the model stopped at `max_tokens` or `model_length`, or a limit on tokens or context
ended the sample. Read as inspect_ai 0.3.285 writes them (log/_log.py, log/_recorders/eval.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.foreign_text import shown
from assay_evaluate.harnesses.files import Archive, open_results, sha256_of_results
from assay_evaluate.harnesses.scores import (
    MOST_SAMPLES,
    ScoredReply,
    TaskScores,
    answer_of,
    choose_metric,
    hash_of,
    name_of,
    score_of,
    settings_of,
    whole_number,
    without_doubles,
    wrong,
)
from assay_evaluate.transport.foreign_json import count_in, object_in, objects_in, text_in

HARNESS = "inspect"
HEADER = "header.json"
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
CUT_AT = frozenset({"max_tokens", "model_length"})
"""`stop_reason` of a reply that was cut off."""
CUT_BY = frozenset({"token", "context"})
"""`limit.type` of a sample that was."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "max_tokens", "stop_seqs", "system_message", "reasoning_effort", "reasoning_tokens",
    "frequency_penalty", "presence_penalty", "num_choices", "best_of", "logit_bias",
)  # fmt: skip
_LIMITS = ("message_limit", "token_limit", "turn_limit", "time_limit", "working_limit")


def is_log(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("eval"), dict) and "status" in data


def read_archive(path: Path, metric: str | None) -> TaskScores:
    with open_results(path) as file:
        archive = Archive(path, file)
        header = archive.read(HEADER)
        if not isinstance(header, dict) or not is_log(header):
            raise wrong(path, f"{HEADER} is no log of inspect; export it again")
        members = [name for name in archive.names if name.startswith("samples/") and name.endswith(".json")]
        return read_log(path, header, ((f"{path}/{name}", archive.read(name)) for name in members), metric)


def samples_in(path: Path, log: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of a log in JSON."""
    for number, sample in enumerate(objects_in(log, "samples"), 1):
        yield f"{path} sample {number}", sample


def read_log(path: Path, log: Mapping[str, Any], samples: Iterator[tuple[str, Any]], metric: str | None) -> TaskScores:
    """metric: a scorer, or `SCORER/KEY` of one that gives several values."""
    spec, plan = object_in(log, "eval"), object_in(log, "plan")
    if log.get("status") == "started":
        raise wrong(path, "is the log of an evaluation that is not finished; wait for it, or run `inspect eval-retry`")
    lean = [_lean(where, sample) for where, sample in samples]
    if lean and not any(values for *_, values in lean):
        reason = next((sample["error"] for _, sample, _ in lean if sample["error"] is not None), "no scorer ran")
        raise wrong(path, f"no sample has a score; the first error: {shown(_message(reason))}; run `inspect eval-retry`")
    name = choose_metric(path, list(dict.fromkeys(value for *_, values in lean for value in values)), metric)
    sampling = {**object_in(plan, "config"), **object_in(spec, "model_generate_config")}
    limits = object_in(spec, "config")
    steps = [{"solver": text_in(step, "solver"), "params": step.get("params")} for step in objects_in(plan, "steps")]
    settings = {
        "task_version": spec.get("task_version"),
        "task_args": spec.get("task_args"),
        "solver": steps or None,
        **{setting: sampling.get(setting) for setting in _SAMPLING},
        **{setting: limits.get(setting) for setting in _LIMITS},
    }
    task = name_of(spec.get("task"), path, "eval.task")
    budget = sampling.get("max_tokens")
    return TaskScores(
        task=task.rsplit("/", 1)[-1] or task,
        harness=HARNESS,
        version=text_in(object_in(spec, "packages"), "inspect_ai") or None,
        metric=name,
        replies=without_doubles((_reply(where, sample, values, name) for where, sample, values in lean), path),
        files={path: sha256_of_results(path)},
        settings=settings_of(path, settings),
        model=text_in(spec, "model") or None,
        max_tokens=budget if type(budget) is int and budget > 0 else None,
        started=text_in(spec, "created") or None,
    )


def _lean(where: str, sample: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What is needed of a sample, without its messages and events; and its scores by name."""
    if not isinstance(sample, dict):
        raise wrong(where, "is no sample; export the log again")
    values: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for scorer, score in object_in(sample, "scores").items():
        value = score.get("value") if isinstance(score, dict) else score
        parts = {f"{scorer}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {scorer: value}
        values |= parts
        answers |= dict.fromkeys(parts, score.get("answer") if isinstance(score, dict) else None)
    output = object_in(sample, "output")
    return (
        where,
        {
            "id": sample.get("id"),
            "epoch": sample.get("epoch", 1),
            "question": hash_of(_text_of(sample.get("input")), sample.get("choices"), sample.get("target")),
            "error": sample.get("error"),
            "invalidation": sample.get("invalidation"),
            "limit": object_in(sample, "limit").get("type"),
            "stop": [choice.get("stop_reason") for choice in objects_in(output, "choices")],
            "output_tokens": count_in(object_in(output, "usage"), "output_tokens"),
            "answers": answers,
        },
        values,
    )


def _text_of(asked: Any) -> Any:
    """The question without ids of messages, which are new in every run."""
    if isinstance(asked, list):
        return [[message.get("role"), message.get("content")] if isinstance(message, dict) else message for message in asked]
    return asked


def _reply(where: str, sample: Mapping[str, Any], values: Mapping[str, Any], metric: str) -> ScoredReply:
    error = sample["error"]
    reason = None
    if error is not None:
        reason = f"halted: {_message(error)}"
    elif sample["invalidation"] is not None:
        reason = "invalidated"
    elif (value := values.get(metric)) is None or (isinstance(value, float) and math.isnan(value)):
        reason = "not scored"
    stops: Sequence[Any] = sample["stop"]
    return ScoredReply(
        item=name_of(sample["id"], where, "id"),
        sample=whole_number(sample["epoch"], where, "epoch", MOST_SAMPLES),
        score=None if reason is not None else _score(values[metric], where, [name for name in values if name != metric]),
        error=None if reason is None else shown(reason),
        question=sample["question"],
        answer=answer_of(sample["answers"].get(metric)),
        cut=None if not stops and sample["limit"] is None else bool(CUT_AT & set(map(str, stops))) or sample["limit"] in CUT_BY,
        output_tokens=sample["output_tokens"],
    )


def _message(error: Any) -> Any:
    return error.get("message") if isinstance(error, dict) else error


def _score(value: Any, where: str, others: Sequence[str]) -> float:
    if isinstance(value, str):
        value = VALUES.get(value if len(value) == 1 else value.lower(), value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return score_of(value, where, others)
