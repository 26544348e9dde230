"""Which format a checkpoint is in: `quant_method` and its like -> what reads it, or why nothing here does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay_quantize.decoding import compressed_tensors_format, fp8_release, gpt_oss_experts, modelopt, packed_words
from assay_quantize.decoding.stored_weight import Declared, Method


def _autoround(location: str, declared: Declared) -> Method:
    """AutoRound's exports are of other formats too, under its own name."""
    packing = str(declared.get("packing_format") or "")
    if packing == "auto_round:fp8":
        return fp8_release.method(location, declared)
    return packed_words.autoround(location, declared)


def _mxfp8(location: str, declared: Declared) -> Method:
    """MiniMax's name for what ModelOpt stores as MXFP8; vLLM reads both alike."""
    return modelopt.method(location, {**declared, "quant_algo": "MXFP8"})


METHODS: Mapping[str, Callable[[str, Declared], Method]] = {
    "compressed-tensors": compressed_tensors_format.method,
    "modelopt": modelopt.method,
    "modelopt_fp4": modelopt.method,
    "modelopt_mixed": modelopt.method,
    "fp8": fp8_release.method,
    "gptq": packed_words.gptq,
    "awq": packed_words.awq,
    "auto-round": _autoround,
    "auto_round": _autoround,
    "intel/auto-round": _autoround,
    "mxfp8": _mxfp8,
    "mxfp4": gpt_oss_experts.method,
}
"""`quant_method` of a config -> (location, what is declared) -> how its modules are read."""

CONVERT = "convert it to compressed-tensors with its own tool, or take another release of the model"
REFUSED: Mapping[str, str] = {
    "bitsandbytes": "bitsandbytes (NF4, LLM.int8) rounds while it loads and stores blocks of its own",
    "bnb_4bit": "bitsandbytes (NF4) stores blocks of its own",
    "quark": "AMD Quark's export",
    "torchao": "torchao serializes subclasses of tensors",
    "aqlm": "AQLM stores codebooks",
    "vptq": "VPTQ stores codebooks",
    "spqr": "SpQR stores outliers apart",
    "quip": "QuIP# stores codebooks",
    "higgs": "HIGGS stores codebooks",
    "exl2": "ExLlamaV2's format has bits of its own for each group",
    "exl3": "ExLlamaV3's format is a trellis code",
    "hqq": "HQQ's format",
    "eetq": "EETQ's format is laid out for its kernel",
    "quanto": "quanto's format",
    "fbgemm_fp8": "FBGEMM's FP8",
    "fp_quant": "FP-Quant stores rotated weights",
    "bitnet": "BitNet's ternary format",
    "sinq": "SINQ's format has two scales",
    "marlin": "Marlin's layout is made for its kernel",
    "gguf": "GGUF in safetensors",
    "mlx": "MLX stores words of codes with scales and biases of its own",
}
"""`quant_method` -> what it is, in a sentence."""


def method_of(location: str, method: str, declared: Declared) -> Method:
    """How the modules of a checkpoint are read. CheckpointError: not at all, with the format's name and the reason."""
    if method in METHODS:
        return METHODS[method](location, declared)
    reason = REFUSED.get(method)
    what = f"is in a format that is not read: {reason}" if reason else f"says quant_method {shown(method)}, which is not read"
    raise CheckpointError(f"{location}: {what}; {CONVERT}. Formats that are read: docs/formats.md")
