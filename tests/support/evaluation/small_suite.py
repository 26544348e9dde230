"""A suite of a few arithmetic and needle items with texts for divergence, and a model that answers all of it right."""

from __future__ import annotations

import re
from typing import Any

from fake_server import Scripted

from assay.recipes.model import Serving
from assay.recipes.suite import SuiteRecipe
from assay_evaluate.tasks.generated import arithmetic_items

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1,
        "name": "small",
        "seed": "eval-small",
        "tasks": [
            {"kind": "arithmetic", "name": "arithmetic", "num_items": 5, "num_steps": [2], "max_tokens": 64},
            {"kind": "needle", "name": "needle", "num_items": 2, "num_needles": 3, "max_tokens": 32,
             "lengths_tokens": [600, 5000]},
        ],
        "divergence": {"num_documents": 3, "max_tokens": 40, "top_k": 200, "position_buckets": [0, 10]},
    }
)  # fmt: skip
SERVING = Serving(num_speculative_tokens=1)
ANSWERS = {item.prompt: item.answer for item in arithmetic_items(SUITE.tasks[0], SUITE.seed)}  # type: ignore[arg-type]


def solve(body: dict[str, Any]) -> Scripted:
    """Answers everything right: sums from the generator, needles by looking, texts with a sentence."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    if prompt in ANSWERS:
        return Scripted(f"#### {ANSWERS[prompt]}", speculation=(4, 4, 3))
    if prompt.startswith(("Read these notes", "请阅读")):
        question = prompt.rsplit("\n", 1)[-1]
        asked = re.search(r"for the (\w+ \w+)\?|^(.+)的密码是多少", question)
        assert asked is not None
        found = re.search(rf"{asked[1] or asked[2]}(?: is |的密码是)(\d+)", prompt)
        assert found is not None
        return Scripted(f"#### {found[1]}", speculation=(2, 2, 1))
    return Scripted("old kettle")
