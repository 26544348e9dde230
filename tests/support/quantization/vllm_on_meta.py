"""Run by test_strict_loading.py with the serving environment's Python: vLLM's CUDA classes load checkpoints on the meta device.

python vllm_on_meta.py CASES.json, a list of [name, folder, part]; on the last line a JSON object, name -> null where our loader
takes the checkpoint, else its refusal. `part` is a key of PARTS.

A CPU build of vLLM has the sources of its CUDA classes, but chooses other classes, and some of them ask for the device while
they are built. `answer_as_a_gpu` gives the answers of an H200: Marlin for every 4-bit weight, FlashMLA for sparse attention.
Nothing is computed, and no kernel runs: what is tried is names, shapes, vLLM's own loaders, and our check.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as nvfp4_linear
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.models.deepseek_v32.nvidia.model import DeepseekV32ForCausalLM
from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla import flashmla_sparse

Stream = Iterable[tuple[str, torch.Tensor]]


class HeadNotLoaded(DeepseekV32MTP):
    """A faulty loader: what the checkpoint stores of the draft's head does not get into the model."""

    def load_weights(self, weights: Stream) -> set[str]:
        return super().load_weights((name, tensor) for name, tensor in weights if "shared_head.head" not in name)


class HeadNotShared(DeepseekV32MTP):
    """A draft that vLLM does not give the target's head, like `step3p5_mtp.py`."""

    has_own_lm_head = True


@dataclass(frozen=True)
class Part:
    """What of a checkpoint is loaded. model_class: where vLLM would choose another one on a CPU."""

    draft: bool
    model_class: type[torch.nn.Module] | None = None
    emulate: bool = False


PARTS = {
    "target": Part(draft=False),
    "draft": Part(draft=True),
    "dsa target": Part(draft=False, model_class=DeepseekV32ForCausalLM),
    "dsa draft": Part(draft=True, model_class=DeepseekV32MTP),
    "dsa draft, emulated": Part(draft=True, model_class=DeepseekV32MTP, emulate=True),
    "dsa draft, head not loaded": Part(draft=True, model_class=HeadNotLoaded),
    "dsa draft, head not shared": Part(draft=True, model_class=HeadNotShared),
}


# ------------------------------------------------------------------------------------------------ the device's answers
def answer_as_a_gpu() -> None:
    """Replace the choices that ask for the device; what they choose is built, but never run."""
    registry._run_in_subprocess = lambda function: function()  # there vLLM would be imported again, to look into a class
    nvfp4_moe.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.MARLIN, MarlinExperts)
    nvfp4_linear.init_nvfp4_linear_kernel = lambda **_: object()
    nvfp4_linear.expose_input_quant_key = lambda *_: None
    flashmla_sparse.current_workspace_manager = NoWorkspace
    choice_of_the_cpu = CpuPlatform.get_attn_backend_cls.__func__

    def choose(cls: type[CpuPlatform], backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return str(choice_of_the_cpu(cls, backend, attn_selector_config, *args, **kwargs))

    CpuPlatform.get_attn_backend_cls = classmethod(choose)


class NoWorkspace:
    """Of vLLM's workspace manager what building a layer calls."""

    def get_simultaneous(self, *shapes: Any) -> list[None]:
        return [None] * len(shapes)


# ------------------------------------------------------------------------------------------------ loading
def start_one_rank(config: VllmConfig, folder: str) -> None:
    """vLLM's process groups, with this process alone in them; `folder` holds the file of the rendezvous."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)


def engine_config(folder: str, part: Part) -> VllmConfig:
    """As `vllm serve` makes it of a checkpoint folder."""
    return EngineArgs(
        model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
        load_format="assay-emulate" if part.emulate else "assay-strict",
        quantization="assay-emulate" if part.emulate else None,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if part.draft else None,
    ).create_engine_config()  # fmt: skip


def refusal(config: VllmConfig, part: Part) -> str | None:
    """What our loader says against the checkpoint of `config`; None: it was loaded."""
    model_config = config.model_config
    if part.draft:
        model_config = config.speculative_config.draft_model_config
        config = config.speculative_config.apply_draft_overrides(config)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        with torch.device("meta"):
            model = initialize_model(vllm_config=config, model_config=model_config, model_class=part.model_class)
        try:
            get_model_loader(config.load_config).load_weights(model, model_config)
        except ValueError as error:
            return str(error)
    return None


def main(cases: list[list[str]]) -> dict[str, str | None]:
    answer_as_a_gpu()
    said: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, checkpoint, part in cases:
            config = engine_config(checkpoint, PARTS[part])
            if not said:
                start_one_rank(config, folder)
            said[name] = refusal(config, PARTS[part])
    return said


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
