"""A draft of a family's file, from vLLM's own classes and the headers of a checkpoint: for a person to review.

What vLLM does with each tensor is read off the module that takes it (`assay_vllm.replay.describe`): whether it can be
quantized, what it is fused with, what a rank holds. What a tensor is *for* vLLM does not say: roles are guessed by name, and
marked so.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.recipes.families import split_layer, text_of
from assay.recipes.family import Form
from assay.recipes.mtp import declared_layers
from assay_evaluate.serving.gpus import GPUS
from assay_evaluate.serving.replay import CUDA, PACKAGES
from assay_evaluate.serving.server import find_interpreter

_NUM_GPUS = 2
_TIMEOUT_S = 900
_EVERY_LINEAR = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": [], "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
"""Quantizes all that vLLM can quantize; one scale per row fits every shape."""
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")

_ROLES: tuple[tuple[str, str], ...] = (
    (r"e_score_correction_bias|expert_bias", "router_bias"),
    (r"(^|\.|_)(\w*norm\w*|ln_\w+)\.(weight|bias)$", "norm"),
    (r"(^|\.)lm_head\.|shared_head\.head", "lm_head"),
    (r"embed_tokens|embeddings|wte", "embedding"),
    (r"\.indexer\.", "indexer"),
    (r"eh_proj|^mtp\.fc|mtp_linear_proj|mtp.*input_proj", "mtp_projection"),
    (r"\.\{expert\}\.", "routed_expert"),
    (r"shared_expert(s)?\.", "shared_expert"),
    (r"shared_expert_gate|\.gate\.weight$|\.router\.", "router"),
    (r"attn|attention", "attention"),
    (r"mlp|feed_forward|ffn", "dense_mlp"),
)
"""Pattern in a name -> role; the first that is found. A guess."""


@dataclass(frozen=True)
class Draft:
    """Forms as in `FamilyNames`; every role is a guess."""

    name: str
    architecture: str
    vllm: str
    classes: Mapping[str, str]
    """`target` or `draft` -> class of vLLM's."""
    layers: str
    num_experts: tuple[str, ...]
    outside: dict[str, Form] = field(default_factory=dict)
    layer: dict[str, Form] = field(default_factory=dict)
    mtp_layers: str | None = None
    mtp_layer: dict[str, Form] = field(default_factory=dict)
    mtp: dict[str, Form] = field(default_factory=dict)
    untaken: tuple[str, ...] = ()
    """Forms of the checkpoint that no parameter of vLLM takes."""


def draft_family(config: Mapping[str, Any], headers: Mapping[str, tuple[str, Sequence[int]]]) -> Draft:
    """The draft for one checkpoint.

    config: its config.json. headers: name -> (dtype, shape); scales are left out, FP8 weights count as 16-bit ones.
    AssayError: no serving environment, or vLLM does not load the checkpoint.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture:
        raise AssayError("config.json names no architecture, so vLLM cannot tell its class; add `architectures`")
    weights = {name: ("BF16" if dtype.startswith("F8") else dtype, shape) for name, (dtype, shape) in headers.items()}
    weights = {name: header for name, header in weights.items() if not re.search(r"(_scale(_inv)?|activation_scale)$", name)}
    said = _ask({key: value for key, value in config.items() if key != "quantization_config"}, weights)
    return _draft(config, architecture, weights, said)


# ------------------------------------------------------------------------------------------------ vLLM
def _ask(config: Mapping[str, Any], weights: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """vLLM's answer about target and draft; without a draft where it knows none for this config."""
    first = _run(config, weights, draft=bool(declared_layers(config)) or any("mtp" in name for name in weights))
    if "target" not in first["parts"]:
        why = "; ".join(one_line(str(finding["message"])) for finding in first["findings"])
        raise AssayError(f"vLLM does not load this checkpoint, so nothing can be drafted: {shown(why, 800)}")
    return first


def _run(config: Mapping[str, Any], weights: Mapping[str, tuple[str, Sequence[int]]], *, draft: bool) -> dict[str, Any]:
    interpreter = find_interpreter(None)
    if interpreter is None:
        raise AssayError("no interpreter with vLLM (.venv-serve); run `make setup`")
    with tempfile.TemporaryDirectory(prefix="assay-family-") as temporary:
        folder = Path(temporary)
        quantized = {**config, "quantization_config": _EVERY_LINEAR}
        cells = [_cell(folder / name, of, weights, draft) for name, of in (("plain", config), ("quantized", quantized))]
        request, answer = folder / "request.json", folder / "answer.json"
        request.write_text(json.dumps({"machine": _machine(), "cells": cells}), encoding="utf-8")
        words = [str(interpreter), "-m", "assay_vllm.replay.describe", str(request), str(answer)]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                  timeout=_TIMEOUT_S, check=False, cwd=folder)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise AssayError(f"vLLM's classes were not built after {_TIMEOUT_S} s; try again when less runs here") from None
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise AssayError(f"{interpreter}: vLLM's classes could not be asked: {shown(lines[-1] if lines else '', 500)}")
        said: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return said


def _cell(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, tuple[str, Sequence[int]]], draft: bool
) -> dict[str, Any]:  # fmt: skip
    """One checkpoint as the program reads it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (headers := folder / "headers.json").write_text(json.dumps({"model.safetensors": weights}), encoding="utf-8")
    return {
        "name": folder.name, "folder": str(folder), "arguments": _arguments(folder, draft), "schemes": None,
        "headers": str(headers),
    }  # fmt: skip


def _machine() -> dict[str, Any]:
    facts = GPUS["H200"]
    return {
        "name": facts.driver_name, "capability": facts.capability, "num_gpus": _NUM_GPUS, "memory_bytes": facts.memory_bytes,
        "num_multiprocessors": facts.num_multiprocessors, "shared_memory_bytes": facts.shared_memory_bytes, "cuda": CUDA,
        "packages": dict(PACKAGES),
    }  # fmt: skip


def _arguments(folder: Path, draft: bool) -> list[str]:
    drafting = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})] if draft else []
    return [
        "--model", str(folder), "--load-format", "assay-strict", "--tensor-parallel-size", str(_NUM_GPUS), "--enforce-eager",
        "--max-model-len", "4096", *drafting,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ the draft
def _draft(
    config: Mapping[str, Any], architecture: str, weights: Mapping[str, tuple[str, Sequence[int]]], said: Mapping[str, Any]
) -> Draft:
    target, block = (said["parts"].get(part, {"tensors": {}})["tensors"] for part in ("target", "draft"))
    num_layers = int(text_of(config).get("num_hidden_layers") or 0)
    root = _root_of_layers(target)
    made = Draft(
        name=str(config.get("model_type") or architecture),
        architecture=architecture,
        vllm=str(said["vllm"]),
        classes={part: one["model_class"] for part, one in said["parts"].items()},
        layers=root,
        num_experts=tuple(key for key in _EXPERT_KEYS if text_of(config).get(key)),
    )
    untaken: dict[str, None] = {}
    together = {of is target: Counter((one["module"], one["parameter"]) for one in of.values()) for of in (block, target)}
    own_root = None
    for name, (_, shape) in weights.items():
        part = target if name in target else block
        where, at = part.get(name), split_layer(name)
        key = name if at is None else f"{at.root}.{{layer}}.{_numberless(at.rest)}"
        if where is None:
            untaken[key] = None
            continue
        inside = name not in target or (at is not None and at.root == root and at.layer >= num_layers)
        form = _form(key, where, shape, alike=together[part is target][where["module"], where["parameter"]])
        if at is None:
            (made.mtp if inside else made.outside).setdefault(name, form)
        elif at.root == root and not inside:
            made.layer.setdefault(_numberless(at.rest), form)
        elif inside:
            own_root = own_root if at.root == root else at.root
            made.mtp_layer.setdefault(_numberless(at.rest), form)
        else:
            made.outside.setdefault(name, form)
    for shared in made.layer.keys() & made.mtp_layer.keys():
        del made.mtp_layer[shared]
    return Draft(**{**vars(made), "mtp_layers": own_root, "untaken": tuple(untaken)})


def _root_of_layers(target: Mapping[str, Any]) -> str:
    """The root that most of the tensors lie under."""
    roots = [at.root for at in map(split_layer, target) if at is not None]
    return max(set(roots), key=roots.count, default="model.layers")


def _numberless(rest: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{expert}", rest, count=1) if re.search(r"experts?\.\d+\.", rest) else rest


def _form(key: str, where: Mapping[str, Any], shape: Sequence[int], alike: int) -> Form:
    """What vLLM does with one weight, by the module that takes it. alike: how many tensors its parameter takes."""
    role = next((role for pattern, role in _ROLES if re.search(pattern, key)), "other")
    classes = set(where["classes"])
    if len(shape) < 2:
        return Form.model_validate({"role": role})
    quantizable = where["method"] is not None and not where["method"].startswith("Unquantized")
    embedding = bool(classes & {"VocabParallelEmbedding", "ParallelLMHead"})
    never = quantizable and role in ("router", "mtp_projection")  # by no precision
    kind = "plain" if embedding or never else "linear" if quantizable else "bare"
    split, fused = _split(key, where, classes), _fused(key, where, alike)
    return Form.model_validate({"role": role, "kind": kind, "split": split, "fused": fused})


def _split(key: str, where: Mapping[str, Any], classes: set[str]) -> str:
    if "{expert}" in key:
        return "columns" if where["parameter"].startswith("w2") else "rows"
    if where["ranks"] == 1 and not classes & {"VocabParallelEmbedding"}:
        return "whole"
    if "RowParallelLinear" in classes:
        return "columns"
    if "QKVParallelLinear" in classes and re.search(r"\.[kv]_proj\.", key):
        return "kv_rows"
    return "rows" if classes & {"ColumnParallelLinear", "VocabParallelEmbedding"} else "whole"


def _fused(key: str, where: Mapping[str, Any], alike: int) -> str | None:
    """Last component of the module that takes other weights as well; of experts the name that vLLM has for gate and up."""
    if "{expert}" in key:
        return "gate_up_proj" if where["parameter"].startswith("w13") else None
    return str(where["module"]).rpartition(".")[2] if alike > 1 and "LinearBase" in where["classes"] else None


# ------------------------------------------------------------------------------------------------ the file
def as_yaml(draft: Draft, source: str) -> str:
    """The file that `recipes/families/` takes. source: what it was drafted from, for its comment."""
    lines = [
        f"# Draft, made by `assay family` from {one_line(source)} and the classes of vLLM {draft.vllm}:",
        *(f"#   {part}: {model_class}" for part, model_class in draft.classes.items()),
        "# Review every role (guessed by name) and what a comment asks for; kind, split and fused are vLLM's own.",
        "schema: 1",
        f"name: {draft.name}",
        f"description: {draft.architecture}.",
        f"architectures: [{draft.architecture}]",
        "reasoning_parser: CHOOSE  # vLLM's name for it",
        f"num_experts: [{', '.join(draft.num_experts)}]",
        *([] if draft.layers == "model.layers" else [f"layers: {draft.layers}"]),
        *_section("outside", draft.outside, ""),
        *_section("layer", draft.layer, ""),
    ]
    if draft.mtp or draft.mtp_layer or draft.mtp_layers:
        lines += ["mtp:", *([f"  layers: {draft.mtp_layers}"] if draft.mtp_layers else [])]
        lines += [*_section("layer", draft.mtp_layer, "  "), *_section("outside", draft.mtp, "  ")]
        needed = [n for n, f in {**draft.mtp, **draft.mtp_layer}.items() if f.part not in ("embedding", "lm_head")]
        lines += [f"  required: [{', '.join(needed)}]"]
    lines += [f"# not taken by vLLM: {one_line(name)}" for name in draft.untaken]
    return "\n".join(lines) + "\n"


def _section(key: str, forms: Mapping[str, Form], indent: str) -> Iterator[str]:
    if forms:
        yield f"{indent}{key}:"
    for name, form in forms.items():
        said = form.model_dump(by_alias=True, exclude_defaults=True)
        order = [each for each in ("role", "kind", "split", "fused") if each in said]
        yield f"{indent}  {json.dumps(name)}: {{{', '.join(f'{each}: {said[each]}' for each in order)}}}  # guessed role"
