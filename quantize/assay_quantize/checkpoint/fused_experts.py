"""Experts stored as 3-D tensors of a layer, read as the 2-D weights of single experts: places in a file, nothing is moved.

transformers 5 keeps `mlp.experts.gate_up_proj` [E, 2I, H], gate above up, and `mlp.experts.down_proj` [E, H, I]. Other names,
and tensors the other way round or with gate and up in turns, are what a family says (`FamilyRecipe.stacked`). vLLM loads the
names of single experts for every family, so that is what a plan sees and what is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.errors import CheckpointError, PlanError
from assay.recipes.families import family_of
from assay.recipes.family import Stacked
from assay.recipes.family_names import names_of, split_layer
from assay.recipes.text_config import text_of
from assay_quantize.checkpoint.declaration import declared_block
from assay_quantize.checkpoint.strided import Strides
from assay_quantize.formats.schemes import DTYPE_BYTES

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader

FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused parameter of transformers -> the weights of single experts in it, from the first row on."""
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<leaf>gate_up_proj|down_proj)(?P<rest>(\.weight)?|(\.weight|_)?_?scale\w*)")
_WEIGHT_OR_SCALE = re.compile(r"(?P<stem>.+?)(?P<rest>(\.weight)?(_?scale\w*)?)")

HOW_TO_SPLIT = "save the model again with one tensor per expert"


class _Fused(NamedTuple):
    """weight: the 3-D weight itself, of which this tensor is a part or the scales; rest: what follows its name. prefix: in
    front of the parts' names. is_down: whether the outputs are as wide as the model, not the inputs."""

    weight: str
    rest: str
    prefix: str
    stacked: Stacked
    is_down: bool


def _stacked_of(family: str) -> Mapping[str, tuple[Stacked, bool]]:
    """Name behind a layer's number, `.weight` at its end left out -> how it is stacked, and `is_down`, as the family says."""
    names = names_of(family)
    return {
        name.removesuffix(".weight"): (stacked, names.layer[stacked.parts[0]].split == "columns")
        for name, stacked in names.stacked.items()
    }


def _fused(name: str, stacked: Mapping[str, tuple[Stacked, bool]]) -> _Fused | None:
    at = split_layer(name) if stacked else None
    if at is not None and (match := _WEIGHT_OR_SCALE.fullmatch(at.rest)) and match["stem"] in stacked:
        prefix = f"{at.root}.{at.layer}."
        return _Fused(f"{prefix}{match['stem']}", match["rest"], prefix, *stacked[match["stem"]])
    if match := _FUSED.fullmatch(name):
        parts = tuple(f"{{expert}}.{part}.weight" for part in FUSED_PARTS[match["leaf"]])
        weight = f"{match['experts']}.{match['leaf']}"
        return _Fused(weight, match["rest"], f"{match['experts']}.", Stacked(parts=parts), match["leaf"] == "down_proj")
    return None


def is_fused(name: str, family: str) -> bool:
    """Whether a tensor, or the scales of one, is of all experts of a layer."""
    return _fused(name, _stacked_of(family)) is not None


def split_experts(
    location: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every fused 3-D tensor replaced by those of its experts, in the order of their data; and a note.

    Raises CheckpointError: shapes that do not fit config.json, a name that is there twice.
    """
    try:
        stacked = _stacked_of(family_of(config))
    except PlanError:  # `assay family` drafts the families that are not known
        stacked = {}
    fused = {name: parts for name in tensors if (parts := _fused(name, stacked))}
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
    if fused.stacked.parts[0].endswith(".bias"):
        yield from _split_weight(location, config, header, fused)
        return
    weight = tensors.get(fused.weight) or tensors.get(f"{fused.weight}.weight")
    if weight is None:
        raise CheckpointError(f"{location}: {header.name} has no {fused.weight}; complete the download")
    if header is weight:
        yield from _split_weight(location, config, header, fused)
        return
    leaf = _check_scales(location, config, header, weight, fused)
    parts, (experts, rows) = fused.stacked.parts, header.shape[:2]
    bytes_each = header.num_bytes // experts
    shared = rows == 1  # one scale of both halves
    rows_each, bytes_part = (rows, bytes_each) if shared else (rows // len(parts), bytes_each // len(parts))
    for expert in range(experts):
        for number, part in enumerate(parts):
            begin = header.begin + expert * bytes_each + (0 if shared else number * bytes_part)
            name = f"{_named(fused, part, expert).removesuffix('weight')}{leaf}"
            shape = (rows_each, *header.shape[2:])
            yield header._replace(name=name, shape=shape, begin=begin, end=begin + bytes_part)


def _named(fused: _Fused, part: str, expert: int) -> str:
    return f"{fused.prefix}{part.replace('{expert}', str(expert))}"


def _split_weight(location: str, config: Mapping[str, Any], header: TensorHeader, fused: _Fused) -> Iterator[TensorHeader]:
    """The weights, or biases, of single experts; with strides where they do not lie one behind the other."""
    parts = fused.stacked.parts
    outputs, inputs = _layout(location, config, header, fused)
    rows, columns = (outputs // len(parts), inputs)
    from_output, from_input = (1, outputs) if _is_transposed(header, outputs, fused) else (inputs, 1)
    size = DTYPE_BYTES[header.dtype]
    for expert in range(header.shape[0]):
        for number, part in enumerate(parts):
            first = number if fused.stacked.interleaved else number * rows
            step = len(parts) if fused.stacked.interleaved else 1
            begin = header.begin + (expert * outputs * inputs + first * from_output) * size
            shape = (rows, columns) if len(header.shape) == 3 else (rows,)
            strides = Strides(from_output * step, from_input)
            is_plain = strides == (inputs, 1)
            end = begin + (rows * columns if is_plain else strides.extent(shape)) * size
            yield header._replace(
                name=_named(fused, part, expert), shape=shape, begin=begin, end=end, strides=None if is_plain else strides
            )


def _layout(location: str, config: Mapping[str, Any], weight: TensorHeader, fused: _Fused) -> tuple[int, int]:
    """(outputs of all parts, inputs) of one expert; CheckpointError: the shape is not that of experts of this model."""
    text, parts = text_of(config), len(fused.stacked.parts)
    hidden, width = text.get("hidden_size"), text.get("moe_intermediate_size")
    if not isinstance(hidden, int):
        raise CheckpointError(f"{location}: config.json: hidden_size is needed to read {weight.name}; add it")
    if fused.stacked.parts[0].endswith(".bias"):
        outputs = hidden if fused.is_down else weight.shape[-1]
        if len(weight.shape) == 2 and weight.shape[1] == outputs and outputs % parts == 0:
            return outputs, 1
        what = f"[experts, {outputs}]"
    else:
        known = (hidden, width) if fused.is_down else (parts * width if isinstance(width, int) else None, hidden)
        if len(weight.shape) == 3:
            for outputs, inputs in (weight.shape[1:], weight.shape[:0:-1]):
                fits = all(side in (None, own) for own, side in zip((outputs, inputs), known, strict=True))
                if fits and outputs % parts == 0:
                    return outputs, inputs
        what = f"[experts, {known[0] or 'outputs'}, {known[1] or 'inputs'}] or the other way round"
    raise CheckpointError(
        f"{location}: {weight.name} has shape {list(weight.shape)}; by config.json it should be {what}; {HOW_TO_SPLIT}"
    )


def _is_transposed(weight: TensorHeader, outputs: int, fused: _Fused) -> bool:
    if len(weight.shape) == 2:
        return False
    return fused.stacked.transposed if weight.shape[1] == weight.shape[2] else weight.shape[2] == outputs


def _check_scales(
    location: str, config: Mapping[str, Any], scale: TensorHeader, weight: TensorHeader, fused: _Fused
) -> str:  # fmt: skip
    """The name that a single expert's scales have; CheckpointError when they cannot be told apart."""
    known = fused.rest.removeprefix(".weight") in ("_scale_inv", "_scale")
    fits = len(scale.shape) == len(weight.shape) == 3 and scale.shape[0] == weight.shape[0]
    outputs, _ = _layout(location, config, weight, fused)
    fits = fits and not fused.stacked.interleaved and not _is_transposed(weight, outputs, fused)
    if fits and len(fused.stacked.parts) > 1 and scale.shape[1] not in (1, weight.shape[1]):
        # a scale of rows of gate and of up would belong to neither
        fits = weight.shape[1] % (2 * declared_block(location, config)[0]) == 0 and scale.shape[1] % 2 == 0
    if not known or not fits:
        raise CheckpointError(
            f"{location}: {scale.name} {list(scale.shape)} cannot be split among the experts of {weight.name} "
            f"{list(weight.shape)}; {HOW_TO_SPLIT}"
        )
    return "weight_scale_inv" if fused.rest.endswith("_scale_inv") else "weight_scale"
