"""Results as other harnesses write them: the same replies, in each of the formats that `assay gate --import` reads."""

from __future__ import annotations

import csv
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Scores = Mapping[str, float | None]
"""Item -> score; None: infrastructure failed."""
CONFIG = {"generation_kwargs": {"temperature": 0.0, "max_gen_toks": 256}, "output_type": "generate_until", "num_fewshot": 5}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_lm_eval(place: Path, scores: Scores, *, questions: Sequence[str] | None = None, shots: int = 5) -> Path:
    """questions: what stands under each item in turn; None: the item's own question."""
    folder = place / "model"
    folder.mkdir(parents=True)
    date = "2026-11-01T10-00-00.000000"
    lines = []
    for (item, score), question in zip(scores.items(), questions or [f"question {item}" for item in scores], strict=True):
        number = int(item)
        row: dict[str, Any] = {
            "doc_id": number, "doc": {"question": question}, "target": question,
            "arguments": {"gen_args_0": {"arg_0": question}},
            "resps": [["x"]], "filtered_resps": ["x"], "filter": "none", "metrics": ["exact_match"],
            "doc_hash": digest(question), "prompt_hash": digest(f"{shots} examples, {question}"),
            "target_hash": digest(f"answer to {question}"),
        }  # fmt: skip
        lines.append(row | ({} if score is None else {"exact_match": score}))
    (folder / f"samples_gsm8k_{date}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "results": {"gsm8k": {}}, "group_subtasks": {"gsm8k": []}, "configs": {"gsm8k": {**CONFIG, "num_fewshot": shots}},
        "versions": {"gsm8k": 3.0}, "n-shot": {"gsm8k": shots},
        "config": {"model": "local-chat-completions", "gen_kwargs": None},
        "date": 1793527200.0, "lm_eval_version": "0.4.13", "model_name": "tiny",
    }  # fmt: skip
    (folder / f"results_{date}.json").write_text(json.dumps(settings))
    return place


def inspect_log(scores: Mapping[str, Sequence[float | None]], questions: Sequence[str] | None = None) -> dict[str, Any]:
    """scores: item -> one for each epoch."""
    samples = [
        {
            "id": int(item), "epoch": epoch, "input": [{"id": f"new-{item}-{epoch}", "role": "user", "content": question}],
            "target": "x", "messages": [],
            "scores": None if score is None else {"match": {"value": value_of(score), "answer": "x"}},
            "error": {"message": "ConnectionError", "traceback": ""} if score is None else None,
            "output": {"model": "m", "choices": [{"message": {}, "stop_reason": "stop"}], "usage": {"output_tokens": 7}},
        }
        for (item, epochs), question in zip(scores.items(), questions or [f"question {item}" for item in scores], strict=True)
        for epoch, score in enumerate(epochs, 1)
    ]  # fmt: skip
    spec = {
        "task": "inspect_evals/gsm8k", "task_version": 1, "model": "vllm/tiny", "created": "2026-11-01T10:00:00+00:00",
        "packages": {"inspect_ai": "0.3.285"}, "model_generate_config": {"temperature": 0.0, "max_tokens": 256},
        "config": {"epochs": 1},
    }  # fmt: skip
    return {"version": 2, "status": "success", "eval": spec, "plan": {"steps": [], "config": {}}, "samples": samples}


def value_of(score: float) -> Any:
    return {1.0: "C", 0.5: "P", 0.0: "I"}.get(score, score)


def write_inspect(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    place.mkdir(parents=True)
    log = inspect_log({item: [score] for item, score in scores.items()}, questions)
    (place / "log.json").write_text(json.dumps(log))
    return place


def write_archive(path: Path, log: dict[str, Any]) -> Path:
    """As `.eval`: a zip of the header and the samples."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({name: part for name, part in log.items() if name != "samples"}))
        for sample in log["samples"]:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return path


def write_eval(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    place.mkdir(parents=True)
    write_archive(place / "log.eval", inspect_log({item: [score] for item, score in scores.items()}, questions))
    return place


def write_nemo(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    folder = place / "gsm8k"
    folder.mkdir(parents=True)
    rows = [
        {
            "problem_idx": int(item), "repeat": 0, "reward": score or 0.0, "prompt": question, "expected_answer": "x",
            "extracted_answer": "x", "metadata": {}, "tokens": 9,
            "scoring_details": {"error_category": "infra_error", "error": "no sandbox"} if score is None else {},
        }
        for (item, score), question in zip(scores.items(), questions or [f"question {item}" for item in scores], strict=True)
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle = {
        "run_id": "eval-1-gsm8k", "config_hash": "sha256:0", "sdk_version": "0.5.0", "timestamp": "2026-11-01T10:00:00+00:00",
        "config": {"model": "tiny", "temperature": 0.0, "max_tokens": 256}, "benchmark": {"name": "gsm8k", "scores": {}},
        "n_results": len(rows),
    }  # fmt: skip
    (folder / "eval-1-gsm8k.json").write_text(json.dumps(bundle))
    return place


def write_swe(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    """An item is an instance; questions are not written: an instance's name is its identity."""
    place.mkdir(parents=True)
    names = {item: f"org__repo{int(item) % 40}-{item}" for item in scores}
    ids: dict[str, list[str]] = {
        "resolved_ids": [names[item] for item, score in scores.items() if score == 1],
        "unresolved_ids": [names[item] for item, score in scores.items() if score == 0],
        "error_ids": [names[item] for item, score in scores.items() if score is None],
        "empty_patch_ids": [], "incomplete_ids": ["org__repo0-999999"], "infra_failure_ids": [],
    }  # fmt: skip
    (place / "tiny.run.json").write_text(json.dumps({"total_instances": len(scores), "schema_version": 2, **ids}))
    return place


def write_csv(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    place.mkdir(parents=True)
    with (place / "gsm8k.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item", "score", "question", "error"])
        for (item, score), question in zip(scores.items(), questions or [f"question {item}" for item in scores], strict=True):
            writer.writerow([item, "" if score is None else score, question, "HTTP 500" if score is None else ""])
    return place


def write_json_lines(place: Path, scores: Scores, *, questions: Sequence[str] | None = None) -> Path:
    place.mkdir(parents=True)
    asked = questions or [f"question {item}" for item in scores]
    rows = [{"item": item, "score": score, "question": q} for (item, score), q in zip(scores.items(), asked, strict=True)]
    (place / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


WRITERS: dict[str, Callable[..., Path]] = {
    "lm-eval": write_lm_eval,
    "inspect": write_inspect,
    "inspect .eval": write_eval,
    "nemo-evaluator": write_nemo,
    "swe-bench": write_swe,
    "csv": write_csv,
    "jsonl": write_json_lines,
}
