"""The client's end of fault injection: servers that can be made to fail while they run, and how to make them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.diagnosis.locate.reading import with_watching
from assay_evaluate.serving.server import Server, ServerSpec
from assay_evaluate.serving.vllm_command import bind_cores

SUPPORT = Path(__file__).resolve().parents[1]
TINY_GLM = SUPPORT.parents[1] / "examples" / "tiny_glm" / "checkpoint"
WORKER = "faults.worker.FaultyWorker"


def faulty_spec(log_path: Path, *, speculate: bool = True, checkpoint: Path = TINY_GLM, **flags: Any) -> ServerSpec:
    """tiny-glm on this machine, with workers that can be told to fail. flags: vLLM's, `_` for `-`."""
    own = {name.replace("_", "-"): value for name, value in flags.items()}
    profile = with_watching(load_recipe(ProfileRecipe, "cpu-emulated"), **{"worker-extension-cls": WORKER, **own})
    environment = {**profile.environment, "PYTHONPATH": str(SUPPORT), "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    return ServerSpec(
        checkpoint=checkpoint,
        profile=bind_cores(profile.model_copy(update={"environment": environment}), own.get("tensor-parallel-size", 1)),
        serving=Serving(num_speculative_tokens=1, reasoning_parser="glm45"),
        speculate=speculate,
        log_path=log_path,
        is_open=True,  # tests ask them as servers of somebody else
    )


def changed(spec: ServerSpec, **flags: Any) -> ServerSpec:
    """`spec` with more of vLLM's flags."""
    return replace(spec, profile=spec.profile.model_copy(update={"vllm": {**spec.profile.vllm, **flags}}))


def rpc(base_url: str, method: str, *arguments: str) -> list[dict[str, Any]]:
    """`method` of every rank's FaultyWorker."""
    reply = httpx.post(f"{base_url}/collective_rpc", json={"method": method, "args": list(arguments)}, timeout=300)
    assert reply.status_code == 200, f"{method}{arguments}: HTTP {reply.status_code}: {reply.text[:500]}"
    results: list[dict[str, Any]] = reply.json()["results"]
    return results


@contextmanager
def planted(server: Server | str, fault: str, **parameters: Any) -> Iterator[dict[str, Any]]:
    """The server fails as told inside the block. Afterwards the dictionary holds `events` and `requests` of all ranks."""
    base_url = server if isinstance(server, str) else server.base_url
    told: dict[str, Any] = {}
    rpc(base_url, "plant_fault", json.dumps({"fault": fault, **parameters}))
    try:
        yield told
    finally:
        healed = rpc(base_url, "heal")
        told["events"] = sum(rank["events"] for rank in healed)
        told["requests"] = max(rank["requests"] for rank in healed)


def foreign_ids(checkpoint: Path = TINY_GLM) -> list[int]:
    """Ids of the vocabulary that are one Chinese character each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [i for i in range(len(tokenizer)) if len(text := tokenizer.decode([i])) == 1 and "\u4e00" <= text <= "\u9fff"]
