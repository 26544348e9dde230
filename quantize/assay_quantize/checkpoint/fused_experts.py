"""Experts stored as 3-D tensors of a layer, read as the 2-D weights of single experts: byte ranges, nothing is moved.

transformers 5 keeps `mlp.experts.gate_up_proj` [E, 2I, H], gate above up, and `mlp.experts.down_proj` [E, H, I].
Step-3.5-Flash keeps `moe.gate_proj.weight` and `moe.up_proj.weight` [E, I, H], and `moe.down_proj.weight` [E, H, I]. vLLM
loads the names of single experts for every family, so that is what a plan sees and what is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.errors import CheckpointError
from assay.recipes.families import text_of
from assay_quantize.checkpoint.source_format import declared_block

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader

_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<leaf>gate_up_proj|down_proj)(?P<rest>(\.weight)?|(\.weight|_)?_?scale\w*)")
_STACKED = re.compile(r"(?P<moe>.+\.moe)\.(?P<leaf>gate_proj|up_proj|down_proj)(?P<rest>\.weight(_scale\w*)?)")
FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused parameter of transformers -> the weights of single experts in it, from the first row on."""
_PARTS = {**FUSED_PARTS, "gate_proj": ("gate_proj",), "up_proj": ("up_proj",)}

HOW_TO_SPLIT = "save the model again with one tensor per expert"


class _Fused(NamedTuple):
    """weight: the 3-D weight itself, of which this tensor is a part or the scales. experts: what its experts are called."""

    experts: str
    leaf: str
    rest: str
    weight: str


def _fused(name: str) -> _Fused | None:
    if match := _FUSED.fullmatch(name):
        return _Fused(match["experts"], match["leaf"], match["rest"], f"{match['experts']}.{match['leaf']}")
    if match := _STACKED.fullmatch(name):
        return _Fused(f"{match['moe']}.experts", match["leaf"], match["rest"], f"{match['moe']}.{match['leaf']}")
    return None


def is_fused(name: str) -> bool:
    """Whether a tensor, or the scales of one, is of all experts of a layer."""
    return _fused(name) is not None


def split_experts(
    location: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every fused 3-D tensor replaced by those of its experts, in the order of their data; and a note.

    Raises CheckpointError: a transposed layout ([E, H, 2I]), shapes that do not fit config.json, a name that is there twice.
    """
    fused = {name: parts for name in tensors if (parts := _fused(name))}
    if not fused:
        return dict(tensors), ()
    made: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        slices = [header] if name not in fused else list(_split(location, config, header, fused[name], tensors))
        for part in slices:
            if part.name in made or (name in fused and part.name in tensors):
                raise CheckpointError(f"{location}: {part.name} is there on its own and inside {name}; download it again")
            made[part.name] = part
    count = len(made) - len(tensors) + len(fused)
    return made, (f"{len(fused):,} tensors hold all experts of a layer; they are read as {count:,} tensors of single experts",)


def _split(
    location: str, config: Mapping[str, Any], header: TensorHeader, fused: _Fused, tensors: Mapping[str, TensorHeader]
) -> Iterator[TensorHeader]:
    weight = tensors.get(fused.weight) or tensors.get(f"{fused.weight}.weight")
    if weight is None:
        raise CheckpointError(f"{location}: {header.name} has no {fused.weight}; complete the download")
    parts = _PARTS[fused.leaf]
    if header is weight:
        _check_layout(location, config, weight, fused.leaf)
        leaf = "weight"
    else:
        leaf = _check_scales(location, config, header, weight, fused)
    experts, rows = header.shape[0], header.shape[1]
    bytes_each = header.num_bytes // experts
    shared = rows == 1  # one scale of both halves
    rows_each, bytes_part = (rows, bytes_each) if shared else (rows // len(parts), bytes_each // len(parts))
    for expert in range(experts):
        for number, part in enumerate(parts):
            begin = header.begin + expert * bytes_each + (0 if shared else number * bytes_part)
            name = f"{fused.experts}.{expert}.{part}.{leaf}"
            shape = (rows_each, *header.shape[2:])
            yield header._replace(name=name, shape=shape, begin=begin, end=begin + bytes_part)


def _check_layout(location: str, config: Mapping[str, Any], weight: TensorHeader, leaf: str) -> None:
    text = text_of(config)
    hidden, intermediate = text.get("hidden_size"), text.get("moe_intermediate_size")
    if not isinstance(hidden, int) or not isinstance(intermediate, int):
        raise CheckpointError(
            f"{location}: config.json: hidden_size and moe_intermediate_size are needed to read {weight.name}; add them"
        )
    rows, columns = (hidden, intermediate) if leaf == "down_proj" else (len(_PARTS[leaf]) * intermediate, hidden)
    if len(weight.shape) == 3 and weight.shape[1:] == (rows, columns):
        return
    if len(weight.shape) == 3 and weight.shape[1:] == (columns, rows):
        what = f"is stored transposed, [experts, {columns}, {rows}]; only [experts, {rows}, {columns}] is read"
    else:
        what = f"has shape {list(weight.shape)}; by config.json it should be [experts, {rows}, {columns}]"
    raise CheckpointError(f"{location}: {weight.name} {what}; {HOW_TO_SPLIT}")


def _check_scales(
    location: str, config: Mapping[str, Any], scale: TensorHeader, weight: TensorHeader, fused: _Fused
) -> str:  # fmt: skip
    """The name that a single expert's scales have; CheckpointError when they cannot be told apart."""
    known = fused.rest.removeprefix(".weight") in ("_scale_inv", "_scale")
    fits = len(scale.shape) == len(weight.shape) == 3 and scale.shape[0] == weight.shape[0]
    if fits and fused.leaf == "gate_up_proj" and scale.shape[1] not in (1, weight.shape[1]):
        # a scale of rows of gate and of up would belong to neither
        fits = weight.shape[1] % (2 * declared_block(location, config)[0]) == 0 and scale.shape[1] % 2 == 0
    if not known or not fits:
        raise CheckpointError(
            f"{location}: {scale.name} {list(scale.shape)} cannot be split among the experts of {weight.name} "
            f"{list(weight.shape)}; {HOW_TO_SPLIT}"
        )
    return "weight_scale_inv" if fused.rest.endswith("_scale_inv") else "weight_scale"
