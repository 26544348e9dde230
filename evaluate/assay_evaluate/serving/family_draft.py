"""A draft of a family's file, from vLLM's own classes and the headers of a checkpoint: for a person to review.

What vLLM does with each tensor is read off the module that takes it (`assay_vllm.replay.describe`): whether it can be
quantized, what it is fused with, what a rank holds. What a tensor is *for* vLLM does not say: roles are guessed by name, and
marked so. Without headers the names are those that vLLM's loaders take for a config.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.installation import setup_command
from assay.recipes.families import EXPERT_COUNT_KEYS, unquantized, without_experts
from assay.recipes.family import Form
from assay.recipes.family_names import split_layer
from assay.recipes.mtp import declared_layers
from assay.recipes.text_config import count_of, text_of
from assay_evaluate.serving.gpus import GPUS
from assay_evaluate.serving.replay import machine, write_head
from assay_evaluate.serving.server import find_interpreter

Weights = Mapping[str, tuple[str, Sequence[int]]]
"""Name -> (dtype, shape)."""
_NUM_GPUS = 2
_TIMEOUT_S = 900
_CONTEXT_TOKENS = 4096
"""Of the classes that are built, or the model's own where that is shorter: no name depends on it."""
_EVERY_LINEAR = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": [], "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
"""Quantizes all that vLLM can quantize; one scale per row fits every shape."""

_ROLES: tuple[tuple[str, str], ...] = (
    (r"e_score_correction_bias|expert_bias|router_bias|\.gate\.bias$", "router_bias"),
    (r"(^|\.)hc_\w+$|\.(ape|attn_sink|tid2eid)$", "other"),
    (r"(^|\.|_)(\w*norm\w*|ln_\w+)\.(weight|bias)$", "norm"),
    (r"(^|\.)lm_head\.|^head\.|shared_head\.(head|output)", "lm_head"),
    (r"embed_tokens|embeddings|wte|^embed\.", "embedding"),
    (r"\.indexer\.", "indexer"),
    (r"eh_proj|\.[eh]_proj\.|^mtp\.fc|mtp_linear_proj|mtp.*input_proj", "mtp_projection"),
    (r"\.\{expert\}\.", "routed_expert"),
    (r"shared?_expert(s)?\.", "shared_expert"),
    (r"shared_expert_gate|\.gate\.weight$|\.router\.", "router"),
    (r"attn|attention|mixer", "attention"),
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
    kept: tuple[str, ...] = ()
    """Modules beside the language model that have layers of their own: vision towers."""
    untaken: tuple[str, ...] = ()
    """Forms of the checkpoint that no parameter of vLLM takes."""
    whole: tuple[str, ...] = ()
    """Forms that hold all experts of a layer in a layout that is not split, so that no precision can quantize them."""
    doubts: tuple[str, ...] = ()
    """What could not be told without headers, a sentence each; empty where there were some."""


@dataclass(frozen=True)
class _Question:
    """What vLLM is asked about one checkpoint. weights: None: there is only a config. draft: whether for an MTP block, too."""

    config: Mapping[str, Any]
    weights: Weights | None
    draft: bool

    @property
    def plain(self) -> dict[str, Any]:
        return unquantized(self.config)

    @property
    def without_block(self) -> _Question | None:
        """To be asked where vLLM builds nothing: a config alone may say nothing of an MTP block."""
        is_guess = self.draft and self.weights is None and not declared_layers(self.config)
        return replace(self, draft=False) if is_guess else None


def draft_family(config: Mapping[str, Any], headers: Weights | None) -> Draft:
    """The draft for one checkpoint, or for a config.json alone; as `draft_families`."""
    return draft_families([(config, headers)])[0]


def draft_families(checkpoints: Sequence[tuple[Mapping[str, Any], Weights | None]]) -> list[Draft]:
    """Drafts, in the order of the checkpoints. One process answers for all: to import vLLM takes longer than most drafts.

    A checkpoint is (its config.json, name -> (dtype, shape)); scales are left out, weights that have any count as 16-bit ones.
    None: there is a config.json alone. AssayError: no serving environment, or vLLM does not load one of them.
    """
    questions = [_question(config, headers) for config, headers in checkpoints]
    answers = _run(questions)
    guesses = {number: other for number, question in enumerate(questions) if (other := question.without_block) is not None}
    again = [number for number in guesses if "target" not in answers[number]["parts"]]
    if again:
        for number, answer in zip(again, _run([guesses[number] for number in again]), strict=True):
            answers[number] = answer
    return [_draft_of(question, answer) for question, answer in zip(questions, answers, strict=True)]


def _question(config: Mapping[str, Any], headers: Weights | None) -> _Question:
    if not (config.get("architectures") or [""])[0]:
        raise AssayError("config.json names no architecture, so vLLM cannot tell its class; add `architectures`")
    text = text_of(config)
    if not any(count_of(key, text.get(key)) for key in EXPERT_COUNT_KEYS):
        what = shown(config["architectures"][0])
        raise AssayError(f"config.json: {without_experts(what, config)}; assay is for mixture-of-experts")
    if headers is None:
        return _Question(config, None, draft=True)
    weights = {
        name: ("BF16" if dtype.startswith("F8") or dtype in ("INT4", "FP4") else dtype, shape)
        for name, (dtype, shape) in headers.items()
        if not re.search(r"(weight_scale(_inv)?|(input|activation)_scale|\.weight_shape)$", name)
        and not (name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in headers)  # a router may have one, too
    }
    return _Question(config, weights, draft=bool(declared_layers(config)) or any("mtp" in name for name in weights))


def _draft_of(question: _Question, answer: Mapping[str, Any]) -> Draft:
    if "target" not in answer["parts"]:
        reasons = "; ".join(one_line(str(finding["message"])) for finding in answer["findings"])
        raise AssayError(f"vLLM does not load this checkpoint, so nothing can be drafted: {shown(reasons, 800)}")
    architecture = str(question.config["architectures"][0])
    if question.weights is not None:
        return _draft(question.config, architecture, question.weights, answer)
    named = [(name, tensor["ndim"]) for part in answer["parts"].values() for name, tensor in part["tensors"].items()]
    weights = {name: ("BF16", (1,) * ndim) for name, ndim in named}
    doubts = _doubts(answer, declared=bool(declared_layers(question.config)))
    return replace(_draft(question.plain, architecture, weights, answer), doubts=tuple(doubts))


def _doubts(answer: Mapping[str, Any], *, declared: bool) -> Iterator[str]:
    yield (
        "drafted from config.json alone, names are those that vLLM's loaders take; a checkpoint may lack some, store experts "
        "in one tensor, or have others that vLLM skips"
    )
    if "draft" in answer["parts"] and not declared:
        yield "config.json does not say whether there is an MTP block; `mtp` is what vLLM would take of one"
    for part, described in answer["parts"].items():
        yield from (f"no name was found for vLLM's {name} ({part})" for name in described["unknown"])


# ------------------------------------------------------------------------------------------------ vLLM
def _run(questions: Sequence[_Question]) -> list[dict[str, Any]]:
    """vLLM's answer to each, about target and draft."""
    interpreter = find_interpreter(None)
    if interpreter is None:
        raise AssayError(f"no serving environment with vLLM; run `{setup_command()}`")
    with tempfile.TemporaryDirectory(prefix="assay-family-") as temporary:
        folder = Path(temporary)
        cells = [
            _cell(folder / f"{number}-{name}", config, question)
            for number, question in enumerate(questions)
            for name, config in (
                ("plain", question.plain),
                ("quantized", {**question.plain, "quantization_config": _EVERY_LINEAR}),
            )
        ]
        request, answer = folder / "request.json", folder / "answer.json"
        request.write_text(json.dumps({"machine": machine(GPUS["H200"], _NUM_GPUS), "cells": cells}), encoding="utf-8")
        words = [str(interpreter), "-m", "assay_vllm.replay.describe", str(request), str(answer)]
        timeout_s = _TIMEOUT_S * len(questions)
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                  timeout=timeout_s, check=False, cwd=folder)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise AssayError(f"vLLM's classes were not built after {timeout_s} s; try again when less runs here") from None
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise AssayError(f"{interpreter}: vLLM's classes could not be asked: {shown(lines[-1] if lines else '', 500)}")
        answers = json.loads(answer.read_text(encoding="utf-8"))
        return [{"vllm": answers["vllm"], **checkpoint} for checkpoint in answers["checkpoints"]]


def _cell(folder: Path, config: Mapping[str, Any], question: _Question) -> dict[str, Any]:
    """One checkpoint as the program reads it. config: with or without quantization."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = text_of(question.config).get("max_position_embeddings")
    context = min(own, _CONTEXT_TOKENS) if isinstance(own, int) and own > 0 else _CONTEXT_TOKENS
    drafting = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})] if question.draft else []
    arguments = [
        "--model", str(folder), "--load-format", "assay-strict", "--tensor-parallel-size", str(_NUM_GPUS), "--enforce-eager",
        "--max-model-len", str(context), *drafting,
    ]  # fmt: skip
    cell = {"name": folder.name, "folder": str(folder), "arguments": arguments, "schemes": None}
    if question.weights is None:
        return cell
    (headers := folder / "headers.json").write_text(json.dumps({"model.safetensors": question.weights}), encoding="utf-8")
    write_head(folder, config, {"model.safetensors": question.weights})
    return {**cell, "headers": str(headers)}


# ------------------------------------------------------------------------------------------------ the draft
def _draft(config: Mapping[str, Any], architecture: str, weights: Weights, answer: Mapping[str, Any]) -> Draft:
    target, block = (answer["parts"].get(part, {"tensors": {}})["tensors"] for part in ("target", "draft"))
    num_layers = int(text_of(config).get("num_hidden_layers") or 0)
    root = str(_root_of_layers({name: tensor for name, tensor in target.items() if ".experts." in name} or target))
    made = Draft(
        name=str(config.get("model_type") or architecture),
        architecture=architecture,
        vllm=str(answer["vllm"]),
        classes={part: described["model_class"] for part, described in answer["parts"].items()},
        layers=root,
        num_experts=tuple(key for key in EXPERT_COUNT_KEYS if text_of(config).get(key)),
    )
    untaken: dict[str, None] = {}
    whole: dict[str, None] = {}
    together = {of is target: _taken_together(of) for of in (block, target)}
    own_root = _root_of_layers({name: tensor for name, tensor in block.items() if name not in target}, default=None)
    own_root = None if own_root == root else own_root
    for name, (_, shape) in weights.items():
        part = target if name in target else block
        where, at = part.get(name), split_layer(name)
        key = name if at is None else f"{at.root}.{{layer}}.{_numberless(at.rest)}"
        if where is None:
            untaken[key] = None
            continue
        inside = name not in target or (at is not None and at.root == root and at.layer >= num_layers)
        form = _form(key, where, shape, num_taken=len(together[part is target][where["module"], where["parameter"]]))
        if _holds_experts(where, shape):
            whole[key] = None
        if at is None:
            (made.mtp if inside else made.outside).setdefault(name, form)
        elif at.root == root and not inside:
            made.layer.setdefault(_numberless(at.rest), form)
        elif inside and at.root in (root, own_root):
            made.mtp_layer.setdefault(_numberless(at.rest), form)
        elif inside:
            made.mtp.setdefault(key, form)
        else:
            made.outside.setdefault(name, form)
    for shared in made.layer.keys() & made.mtp_layer.keys():
        if made.mtp_layer[shared] == made.layer[shared]:
            del made.mtp_layer[shared]
    kept = tuple(dict.fromkeys(_apart(name, root) for name in made.outside if split_layer(name) is not None))
    outside = {name: form for name, form in made.outside.items() if not name.startswith(tuple(f"{module}." for module in kept))}
    # of several MTP layers vLLM may take the first alone
    taken = {f"{own_root}.{{layer}}.{rest}" for rest in {**made.layer, **made.mtp_layer}}
    left = tuple(form for form in untaken if form not in taken)
    return Draft(
        **{**vars(made), "outside": outside, "mtp_layers": own_root, "kept": kept, "untaken": left, "whole": tuple(whole)}
    )


def _taken_together(tensors: Mapping[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Parameter of vLLM -> the names that it takes, behind the layer's number; of experts without theirs."""
    names: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, where in tensors.items():
        at = split_layer(name)
        names[where["module"], where["parameter"]].add(name if at is None else _numberless(at.rest))
    return names


def _apart(name: str, root: str) -> str:
    """`model.visual` of `model.visual.blocks.0.norm1.weight`: up to the first component that `root` has not."""
    parts, others = name.split("."), root.split(".")
    same = next((i for i, (part, other) in enumerate(zip(parts, others, strict=False)) if part != other), len(others))
    return ".".join(parts[: same + 1])


def _root_of_layers(tensors: Mapping[str, Any], default: str | None = "model.layers") -> str | None:
    """The root that most of the tensors lie under."""
    roots = [at.root for at in map(split_layer, tensors) if at is not None]
    return max(dict.fromkeys(roots), key=roots.count, default=default)


def _numberless(rest: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{expert}", rest, count=1) if re.search(r"experts?\.\d+\.", rest) else rest


def _holds_experts(where: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a weight goes into the parameter of all experts as it is."""
    return len(shape) == 3 and where["parameter"].startswith(("w13", "w2"))


def _form(key: str, where: Mapping[str, Any], shape: Sequence[int], num_taken: int) -> Form:
    """What vLLM does with one weight, by the module that takes it. alike: how many names its parameter takes."""
    plain_key = key.replace(".{layer}.weight", ".weight")
    role = next((role for pattern, role in _ROLES if re.search(pattern, plain_key)), "other")
    classes = set(where["classes"])
    if _holds_experts(where, shape):
        return Form.model_validate({"role": "routed_expert", "kind": "plain"})
    if len(shape) < 2 or not key.endswith("weight"):
        return Form.model_validate({"role": role})
    quantizable = where["method"] is not None and not where["method"].startswith("Unquantized")
    embedding = bool(classes & {"VocabParallelEmbedding", "ParallelLMHead"})
    never = quantizable and role in ("router", "mtp_projection")  # by no precision
    kind = "plain" if embedding or never else "linear" if quantizable else "bare"
    split, fused = _split(key, where, classes), _fused(key, where, num_taken)
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


def _fused(key: str, where: Mapping[str, Any], num_taken: int) -> str | None:
    """Last component of the module that takes other weights as well; of experts the name that vLLM has for gate and up."""
    if "{expert}" in key:
        return "gate_up_proj" if num_taken > 1 and where["parameter"].startswith("w13") else None
    return str(where["module"]).rpartition(".")[2] if num_taken > 1 and "LinearBase" in where["classes"] else None


# ------------------------------------------------------------------------------------------------ the file
def as_yaml(draft: Draft, source: str) -> str:
    """The file that `recipes/families/` takes. source: what it was drafted from, for its comment."""
    lines = [
        f"# Draft, made by `assay family` from {one_line(source)} and the classes of vLLM {draft.vllm}:",
        *(f"#   {part}: {model_class}" for part, model_class in draft.classes.items()),
        "# Review every role (guessed by name) and what a comment asks for; kind, split and fused are vLLM's own.",
        *(f"# Not known without headers: {one_line(doubt)}." for doubt in draft.doubts),
        "schema: 1",
        f"name: {draft.name}",
        f"description: {draft.architecture}.",
        f"architectures: [{draft.architecture}]",
        "reasoning_parser: CHOOSE  # vLLM's name for it",
        f"num_experts: [{', '.join(draft.num_experts)}]",
        *([] if draft.layers == "model.layers" else [f"layers: {draft.layers}"]),
        *([f"kept: [{', '.join(map(one_line, draft.kept))}]"] if draft.kept else []),
        *_section("outside", draft.outside, ""),
        *_section("layer", draft.layer, ""),
    ]
    if draft.mtp or draft.mtp_layer or draft.mtp_layers:
        lines += ["mtp:", *([f"  layers: {draft.mtp_layers}"] if draft.mtp_layers else [])]
        lines += [*_section("layer", draft.mtp_layer, "  "), *_section("outside", draft.mtp, "  ")]
        needed = [n for n, f in {**draft.mtp, **draft.mtp_layer}.items() if f.part not in ("embedding", "lm_head")]
        lines += [f"  required: {json.dumps(needed)}"]
    lines += [f"# all experts of a layer in a layout that is not split, so never quantized: {one_line(n)}" for n in draft.whole]
    lines += [f"# not taken by vLLM: {one_line(name)}" for name in draft.untaken]
    return "\n".join(lines) + "\n"


def _section(key: str, forms: Mapping[str, Form], indent: str) -> Iterator[str]:
    if forms:
        yield f"{indent}{key}:"
    for name, form in forms.items():
        fields = form.model_dump(by_alias=True, exclude_defaults=True)
        order = [field for field in ("role", "kind", "split", "fused") if field in fields]
        yield f"{indent}  {json.dumps(name)}: {{{', '.join(f'{field}: {fields[field]}' for field in order)}}}  # guessed role"
