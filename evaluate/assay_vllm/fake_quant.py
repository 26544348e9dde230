"""Quantize and dequantize activations as the kernels do, in float32, on any device.

Each rule follows the kernel vLLM would run; where compressed-tensors has the same rule the results are bit-equal to its
`fake_quantize` on float32 input (the tests compare). Not emulated: FP8 group scales rounded up to powers of two, which DeepGEMM
uses on Blackwell.
"""

from __future__ import annotations

from typing import Any

import torch

FP8_MAX = 448.0
FP4_MAX = 6.0


def check_supported(args: Any) -> None:
    """NotImplementedError for activation arguments (a compressed-tensors `QuantizationArgs`) that cannot be emulated."""
    kind, strategy = _text(args.type), _text(args.strategy)
    supported = (
        (args.num_bits == 8 and kind in {"float", "int"} and strategy in {"tensor", "token", "group"})
        or (kind == "float" and args.num_bits == 4 and strategy == "tensor_group" and args.group_size == 16)
        or (kind == "float" and args.num_bits == 4 and strategy == "group" and args.group_size == 32 and _has_mx_scales(args))
    )
    if not supported or not args.symmetric:
        symmetry = "symmetric" if args.symmetric else "asymmetric"
        raise NotImplementedError(
            f"{symmetry} {kind}{args.num_bits} activations per {strategy} (group size {args.group_size}) cannot be emulated; "
            "emulated are symmetric fp8 and int8 per tensor, token or group, MXFP4 and NVFP4"
        )


def describe(args: Any) -> str:
    """Short text for the log: `fp8 group 128 dynamic`."""
    group = f" {args.group_size}" if args.group_size else ""
    return f"{_text(args.type)}{args.num_bits} {_text(args.strategy)}{group} {'dynamic' if args.dynamic else 'static'}"


def fake_quantize(
    x_TI: torch.Tensor, args: Any, static_scale: torch.Tensor | None = None, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`x_TI` [tokens, features] rounded to what the quantized values can express; same shape and dtype.

    args: `QuantizationArgs` that `check_supported` accepts. static_scale: value of one quantization step, for static
    schemes. global_scale: NVFP4's, as stored: block scales are multiplied with it before they are rounded to FP8.
    """
    if x_TI.numel() == 0:
        return x_TI
    strategy = _text(args.strategy)
    values = x_TI.float()
    if strategy in {"group", "tensor_group"}:
        if x_TI.shape[-1] % args.group_size:
            raise ValueError(f"{x_TI.shape[-1]} features per rank cannot be cut into quantization groups of {args.group_size}")
        values = values.reshape(*x_TI.shape[:-1], -1, args.group_size)
    amax = values.abs().amax() if strategy == "tensor" else values.abs().amax(-1, keepdim=True)
    if strategy == "tensor_group":
        if global_scale is None:
            raise ValueError("NVFP4 activations need input_global_scale")
        result = _nvfp4(values, amax, global_scale.float().reshape(()))
    elif _has_mx_scales(args):
        result = _mx(values, amax, args.num_bits)
    else:
        largest = FP8_MAX if _text(args.type) == "float" else 127.0
        scale = static_scale.float().reshape(()) if static_scale is not None and not args.dynamic else amax / largest
        scale = torch.where(scale == 0, 1.0, scale)
        rounded = to_fp8(values / scale) if _text(args.type) == "float" else (values / scale).round().clamp(-128, 127)
        result = rounded * scale
    return result.reshape(x_TI.shape).to(x_TI.dtype)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value, saturating, as float32."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value (0, .5, 1, 1.5, 2, 3, 4, 6), ties to the even code, saturating."""
    x = x.clamp(-FP4_MAX, FP4_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


def _nvfp4(values: torch.Tensor, amax: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 with an FP8 scale each. A block whose scale rounds to zero is zero, as in vLLM's reference."""
    scale = to_fp8(amax / FP4_MAX * global_scale) / global_scale
    step = torch.where(scale == 0, 1.0, scale)
    return torch.where(scale == 0, 0.0, to_fp4(values / step) * step)


def _mx(values: torch.Tensor, amax: torch.Tensor, num_bits: int) -> torch.Tensor:
    """MXFP8 and MXFP4: blocks of 32, each with the smallest power-of-two scale under which no value saturates.

    MXFP8 as vLLM's `_mxfp8_e4m3_quantize_torch`. MXFP4 as FlashInfer's kernel on Blackwell (`cvt_warp_fp16_to_fp4` with UE8M0
    scales, which rounds amax / 6 up); compressed-tensors rounds the scale of *weights* to the nearest power instead.
    """
    largest, nearest = (FP8_MAX, to_fp8) if num_bits == 8 else (FP4_MAX, to_fp4)
    exponent = torch.ceil(torch.log2(amax.clamp_min(torch.finfo(torch.float32).tiny) / largest)).clamp(-127, 127)
    step = torch.exp2(exponent)
    return nearest(values / step) * step


def _has_mx_scales(args: Any) -> bool:
    return args.scale_dtype in (torch.uint8, "torch.uint8")


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
