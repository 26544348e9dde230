"""Queries, keys and values stored in one tensor, read as three: places in a file, nothing is moved.

Which names hold all three, the family says (`FamilyRecipe.joined`). In 16 bits the rows of queries, of keys and of values
follow each other. In FP8, as MiMo-V2.5 is released, the tensor is stored for as many ranks as the model has key-value heads
(`num_key_value_heads`): each share has the queries, keys and values of one rank, and blocks of scales of its own, the last of
which may be cut short. vLLM 0.32 (`mimo_v2.py: _shard_fp8_qkv_proj`) and llama.cpp (`conversion/mimo.py`) read them so. A block
may then have rows of keys and of values, so each of the three is read with scales of single rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from assay.errors import CheckpointError, PlanError
from assay.recipes.families import family_of
from assay.recipes.family_names import names_of, split_layer
from assay.recipes.text_config import text_of
from assay_quantize.checkpoint.declaration import declared_block, declared_quantization
from assay_quantize.checkpoint.stored import WEIGHT_SCALE_LEAVES
from assay_quantize.checkpoint.strided import Pieces
from assay_quantize.formats.schemes import DTYPE_BYTES

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader


def split_attention(
    location: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every joined one, and its scales, replaced by three, in the order of their data; and a note.

    Raises CheckpointError: shapes that do not fit config.json, a name that is there twice.
    """
    joined: Mapping[str, tuple[str, str, str]] = {}
    if (declared_quantization(config) or {}).get("quant_method", "fp8") == "fp8":  # what other tools make has scales of its own
        try:
            joined = names_of(family_of(config)).joined
        except PlanError:  # `assay family` drafts the families that are not known
            joined = {}
    made: dict[str, TensorHeader] = {}
    count = 0
    for name, header in tensors.items():
        at = split_layer(name) if joined else None
        if at is None or (whole := _whole(at.rest)) not in joined or _is_packed(name, tensors):
            parts = {name: header}
        else:
            members = [f"{at.root}.{at.layer}.{member}" for member in joined[whole]]
            split = _split(location, config, header, tensors, f"{at.root}.{at.layer}.{whole}", members)
            parts = {part.name: part for part in split}
            count += at.rest == whole
        if (twice := next((part for part in parts if part in made or (len(parts) > 1 and part in tensors)), None)) is not None:
            raise CheckpointError(f"{location}: {twice} is there on its own and inside {name}; download it again")
        made |= parts
    note = f"{count:,} tensors hold queries, keys and values of a layer; they are read as three each"
    return made, (note,) if count else ()


def _whole(rest: str) -> str:
    """Name of the weight that a tensor is, or has scales of."""
    module, _, leaf = rest.rpartition(".")
    return f"{module}.weight" if leaf in WEIGHT_SCALE_LEAVES else rest


def _is_packed(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Scales of a weight that is stored under another name: of a quantized copy."""
    return f"{name.rpartition('.')[0]}.weight" not in tensors


def _split(
    location: str, config: Mapping[str, Any], header: TensorHeader, tensors: Mapping[str, TensorHeader], whole: str,
    members: list[str],
) -> Iterator[TensorHeader]:  # fmt: skip
    weight = tensors[whole]
    is_scaled = any(f"{whole.removesuffix('weight')}{leaf}" in tensors for leaf in WEIGHT_SCALE_LEAVES)
    rows, ranks = _rows(location, config, weight, is_scaled=is_scaled)
    share = sum(rows) // ranks
    block_rows, block_columns = declared_block(location, config)
    size = DTYPE_BYTES[header.dtype]
    begin_row = 0
    for member, member_rows in zip(members, rows, strict=True):
        first = begin_row // ranks
        begin_row += member_rows
        if header is not weight:
            _check_scales(location, header, weight, (ranks * math.ceil(share / block_rows), block_columns))
            pieces = Pieces(member_rows // ranks, math.ceil(share / block_rows), first, block_rows)
            name = f"{member.removesuffix('weight')}{header.name.rpartition('.')[2]}"
            yield header._replace(name=name, shape=(member_rows, header.shape[1]), strides=pieces)
        elif ranks > 1:
            pieces = Pieces(member_rows // ranks, share, first)
            yield header._replace(name=member, shape=(member_rows, header.shape[1]), strides=pieces)
        else:
            row_bytes = header.shape[1] * size
            begin = header.begin + first * row_bytes
            yield header._replace(
                name=member, shape=(member_rows, header.shape[1]), begin=begin, end=begin + member_rows * row_bytes
            )


def _rows(
    location: str, config: Mapping[str, Any], weight: TensorHeader, *, is_scaled: bool
) -> tuple[tuple[int, int, int], int]:
    """(rows of queries, of keys and of values, ranks for which they are stored).

    Layers may differ in their number of key-value heads: it follows from the shape. CheckpointError: that fits no number.
    """
    text = text_of(config)
    keys = ("num_attention_heads", "head_dim", "num_key_value_heads")
    heads, width, ranks = (text.get(key) for key in keys)
    value = text.get("v_head_dim") or width
    if not all(type(number) is int and number > 0 for number in (heads, width, ranks, value)):
        raise CheckpointError(f"{location}: config.json: {', '.join(keys)} are needed to read {weight.name}; add them")
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(ranks, int) and isinstance(value, int)
    ranks = ranks if is_scaled else 1
    kv_heads, rest = divmod(weight.shape[0] - heads * width, width + value) if len(weight.shape) == 2 else (0, 1)
    if rest or kv_heads <= 0 or heads % ranks or kv_heads % ranks:
        raise CheckpointError(
            f"{location}: {weight.name} has shape {list(weight.shape)}; by config.json it should have {heads} x {width} rows "
            f"of queries, and {width} of keys and {value} of values for each head of a multiple of {ranks}; take the "
            "config.json of the model's release"
        )
    return (heads * width, kv_heads * width, kv_heads * value), ranks


def _check_scales(location: str, scale: TensorHeader, weight: TensorHeader, fits: tuple[int, int]) -> None:
    """fits: (rows of scales, columns that share one)."""
    shape = (fits[0], math.ceil(weight.shape[1] / fits[1]))
    if scale.shape != shape:
        raise CheckpointError(
            f"{location}: {scale.name} has shape {list(scale.shape)}; of {weight.name} {list(weight.shape)}, stored for the "
            f"ranks that num_key_value_heads of config.json says, it should be {list(shape)}; take the config.json of the "
            "model's release"
        )
