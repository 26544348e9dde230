"""In which form the weights of a source are stored, and what of it can be read: plain, FP8 with scales, experts fused in 3-D.

Tensors are trusted, lists in config.json are not: a weight is FP8 when it is stored as FP8 and its scales lie beside it.
Scales may be per block (`weight_scale_inv` of DeepSeek, GLM and Qwen releases, `scale` of DeepSeek-V4, `weight_scale` of
compressed-tensors), per channel or per tensor. Of packed weights two kinds are read, in which models were trained and published
in nothing else: symmetric INT4 of compressed-tensors (Kimi-K2-Thinking), and MXFP4 (groups of 32 with scales that are powers of
two) as DeepSeek-V4 and Kimi-K3 have it. The others (NVFP4, GPTQ, AWQ) are refused: quantizing them once more would measure
another model.

Packed weights get the names and shapes of the weights they stand for. `kernels/dequantize.py` says how they are read.

INT4 of compressed-tensors (Kimi-K2-Thinking):
`weight_packed` I32 [O, I/8] holds the codes of eight columns in a word, the first in its lowest bits, 8 added to each;
`weight_scale` [O, I/group] their scales; `weight_shape` [2] is O and I. A plan sees `weight` [O, I] of dtype `INT4`, which no
file has: its bytes are those of `weight_packed`.

FP4 of DeepSeek-V4: `weight` I8 [O, I/2] holds two E2M1 codes in a byte, the first in its low half; `scale` F8_E8M0 [O, I/32]
the exponents of their scales: OCP's MXFP4. A plan sees `weight` [O, I] of dtype `FP4`. MXFP4 of compressed-tensors (Kimi-K3)
has the same bytes as `weight_packed` U8 and `weight_scale` U8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.errors import CheckpointError
from assay.quantities import and_more
from assay.recipes.text_config import text_of
from assay_quantize.checkpoint.declaration import (
    declared_block,
    declared_quantization,
    declares_fp8_by_name,
    declares_int4,
    declares_mxfp4,
)
from assay_quantize.checkpoint.stored import (
    ACTIVATION_LEAVES,
    BARE_SCALE,
    CACHE_LEAVES,
    PACKED_LEAVES,
    SHAPE_LEAF,
    WEIGHT_SCALE_LEAVES,
)
from assay_quantize.formats.schemes import CODES_PER_ELEMENT

if TYPE_CHECKING:
    from assay_quantize.checkpoint.headers import TensorHeader

BF16_RELEASES = {
    "GLM-5.3": "zai-org/GLM-5.3-BF16",
    "GLM-": "the repository of the same name without a suffix",
    "Qwen3": "the repository of the same name without a suffix",
    "DeepSeek-": "the FP8 release by deepseek-ai",
    "Kimi-K2": "moonshotai/Kimi-K2-Instruct-0905, published in FP8",
}
"""Start of a model's name -> which release of it can be read."""

FP8 = "F8_E4M3"
INT4, FP4 = "INT4", "FP4"
"""What packed weights are called here; safetensors has no such dtypes."""
E8M0 = "F8_E8M0"
"""An exponent, bias 127: powers of two."""
FP4_GROUP = MX_GROUP = 32
"""Columns that share a scale in OCP's MXFP4 and MXFP8."""
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Projections that only attention with a KV cache has."""

SCALE_DTYPES = ("F32", "BF16", "F16")
INT4_SCALE_DTYPES = ("F32", "BF16")
"""compressed-tensors multiplies codes in the dtype of their scales: with F16 that would not be what is read."""
SCALED = {
    FP8: ("FP8", "weight_scale_inv, weight_scale or scale"), INT4: (INT4, "weight_scale"), FP4: (FP4, "scale or weight_scale"),
}  # fmt: skip
"""Dtype of weights that have scales -> (what it is called, where the scales are)."""
MAX_NAME_PARTS = 32
"""No module is nested deeper; what is costs nothing to compare with a list."""


class Companions(NamedTuple):
    """Tensors that belong to a weight.

    scale_of: FP8, FP4 or INT4 weight -> its scales. shape_of: INT4 weight -> what says its shape. weight_of: both the other
    way, and the scales of activations and of the KV cache (`of_activations`) -> their weight.
    """

    scale_of: dict[str, str]
    weight_of: dict[str, str]
    of_activations: frozenset[str]
    shape_of: dict[str, str]


# ------------------------------------------------------------------------------------------------ config.json
def check_config_readable(location: str, config: Mapping[str, Any]) -> None:
    """Refuse a source whose config says that it is quantized in a way that cannot be read, with the method's name."""
    if config.get("compression_config"):  # of old compressed-tensors
        raise not_readable(location, "config.json has a compression_config")
    declared = declared_quantization(config)
    if declared is None:
        return
    method = declared.get("quant_method", "unknown")
    if method == "fp8":
        declared_block(location, config)
        return
    how = f"config.json says quant_method {_shown(method)}"
    if method == "compressed-tensors":
        if declares_fp8_by_name(declared) or declares_int4(config) or declares_mxfp4(config):
            return
        how += f", format {_shown(declared.get('format'))}"
    raise not_readable(location, how)


def released_as(location: str) -> str | None:
    """Which release of a model can be read, by the start of its name; None: not known."""
    return next((where for start, where in BF16_RELEASES.items() if Path(location).name.startswith(start)), None)


def not_readable(location: str, how: str) -> CheckpointError:
    """The error for a source that is quantized already; `how` says where that shows."""
    release = released_as(location)
    return CheckpointError(
        f"{location}: is quantized already ({how}); a BF16, FP16, FP32 or FP8 source is needed"
        f"{f'; for this model that is {release}' if release else ''}"
    )


def block_of(
    dtype: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, int] | None:  # fmt: skip
    """(rows, columns) of an [O, I] weight that share one of its scales; None when the shapes do not go together.

    FP8: per block [ceil(O/rows), ceil(I/columns)], per channel [O] or [O, 1], per tensor [] or [1], per row and columns of a
    block [O, ceil(I/columns)] (`joined_attention.py`), per row and 32 columns (tables of DeepSeek-V4.1). INT4: [O, I/group],
    whatever `block` says, where a group is a number of whole words. FP4: [O, I/32].
    """
    if len(shape) != 2:
        return None
    rows, columns = shape
    if dtype == FP4:
        return (1, FP4_GROUP) if scale_shape == (rows, columns / FP4_GROUP) else None
    if dtype == INT4:
        fits = len(scale_shape) == 2 and scale_shape[0] == rows and columns % (8 * scale_shape[1]) == 0
        return (1, columns // scale_shape[1]) if fits else None
    if scale_shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return block
    if math.prod(scale_shape) == 1:
        return rows, columns
    if scale_shape in ((rows,), (rows, 1)):
        return 1, columns
    widths = (block[1], MX_GROUP)
    return next(((1, width) for width in widths if scale_shape == (rows, math.ceil(columns / width))), None)


# ------------------------------------------------------------------------------------------------ tensors
def find_companions(location: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> Companions:
    """Which tensors are scales, and of which weight. CheckpointError: packed weights, scales that fit no weight."""
    scale_of: dict[str, str] = {}
    shape_of: dict[str, str] = {}
    of_activations: dict[str, str] = {}
    block = declared_block(location, config)
    for name, header in tensors.items():
        module, _, leaf = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        is_scale = leaf in WEIGHT_SCALE_LEAVES and (leaf != BARE_SCALE or (weight is not None and weight.dtype in (FP8, FP4)))
        known = (FP8, E8M0) if is_scale else (FP8,)
        if leaf in PACKED_LEAVES or (header.dtype.startswith("F8_") and header.dtype not in known):
            raise not_readable(location, f"{name} is {header.dtype}")
        if leaf in ACTIVATION_LEAVES:
            of_activations[name] = f"{module}.weight"
        if leaf in CACHE_LEAVES and math.prod(header.shape) == 1:
            beside = [module, *(f"{module}.{projection}" for projection in KEY_PROJECTIONS)]
            if (scaled := next((m for m in beside if f"{m}.weight" in tensors), None)) is not None:
                of_activations[name] = f"{scaled}.weight"
        if leaf == SHAPE_LEAF and (packed := tensors.get(f"{module}.weight")) is not None and packed.dtype == INT4:
            shape_of[packed.name] = name
        if not is_scale:
            continue
        if weight is None or f"{module}.weight_packed" in tensors or weight.dtype not in (*SCALED, *SCALE_DTYPES):
            stored = tensors.get(f"{module}.weight_packed", weight)
            raise not_readable(location, f"{stored.name} is {stored.dtype}" if stored else f"{name} scales no weight")
        if weight.dtype not in SCALED or weight.name in scale_of:
            other = scale_of.get(weight.name)
            what = f"has two tensors of scales, {other} and {name}" if other else f"is {weight.dtype}, but has scales ({name})"
            raise CheckpointError(f"{location}: {weight.name} {what}; the checkpoint is damaged, download it again")
        _check_scale(location, weight, header, block)
        scale_of[weight.name] = name
    for name, header in tensors.items():
        if header.dtype in SCALED and name not in scale_of:
            what, lacks = SCALED[header.dtype]
            raise CheckpointError(f"{location}: {name} is {what}, but there is no {lacks} beside it; complete the download")
    lost = next((name for name, weight in of_activations.items() if weight not in tensors), None)
    if lost is not None:
        raise CheckpointError(f"{location}: {lost} belongs to {of_activations[lost]}, not there; complete the download")
    weight_of = {of: weight for companions in (scale_of, shape_of) for weight, of in companions.items()} | of_activations
    return Companions(scale_of, weight_of, frozenset(of_activations), shape_of)


def _check_scale(location: str, weight: TensorHeader, scale: TensorHeader, block: tuple[int, int]) -> None:
    dtypes = {INT4: INT4_SCALE_DTYPES, FP4: (E8M0,)}.get(weight.dtype, (*SCALE_DTYPES, E8M0))
    if scale.dtype not in dtypes:
        raise CheckpointError(f"{location}: {scale.name} has dtype {scale.dtype}; scales are read as {', '.join(dtypes)}")
    if block_of(weight.dtype, weight.shape, scale.shape, block) is None:
        damaged = "is read; the checkpoint is damaged, download it again"
        what = {
            INT4: f"one scale per row, or per group of a multiple of 8 columns, {damaged}",
            FP4: f"one exponent for {FP4_GROUP} columns of a row {damaged}",
            FP8: f"one scale per {block[0]} x {block[1]} block, per row or per tensor is read; check weight_block_size in "
            "config.json",
        }[weight.dtype]
        raise CheckpointError(
            f"{location}: {scale.name} {list(scale.shape)} does not fit {weight.name} {list(weight.shape)}: {what}"
        )


# ------------------------------------------------------------------------------------------------ lists that lie
def list_notes(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> tuple[str, ...]:
    """Where config.json (its list of unconverted modules above all) and the tensors disagree; the tensors are right.

    A list with patterns is not compared: those of a stranger may take hours to match. Neither is that of a packed source.
    """
    declared = declared_quantization(config) or {}
    if any(header.dtype == INT4 or (header.dtype == FP4 and declares_mxfp4(config)) for header in tensors.values()):
        return ()
    if declared and not any(header.dtype == FP8 for header in tensors.values()):
        return (
            f"config.json: quant_method {_shown(declared.get('quant_method'))}, but no weight is FP8: the tensors are right",
        )
    key = next((k for k in ("modules_to_not_convert", "ignored_layers", "ignore") if declared.get(k)), None)
    if key is None or not isinstance(declared[key], list) or any(str(entry).startswith("re:") for entry in declared[key]):
        return ()
    listed = {entry.strip(".") for entry in declared[key] if isinstance(entry, str)}
    modules = {name.removesuffix(".weight"): h for name, h in tensors.items() if name.endswith(".weight") and len(h.shape) == 2}
    fp8 = [module for module, header in modules.items() if header.dtype == FP8]
    forms = {_numberless(module) for module in fp8}
    wrong = [module for module in fp8 if _is_listed(module, listed)]
    left_out = [m for m, h in modules.items() if h.dtype != FP8 and _numberless(m) in forms and not _is_listed(m, listed)]
    odd = (("lists", wrong, "as FP8 all the same"), ("does not list", left_out, "unquantized"))
    return tuple(
        f"config.json: {key} {what} {and_more(names, ' modules')}, stored {how}: the tensors are right"
        for what, names, how in odd
        if names
    )


def _is_listed(module: str, names: Set[str]) -> bool:
    """As transformers reads such a list: by the whole name, its start or its end."""
    parts = module.split(".")
    if len(parts) > MAX_NAME_PARTS:
        return False
    pieces = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    pieces |= {".".join(parts[begin:]) for begin in range(len(parts))}
    return not names.isdisjoint(pieces)


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", name)


def _shown(value: Any) -> str:
    return ascii(value)[:60]


def left_out_notes(of_activations: Set[str]) -> Iterator[str]:
    """What is said of scales that no new checkpoint takes over."""
    of_cache = sorted(name for name in of_activations if name.rpartition(".")[2] in CACHE_LEAVES)
    if rest := sorted(of_activations - set(of_cache)):
        yield f"{len(rest):,} scales of activations ({rest[0]}, ...) are left out"
    if of_cache:
        what = "they were measured for the checkpoint as it is; `kv_cache: fp8_calibrated` of a precision measures new ones"
        yield f"{len(of_cache):,} scales of the KV cache ({of_cache[0]}, ...) are left out: {what}"


def ties_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json ties the output head to the embedding. Of a wrapper its own word counts, not its language model's
    (vLLM 0.32: `VllmConfig.with_hf_config`)."""
    return bool(config.get("tie_word_embeddings", text_of(config).get("tie_word_embeddings")))


def tied_note(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Of a head that is stored though config.json ties it to the embedding.

    vLLM 0.32 takes the stored one (`ModelConfig.maybe_untie_word_embeddings`), as transformers 5 does if the two differ.
    """
    is_tied = ties_head(config)
    head = next((name for name in tensors if name.endswith("lm_head.weight")), None)
    if is_tied and head is not None:
        yield (
            f"{head} is stored, and config.json ties the head to the embedding (tie_word_embeddings): vLLM 0.32 serves the "
            f"stored one, older loaders the embedding; set tie_word_embeddings to false, or delete {head} if the two are equal"
        )


def squeeze_scales(tensors: Mapping[str, TensorHeader]) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with scales of blocks in two dimensions where ModelOpt's FP8_PB_WO has them in four, [rows, 1, columns, 1]."""
    made, count = dict(tensors), 0
    for name, header in tensors.items():
        if name.rpartition(".")[2] in WEIGHT_SCALE_LEAVES and len(header.shape) == 4 and header.shape[1::2] == (1, 1):
            made[name] = header._replace(shape=header.shape[::2])
            count += 1
    note = f"{count:,} scales of blocks are [rows, 1, columns, 1], as ModelOpt's FP8_PB_WO writes them; they are read as 2-D"
    return made, (note,) if count else ()


def name_packed(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """`tensors` with every packed weight under the name and shape of what it stands for, in the same order; and a note.

    INT4, and MXFP4 under these names, only where config.json declares it: `find_companions` refuses packed weights of any other
    kind.
    """
    if declares_int4(config):
        packed, dtype, said = "I32", INT4, "packed INT4"
    elif declares_mxfp4(config):
        packed, dtype, said = "U8", FP4, "packed MXFP4"
    else:
        return _name_fp4(config, tensors)
    made: dict[str, TensorHeader] = {}
    count = 0
    for name, header in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" and header.dtype == packed and len(header.shape) == 2:
            rows, elements = header.shape
            header = header._replace(name=f"{module}.weight", dtype=dtype, shape=(rows, elements * CODES_PER_ELEMENT[packed]))
            count += 1
        elif leaf == "weight_scale" and dtype == FP4 and header.dtype == "U8":
            header = header._replace(dtype=E8M0)
        made[header.name] = header
    return made, (f"{count:,} weights are {said}; they are read as BF16",) if count else ()


def _name_fp4(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], tuple[str, ...]]:
    """What is stored as I8 beside scales that are exponents is FP4 (DeepSeek-V4); I8 beside any other scales is refused as
    before. So are bytes beside bytes, where config.json says that experts are MXFP4 (MiMo-V2.6)."""
    made = dict(tensors)
    in_bytes = (declared_quantization(config) or {}).get("store_dtype") == "mxfp4"
    for name, header in tensors.items():
        if not name.endswith(".weight") or header.dtype not in ("I8", "U8") or len(header.shape) != 2:
            continue
        rows, num_bytes = header.shape
        fp4 = header._replace(dtype=FP4, shape=(rows, num_bytes * CODES_PER_ELEMENT["U8"]))
        exponents = tensors.get(f"{name}_scale")
        scale = tensors.get(f"{name.removesuffix('.weight')}.{BARE_SCALE}")
        if header.dtype == "I8" and scale is not None and scale.dtype == E8M0:
            made[name] = fp4
        elif header.dtype == "U8" and in_bytes and exponents is not None and exponents.dtype == "U8":
            made[name] = fp4
            made[exponents.name] = exponents._replace(dtype=E8M0)
    count = sum(header.dtype == FP4 for header in made.values())
    return made, (f"{count:,} weights are FP4; they are read as BF16",) if count else ()
