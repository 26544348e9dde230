"""Run by test_vllm_loads.py with the serving environment's Python: what vLLM says to folders before it starts anything.

python vllm_accepts.py FOLDER...: a JSON object on the last line, folder -> null where vLLM would go on and load the weights,
else the error. `create_engine_config` is the first thing `vllm serve` does.
"""

from __future__ import annotations

import json
import sys


def refusal(folder: str) -> str | None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        AsyncEngineArgs(model=folder, dtype="float32", enforce_eager=True, max_model_len=128).create_engine_config()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    print("\n" + json.dumps({folder: refusal(folder) for folder in sys.argv[1:]}))
