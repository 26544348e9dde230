"""The one table of quantization schemes: what each makes out of a weight, and how `config.json` says so.

A weight `w_OI` (rows O = output features, columns I = input features) becomes a few tensors under the same module:

    pack-quantized        weight_packed I32 [O, I*4/32], weight_scale [O, I/group], weight_shape I64 [2]
                          asymmetric: weight_zero_point I32 [ceil(O/8), I/group], packed along the rows
    float-quantized       weight F8_E4M3 [O, I], weight_scale [ceil(O/128), ceil(I/128)]; per channel [O, 1]
                          with static activations: input_scale F32 [1], calibrated
    nvfp4-pack-quantized  weight_packed U8 [O, I/2], weight_scale F8_E4M3 [O, I/16], weight_global_scale F32 [1]
                          with 4-bit activations: input_global_scale F32 [1], a constant or calibrated
    mxfp4-pack-quantized  weight_packed U8 [O, I/2], weight_scale U8 [O, I/32] (exponents, bias 127)
    mxfp8-quantized       weight F8_E4M3 [O, I], weight_scale U8 [O, I/32] (exponents, bias 127)
    int-quantized         weight I8 [O, I], weight_scale [O, 1]

Scales without a dtype of their own have the dtype of the source weight, as llm-compressor writes them. Sizes are pure
arithmetic: the planner runs without torch, and a test compares them with what compressed-tensors produces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.errors import PlanError
from assay.records.plan import OutputTensor

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""safetensors dtype name -> bytes per element."""

SOURCE_DTYPES = ("BF16", "F16", "F32")
"""What can be quantized."""


@dataclass(frozen=True)
class Scheme:
    """One row of the table.

    preset: compressed-tensors' name for it, from which every argument in `config.json` is taken; where it has no preset, the
        nearest one's, and `group_size` says what is changed.
    layout: which tensors are made (the docstring of this module).
    group_size: columns that share a scale; None: all of them (one scale per row).
    block_rows: rows that share a scale.
    input_global_scale: what activations are multiplied with before their scales are rounded to FP8, stored with every weight;
        None: nothing is stored. A recipe may have it calibrated instead.
    input_scale: the value of one step of activations is stored with every weight, calibrated.
    max_relative_error: verification refuses a weight that is further from its source, as ||dequantized - source|| /
        ||source||. Normal weights come out at 0.11 (INT4 groups of 128), 0.10 (FP4), 0.03 (FP8), 0.01 (INT8); outliers
        raise it; weights of another layer give 1.41.
    """

    preset: str
    format: str
    layout: Literal["int4", "plain", "nvfp4", "mxfp4", "mxfp8"]
    weight_dtype: str
    group_size: int | None
    block_rows: int = 1
    symmetric: bool = True
    input_global_scale: float | None = None
    input_scale: bool = False
    max_relative_error: float = 0.5


INPUT_AMAX = 2688.0
"""6 * 448, the largest magnitudes of E2M1 and E4M3: what ModelOpt takes for the range of activations where it looks at no data
(`constant_amax` of its recipe `nvfp4_experts_only_input_scale1-kv_fp8_cast`)."""
INPUT_GLOBAL_SCALE = 6 * 448 / INPUT_AMAX
"""As compressed-tensors stores it, and vLLM reads it: the divisor, 1 / ModelOpt's `input_scale`. Both are 1."""

SCHEMES: dict[str, Scheme] = {
    "w4a16": Scheme("W4A16", "pack-quantized", "int4", "I32", 128),
    "w4a16_g64": Scheme("W4A16", "pack-quantized", "int4", "I32", 64),
    "w4a16_g32": Scheme("W4A16", "pack-quantized", "int4", "I32", 32),
    "w4a16_channel": Scheme("W4A16", "pack-quantized", "int4", "I32", None),
    "w4a16_asym": Scheme("W4A16_ASYM", "pack-quantized", "int4", "I32", 128, symmetric=False),
    "fp8_block": Scheme("FP8_BLOCK", "float-quantized", "plain", "F8_E4M3", 128, 128, max_relative_error=0.2),
    "fp8_channel": Scheme("FP8_DYNAMIC", "float-quantized", "plain", "F8_E4M3", None, max_relative_error=0.2),
    "fp8_static": Scheme("FP8_DYNAMIC", "float-quantized", "plain", "F8_E4M3", None, input_scale=True, max_relative_error=0.2),
    "nvfp4a16": Scheme("NVFP4A16", "nvfp4-pack-quantized", "nvfp4", "U8", 16),
    "nvfp4": Scheme("NVFP4", "nvfp4-pack-quantized", "nvfp4", "U8", 16, input_global_scale=INPUT_GLOBAL_SCALE),
    "mxfp4": Scheme("MXFP4", "mxfp4-pack-quantized", "mxfp4", "U8", 32),
    "mxfp8": Scheme("MXFP8", "mxfp8-quantized", "mxfp8", "F8_E4M3", 32, max_relative_error=0.2),
    "w8a8": Scheme("W8A8", "int-quantized", "plain", "I8", None, max_relative_error=0.2),
}
"""Scheme name of a recipe -> its row."""

INPUT_LEAVES = ("input_scale", "input_global_scale")
"""Scales of activations, stored beside a weight; nothing of the weight is in them."""
PART_LEAVES = frozenset(
    {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", *INPUT_LEAVES}
)
"""Local names of what quantizing makes, beside `weight`."""
CODES_PER_ELEMENT = {"I32": 8, "U8": 2}
"""Dtype of `weight_packed` -> columns of the weight in one of its elements."""
KV_LEAVES = ("k_scale", "v_scale")
"""Scales of the KV cache, stored in the module of an attention."""

SHARES_GLOBAL_SCALE = frozenset({"nvfp4a16", "nvfp4"})
"""Schemes in which the members of a fused group must have one `weight_global_scale`: vLLM applies one to all of them."""


def module_of(name: str) -> str:
    """The module a weight belongs to: its name without the last component."""
    return name.rpartition(".")[0]


def check_shape(scheme: str, name: str, shape: tuple[int, ...], *, merged: bool = False) -> None:
    """Refuse a weight the scheme cannot hold, or that vLLM could not load.

    shape: (O, I). merged: another weight follows in the same vLLM parameter (gate before up, q before k and v, ...); then FP8
    blocks (vLLM's `validate_fp8_block_shape`) and rows whose zero points share an int32 must end where this weight ends.
    Raises PlanError naming the tensor, its shape, the size that does not divide and what to do.
    """
    row = SCHEMES[scheme]
    what = f"{name}: shape {list(shape)} does not fit scheme {scheme}"
    keep = "keep its role in 16 bits (`keep: {bf16: [...]}`), or choose another scheme"
    if len(shape) != 2:
        raise PlanError(f"{what}: only matrices are quantized, this one has {len(shape)} dimensions; {keep}")
    rows, columns = shape
    if 0 in shape:
        raise PlanError(f"{what}: it is empty; the checkpoint is damaged")
    if row.group_size is not None and columns % row.group_size:
        raise PlanError(f"{what}: {columns} columns are not a multiple of the group size {row.group_size}; {keep}")
    if row.layout == "int4" and columns % 8:
        raise PlanError(f"{what}: {columns} columns are not a multiple of 8, the codes in an int32; {keep}")
    behind = f"and vLLM loads another weight right behind it; {keep}"
    if merged and row.block_rows > 1 and rows % row.block_rows:
        raise PlanError(f"{what}: {rows} rows are not a multiple of the block size {row.block_rows}, {behind}")
    if merged and not row.symmetric and rows % 8:
        raise PlanError(f"{what}: {rows} rows are not a multiple of 8, the zero points in an int32, {behind}")


def output_tensors(scheme: str, name: str, shape: tuple[int, ...], dtype: str = "BF16") -> tuple[OutputTensor, ...]:
    """What quantizing the weight `name` makes, sorted by name; arithmetic only, no torch.

    shape: (O, I). dtype: of the source weight (BF16, F16, F32); scales without a dtype of their own take it.
    Raises PlanError (`check_shape`), also for a source dtype that cannot be quantized.
    """
    check_shape(scheme, name, shape)
    if dtype not in SOURCE_DTYPES:
        raise PlanError(f"{name}: dtype {dtype} cannot be quantized; the source must be one of {', '.join(SOURCE_DTYPES)}")
    row = SCHEMES[scheme]
    rows, columns = shape
    groups = 1 if row.group_size is None else math.ceil(columns / row.group_size)
    parts: dict[str, tuple[str, tuple[int, ...]]]
    if row.layout == "int4":
        parts = {
            "weight_packed": ("I32", (rows, math.ceil(columns * 4 / 32))),
            "weight_scale": (dtype, (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        if not row.symmetric:
            parts["weight_zero_point"] = ("I32", (math.ceil(rows * 4 / 32), groups))
    elif row.layout == "plain":
        parts = {
            "weight": (row.weight_dtype, shape),
            "weight_scale": (dtype, (math.ceil(rows / row.block_rows), groups)),
        }
        if row.input_scale:
            parts["input_scale"] = ("F32", (1,))
    elif row.layout == "nvfp4":
        parts = {
            "weight_global_scale": ("F32", (1,)),
            "weight_packed": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, groups)),
        }
        if row.input_global_scale is not None:
            parts["input_global_scale"] = ("F32", (1,))
    elif row.layout == "mxfp4":
        parts = {"weight_packed": ("U8", (rows, columns // 2)), "weight_scale": ("U8", (rows, groups))}
    else:
        parts = {"weight": ("F8_E4M3", shape), "weight_scale": ("U8", (rows, groups))}
    module = module_of(name)
    return tuple(
        OutputTensor(f"{module}.{part}", part_dtype, part_shape, math.prod(part_shape) * DTYPE_BYTES[part_dtype])
        for part, (part_dtype, part_shape) in sorted(parts.items())
    )


def compressed_tensors_scheme(scheme: str) -> QuantizationScheme:
    """The compressed-tensors object that defines the scheme's arithmetic. Imports torch."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    row = SCHEMES[scheme]
    made = preset_name_to_scheme(row.preset, ["Linear"])
    made.format = CompressionFormat(row.format)
    strategy = {"group_size": row.group_size, "strategy": "channel" if row.group_size is None else "group"}
    if row.input_scale:
        made.input_activations = preset_name_to_scheme("FP8", ["Linear"]).input_activations
    if row.layout == "int4":
        made.weights = QuantizationArgs(**{**made.weights.model_dump(), **strategy})
    return made
