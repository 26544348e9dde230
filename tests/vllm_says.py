"""Run by test_vllm_says.py with the serving environment's Python: vLLM's own answers about draft heads.

python vllm_says.py QUESTIONS.json: a JSON object on the last line.
`drafts`: folder -> [architecture of the draft, its layers] for `method: mtp` with the draft tokens asked for, or the error;
`create_engine_config` is the first thing `vllm serve` does.
"""

from __future__ import annotations

import json
import sys
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


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        questions = json.load(file)
    said = {"drafts": {folder: drafts(folder, questions["tokens"]) for folder in questions["drafts"]}}
    print("\n" + json.dumps(said))
