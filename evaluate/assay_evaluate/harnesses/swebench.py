"""The report of SWE-bench's harness, `MODEL.RUN_ID.json`: lists of instances by outcome.

Resolved is right; unresolved, or an empty patch, is wrong. An instance whose evaluation broke (`error_ids`, and
`infra_failure_ids` of swebench 5) has no score; one without a prediction was not asked. An instance's name is its identity, and
says its repository, whose instances rise and fall together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay_evaluate.harnesses.files import sha256_of_results
from assay_evaluate.harnesses.scores import ScoredReply, TaskScores, choose_metric, name_of, without_doubles, wrong

HARNESS = "swe-bench"
TASK = "swe-bench"
METRIC = "resolved"


def is_report(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("resolved_ids"), list)


def read_report(path: Path, data: Mapping[str, Any], metric: str | None) -> TaskScores:
    choose_metric(path, [METRIC], metric)

    def listed(key: str) -> list[str]:
        values = data.get(key, [])
        if not isinstance(values, list):
            raise wrong(path, f"{key} is no list of instances; write the report again")
        return [name_of(value, path, f"an instance of {key}") for value in values]

    if "unresolved_ids" not in data:
        raise wrong(path, "does not list unresolved_ids: it has totals only; grade again with swebench 2 or newer")
    broken = {**dict.fromkeys(listed("error_ids"), "its evaluation broke"),
              **dict.fromkeys(listed("infra_failure_ids"), "its environment broke")}  # fmt: skip
    resolved = listed("resolved_ids")
    outcomes = [*((name, True) for name in resolved), *((name, False) for name in listed("unresolved_ids"))]
    outcomes += [(name, False) for name in listed("empty_patch_ids")]
    replies = [
        ScoredReply(
            item=name, score=None if name in broken else float(is_right), error=broken.get(name), cluster=_repository(name)
        )
        for name, is_right in outcomes
    ]
    graded = {name for name, _ in outcomes}
    replies += [
        ScoredReply(item=name, score=None, error=reason, cluster=_repository(name))
        for name, reason in broken.items()
        if name not in graded
    ]
    return TaskScores(
        task=TASK, harness=HARNESS, version=None, metric=METRIC, replies=without_doubles(replies, path),
        files={path: sha256_of_results(path)}, model=path.name.split(".")[0] or None,
    )  # fmt: skip


def _repository(instance: str) -> str:
    """`django__django-11099` -> `django__django`."""
    return instance.rsplit("-", 1)[0]
