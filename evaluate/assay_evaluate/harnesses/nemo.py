"""NVIDIA NeMo Evaluator: a bundle `eval-….json` with `results.jsonl` beside it, one line a reply.

A line has `problem_idx`, `repeat`, `reward`, the prompt and the expected answer, by which pairing is proved. A reply that
infrastructure spoilt has reward 0 there, and `scoring_details.error_category` says why; so has one that the judge could not
read. What older versions write (`results.yml`) has totals only. Read as the SDK at 0.5.0rc0 writes them (engine/artifacts.py,
engine/eval_loop.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.foreign_text import shown
from assay_evaluate.harnesses.files import json_lines, sha256_of_results
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
from assay_evaluate.transport.foreign_json import object_in, text_in

HARNESS = "nemo-evaluator"
RESULTS = "results.jsonl"
REWARD = "reward"
INFRASTRUCTURE = frozenset({"infra_error", "tool_infra", "system"})
"""`error_category` of replies for whose score 0 no model is to blame."""
_SETTINGS = (
    "temperature", "top_p", "max_tokens", "system_prompt", "shuffle_seed", "scorers", "solver", "solver_type", "judge",
    "judge_model", "num_fewshot", "prompt_template",
)  # fmt: skip


def is_bundle(data: Mapping[str, Any]) -> bool:
    return "config_hash" in data and isinstance(data.get("benchmark"), dict)


def read_bundle(path: Path, bundle: Mapping[str, Any], metric: str | None) -> TaskScores:
    """metric: `reward`, or one of `scorer_rewards`."""
    config, results = object_in(bundle, "config"), path.with_name(RESULTS)
    if not results.is_file():
        raise wrong(path, f"has totals only, and no {RESULTS} lies beside it; put it there")
    lines = list(json_lines(results))
    scorers = list(dict.fromkeys(name for _, row in lines for name in object_in(row, "scorer_rewards")))
    name = choose_metric(results, [REWARD, *scorers], metric)
    budget = config.get("max_tokens")
    return TaskScores(
        task=name_of(object_in(bundle, "benchmark").get("name"), path, "benchmark.name"),
        harness=HARNESS,
        version=text_in(bundle, "sdk_version") or None,
        metric=name,
        replies=without_doubles((_reply(where, row, name, scorers) for where, row in lines), results),
        files={file: sha256_of_results(file) for file in (path, results)},
        settings=settings_of(path, {setting: config.get(setting) for setting in _SETTINGS}),
        model=text_in(config, "model") or None,
        max_tokens=budget if type(budget) is int and budget > 0 else None,
        started=text_in(bundle, "timestamp") or None,
    )


def _reply(where: str, row: Mapping[str, Any], metric: str, scorers: list[str]) -> ScoredReply:
    details, metadata = object_in(row, "scoring_details"), object_in(row, "metadata")
    judge, category = object_in(details, "judge"), details.get("error_category")
    error = None
    if category in INFRASTRUCTURE:
        error = f"{category}: {details.get('error')}"
    elif judge.get("error"):
        error = f"no verdict of the judge: {judge['error']}"
    value = row.get(REWARD) if metric == REWARD else object_in(row, "scorer_rewards").get(metric)
    if value is None and error is None:
        error = "no score stands there"
    subtask = metadata.get("category")
    return ScoredReply(
        item=name_of(row.get("problem_idx"), where, "problem_idx"),
        sample=whole_number(row.get("repeat", 0), where, "repeat", MOST_SAMPLES),
        score=None if error is not None else score_of(value, where, [name for name in scorers if name != metric]),
        error=None if error is None else shown(error),
        question=hash_of(row.get("prompt"), row.get("expected_answer")) if "prompt" in row else None,
        answer=answer_of(row.get("extracted_answer")),
        subtask=name_of(subtask, where, "metadata.category") if isinstance(subtask, str) and subtask else None,
    )
