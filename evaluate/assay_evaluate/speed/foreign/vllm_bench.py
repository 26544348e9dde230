"""What `vllm bench serve --save-result` writes, one object a file (vllm/benchmarks/serve.py).

It does not know the hardware, nor how its server was started; `--metadata hardware=8xH200 speculation=5 ...` puts that into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.records.speed import SpeedRow
from assay_evaluate.speed.foreign.stated import SPECULATION_UNKNOWN, Stated, num_gpus_of, required, text, whole, wrong
from assay_evaluate.speed.rows import repeat_of, tokens_each

METADATA = ("checkpoint", "hardware", "engine", "scheme", "prompts", "speculation", "tensor", "expert", "data", "pipeline")
"""Keys of `--metadata` that are read."""


def is_vllm_bench(found: Any) -> bool:
    return isinstance(found, dict) and "output_throughput" in found and "max_concurrency" in found


def read_vllm_bench(found: Mapping[str, Any], stated: Stated, where: str) -> list[SpeedRow]:
    """One row of one repeat. AssayError: checkpoint or hardware is not stated, or the requests in flight were not limited."""
    if not is_vllm_bench(found):
        raise wrong(where, "no result of `vllm bench serve` (it has no `output_throughput` and `max_concurrency`)")
    concurrency = whole(found, "max_concurrency")
    if not concurrency:
        raise wrong(where, "was measured without --max-concurrency, so nobody knows how many requests were in flight")
    label = required(
        stated.label or text(found, "checkpoint") or text(found, "model_id"), "the checkpoint", "--label NAME", where
    )
    hardware = required(stated.hardware or text(found, "hardware"), "the hardware", "--hardware 8xH200", where)
    speculation = _speculation(found, stated)
    unknown = [SPECULATION_UNKNOWN] if speculation is None else []
    unknown += [] if text(found, "engine") else ["the version of the engine is not stated"]
    parallelism = {name: ranks for name in ("tensor", "expert", "data", "pipeline") if (ranks := whole(found, name))}
    return [
        SpeedRow(
            checkpoint=label,
            scheme=text(found, "scheme"),
            origin="imported",
            source=f"vllm bench serve: {where}",
            hardware=hardware,
            num_gpus=num_gpus_of(hardware),
            parallelism=parallelism,
            speculation=speculation,
            prompts=stated.prompts or text(found, "prompts") or "not stated",
            prompt_tokens=tokens_each([found], "total_input_tokens"),
            output_tokens=tokens_each([found], "total_output_tokens"),
            concurrency=concurrency,
            engine=text(found, "engine"),
            repeats=(repeat_of(found, where),),
            assumptions=tuple(unknown),
        )
    ]


def _speculation(found: Mapping[str, Any], stated: Stated) -> int | None:
    """As stated; else as many as there are positions with an acceptance rate. A result without rates says nothing."""
    if stated.speculation is not None:
        return stated.speculation
    if (told := whole(found, "speculation")) is not None:
        return told
    positions = found.get("spec_decode_per_position_acceptance_rates")
    return len(positions) if isinstance(positions, list) and positions else None
