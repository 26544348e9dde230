"""ServerSpec -> vLLM's command line and environment: a pure function of recipe, profile and the checkpoint's config.json.

Flags come from three places, later wins: what assay always wants, the model's `serving`, the profile's `vllm:` block.
Names are vLLM's own, without the dashes in front; values as in YAML: true is a bare flag, false its `--no-` form,
null takes a default away, a mapping is passed as JSON, a list as several words.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ServeError
from assay.recipes.families import quantization_of
from assay.recipes.model import Serving
from assay.recipes.mtp import mtp_block
from assay.recipes.profile import ProfileRecipe
from assay.records.serving import as_arguments
from assay.safe_files import is_too_deep
from assay.safetensors_index import tensor_names
from assay.secret_text import without_secrets

EMULATE = "assay-emulate"
"""Quantization method and load format of the plugin `assay_vllm`."""
STRICT = "assay-strict"
"""Its load format in which every parameter and every expert must come from the checkpoint."""
PLAIN_MLA = "CPU_MLA"
"""vLLM's attention backend for MLA on CPUs in any dtype."""

_FIXED = frozenset({"model", "host", "port", "served-model-name"})
_BEHAVIOUR = re.compile(r"VLLM_|CUDA_VISIBLE_DEVICES$|OMP_NUM_THREADS$|NCCL_|TORCH_|TORCHDYNAMO_|CUBLAS_|NVIDIA_TF32")
"""Variables of our own environment that can change what a server computes: inherited and recorded."""

_OF_GENERATION = frozenset(
    {
        "speculative-config", "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice", "enable-scale-out",
        "default-chat-template-kwargs", "max-logprobs", "enable-per-request-metrics", "per-request-spec-decode-metrics",
    }
)  # fmt: skip
_HIDDEN_STATES = {"runner": "pooling", "convert": "embed", "pooler-config": {"task": "token_embed"}}


@dataclass(frozen=True)
class VllmCommand:
    """How one server is started. `arguments` follow the interpreter."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    """The whole environment of the process."""
    flags: dict[str, Any]
    """Flags that must be alike for reference and candidate."""
    checkpoint_flags: dict[str, Any]
    speculation: dict[str, Any] | None
    recorded_environment: dict[str, str]
    emulated: bool | None
    reason_undrafted: str | None = None
    """In a sentence, if speculation was asked for and the checkpoint has nothing to draft with; else None."""


def vllm_command(
    checkpoint: Path,
    profile: ProfileRecipe,
    serving: Serving,
    *,
    speculate: bool,
    port: int,
    served_model_name: str,
    plugin: bool = True,
    hidden_states: bool = False,
) -> VllmCommand:
    """The command for a checkpoint folder; ServeError if its config or the profile cannot be served.

    plugin: the interpreter has assay's plugin; without it vLLM checks little of what it loads, and of quantized models nothing.
    hidden_states: a server that gives the hidden states of every token (POST /pooling) and generates nothing.
    """
    config = read_config(checkpoint)
    flags = {
        "enable-per-request-metrics": True,
        "per-request-spec-decode-metrics": "summary",
        "disable-uvicorn-access-log": True,
        "enable-scale-out": True,  # /inference/v1/generate: log-probabilities at a fifth of the cost of /v1/completions
        **requested_flags(profile, serving),
    }
    # vLLM's check alone refuses whole checkpoints; our load formats know what they may lack (assay_vllm/exemptions.py)
    if plugin and "load-format" not in flags:
        own = flags.get("model-loader-extra-config") or {}
        flags["model-loader-extra-config"] = {"enable_weights_track": True, **own}
    longest, length = (config.get("text_config") or config).get("max_position_embeddings"), flags.get("max-model-len")
    if isinstance(longest, int) and isinstance(length, int) and length > longest:
        flags["max-model-len"] = longest  # vLLM refuses more than the model's own; a profile serves many models
    if hidden_states:
        flags = {name: value for name, value in flags.items() if name not in _OF_GENERATION} | _HIDDEN_STATES
    drafting = flags.pop("speculative-config", None)
    speculation, reason_undrafted = _speculation(checkpoint, config, drafting if speculate else None)
    if speculation is None:
        flags.pop("per-request-spec-decode-metrics", None)
    # For MLA vLLM chooses attention that computes in BF16 alone where the CPU has AMX, whatever the dtype
    # (`CpuPlatform.get_attn_backend_cls` of vLLM 0.32)
    is_mla_on_cpu = profile.hardware.device == "cpu" and "kv_lora_rank" in config and flags.get("dtype") == "float32"
    if is_mla_on_cpu and not {"attention-backend", "attention-config"} & flags.keys():
        flags["attention-backend"] = PLAIN_MLA
        speculation = {"attention_backend": PLAIN_MLA, **speculation} if speculation else None
    declared = quantization_of(config)
    quantization: Mapping[str, Any] = declared if isinstance(declared, dict) else {}
    emulated = profile.emulate if quantization else None
    checkpoint_flags: dict[str, Any] = {}  # that depend on its format
    if emulated:
        if (method := quantization.get("quant_method")) != "compressed-tensors":
            raise ServeError(
                f"{checkpoint}: quantized as {method!r}, but profile {profile.name} emulates compressed-tensors checkpoints "
                "only; use a profile with `emulate: false` on hardware that has the kernels"
            )
        checkpoint_flags = {"quantization": EMULATE, "load-format": EMULATE}
    elif "kv-cache-dtype" not in flags:  # vLLM's own kernels for it on CPUs need AVX-512; the plugin rounds
        # vLLM reads `kv_cache_scheme` for attention with heads, and not for latent attention (MLA). A profile that sets
        # `kv-cache-dtype` sets it for all checkpoints alike.
        scheme = quantization.get("kv_cache_scheme")
        if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
            checkpoint_flags["kv-cache-dtype"] = "fp8"
    if plugin and "load-format" not in flags | checkpoint_flags:
        checkpoint_flags["load-format"] = STRICT
    flags = {name: value for name, value in sorted(flags.items()) if value is not None}
    fixed = {"model": str(checkpoint.resolve()), "host": "127.0.0.1", "port": port, "served-model-name": served_model_name}
    every = {**fixed, **flags, **checkpoint_flags} | ({"speculative-config": speculation} if speculation else {})
    environment, recorded = _environment(profile, os.environ)
    return VllmCommand(
        arguments=("-m", "vllm.entrypoints.openai.api_server", *as_arguments(every)),
        environment=environment,
        flags=flags,
        checkpoint_flags=checkpoint_flags,
        speculation=speculation,
        recorded_environment=recorded,
        emulated=emulated,
        reason_undrafted=reason_undrafted,
    )


def read_config(checkpoint: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; ServeError when it is not there or not an object."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if is_too_deep(config):
            raise RecursionError
    except RecursionError:
        raise ServeError(f"{path}: cannot be read (nested too deeply); a model's config has a few levels") from None
    except (OSError, ValueError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServeError(
            f"{path}: cannot be read ({reason}); give a checkpoint folder with config.json and *.safetensors"
        ) from None
    if not isinstance(config, dict):
        raise ServeError(f"{path}: holds a {type(config).__name__}, a model's config is an object")
    return config


def _speculation(
    checkpoint: Path, config: Mapping[str, Any], requested: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str | None]:
    """(the speculation of this checkpoint, why there is none though it was asked for).

    Only `method: mtp` drafts with the checkpoint's own MTP block; other methods bring what they need.
    """
    if not requested or not str(requested.get("method")).endswith("mtp") or "model" in requested:
        return requested or None, None
    block = mtp_block(config, tensor_names(checkpoint))
    if block.num_layers:
        return requested, None
    tokens = requested.get("num_speculative_tokens")
    return None, f"{checkpoint}: served without the {tokens} draft tokens that were asked for: {block.absence}"


def requested_flags(profile: ProfileRecipe, serving: Serving) -> dict[str, Any]:
    """Flags that the model's recipe and the profile ask for; the profile's win. ServeError: it sets one that is not its own."""
    drafted, parser = serving.num_speculative_tokens, serving.tool_call_parser
    asked: dict[str, Any] = {
        "reasoning-parser": serving.reasoning_parser,
        "tool-call-parser": parser,
        "enable-auto-tool-choice": bool(parser),
        "max-model-len": serving.max_model_len,
        "default-chat-template-kwargs": dict(serving.chat_template_kwargs),
        "speculative-config": {"method": "mtp", "num_speculative_tokens": drafted} if drafted else None,
    }
    flags = {name: value for name, value in asked.items() if value}
    of_profile = _normal_names(profile.vllm)
    if taken := sorted(_FIXED & of_profile.keys()):
        raise ServeError(
            f"profile {profile.name}: `vllm:` may not hold {taken[0]!r}: the checkpoint, the address and the model's name are "
            "set by the command; remove it (for a server that runs already say `endpoints:`)"
        )
    return flags | _normal_names(serving.vllm) | of_profile


def _normal_names(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("--").replace("_", "-"): value for name, value in flags.items()}


def _environment(profile: ProfileRecipe, inherited: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(the server's whole environment, what of it goes into the fingerprint). Secrets of our own environment go
    into neither; those of the profile reach the server only."""
    own = {
        "HF_HUB_OFFLINE": "1",  # the checkpoint is a folder: nothing is to be fetched, and no network is waited for
        "VLLM_NO_USAGE_STATS": "1",
    }
    if profile.hardware.device == "cpu":
        # vLLM compiles the ranking of log-probabilities with Inductor on the first request: 17 s and a C++ compiler
        own["TORCH_COMPILE_DISABLE"] = "1"
    own |= profile.environment
    passed = {
        name: value
        for name, value in without_secrets(inherited).items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"}
    }
    plumbing = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    recorded = {
        name: value for name, value in passed.items() if _BEHAVIOUR.match(name) and "/" not in value and name not in own
    } | without_secrets(own)
    return {**passed, **plumbing, **own}, dict(sorted(recorded.items()))


def server_environment(profile: ProfileRecipe) -> dict[str, str]:
    """The whole environment of a server of `profile` that is started here."""
    return _environment(profile, os.environ)[0]


def bind_cores(profile: ProfileRecipe, ranks: int) -> ProfileRecipe:
    """vLLM's CPU workers must be told whose core is whose on a machine of one NUMA node, or they stop at an assertion."""
    if ranks < 2 or profile.hardware.device != "cpu" or "VLLM_CPU_OMP_THREADS_BIND" in profile.environment:
        return profile
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    return profile.model_copy(update={"environment": profile.environment | bound})
