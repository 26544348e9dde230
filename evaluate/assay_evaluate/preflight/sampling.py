"""How a suite asks, against the model's card and the checkpoint's generation_config.json.

Requests pin every parameter (asking/dialect.py), so what is asked is known before a server runs. Greedy decoding of a model
that thinks is FAIL where replies may be long: it ends in repetitions that say nothing about a quantization (decision 091). A
budget below the card's is not: replies that are cut are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from assay.recipes.model import ModelRecipe, Sampling
from assay.recipes.suite import SuiteRecipe, TaskBase
from assay.records.preflight.report import Check

LONG_REPLY_TOKENS = 4096
"""Budget from which on a greedy reply of a thinking model is long enough to end in a loop."""


class Asked(NamedTuple):
    """Parameters of a request. top_k: -1: all tokens."""

    temperature: float
    top_p: float
    top_k: int

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}" + (f", top_k {self.top_k}" if self.top_k > 0 else "")


def check_sampling(suite: SuiteRecipe, recipe: ModelRecipe, generation_config: Mapping[str, Any] | None) -> Iterator[Check]:
    """One check for each way of asking. suite: as the model asks it (`as_model_asks`). generation_config: if there is one."""
    ways: dict[Asked, list[TaskBase]] = {}
    for task in suite.tasks:
        ways.setdefault(Asked(task.temperature, task.top_p, task.top_k), []).append(task)
    advised = _advice(recipe.sampling, generation_config)
    for way, tasks in ways.items():
        yield _judge(way, tasks, recipe, advised)


def _judge(way: Asked, tasks: list[TaskBase], recipe: ModelRecipe, advised: Mapping[str, Asked]) -> Check:
    named = ", ".join(task.name for task in tasks)
    others = "".join(f"; {who}: {what}" for who, what in advised.items() if what != way)
    if (
        way.temperature == 0
        and recipe.serving.reasoning_parser is not None
        and (long := [task for task in tasks if task.max_tokens >= LONG_REPLY_TOKENS])
    ):
        most = max(task.max_tokens for task in long)
        named = ", ".join(task.name for task in long)
        detail = f"{named}: greedy, up to {most:,} tokens of a model that thinks, which ends in repetitions{others}"
        return Check(check="sampling", subject=None, outcome="FAIL", detail=detail, remedy=_remedy(recipe, advised))
    same = [who for who, what in advised.items() if what == way]
    detail = f"{named}: {way}" + (f", as in {' and '.join(same)}" if same else "")
    budgets = _budgets(tasks, recipe.sampling)
    return Check(check="sampling", subject=None, outcome="PASS", detail=detail + others + budgets)


def _remedy(recipe: ModelRecipe, advised: Mapping[str, Asked]) -> str:
    if recipe.sampling is not None:
        return "write `sampling: model` into these tasks of the suite"
    if advised:
        way = next(iter(advised.values()))
        values = f"{{temperature: {way.temperature:g}, top_p: {way.top_p:g}, top_k: {way.top_k}}}"
        return f"write `sampling: {values}` into the model's recipe, and `sampling: model` into these tasks of the suite"
    return "write `sampling:` as its card says into the model's recipe, and `sampling: model` into these tasks of the suite"


def _advice(card: Sampling | None, generation_config: Mapping[str, Any] | None) -> dict[str, Asked]:
    """Who says how the model is to be asked. A generation_config.json without sampling says nothing."""
    advice = {}
    if card is not None:
        advice["the model's recipe"] = Asked(card.temperature, card.top_p, card.top_k)
    config = generation_config or {}
    numbers = {key: value for key in ("temperature", "top_p", "top_k") if isinstance(value := config.get(key), int | float)}
    if config.get("do_sample", True) is not False and numbers:
        top_k = int(numbers.get("top_k", -1))
        advice["generation_config.json"] = Asked(numbers.get("temperature", 1.0), numbers.get("top_p", 1.0), top_k or -1)
    return advice


def _budgets(tasks: list[TaskBase], card: Sampling | None) -> str:
    """Which tasks let a reply be shorter than the card does."""
    if card is None or card.max_tokens is None:
        return ""
    shorter = [f"{task.name} {task.max_tokens:,}" for task in tasks if task.max_tokens < card.max_tokens]
    return f"; budgets below the card's {card.max_tokens:,}, cut replies are counted: {', '.join(shorter)}" if shorter else ""
