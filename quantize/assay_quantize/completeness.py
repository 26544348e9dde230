"""Is a source whole? Layers and experts against the config, layers against each other, the MTP block against what is declared.

vLLM loads a checkpoint that lacks MTP experts without a word and then drafts at 0 % acceptance; so it is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from assay.errors import PlanError
from assay.families import NAMES, Classified, declared_mtp_layers, num_experts, num_hidden_layers

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
HOW_TO_DROP = "complete the download, or take a precision with `mtp: drop`"


def mtp_layer_indexes(family: str, classified: Mapping[str, Classified]) -> tuple[int, ...]:
    """Decoder-layer indexes of inlined MTP blocks; empty if there are none or the block is called `mtp.*`."""
    if NAMES[family].mtp:
        return ()
    return tuple(sorted({c.layer for c in classified.values() if c.role == "mtp" and c.layer is not None}))


def check_layers(where: str, family: str, classified: Mapping[str, Classified], config: Mapping[str, Any]) -> None:
    """Every decoder layer is there, has all experts, and has the tensors that the other layers of its kind have.

    Kinds are told apart by what they contain: experts or a dense MLP, full or linear attention, an indexer or none.
    """
    layers = _by_layer({name: c for name, c in classified.items() if c.role != "mtp"})
    declared = num_hidden_layers(config)
    missing = sorted(set(range(declared)) - set(layers))
    if missing:
        raise PlanError(
            f"{where}: config.json declares {declared} layers, but there is no tensor of layer {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; complete the download"
        )
    kinds: dict[tuple[bool, ...], dict[int, set[str]]] = defaultdict(dict)
    for layer, names in layers.items():
        rest = {_rest(name) for name in names if classified[name].expert is None}
        _check_experts(where, names, classified, num_experts(family, config), f"layer {layer}")
        has_experts = any(classified[name].expert is not None for name in names)
        kinds[(has_experts, *(any(r.startswith(p) for r in rest) for p in _KINDS))][layer] = rest
    for alike in kinds.values():
        union = set().union(*alike.values())
        for layer, rest in alike.items():
            if lacking := sorted(union - rest):
                other = next(number for number, names in alike.items() if lacking[0] in names)
                raise PlanError(f"{where}: layer {layer} has no {lacking[0]}, which layer {other} has; complete the download")
    if "model.embed_tokens.weight" not in classified or "model.norm.weight" not in classified:
        raise PlanError(f"{where}: model.embed_tokens.weight or model.norm.weight is not there; complete the download")
    if "lm_head.weight" not in classified and not config.get("tie_word_embeddings"):
        raise PlanError(f"{where}: lm_head.weight is not there, and tie_word_embeddings is not set; complete the download")


_KINDS = ("linear_attn.", "self_attn.", "self_attn.indexer.")


def check_mtp(where: str, family: str, classified: Mapping[str, Classified], config: Mapping[str, Any]) -> None:
    """The MTP block is there if it is declared, declared if it is there, and whole."""
    names = NAMES[family]
    block = {name: c for name, c in classified.items() if c.role == "mtp"}
    declared = declared_mtp_layers(config)
    layers = _by_layer(block)
    if declared and not block:
        raise PlanError(
            f"{where}: config.json declares {declared} MTP layer(s) (num_nextn_predict_layers), but there are no MTP tensors; "
            f"{HOW_TO_DROP}"
        )
    if declared is not None and declared != len(layers):
        raise PlanError(
            f"{where}: config.json declares {declared} MTP layer(s) (num_nextn_predict_layers), but there are {len(layers)}; "
            "correct the number, or take a precision with `mtp: drop`"
        )
    if not block:
        return
    first = 0 if names.mtp else num_hidden_layers(config)
    if list(layers) != list(range(first, first + len(layers))):
        raise PlanError(
            f"{where}: MTP layers are numbered {list(layers)}; vLLM looks for them from {first} on (num_hidden_layers)"
        )
    ordinary = _by_layer({name: c for name, c in classified.items() if c.role != "mtp"})
    required = _required_in_mtp(classified, ordinary)
    for layer, present in layers.items():
        rest = {_rest(name) for name in present}
        needed = required | (set() if names.mtp else set(names.mtp_required))
        if lacking := sorted(needed - rest):
            raise PlanError(f"{where}: MTP layer {layer} has no {lacking[0]}; {HOW_TO_DROP}")
        _check_experts(where, present, classified, num_experts(family, config), f"MTP layer {layer}", must=True)
    if names.mtp and (lacking := sorted(set(names.mtp_required) - set(block))):
        raise PlanError(f"{where}: the MTP block has no {lacking[0]}; {HOW_TO_DROP}")


def _required_in_mtp(classified: Mapping[str, Classified], layers: Mapping[int, list[str]]) -> set[str]:
    """What an MTP layer must have: what all MoE layers of the model with full attention have, the indexer apart."""
    moe = [
        {_rest(name) for name in names}
        for names in layers.values()
        if any(classified[name].expert is not None for name in names)
    ]
    full = [rests for rests in moe if any(rest.startswith("self_attn.") for rest in rests)]
    common = set.intersection(*full) if full else set()
    return {rest for rest in common if ".experts." not in rest and ".indexer." not in rest}


def _check_experts(
    where: str, names: list[str], classified: Mapping[str, Classified], experts: int, what: str, *, must: bool = False
) -> None:
    """All experts 0..n-1 with all three projections, or (unless `must`) none at all."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        expert = classified[name].expert
        if expert is not None:
            found[expert].add(name.split(".")[-2])
    if not found and not must:
        return
    mend = HOW_TO_DROP if must else "complete the download"
    if beyond := sorted(set(found) - set(range(experts))):
        raise PlanError(f"{where}: {what} has expert {beyond[0]}, config.json declares {experts} experts; correct the config")
    for expert in range(experts):
        if lacking := [p for p in PROJECTIONS if p not in found.get(expert, set())]:
            raise PlanError(
                f"{where}: {what} has no {lacking[0]} of expert {expert}; {len(found)} of {experts} experts are there; {mend}"
            )


def _by_layer(classified: Mapping[str, Classified]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = defaultdict(list)
    for name, found in classified.items():
        if found.layer is not None:
            layers[found.layer].append(name)
    return dict(sorted(layers.items()))


def _rest(name: str) -> str:
    """`self_attn.q_proj.weight` of `model.layers.3.self_attn.q_proj.weight`."""
    return name.split(".layers.", 1)[1].split(".", 1)[1]
