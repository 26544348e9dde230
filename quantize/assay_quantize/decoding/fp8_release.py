"""FP8 releases (DeepSeek-V3 to V4, GLM-5, Qwen3, MiniMax-M2; AutoRound's `auto_round:fp8`): FP8 weights and their scales.

    weight F8_E4M3 [O, I] and `weight_scale_inv`, `weight_scale` or `scale`: per block, row or tensor, in F32, BF16 or as
    exponents (F8_E8M0, U8: UE8M0); DeepSeek-V4's blocks are 128 x 128, MiniMax's 1 x 32
    weight I8 or U8 [O, I/2] and `scale` F8_E8M0 [O, I/32]: FP4 experts of DeepSeek-V4

`quant_method: fp8` with `weight_block_size` and `activation_scheme`. Whatever it is called, a scale multiplies.
"""

from __future__ import annotations

import math

from assay.errors import CheckpointError
from assay_quantize.checkpoint.declaration import DEFAULT_BLOCK
from assay_quantize.checkpoint.source_format import FP4_GROUP
from assay_quantize.checkpoint.stored import ACTIVATION_LEAVES, WEIGHT_SCALE_LEAVES
from assay_quantize.decoding.parts import EXPONENTS, FLOATS, FP8, needed, of_shape, scale_part
from assay_quantize.decoding.stored_weight import ActivationRule, Declared, KvRule, Method, Module, NotRead, Part, StoredWeight

SCHEMES = ("dynamic", "static")


def method(location: str, declared: Declared) -> Method:
    """Raises CheckpointError for an activation scheme or a block size that is none."""
    scheme = declared.get("activation_scheme", "dynamic")
    if scheme not in SCHEMES:
        raise CheckpointError(f"{location}: config.json: activation_scheme must be one of {', '.join(SCHEMES)}")
    stated = declared.get("weight_block_size") or declared.get("group_size")
    block = DEFAULT_BLOCK
    if isinstance(stated, list | tuple):
        if len(stated) != 2 or not all(type(n) is int and n > 0 for n in stated):
            raise CheckpointError(f"{location}: config.json: weight_block_size must be [rows, columns]")
        block = (stated[0], stated[1])

    def weight(module: str, tensors: Module) -> StoredWeight:
        return _stored_weight(module, tensors, block, str(scheme))

    return Method(weight, KvRule(), "FP8")


def _stored_weight(module: str, tensors: Module, block: tuple[int, int], scheme: str) -> StoredWeight:
    leaves = [leaf for leaf in WEIGHT_SCALE_LEAVES if leaf in tensors]
    if len(leaves) != 1:
        what = (
            f"has scales twice: {' and '.join(leaves)}"
            if leaves
            else f"has none of the scales {', '.join(WEIGHT_SCALE_LEAVES)}"
        )
        raise NotRead(what)
    beside = {leaf: tensors[leaf] for leaf in ACTIVATION_LEAVES if leaf in tensors}
    codes = needed(tensors, "weight", (*FP8, "I8", "U8"), 2)
    if codes.dtype in ("I8", "U8"):
        shape = (codes.shape[0], 2 * codes.shape[1])
        scale = of_shape(needed(tensors, leaves[0], EXPONENTS), (shape[0], math.ceil(shape[1] / FP4_GROUP)))
        rule = ActivationRule("dynamic", "fp8_e4m3", "group", block[1])
        parts = {"weight": Part(codes), "weight_scale": scale}
        return StoredWeight(
            f"{module}.weight", "DeepSeek FP4", "fp4_e2m1", shape, "mxfp4", parts, {}, (1, FP4_GROUP), True, rule, beside
        )
    shape = (codes.shape[0], codes.shape[1])
    scale, shares = scale_part(needed(tensors, leaves[0], (*FLOATS, *EXPONENTS)), shape, block)
    rule = _activation_rule(scheme, shares, shape, beside)
    parts = {"weight": Part(codes), "weight_scale": scale}
    return StoredWeight(f"{module}.weight", "FP8", FP8[codes.dtype], shape, "scaled", parts, {}, shares, True, rule, beside)


def _activation_rule(scheme: str, shares: tuple[int, int], shape: tuple[int, int], beside: Module) -> ActivationRule:
    """vLLM's `Fp8LinearMethod`: per group of a block's columns, else per token, else by the stored scale."""
    if scheme == "static":
        return ActivationRule("static", "fp8_e4m3", "tensor", scale=next(iter(beside), "input_scale"))
    if shares[1] != shape[1]:
        return ActivationRule("dynamic", "fp8_e4m3", "group", shares[1])
    return ActivationRule("dynamic", "fp8_e4m3", "token")
