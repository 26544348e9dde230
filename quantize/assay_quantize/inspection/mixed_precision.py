"""ModelOpt's MIXED_PRECISION: one algorithm for each entry of `quantized_layers`, found for a module as vLLM 0.32 finds it.

`ModelOptMixedPrecisionConfig._resolve_quant_algo` (modelopt.py) asks in this order: the module's own name; the members of a
fused module; the first entry that lies below the module (all experts of a layer are one module); of experts, the first entry
below the module around them. A module that none of these finds is built plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from assay_quantize.formats.vllm_rules import MixedSchemes, RuntimeModule

MIXED = "MIXED_PRECISION"
OF_LINEARS = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"})
OF_EXPERTS = frozenset({"FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4", "MXFP8"})
"""`quant_algo` by which vLLM builds a linear, or the experts of a layer; by any other it builds them plain."""
STATIC = ("FP8", "NVFP4")
"""Those that need a stored scale of activations."""
_WRAPPED = ("language_model.model.", "model.language_model.")
"""Two spellings of one root, of which vLLM tries both."""


def is_mixed(declared: Mapping[str, Any]) -> bool:
    """Whether a claim has an algorithm for each layer."""
    return str(declared.get("quant_algo", "")).upper() == MIXED


def algorithms_of(declared: Mapping[str, Any]) -> dict[str, str]:
    """Entry of `quantized_layers` -> its algorithm; empty: there is none that can be read."""
    layers = declared.get("quantized_layers")
    if not isinstance(layers, dict):
        return {}
    told = {str(name): entry.get("quant_algo") for name, entry in layers.items() if isinstance(entry, dict)}
    return {name: algorithm.upper() for name, algorithm in told.items() if isinstance(algorithm, str)}


def spellings(name: str) -> tuple[str, ...]:
    """A module's name as vLLM looks for it in `quantized_layers`."""
    made = [name]
    if name.endswith(".lm_head"):
        made.append("lm_head")
    for root, other in (_WRAPPED, _WRAPPED[::-1]):
        if name.startswith(root):
            made.append(other + name.removeprefix(root))
    return tuple(made)


def expects_mixed(
    algorithms: Mapping[str, str], is_excluded: Callable[[str], bool], fused: Mapping[str, Sequence[str]]
) -> Callable[[RuntimeModule], str | None]:
    """A module of vLLM -> the algorithm by which it is built; None: plain. MixedSchemes: vLLM refuses to start.

    algorithms: `quantized_layers` by vLLM's names. is_excluded: vLLM's answer of the list of modules that stay plain.
    """
    first_below = _first_below(algorithms)

    def expects(module: RuntimeModule) -> str | None:
        if module.kind in ("plain", "embedding") or is_excluded(module.name):
            return None
        algorithm = _algorithm_of(module.name, algorithms, first_below, fused)
        return algorithm if algorithm in (OF_EXPERTS if module.kind == "experts" else OF_LINEARS) else None

    return expects


def _first_below(algorithms: Mapping[str, str]) -> dict[str, str]:
    """Module around entries -> the algorithm of the first of them."""
    first: dict[str, str] = {}
    for name, algorithm in algorithms.items():
        for parent in parents_of(name):
            first.setdefault(parent, algorithm)
    return first


def parents_of(name: str) -> Iterator[str]:
    """Modules around a module, the nearest first."""
    while name := name.rpartition(".")[0]:
        yield name


def _algorithm_of(
    name: str, algorithms: Mapping[str, str], first_below: Mapping[str, str], fused: Mapping[str, Sequence[str]]
) -> str | None:  # fmt: skip
    names = spellings(name)
    by_name = next((algorithms[spelling] for spelling in names if spelling in algorithms), None)
    if by_name is not None:
        return by_name
    leaf = name.rpartition(".")[2]
    members = [f"{spelling.rpartition('.')[0]}.{member}" for spelling in names for member in fused.get(leaf, ())]
    of_members = sorted({algorithms[member] for member in members if member in algorithms})
    if len(of_members) > 1:
        raise MixedSchemes(
            f"quantized_layers has several algorithms for members of {name}: {', '.join(of_members)}; vLLM refuses"
        )
    if of_members:
        return of_members[0]
    around = [name.removesuffix(".experts")] if name.endswith(".experts") else []
    return next((first_below[module] for module in (*names, *around) if module in first_below), None)


def without_tensor(algorithms: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Entries that name no stored module, and none around one. modules: as the checkpoint names them."""
    known: set[str] = set()
    for module in modules:
        for name in (module, *parents_of(module)):
            known.update(spellings(name))
    return [entry for entry in algorithms if entry not in known]
