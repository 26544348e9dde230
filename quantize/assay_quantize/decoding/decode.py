"""Parts of a slab of rows to FP32: one function a layout.

INT and FP8 of compressed-tensors are decompressed by its own functions, GGUF's blocks by the package `gguf`. FP4 and layouts of
GPTQ, AWQ, ModelOpt, gpt-oss and of FP8 releases are computed here, as the code that the docstrings name computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay_quantize.decoding.compressed_tensors_format import PACKED, Numbers
from assay_quantize.decoding.numbers import (
    AWQ_ORDER,
    e2m1_values,
    e8m0_values,
    float_scale,
    packed_along_rows,
    times_scale,
    word_values,
)
from assay_quantize.decoding.stored_weight import Layout, StoredWeight

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

Parts = Mapping[str, Tensor]
"""Local name -> what of a part belongs to the slab, as it is stored."""


def decode(parts: Parts, weight: StoredWeight) -> Tensor:
    """FP32 rows of the weight. Raises IndexError, RuntimeError or ValueError for parts that contradict each other."""
    with torch.no_grad():
        return LAYOUTS[weight.layout](parts, weight)


# ------------------------------------------------------------------------------------------------ plain, FP8, INT8
def _plain(parts: Parts, weight: StoredWeight) -> Tensor:
    values = parts["weight"].float()
    return values.t().contiguous() if weight.arguments.get("transposed") else values


def _scaled(parts: Parts, weight: StoredWeight) -> Tensor:
    """DeepSeek's `weight_dequant` (inference/kernel.py), ModelOpt's `FP8QTensor.dequantize`: float(w) * scale."""
    assert weight.shares is not None
    return times_scale(parts["weight"].float(), float_scale(parts["weight_scale"]), weight.shares)


# ------------------------------------------------------------------------------------------------ compressed-tensors
def _scheme(numbers: Numbers) -> QuantizationScheme:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=numbers.num_bits,
        type=numbers.kind,
        symmetric=numbers.symmetric,
        strategy=numbers.strategy,
        group_size=numbers.group_size,
        block_structure=None if numbers.block is None else list(numbers.block),
    )
    return QuantizationScheme(targets=["Linear"], weights=args)


def _compressed_tensors(parts: Parts, weight: StoredWeight) -> Tensor:
    """By the library, which computes in the dtype of the scales: they are widened first."""
    from compressed_tensors.compressors import BaseCompressor

    format_, scheme = weight.arguments["format"], _scheme(weight.arguments["numbers"])
    _check_shape(parts, weight)
    state = dict(parts)
    if state["weight_scale"].dtype in (torch.bfloat16, torch.float16):
        state["weight_scale"] = state["weight_scale"].float()
    if format_ == PACKED:
        state["weight_shape"] = torch.tensor([state["weight_packed"].shape[0], weight.shape[1]])
    made: Tensor = BaseCompressor.get_value_from_registry(format_).decompress(state, scheme)["weight"]
    return made.float()


def _check_shape(parts: Parts, weight: StoredWeight) -> None:
    told = parts.get("weight_shape")
    if told is not None and tuple(told.tolist()) != weight.shape:
        raise ValueError(f"weight_shape says {told.tolist()}, its codes and scales are of a weight {list(weight.shape)}")


def _group_indexed(parts: Parts, weight: StoredWeight) -> Tensor:
    """pack-quantized with `weight_g_idx`, of compressed-tensors before 0.18: column i has the scale of group g_idx[i]."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    _check_shape(parts, weight)
    bits = weight.arguments["numbers"].num_bits
    packed, scale, index = parts["weight_packed"], parts["weight_scale"].float(), parts["weight_g_idx"].long()
    codes = unpack_from_int32(packed, bits, torch.Size((packed.shape[0], weight.shape[1])))
    if bool((index == -1).any()):  # as the library: it was never set, columns are in order
        index = torch.arange(weight.shape[1]) // (weight.shares[1] if weight.shares else weight.shape[1])
    values = codes.float()
    if "weight_zero_point" in parts:
        zero = unpack_from_int32(parts["weight_zero_point"], bits, torch.Size((packed.shape[0], scale.shape[1])), packed_dim=0)
        values -= zero.float()[:, index]
    made: Tensor = values.mul_(scale[:, index])
    return made


# ------------------------------------------------------------------------------------------------ FP4
def _compressed_fp4(parts: Parts, weight: StoredWeight) -> Tensor:
    """As compressed-tensors' `dequantize`, without the BF16 of its `decompress`: values times (scale / scale of all scales)."""
    assert weight.shares is not None
    scale = float_scale(parts["weight_scale"])
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"]
    return times_scale(e2m1_values(parts["weight_packed"]), scale, weight.shares)


def _nvfp4(parts: Parts, weight: StoredWeight) -> Tensor:
    """ModelOpt's `NVFP4QTensor.dequantize` (0.47): values times (scale of the group times scale of the weight)."""
    assert weight.shares is not None
    return times_scale(e2m1_values(parts["weight"]), parts["weight_scale"].float() * parts["weight_scale_2"], weight.shares)


def _mxfp4(parts: Parts, weight: StoredWeight) -> Tensor:
    """OCP MX: values times a power of two for 32 columns. transformers' `convert_moe_packed_tensors` (gpt-oss)."""
    assert weight.shares is not None
    return times_scale(e2m1_values(parts["weight"].flatten(1)), e8m0_values(parts["weight_scale"]), weight.shares)


# ------------------------------------------------------------------------------------------------ GPTQ, AWQ
def _gptq(parts: Parts, weight: StoredWeight) -> Tensor:
    """AutoGPTQ's and GPTQModel's layout: columns of `qweight` are rows of the weight.

    zero_offset: 1 where a stored zero point is one less than what is subtracted (`checkpoint_format: gptq`), else 0. The sum
    stays in its bits, as in GPTQModel: a stored 15 of 4 bits is 0.
    """
    bits, offset, group = (weight.arguments[key] for key in ("bits", "zero_offset", "group"))
    scale_GO = parts["scales"].float()
    groups, rows = scale_GO.shape
    codes_IO = packed_along_rows(parts["qweight"], bits)
    zeros_GO = (packed_along_rows(parts["qzeros"].t().contiguous(), bits).t() + offset) & ((1 << bits) - 1)
    zeros_GO = zeros_GO[:, :rows]
    in_order = torch.arange(weight.shape[1]) // group
    index = parts.get("g_idx", in_order).long()
    if torch.equal(index, in_order) and weight.shape[1] % group == 0:
        return _grouped(codes_IO, zeros_GO, scale_GO)
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise IndexError(f"g_idx runs from {int(index.min())} to {int(index.max())}, there are {groups} groups")
    w_OI: Tensor = ((codes_IO - zeros_GO[index]).float() * scale_GO[index]).t().contiguous()
    return w_OI


def _grouped(codes_IO: Tensor, zeros_GO: Tensor, scale_GO: Tensor) -> Tensor:
    """FP32 w_OI where columns that follow each other share a scale."""
    codes_GgO = codes_IO.reshape(scale_GO.shape[0], -1, scale_GO.shape[1])
    w_GgO = (codes_GgO - zeros_GO.unsqueeze(1)).float().mul_(scale_GO.unsqueeze(1))
    w_OI: Tensor = w_GgO.flatten(0, 1).t().contiguous()
    return w_OI


def _awq(parts: Parts, weight: StoredWeight) -> Tensor:
    """AutoAWQ's GEMM layout (`awq/utils/packing_utils.py: dequantize_gemm`, 0.2.9): a word holds eight rows, interleaved."""
    bits, scale_GO = weight.arguments["bits"], parts["scales"].float()
    order = torch.tensor(AWQ_ORDER)

    def values(words: Tensor) -> Tensor:
        stored = word_values(words, bits)
        in_order: Tensor = stored.view(stored.shape[0], -1, len(AWQ_ORDER))[..., order].flatten(1)
        return in_order

    zeros_GO = values(parts["qzeros"]) if "qzeros" in parts else torch.full(scale_GO.shape, 1 << (bits - 1))
    return _grouped(values(parts["qweight"]), zeros_GO, scale_GO)


# ------------------------------------------------------------------------------------------------ GGUF
def _ggml(parts: Parts, weight: StoredWeight) -> Tensor:
    """llama.cpp's blocks, by `gguf.quants.dequantize`."""
    from gguf import GGMLQuantizationType, quants

    blocks = parts["weight"].numpy()
    made = quants.dequantize(blocks, GGMLQuantizationType[weight.arguments["type"]])
    return torch.from_numpy(made).reshape(-1, weight.shape[1]).float()


LAYOUTS: Mapping[Layout, Callable[[Parts, StoredWeight], Tensor]] = {
    "plain": _plain,
    "scaled": _scaled,
    "compressed_tensors": _compressed_tensors,
    "group_indexed": _group_indexed,
    "compressed_fp4": _compressed_fp4,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "ggml": _ggml,
}
"""Layout -> what makes FP32 of its parts."""
