"""Quantized checkpoints made by compressed-tensors alone, one scheme per group of modules, and what they stand for.

Independent of the quantizer under test and of the plugin: round to nearest with plain minimum/maximum scales.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import safe_open
from safetensors.torch import save_file


def scheme_of(preset: str, targets: list[str] | None = None) -> QuantizationScheme:
    """A preset of compressed-tensors with its storage format filled in."""
    scheme = preset_name_to_scheme(preset, targets or ["Linear"])
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    return scheme


def quantize_weight(weight_OI: torch.Tensor, scheme: QuantizationScheme, module: str = "") -> dict[str, torch.Tensor]:
    """Stored parts of one module, by local name. Static NVFP4 activation scales are made up from the module's name."""
    args = scheme.weights
    rows, columns = weight_OI.shape
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width, dtype=weight_OI.dtype)
        padded[:rows, :columns] = weight_OI
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
    elif args.strategy == "channel":
        blocks = weight_OI.unflatten(1, (1, columns))
    else:
        blocks = weight_OI.unflatten(1, (-1, args.group_size))
    state = {"weight": weight_OI}
    global_scale = None
    if args.strategy == "tensor_group" and args.scale_dtype == torch.float8_e4m3fn:
        global_scale = state["weight_global_scale"] = generate_gparam(weight_OI.min(), weight_OI.max())
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale)
    state |= {"weight_scale": scale, "weight_zero_point": zero_point}
    parts = dict(BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme))
    inputs = scheme.input_activations
    if inputs is not None and inputs.strategy == "tensor_group" and inputs.scale_dtype == torch.float8_e4m3fn:
        amax = torch.tensor(4.0 + zlib.crc32(module.encode()) % 400 / 100)
        parts["input_global_scale"] = generate_gparam(-amax, amax)
    return {name: tensor.contiguous() for name, tensor in parts.items() if tensor is not None}


def dense_weight(parts: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """What the parts stand for: as compressed-tensors rounds it when weight-only, exact in float32 when activations are too."""
    if scheme.input_activations is None:
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        return compressor.decompress({k: v.clone() for k, v in parts.items()}, scheme)["weight"]
    scale = parts["weight_scale"].float()
    if "weight_packed" in parts:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        rows, half = parts["weight_packed"].shape
        values = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32)
        if scheme.weights.scale_dtype == torch.uint8:
            return values * torch.exp2(scale - 127).repeat_interleave(scheme.weights.group_size, 1)
        return dequantize(values, scale, args=scheme.weights, dtype=torch.float32) / parts["weight_global_scale"]
    if scheme.weights.strategy == "block":
        height, width = scheme.weights.block_structure
        rows, columns = parts["weight"].shape
        values = parts["weight"].float()
        row_block, column_block = torch.arange(rows) // height, torch.arange(columns) // width
        return values * scale[row_block][:, column_block]
    if scale.dtype == torch.float32 and scheme.weights.scale_dtype == torch.uint8:
        exponents = parts["weight_scale"].float() - 127
        return parts["weight"].float() * torch.exp2(exponents).repeat_interleave(scheme.weights.group_size, 1)
    return dequantize(parts["weight"], scale, args=scheme.weights, dtype=torch.float32)


def quantize_checkpoint(
    source: Path, target: Path, presets: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, QuantizationScheme], dict[str, torch.Tensor]]:
    """Quantize every module that fully matches a regex of `presets` (regex -> preset) and write a checkpoint vLLM reads.

    Returns (all dense tensors by name, module -> scheme, input_global_scale by module).
    """
    target.mkdir(parents=True)
    schemes = {pattern: scheme_of(preset, [f"re:{pattern}$"]) for pattern, preset in presets.items()}
    dense: dict[str, torch.Tensor] = {}
    scheme_by_module: dict[str, QuantizationScheme] = {}
    input_scales: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for shard in sorted(source.glob("*.safetensors")):
        stored: dict[str, torch.Tensor] = {}
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_tensor(name)
                module = name.removesuffix(".weight")
                scheme = next((s for pattern, s in schemes.items() if re.fullmatch(pattern, module)), None)
                if scheme is None or module == name:
                    stored[name] = dense[name] = tensor
                    continue
                parts = quantize_weight(tensor, scheme, module)
                stored |= {f"{module}.{part}": value for part, value in parts.items()}
                dense[name] = dense_weight(parts, scheme)
                scheme_by_module[module] = scheme
                if "input_global_scale" in parts:
                    input_scales[module] = parts["input_global_scale"]
        save_file(stored, target / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, shard.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _quantization_config(list(schemes.values()), _unquantized(dense, scheme_by_module))
    (target / "config.json").write_text(json.dumps(config))
    copy_small_files(source, target)
    return dense, scheme_by_module, input_scales


def write_dense(source: Path, target: Path, dense: dict[str, torch.Tensor]) -> Path:
    """An unquantized checkpoint of the given tensors, in the dtypes they have."""
    target.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, target / "model.safetensors")
    shutil.copy(source / "config.json", target / "config.json")
    copy_small_files(source, target)
    return target


def copy_small_files(source: Path, target: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


def _unquantized(dense: dict[str, torch.Tensor], quantized: dict[str, Any]) -> list[str]:
    modules = [name.removesuffix(".weight") for name, t in dense.items() if name.endswith(".weight") and t.dim() == 2]
    return [module for module in modules if module not in quantized]


def _quantization_config(schemes: list[QuantizationScheme], ignore: list[str]) -> dict[str, Any]:
    groups = {f"group_{i}": json.loads(scheme.model_dump_json()) for i, scheme in enumerate(schemes)}
    for group in groups.values():  # compressed-tensors 0.17, in the serving environment, forbids fields it does not know
        for args in (group["weights"], group["input_activations"]):
            for unknown in set(args or ()) - _ARGS_OF_0_17:
                del args[unknown]
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }


_ARGS_OF_0_17 = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
