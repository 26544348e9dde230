"""Asks NVIDIA's AIConfigurator for latencies. Started by path with a Python that has `aiconfigurator-core`; imports no assay.

stdin: `{model, system, quant, ranks, kv, points: [[concurrency, drafts, prompt tokens, reply tokens], ...]}`. stdout, last
line: `{"version": ..., "points": [{"prefill_ms": ..., "decode_ms": ...} or {"error": ...}, ...]}`; decode_ms is of as many
steps as the reply has tokens, less one.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any


def predict(question: dict[str, Any]) -> dict[str, Any]:
    from aiconfigurator_core.sdk import EngineHandle

    engines: dict[int, Any] = {}
    points: list[dict[str, Any]] = []
    for concurrency, drafts, prompt_tokens, reply_tokens in question["points"]:
        try:
            if drafts not in engines:
                engines[drafts] = EngineHandle.compile(
                    question["model"], question["system"], "vllm", nextn=drafts, gemm_quant_mode=question["quant"],
                    moe_quant_mode=question["quant"], kvcache_quant_mode=question["kv"], **question["ranks"],
                )  # fmt: skip
            engine = engines[drafts]
            points.append(
                {
                    "prefill_ms": engine.predict_prefill_latency(concurrency, prompt_tokens),
                    "decode_ms": engine.predict_decode_latency(concurrency, prompt_tokens, reply_tokens),
                }
            )
        except Exception as error:  # noqa: BLE001 (whatever it says against a configuration is an answer)
            points.append({"error": f"{type(error).__name__}: {error}"})
    return {"version": importlib.metadata.version("aiconfigurator-core"), "points": points}


if __name__ == "__main__":
    print(json.dumps(predict(json.load(sys.stdin))))
