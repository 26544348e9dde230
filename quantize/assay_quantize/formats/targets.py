"""Which scheme a module has, said as patterns: the targets of `config_groups`, and what `ignore` adds for single layers.

vLLM takes the first target that matches, compressed-tensors merges all that do; so the patterns of two schemes never match the
same module. Each is escaped and closed with `$`, because both match by `re.match`. Where vLLM calls a module otherwise than the
checkpoint (`rename`), there are patterns for both names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from assay.recipes.family_names import alternatives, asked_of_vllm, numberless, split_layer
from assay.records.plan import TensorPlan

Rename = Callable[[str], str]
"""A module of the checkpoint -> what vLLM calls it (`FamilyNames.runtime_namer`)."""
Place = tuple[str, int]
"""What stands in front of a layer's number, and the number: ("model.layers", 3)."""

ELSEWHERE = "elsewhere"
"""In place of a scheme: modules of this name may have one outside the layers that are looked at."""


def targets_by_scheme(tensors: Sequence[TensorPlan], rename: Rename = str) -> dict[str, tuple[str, ...]]:
    """Scheme -> targets of its config group, in the order of the schemes' names; `Linear` where there is one scheme only."""
    places = _places((tensor for tensor in tensors if tensor.scheme is not None), rename)
    schemes = sorted({scheme for by_scheme in places.values() for scheme in by_scheme if scheme is not None})
    if len(schemes) < 2:
        return dict.fromkeys(schemes, ("Linear",))
    return {
        scheme: tuple(_patterns({name: layers for name, layers in places.items() if scheme in layers}, scheme))
        for scheme in schemes
    }


def kept_in_some_layers(tensors: Iterable[TensorPlan], rename: Rename = str, roles: Collection[str] = ()) -> tuple[str, ...]:
    """Patterns for `ignore`: weights that are kept in some layers and quantized in others; the MTP block has its own.

    roles: those that the recipe quantizes. One that it keeps in every layer is named as well, layer by layer, for in the MTP
    block it may be quantized.
    """
    of_layers = [t for t in tensors if t.role != "mtp" and t.action != "drop" and t.name.endswith(".weight")]
    of_layers = [t for t in of_layers if len(t.shape) == 2]
    places = _places(of_layers, rename)
    everywhere = set(roles) - {t.role for t in of_layers if t.scheme is not None}
    for name in _places((t for t in of_layers if t.role in everywhere), rename):
        places[name][ELSEWHERE] = set()
    mixed = {name: by_scheme for name, by_scheme in places.items() if len(by_scheme) > 1 and None in by_scheme}
    return tuple(_patterns(mixed, None))


def _places(tensors: Iterable[TensorPlan], rename: Rename) -> dict[str, dict[str | None, set[Place]]]:
    """Name of a module inside its layer, an expert's number as `{expert}` -> scheme -> the layers where it has that."""
    places: dict[str, dict[str | None, set[Place]]] = defaultdict(lambda: defaultdict(set))
    for tensor in tensors:
        stored = tensor.name.removesuffix(".weight")
        for at in map(split_layer, (stored, rename(stored))):
            if at is not None:
                name = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", at.rest)
                places[name][tensor.scheme].add((at.root, at.layer))
    return places


def _patterns(places: Mapping[str, Mapping[str | None, set[Place]]], scheme: str | None) -> list[str]:
    """Patterns of the modules that have `scheme`; with the numbers of their layers where other layers have another one."""
    leaves: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, by_scheme in places.items():
        parent, _, leaf = name.rpartition(".")
        for where in [r".*\."] if len(by_scheme) == 1 else _layers(by_scheme[scheme]):
            leaves[where, parent].append(leaf)
    return sorted(
        f"re:{where}{numberless(parent)}\\.{alternatives(asked_of_vllm(parent, sorted(names)))}$"
        for (where, parent), names in leaves.items()
    )


def _layers(places: set[Place]) -> list[str]:
    roots = sorted({root for root, _ in places})
    return [rf"(.*\.)?{re.escape(root)}\.{alternatives([str(n) for r, n in sorted(places) if r == root])}\." for root in roots]
