"""A stream of checkpoint tensors in, the same stream out with every quantized module replaced by one dense `weight`.

compressed-tensors unpacks and dequantizes; nothing here knows vLLM's layers, tensor parallelism or how experts are named.
Parts of a module may come in any order and from different shards; a module is held only until its last part has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

TensorStream = Iterable[tuple[str, torch.Tensor]]

_WEIGHT_PARTS = frozenset(
    {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx"}
)
_INPUT_PARTS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_QUANTIZED_DTYPES = frozenset({torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2})
_FUSED = (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Projections that vLLM loads into one parameter, and whose NVFP4 kernels know one global scale."""


@dataclass(frozen=True)
class _Group:
    """One entry of `config_groups`: its modules, how they are unpacked, and the parts a module must have."""

    scheme: QuantizationScheme
    compressor: type[BaseCompressor]
    needed: frozenset[str]


class Dequantizer:
    """Call it with a stream of (name, tensor); afterwards `num_modules`, `input_scales` and `unequal_global_scales()` are set.

    quantization_config: of config.json, quant_method compressed-tensors. dtype: of the dense weights that come out.
    """

    def __init__(self, quantization_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        fields = QuantizationConfig.model_fields  # vLLM's config holds more keys than compressed-tensors has fields
        config = QuantizationConfig.model_validate({k: v for k, v in quantization_config.items() if k in fields})
        self._groups = [(target, group) for group in map(_group_of, config.config_groups.values()) for target in group[1]]
        self._dtype = dtype
        self.num_modules = 0
        self.input_scales: dict[str, torch.Tensor] = {}
        """Static activation scales met in the stream, by full name."""
        self._global_scales: dict[str, float] = {}

    def __call__(self, stream: TensorStream) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises ValueError, naming modules and tensors, if a quantized module is incomplete at the end."""
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in stream:
            module, _, part = name.rpartition(".")
            if part in _INPUT_PARTS:
                self.input_scales[name] = tensor.clone()
            elif part not in _WEIGHT_PARTS or (part == "weight" and tensor.dtype not in _QUANTIZED_DTYPES):
                yield name, tensor  # kept dense, or nothing of ours
            else:
                parts = waiting.setdefault(module, {})
                parts[part] = tensor
                group = self._group(module)
                if group.needed <= parts.keys():
                    del waiting[module]
                    yield f"{module}.weight", self._dense(module, parts, group)
                elif part not in group.needed and len(parts) == 1:
                    del waiting[module]  # optional (a symmetric scheme's zero point) and alone: nothing to wait for
        if waiting:
            shown = [
                f"{name} lacks {', '.join(sorted(self._group(name).needed - parts.keys()))} (has {', '.join(sorted(parts))})"
                for name, parts in list(waiting.items())[:3]
            ]
            more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
            raise ValueError(f"{len(waiting)} quantized modules are incomplete in the checkpoint: {'; '.join(shown)}{more}")

    def unequal_global_scales(self) -> list[str]:
        """Fused projections whose NVFP4 weight global scales differ. vLLM's own kernels would apply one to all of them."""
        unequal = []
        for module, scale in self._global_scales.items():
            parent, _, last = module.rpartition(".")
            for first, *others in _FUSED:
                partners = [f"{parent}.{other}" for other in others] if last == first else []
                unequal += [f"{module} and {p}" for p in partners if self._global_scales.get(p, scale) != scale]
        return unequal

    def _group(self, module: str) -> _Group:
        by_class = None
        for target, (group, _) in self._groups:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return group
            if target == "Linear" and by_class is None:
                by_class = group
        if by_class is None:
            targets = ", ".join(target for target, _ in self._groups)
            raise ValueError(f"{module}: holds quantized tensors, but no target of quantization_config matches it ({targets})")
        return by_class

    def _dense(self, module: str, parts: dict[str, torch.Tensor], group: _Group) -> torch.Tensor:
        values = parts.get("weight_packed", parts.get("weight"))
        if values is None or values.dim() != 2:
            raise ValueError(f"{module}: quantized weights of shape {tuple(values.shape) if values is not None else None} "
                             "are not supported, only matrices (one per expert)")  # fmt: skip
        if "weight_global_scale" in parts:
            self._global_scales[module] = float(parts["weight_global_scale"].float().reshape(-1)[0])
        self.num_modules += 1
        return dequantize(parts, group.scheme, group.compressor).to(self._dtype)


def dequantize(parts: Mapping[str, torch.Tensor], scheme: QuantizationScheme, compressor: type[BaseCompressor]) -> torch.Tensor:
    """Dense weight [out, in] of one module.

    Weight-only schemes are rounded as compressed-tensors rounds them, to the dtype of the scales: their kernels expand
    weights to BF16 before they multiply. With quantized activations the result is float32: those kernels multiply quantized
    values and apply the scales to float32 sums, so that value * scale is never rounded.
    """
    parts = dict(parts)
    if scheme.weights.strategy == "block":
        # decompress() of compressed-tensors 0.17 infers the strategy from the scale's shape and gets [n, 1] blocks wrong
        return _dequantize_blocks(parts["weight"], parts["weight_scale"], scheme.weights.block_structure)
    if scheme.input_activations is None:
        weight: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
        return weight
    global_scale = parts.pop("weight_global_scale", None)
    if parts["weight_scale"].dtype in (torch.bfloat16, torch.float16):
        parts["weight_scale"] = parts["weight_scale"].float()
    # Without its global scale an NVFP4 product (4-bit value * 8-bit scale) is exact even in BF16.
    weight = compressor.decompress(parts, scheme)["weight"].float()
    return weight if global_scale is None else weight / global_scale.float()


def _dequantize_blocks(values_OI: torch.Tensor, scale_oi: torch.Tensor, block: Iterable[int]) -> torch.Tensor:
    rows, columns = values_OI.shape
    block_rows, block_columns = block
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    if tuple(scale_oi.shape) != expected:
        raise ValueError(f"block scales of shape {tuple(scale_oi.shape)} for weights {rows}x{columns}; {expected} expected")
    scale_OI = scale_oi.float().repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)
    return values_OI.float() * scale_OI[:rows, :columns]


def _group_of(scheme: QuantizationScheme) -> tuple[_Group, list[str]]:
    """A config group and its targets. A format without weights (KV cache only) has no place in config_groups."""
    format_ = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(getattr(format_, "value", format_))
    optional = {"weight_g_idx"} | _INPUT_PARTS
    if scheme.weights.symmetric:
        optional |= {"weight_zero_point"}
    if scheme.weights.scale_dtype in (torch.uint8, "torch.uint8", "uint8"):
        optional |= {"weight_global_scale"}  # MX formats have power-of-two group scales and nothing above them
    needed = frozenset(compressor.compression_param_names(scheme)) - optional
    return _Group(scheme, compressor, needed), list(scheme.targets)
