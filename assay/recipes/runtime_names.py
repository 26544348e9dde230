"""How vLLM names the modules into which a family's weights are loaded; all of it follows from the family's table."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

from assay.recipes.family_names import family_names, names_of

_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(?:mtp_block\.)?(?P<rest>.+)$")
_SUFFIXES = re.compile(r"\.(residual|sum)$")
"""Of places that `assay diagnose locate` reads beside a module's output."""


@functools.cache
def fused_members(family: str) -> Mapping[str, tuple[str, ...]]:
    """Last component of a fused module -> those of the weights loaded into it, in vLLM's order: `qkv_proj` -> q, k and v."""
    return MappingProxyType(_fused(family, {"linear", "plain", "bare"}))


@functools.cache
def packed_modules(family: str) -> Mapping[str, tuple[str, ...]]:
    """The fused linears that get a quantization config: vLLM's `packed_modules_mapping`. Experts are none of them."""
    return MappingProxyType(_fused(family, {"linear", "plain"}, experts=False))


def _fused(family: str, kinds: set[str], *, experts: bool = True) -> dict[str, tuple[str, ...]]:
    members_by_name: dict[str, dict[str, None]] = {}
    for name, form in names_of(family).layer.items():
        if form.fused is not None and form.kind in kinds and (experts or "{expert}" not in name):
            members_by_name.setdefault(form.fused, {})[name.split(".")[-2]] = None
    return {fused: tuple(members) for fused, members in members_by_name.items()}


def role_of(name: str) -> str | None:
    """The role of a module of vLLM's, of any family; None: not known.

    Also of what `assay diagnose locate` reads beside modules: `...residual`, `...sum`, single experts, and the choice of
    experts (`experts.router`). A module that no table has goes by the module it lies in.
    """
    name = _SUFFIXES.sub("", name)
    in_layer = _IN_LAYER.search(name)
    if in_layer is None:
        words, roles = name.split("."), _roles_outside()
        return next((roles[end] for first in range(len(words)) if (end := ".".join(words[first:])) in roles), None)
    rest, roles = in_layer["rest"], _roles_in_layer()
    if rest not in roles and rest.endswith("norm"):
        return "norm"
    while rest and rest not in roles:
        rest = rest.rpartition(".")[0]
    return roles.get(rest)


@functools.cache
def _roles_outside() -> dict[str, str]:
    """Name of a module outside the layers, without what stands in front -> role."""
    roles = {"embed_tokens": "embedding", "norm": "norm", "lm_head": "lm_head", "logits_processor": "lm_head"}
    for names in map(names_of, family_names()):
        part_by_name = {names.runtime_name(name.rpartition(".")[0]): form.part for name, form in names.outside.items()}
        roles |= {module.rpartition(".")[2]: part for module, part in part_by_name.items()}
        roles |= {name.rpartition(".")[0]: "mtp" for name in names.mtp}
    return roles


@functools.cache
def _roles_in_layer() -> dict[str, str]:
    """Name of a module behind the layer's number -> role. A parent has the role of its linear weights, if they have one.

    A vector beside other modules, as a router's bias in the module of all experts, gives the module they lie in none.
    """
    roles: dict[str, str] = {}
    of_children: dict[str, set[str]] = {}
    of_vectors: dict[str, str] = {}
    parents: set[str] = set()
    for names in map(names_of, family_names()):
        for name, form in names.layer.items():
            stored = name.rpartition(".")[0]
            for module in (names.runtime_name(stored), stored):  # what vLLM calls one by another name may lie under this one
                parent = module.rpartition(".")[0].removesuffix(".{expert}")
                parents.add(parent)
                (roles if name.endswith(".weight") else of_vectors).setdefault(module, form.part)
                if form.fused is not None:
                    roles.setdefault(f"{parent}.{form.fused}", form.part)
                if form.kind == "linear":
                    of_children.setdefault(parent, set()).add(form.part)
        # an MTP layer may hold a module of every layer in another form
        roles |= {name.rpartition(".")[0]: "mtp" for name in names.mtp_layer if name not in names.layer}
        if names.mtp_runtime_layers is not None:  # what lies beside the layers in the checkpoint lies in one of vLLM's
            roles |= {name.partition(".{layer}.")[0].rpartition(".")[2]: "mtp" for name in names.mtp if ".{layer}." in name}
    for parent, parts in of_children.items():
        if len(parts) == 1:
            roles.setdefault(parent, *parts)
    for module, part in of_vectors.items():
        if module not in parents:
            roles.setdefault(module, part)
    roles.pop("", None)  # of vectors that the layer itself holds
    routers = {f"{names_of(family).experts}.router": "router" for family in family_names()}
    return roles | routers | {"shared_head": "mtp", "embed_tokens": "embedding"}
