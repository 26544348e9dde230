"""A suite asked as the model's card says: what its tasks become, and what of it is part of the hash."""

from __future__ import annotations

import pytest

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe, Sampling
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks

CARD = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=32768)
GLM = Sampling(temperature=1.0, top_p=0.95, max_tokens=131072)
UNKNOWN = Sampling(temperature=1.0)
"""vLLM's defaults."""
CARDS = {
    "deepseek-v3": UNKNOWN, "glm-4.5-air": UNKNOWN, "glm-4.7": GLM, "glm-5": GLM, "glm-5.2": GLM, "qwen3-30b-a3b": CARD,
    "qwen3-next-80b-a3b": Sampling(temperature=0.6, top_p=0.95),
}  # fmt: skip
OF_THE_CARD = {"gsm8k", "math500", "aime", "gpqa-diamond", "mmlu-pro", "ifeval", "mgsm", "mmlu-languages"}
BUDGETS = {
    "arithmetic": 16384, "needle": 16384, "gsm8k": 16384, "math500": 32768, "aime": 65536, "gpqa-diamond": 65536,
    "mmlu-pro": 16384, "ifeval": 16384, "ruler": 16384, "tools": 16384,
    "mgsm": 16384, "mmlu-languages": 16384, "needle-languages": 16384, "tools-languages": 16384,
}  # fmt: skip
"""Task of suites `full` and `languages` -> tokens of a reply where the card says nothing."""


def suite(**options: object) -> SuiteRecipe:
    task = {"kind": "arithmetic", "name": "a", "num_items": 2, "max_tokens": 512, **options}
    return SuiteRecipe.model_validate({"schema": 1, "name": "s", "seed": "eval-s", "tasks": [task]})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.0, 1.0, -1, 512)),
        ({"sampling": "model"}, (0.6, 0.95, 20, 512)),
        ({"budget": "model"}, (0.0, 1.0, -1, 32768)),
        ({"sampling": "model", "budget": "model"}, (0.6, 0.95, 20, 32768)),
    ],
)
def test_a_task_takes_what_it_asks_for(options: dict[str, object], expected: tuple[float, float, int, int]) -> None:
    (task,) = as_model_asks(suite(**options), CARD).tasks
    assert (task.temperature, task.top_p, task.top_k, task.max_tokens) == expected


def test_a_model_without_sampling_or_budget_leaves_the_suite_as_it_is() -> None:
    asked = suite(sampling="model", budget="model", temperature=0.3)
    assert as_model_asks(asked, None) == asked
    (task,) = as_model_asks(asked, Sampling(temperature=1.0)).tasks
    assert (task.temperature, task.max_tokens) == (1.0, 512)


def test_otherwise_sampled_is_another_suite() -> None:
    """The hash knows the values and not where they come from; what is recorded holds the values."""
    asked = suite(sampling="model")
    assert asked.sha256 == suite().sha256
    effective = as_model_asks(asked, CARD)
    assert effective.sha256 == suite(temperature=0.6, top_p=0.95, top_k=20).sha256 != asked.sha256
    recorded = effective.model_dump(mode="json", by_alias=True)["tasks"][0]
    assert (recorded["temperature"], recorded["top_p"], recorded["top_k"]) == (0.6, 0.95, 20)
    assert not {"sampling", "budget"} & recorded.keys()


@pytest.mark.parametrize("name", ["full", "code", "languages", "long-context"])
def test_suites_for_gpus_ask_as_the_card_says(name: str) -> None:
    assert {task.sampling for task in load_recipe(SuiteRecipe, name).tasks} == {"model"}


def test_the_quick_suite_is_greedy_for_every_model() -> None:
    quick = load_recipe(SuiteRecipe, "quick")
    for name in recipe_names("models"):
        assert as_model_asks(quick, load_recipe(ModelRecipe, name).sampling) == quick


def test_every_model_for_gpus_is_asked_as_its_card_says() -> None:
    models = [name for name in recipe_names("models") if not name.startswith("tiny-")]
    assert {name: load_recipe(ModelRecipe, name).sampling for name in models} == CARDS


@pytest.mark.parametrize("name", CARDS)
def test_short_prompts_leave_the_reply_the_length_of_the_card(name: str) -> None:
    """Prompts of stated lengths need room of their own, so their tasks keep the suite's budget."""
    found = {}
    for suite_name in ("full", "languages"):
        tasks = as_model_asks(load_recipe(SuiteRecipe, suite_name), CARDS[name]).tasks
        found |= {task.name: task.max_tokens for task in tasks}
    card = CARDS[name].max_tokens
    assert found == {task: card if card and task in OF_THE_CARD else tokens for task, tokens in BUDGETS.items()}


def test_deepseek_v31_is_asked_to_think_and_its_tools_are_not_measured() -> None:
    """Its chat template thinks only if told to, and writes no tools: the parser would wait for what never comes."""
    serving = load_recipe(ModelRecipe, "deepseek-v3").serving
    assert (serving.chat_template_kwargs, serving.tool_call_parser) == ({"thinking": True}, None)
