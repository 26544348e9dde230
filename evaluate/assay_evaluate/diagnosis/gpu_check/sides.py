"""How the two sides are served: natively as on any single GPU, and emulated on the same one.

Emulation runs in the same environment and on the same GPU as the native server, in BF16 like it: vLLM, attention and router are
then the same, and what is left is the quantized matrix product. It uses `torch.matmul` and vLLM's BF16 experts on dequantized
weights. Nothing is captured in CUDA graphs there, because the emulated experts choose their rows on the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.profile import Hardware, ProfileRecipe
from assay_evaluate.diagnosis.gpu_check.judgement import keeps_activations
from assay_evaluate.serving.gpus import GPUS, GpuFacts
from assay_evaluate.serving.hardware import Gpu
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.serving.vllm_command import EMULATE, read_config

SERVING = Serving(num_speculative_tokens=1)
FLAGS: Mapping[str, Any] = {
    "max-model-len": 1024, "max-num-seqs": 16, "max-logprobs": 64, "no-enable-prefix-caching": True,
    # given, not measured by each server: several start at once, and one that frees memory would confuse the others' measurement
    "kv-cache-memory-bytes": 1 << 29, "gpu-memory-utilization": 0.05,
}  # fmt: skip
GRAPHS: Mapping[str, Any] = {"cudagraph-capture-sizes": [1, 2, 4, 8, 16, 32]}
"""Of the native side: what 16 sequences with one draft each need; each size takes time to capture."""
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Sides:
    """Profiles of the two sides. gpu: as the driver names it; None: a self-test, in which both sides are emulated on a CPU."""

    native: ProfileRecipe
    emulated: ProfileRecipe
    gpu: str | None

    def spec(self, checkpoint: Path, log: Path, *, emulated: bool) -> ServerSpec:
        profile = self.emulated if emulated else self.native
        return ServerSpec(checkpoint, profile, SERVING, speculate=True, log_path=log)


def sides_on(gpu: Gpu) -> Sides:
    """On one GPU of this machine. Environment variables are those of a shipped profile for such a GPU, if there is one."""
    shipped = [load_recipe(ProfileRecipe, name) for name in recipe_names("profiles")]
    same_gpu = (p for p in shipped if p.hardware.gpu and p.hardware.gpu.casefold() in gpu.name.casefold())
    profile = next(same_gpu, None)
    hardware = Hardware(
        device="cuda", gpu=_known_name(gpu.name) or gpu.name, num_gpus=1, memory_bytes_each=gpu.memory_bytes or None
    )
    native = ProfileRecipe.model_validate(
        {
            "schema": 1, "name": "gpu-check", "description": "One GPU, a small model.", "hardware": hardware,
            "vllm": {**FLAGS, **GRAPHS}, "environment": {} if profile is None else profile.environment,
            "startup_timeout_s": START_TIMEOUT_S,
        }
    )  # fmt: skip
    emulated = native.model_copy(
        update={"name": "gpu-check-emulated", "emulate": True, "vllm": {**FLAGS, "enforce-eager": True}}
    )
    return Sides(native, emulated, gpu.name)


def self_test_sides() -> Sides:
    """Both sides emulated on this machine's CPU: every line of the program runs, and nothing is shown about a GPU."""
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    profile = profile.model_copy(update={"vllm": {**profile.vllm, "max-model-len": 1024}})
    return Sides(profile, profile, None)


def facts_of_gpu(name: str) -> GpuFacts | None:
    """Of a GPU as the driver names it; None: not known here."""
    known = _known_name(name)
    return None if known is None else GPUS[known]


def _known_name(name: str) -> str | None:
    return next((known for known in GPUS if known.casefold() in name.casefold()), None)


# ------------------------------------------------------------------------------------------------ quantized activations
def activations_of(checkpoint: Path) -> tuple[Mapping[str, Any], ...]:
    """What config.json says of the inputs of quantized modules, group by group; empty: they stay in 16 bits."""
    groups = (read_config(checkpoint).get("quantization_config") or {}).get("config_groups") or {}
    return tuple(group["input_activations"] for group in groups.values() if group.get("input_activations"))


def activation_bits(checkpoint: Path) -> int:
    """The fewest bits that config.json declares for the input of a module."""
    return min((int(args["num_bits"]) for args in activations_of(checkpoint)), default=16)


def quantizes_activations(checkpoint: Path, lines: Sequence[str]) -> bool | None:
    """Whether the server whose log has these lines quantizes activations; None: some of them.

    Marlin multiplies 16-bit activations with any weights: on GPUs without the format, vLLM takes it whatever config.json says.
    """
    if not activations_of(checkpoint):
        return False
    if any(line.startswith(EMULATE) for line in lines):
        return True
    keeps = keeps_activations(lines)
    return None if keeps is None else not keeps


def with_plain_activations(checkpoint: Path, folder: Path) -> Path:
    """The same weights, declared without quantized activations: links and another config.json in `folder`."""
    config = read_config(checkpoint)
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.resolve().iterdir():
        if path.name != "config.json" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def reason_without_kernel(checkpoint: Path, gpu: str | None) -> str | None:
    """What is known to be missing in vLLM and shows only when a kernel runs; None: nothing. The replay says so as well, where
    vLLM's loaders could be asked (`refused_when_run`)."""
    facts = None if gpu is None else facts_of_gpu(gpu)
    is_blackwell = facts is not None and facts.capability >= (10, 0)
    if is_blackwell and any(args.get("type") == "int" for args in activations_of(checkpoint)):
        return "vLLM has no INT8 kernel for Blackwell"
    return None
