"""Writes recipes/shapes/NAME.json, the names and shapes of the models with recipes, from `hollow.py`.

PYTHONPATH=tests/support/models:tests/support/quantization:tests/support python tests/support/models/shapes_written.py
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import hollow
import models_page

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe

SHAPES = Path(__file__).parents[3] / "recipes" / "shapes"


def shapes_of(model: str) -> dict[str, Any]:
    """The file's content: source, config, and for every kind of tensor [dtype, shape, layers]."""
    base, every = hollow.MODELS[model]
    indexers = {"glm-5": set(range(78)), "glm-5.2": hollow.GLM52_INDEXERS}
    whole = hollow.changed(base, max_position_embeddings=models_page.CONTEXTS[model])
    two = hollow.changed(whole, **{hollow._experts_key(base): 2})
    shapes = hollow.glm5_shapes(two, indexers[model]) if model in indexers else every(two)
    made, dtypes = hollow.as_published(two, shapes, model, release=False)
    if "quantization_config" in two:
        whole["quantization_config"] = two["quantization_config"]
    num_experts = whole[hollow._experts_key(whole)]
    kinds: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, shape in made:
        if ".experts.1." in name:
            continue  # like the first
        template = name.replace(".experts.0.", ".experts.{expert}.")
        at = re.search(r"layers\.(\d+)\.", template)
        template = re.sub(r"layers\.\d+\.", "layers.{layer}.", template, count=1)
        dtype = dtypes.get(name, hollow.dtype_of(name))
        if template.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            shape = (num_experts, *shape[1:])
        kinds.setdefault((template, dtype, tuple(shape)), []).extend([int(at.group(1))] if at else [])
    named = [template for template, _, _ in kinds]
    assert len(set(named)) == len(named), f"{model}: one name has two shapes"
    tensors = {template: [dtype, list(shape), _ranges(layers)] for (template, dtype, shape), layers in kinds.items()}
    return {"source": load_recipe(ModelRecipe, model).source.hub, "config": whole, "tensors": tensors}


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 6] -> 0-2,6."""
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def text_of(model: str) -> str:
    """One line a tensor."""
    content = shapes_of(model)
    tensors = ",\n".join(f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in content["tensors"].items())
    config = json.dumps(content["config"])
    return f'{{\n "source": {json.dumps(content["source"])},\n "config": {config},\n "tensors": {{\n{tensors}\n }}\n}}\n'


def main() -> None:
    SHAPES.mkdir(exist_ok=True)
    for model in models_page.models():
        (SHAPES / f"{model}.json").write_text(text_of(model), encoding="utf-8")


if __name__ == "__main__":
    main()
