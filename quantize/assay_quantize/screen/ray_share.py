"""What a Ray task does on its node: some texts of a pass through all layers, into a folder of its own that all nodes see."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import assay
from assay.callbacks import say_nothing
from assay.errors import QuantizeError
from assay.file_data import other_data
from assay.recipes.family_names import take_up_family
from assay_quantize.calibration.quiet import quiet
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.remote.ray_worker import wait_for
from assay_quantize.screen.forward import PASS_RECORD, device_name, run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText


@dataclass(frozen=True)
class ShareJob:
    """What is the same for all shares of a pass.

    checkpoint: its folder; data: what identifies its files (`Checkpoint.data`); own_family: as plans record it. numerics: of
    the driver, which every node must have. memory_bytes: as of `LayerModel`. version: assay's, of the driver.
    """

    checkpoint: Path
    location: str
    data: Mapping[str, str]
    own_family: Mapping[str, Any] | None
    dtype: torch.dtype
    device: str
    fp8_kv_cache: bool
    memory_bytes: int | None
    num_threads: int
    numerics: Mapping[str, str]
    version: str = assay.__version__


def numerics_here(device: str) -> dict[str, str]:
    """What the bits of a state depend on beside weights, tokens and dtype."""
    import transformers

    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "MKL_CBWR": os.environ.get("MKL_CBWR", "not set"),
    }


def run_share(
    job: ShareJob, texts: Sequence[ScoredText], num_doubled: int, folder: Path, identity: str, record_bytes: int
) -> dict[str, int]:
    """One task: `run_pass` over `texts`. folder: where the driver wrote the record of the pass, of `record_bytes`, and what an
    earlier attempt left. Returns the size of every file that it leaves there.

    QuantizeError: this node does not see the folders, reads another checkpoint, or computes otherwise than the driver.
    """
    node = f"node {os.uname().nodename}"
    if job.version != assay.__version__:
        raise QuantizeError(f"{node} has assay {assay.__version__}, the driver {job.version}; install the same on all")
    wait_for(folder / PASS_RECORD, record_bytes)
    wait_for(job.checkpoint, None)
    torch.set_num_threads(job.num_threads)
    if job.device == "cuda" and not torch.cuda.is_available():
        raise QuantizeError(f"{node}: torch sees no CUDA device; install torch for CUDA there, or leave --device out")
    check_numerics(node, job.numerics, numerics_here(job.device))
    if job.own_family is not None:
        take_up_family(job.own_family)
    checkpoint = replace(open_checkpoint(job.checkpoint, allow_quantized=True), location=job.location)
    if (how := other_data(job.data, checkpoint.data)) is not None:
        raise QuantizeError(f"{node} reads another checkpoint in {job.checkpoint} than the driver: {how}; share one folder")
    with quiet(), open_stored(checkpoint) as stored:
        model = LayerModel(stored, job.dtype, job.device, fp8_kv_cache=job.fp8_kv_cache, memory_bytes=job.memory_bytes)
        run_pass(model, texts, folder, identity, say_nothing, num_doubled=num_doubled, outlives_node=True)
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.safetensors")}


def check_numerics(node: str, expected: Mapping[str, str], own: Mapping[str, str]) -> None:
    """QuantizeError: states of this node would differ from the driver's in their last bits."""
    differing = [f"{name} {own[name]}, the driver {expected[name]}" for name in expected if own[name] != expected[name]]
    if differing:
        raise QuantizeError(
            f"{node} computes otherwise than the driver, and figures of different numerics are not mixed: "
            f"{'; '.join(differing)}; take nodes of one kind, the driver's among them"
        )
