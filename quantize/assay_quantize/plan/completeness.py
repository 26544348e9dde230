"""Is a source whole? Layers and experts against the config, layers against each other, the MTP block against what is declared.

vLLM loads a checkpoint that lacks MTP experts without a word and then drafts at 0 % acceptance; so it is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from assay.errors import PlanError
from assay.recipes.families import Classified, names_of, num_experts, num_hidden_layers, split_layer, text_of
from assay.recipes.mtp import mtp_problems


def check_layers(where: str, family: str, classified: Mapping[str, Classified], config: Mapping[str, Any]) -> None:
    """Every decoder layer is there, has all experts, and has the tensors that the other layers of its kind have.

    Kinds are told apart by what they contain: experts or a dense MLP, full or linear attention, an indexer or none, sinks of a
    sliding window, a compressor, experts chosen by token; where a layer is one mixer, by what is in it.
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
        _check_experts(where, family, names, classified, num_experts(family, config), f"layer {layer}")
        has_experts = any(classified[name].expert is not None for name in names)
        kinds[(has_experts, *(any(r.startswith(p) for r in rest) for p in _KINDS))][layer] = rest
    for alike in kinds.values():
        union = set().union(*alike.values())
        for layer, rest in alike.items():
            if lacking := sorted(union - rest):
                other = next(number for number, names in alike.items() if lacking[0] in names)
                raise PlanError(f"{where}: layer {layer} has no {lacking[0]}, which layer {other} has; complete the download")
    outside = names_of(family).outside
    needed = [name for name, form in outside.items() if form.part in ("embedding", "norm")]
    if any(name not in classified for name in needed):
        raise PlanError(f"{where}: {' or '.join(needed)} is not there; complete the download")
    heads = [name for name, form in outside.items() if form.part == "lm_head" and name not in classified]
    if heads and not (config.get("tie_word_embeddings") or text_of(config).get("tie_word_embeddings")):
        raise PlanError(f"{where}: {heads[0]} is not there, and tie_word_embeddings is not set; complete the download")


_KINDS: tuple[str | tuple[str, ...], ...] = (
    "linear_attn.", "self_attn.", "self_attn.indexer.", "self_attn.attention_sink_bias",
    ("mixer.in_proj.", "mixer.out_proj.", "mixer.conv1d.", "mixer.A_log", "mixer.D", "mixer.dt_bias"),
    "attn.compressor.", "attn.indexer.", "ffn.gate.tid2eid",
    ("mixer.q_proj.", "mixer.k_proj.", "mixer.v_proj.", "mixer.o_proj."),
)  # fmt: skip


def check_mtp(where: str, family: str, names: Collection[str], config: Mapping[str, Any]) -> None:
    """The MTP block is there if it is declared, declared if it is there, and whole (`mtp.mtp_problems`).

    names: of all tensors but scales.
    """
    problems = mtp_problems(family, config, names)
    first = next(problems, None)
    if first is not None:
        more = sum(1 for _ in problems)
        also = f" (and {more} more like this)" if more else ""
        raise PlanError(f"{where}: {first.where} {first.what}{also}; {first.mend}")


def _check_experts(
    where: str, family: str, names: list[str], classified: Mapping[str, Classified], experts: int, what: str
) -> None:
    """All experts 0..n-1 with all their projections, or none at all."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        expert = classified[name].expert
        if expert is not None:
            found[expert].add(name.split(".")[-2])
    if not found:
        return
    if beyond := sorted(set(found) - set(range(experts))):
        raise PlanError(f"{where}: {what} has expert {beyond[0]}, config.json declares {experts} experts; correct the config")
    for expert in range(experts):
        if lacking := [p for p in names_of(family).projections if p not in found.get(expert, set())]:
            raise PlanError(
                f"{where}: {what} has no {lacking[0]} of expert {expert}; {len(found)} of {experts} experts are there; "
                "complete the download"
            )


def _by_layer(classified: Mapping[str, Classified]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = defaultdict(list)
    for name, found in classified.items():
        if found.layer is not None:
            layers[found.layer].append(name)
    return dict(sorted(layers.items()))


def _rest(name: str) -> str:
    """`self_attn.q_proj.weight` of `model.layers.3.self_attn.q_proj.weight`."""
    at = split_layer(name)
    assert at is not None, name
    return at.rest
