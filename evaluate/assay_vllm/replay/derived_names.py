"""What a checkpoint calls the parameters of a model, where there is no checkpoint: told by the model's own loader.

Names are proposed from what vLLM's classes say of fused weights and of renamed ones, and from where MTP blocks lie. Each is
given to the model's `load_weights`, whose parameters only note who came: a name is good if its parameter took it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from assay_vllm.replay.headers import layer_of

_MOST_RENAMED = 3
"""Parts of one name that a checkpoint has otherwise."""


def names_taken(model: Any, *, first_mtp_layer: int | None) -> tuple[dict[str, list[str]], list[str]]:
    """(name in a checkpoint -> the parameter that takes it, parameters of which no name is known).

    One of each kind: the first layer that has a parameter speaks for all, the first expert for the others. first_mtp_layer:
    number of the first MTP layer where it follows the decoder layers; None: the model is no draft.
    """
    members, renamed = _members(model), _renamed(model)
    came = _follow(model)
    parameters_of: dict[str, list[str]] = {}
    unknown: list[str] = []
    kinds: set[str] = set()
    for parameter, _ in model.named_parameters():
        layer = layer_of(parameter)
        kind = parameter if layer is None else f"{layer[0].rpartition('.')[0]}.{layer[1]}"
        if kind in kinds:
            continue
        kinds.add(kind)
        ndim, taking = stored_ndim(model, parameter), list[str]()

        def taken(name: str, ndim: int = ndim, parameter: str = parameter) -> bool:
            """A loader raises at a name that it does not know, and some at the end, because all other tensors are missing."""
            came.clear()
            with contextlib.suppress(Exception):
                model.load_weights([(name, torch.empty((1,) * ndim, dtype=torch.bfloat16, device="meta"))])
            return came == [parameter]

        for proposed in (_unfused(model, parameter, members), [parameter]):
            names = [name for own in proposed for name in _stored(own, renamed, first_mtp_layer, taken)]
            taking = taking or list(dict.fromkeys(names))
        parameters_of.update({name: [parameter] for name in taking})
        unknown += [] if taking else [parameter]
    return parameters_of, unknown


def stored_ndim(model: Any, parameter: str) -> int:
    """Dimensions of what a checkpoint stores for a parameter: experts lie one by one."""
    owner = model.get_submodule(parameter.rpartition(".")[0])
    ndim: int = model.get_parameter(parameter).ndim
    return ndim - 1 if hasattr(owner, "ckpt_gate_proj_name") else ndim


def _follow(model: Any) -> list[str]:
    """Parameters note that they were given something, and load nothing."""
    came: list[str] = []
    for name, parameter in model.named_parameters():
        load = getattr(parameter, "weight_loader", default_weight_loader)

        @functools.wraps(load)
        def note(*args: Any, _name: str = name, **kwargs: Any) -> bool:
            came.append(_name)
            return True

        parameter.weight_loader = note
    return came


# ------------------------------------------------------------------------------------------------ what classes say
def _members(model: Any) -> dict[str, list[str]]:
    """Last component of a fused module -> the components that a checkpoint has instead.

    Of three places: `packed_modules_mapping`, the stacked names of a `hf_to_vllm_mapper`, and the (fused, member, shard) that
    stand as constants in a `load_weights`.
    """
    members: dict[str, dict[str, None]] = defaultdict(dict)
    for module in model.modules():
        for fused, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
            members[fused].update(dict.fromkeys(parts))
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        for part, (fused, _) in getattr(mapper, "orig_to_new_stacked", {}).items():
            members[fused.rpartition(".")[2]][part.rpartition(".")[2]] = None
        code = getattr(getattr(type(module), "load_weights", None), "__code__", None)
        for fused, part in _triples(() if code is None else code.co_consts):
            members[fused][part] = None
    return {fused: list(parts) for fused, parts in members.items()}


def _triples(constants: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    for triple in constants:
        if not isinstance(triple, tuple):
            continue
        if len(triple) == 3 and isinstance(triple[0], str) and isinstance(triple[1], str) and isinstance(triple[2], int | str):
            yield triple[0].strip("."), triple[1].strip(".")
        else:
            yield from _triples(triple)


def _renamed(model: Any) -> tuple[list[tuple[str, str]], ...]:
    """(part of vLLM's name, part of the checkpoint's): of the model's own mapper, and of all that are in it."""
    names: list[tuple[str, str]] = []
    own = 0
    for module in model.modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        for kind in ("orig_to_new_substr", "orig_to_new_prefix", "orig_to_new_suffix"):
            names += [(new, old) for old, new in getattr(mapper, kind, {}).items() if new]
        own = own or len(names) if module is model else own
    return list(dict.fromkeys(names[:own])), list(dict.fromkeys(names))


def _unfused(model: Any, parameter: str, members: dict[str, list[str]]) -> Iterator[str]:
    """Names of what is fused into a parameter, or of one expert's part of it; nothing for any other."""
    owner, _, leaf = parameter.rpartition(".")
    module = model.get_submodule(owner)
    if hasattr(module, "ckpt_gate_proj_name"):
        first = (module.ckpt_gate_proj_name, module.ckpt_up_proj_name)
        part = "bias" if leaf.endswith("bias") else "weight"
        for projection in first if leaf.startswith("w13") else (module.ckpt_down_proj_name,):
            # a checkpoint numbers them behind `experts`, whatever follows it in vLLM's name
            yield f"{''.join(owner.partition('.experts')[:2])}.0.{projection}.{part}"
        return
    parent, _, last = owner.rpartition(".")
    for member in members.get(last, []):
        yield ".".join(filter(None, (parent, member, leaf)))


def _stored(
    name: str,
    renamed: tuple[list[tuple[str, str]], ...],
    first_mtp_layer: int | None,
    taken: Callable[[str], bool],
) -> list[str]:
    """What a checkpoint calls the tensor that vLLM calls `name`: of the names that are taken those in which most is renamed.

    vLLM takes its own names as well, but it renames because a checkpoint has others. The model's own mapper knows best.
    """
    for rules in renamed:
        applied = [rule for rule in rules if rule[0] in name]
        for count in range(min(len(applied), _MOST_RENAMED), 0, -1):
            groups = itertools.combinations(applied, count)
            forms = (functools.reduce(lambda own, rule: own.replace(*rule, 1), group, name) for group in groups)
            if names := _taken_places(forms, first_mtp_layer, taken):
                return names
    return _taken_places([name], first_mtp_layer, taken)


def _taken_places(forms: Iterable[str], first_mtp_layer: int | None, taken: Callable[[str], bool]) -> list[str]:
    return [place for place in dict.fromkeys(at for form in forms for at in _places(form, first_mtp_layer)) if taken(place)]


def _places(own: str, first_mtp_layer: int | None) -> Iterator[str]:
    """Where a checkpoint may have a tensor of this name."""
    yield own
    if first_mtp_layer is None:
        return
    inside = own.removeprefix("model.")
    yield own.replace(".mtp_block.", ".")
    yield f"mtp.{inside}"
    yield f"model.layers.{first_mtp_layer}.{inside}"
    yield f"model.layers.{first_mtp_layer}.shared_head.{inside.removeprefix('lm_')}"
