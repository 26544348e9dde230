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
    layers: dict[int, list[str]] = defaultdict(list)
    for name, what in classified.items():
        if what.role != "mtp" and what.layer is not None:
            layers[what.layer].append(name)
    declared = num_hidden_layers(config)
    missing = sorted(set(range(declared)) - set(layers))
    if missing:
        raise PlanError(
            f"{where}: config.json declares {declared} layers, but there is no tensor of layer {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; complete the download"
        )
    kinds: dict[tuple[bool, ...], dict[int, set[str]]] = defaultdict(dict)
    for layer, names in sorted(layers.items()):
        rest = {place.rest for name in names if classified[name].expert is None and (place := split_layer(name)) is not None}
        _check_experts(where, family, names, classified, num_experts(family, config), f"layer {layer}")
        has_experts = any(classified[name].expert is not None for name in names)
        kinds[(has_experts, *(any(r.startswith(p) for r in rest) for p in _KINDS))][layer] = rest
    for of_kind in kinds.values():
        union = set().union(*of_kind.values())
        for layer, rest in of_kind.items():
            if lacking := sorted(union - rest):
                other = next(number for number, names in of_kind.items() if lacking[0] in names)
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
    problems = list(mtp_problems(family, config, names))
    if problems:
        first, also = problems[0], f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise PlanError(f"{where}: {first.where} {first.what}{also}; {first.mend}")


def _check_experts(
    where: str, family: str, names: list[str], classified: Mapping[str, Classified], experts: int, what: str
) -> None:
    """All experts 0..n-1 with all their projections, or none at all."""
    projections: dict[int, set[str]] = defaultdict(set)
    for name in names:
        expert = classified[name].expert
        if expert is not None:
            projections[expert].add(name.split(".")[-2])
    if not projections:
        return
    if beyond := sorted(projections.keys() - set(range(experts))):
        raise PlanError(f"{where}: {what} has expert {beyond[0]}, config.json declares {experts} experts; correct the config")
    for expert in range(experts):
        if lacking := [p for p in names_of(family).projections if p not in projections.get(expert, set())]:
            raise PlanError(
                f"{where}: {what} has no {lacking[0]} of expert {expert}; {len(projections)} of {experts} experts are there; "
                "complete the download"
            )
