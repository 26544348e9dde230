"""Run by test_vllm_says.py with the serving environment's Python: vLLM's own answers about draft heads and names.

python vllm_says.py QUESTIONS.json: a JSON object on the last line.
`drafts`: folder -> [architecture of the draft, its layers] for `method: mtp` with the draft tokens asked for, or the error;
`create_engine_config` is the first thing `vllm serve` does. `packed`: architecture -> its `packed_modules_mapping`, with what
its constructors may add.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from typing import Any


def drafts(folder: str, tokens: int) -> list[Any] | str:
    from vllm.engine.arg_utils import AsyncEngineArgs

    asked = {"method": "mtp", "num_speculative_tokens": tokens}
    arguments = AsyncEngineArgs(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, speculative_config=asked)
    try:
        config = arguments.create_engine_config().speculative_config.draft_model_config.hf_config
    except (OSError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return [config.architectures[0], getattr(config, "num_nextn_predict_layers", 1)]


def packed(architecture: str) -> dict[str, list[str]]:
    from vllm.model_executor.models.registry import ModelRegistry

    from assay_vllm.replay.stand_ins import install_beside

    install_beside()  # multimodal classes import torchvision
    model = ModelRegistry.models[architecture].load_model_cls()
    found = dict(model.packed_modules_mapping)
    for each in model.__mro__:
        if not each.__module__.startswith("vllm."):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            # self.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self.packed_modules_mapping["):
                found[ast.literal_eval(node.targets[0].slice)] = ast.literal_eval(node.value)
    return found


def inspect_classes_here() -> None:
    """vLLM looks into each model class in a process of its own, which would import vLLM again."""
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()


if __name__ == "__main__":
    inspect_classes_here()
    with open(sys.argv[1], encoding="utf-8") as file:
        questions = json.load(file)
    said = {
        "drafts": {folder: drafts(folder, questions["tokens"]) for folder in questions["drafts"]},
        "packed": {architecture: packed(architecture) for architecture in questions["packed"]},
    }
    print("\n" + json.dumps(said))
