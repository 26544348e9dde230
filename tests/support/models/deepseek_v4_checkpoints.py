"""Small checkpoints stored as DeepSeek-V4 is: linears in FP8 blocks, experts in FP4, scales that are powers of two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import hollow_deepseek_v4
import hollow_deepseek_v41
import torch
from tiny_checkpoints import read_shards, write_json, write_shards

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of every FP4 code: sign, two bits of exponent with bias 1, one of mantissa (OCP Microscaling Formats 1.0)."""


def powers_of_two(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The exponents by which nothing of size `amax` is larger than `largest`, as F8_E8M0."""
    exponents = torch.ceil(torch.log2(amax.double().clamp(min=2.0**-100) / largest)).clamp(-127, 127) + 127
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def to_fp4(w_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes I8 [O, I/2], exponents [O, I/32])."""
    groups = w_OI.float().unflatten(1, (-1, 32))
    scale = powers_of_two(groups.abs().amax(2), 6.0)
    nearest = (groups / scale.float()[..., None])[..., None].sub(E2M1).abs().argmin(-1).flatten(1).to(torch.uint8)
    return (nearest[:, ::2] | nearest[:, 1::2] << 4).view(torch.int8), scale


def to_fp8(w_OI: torch.Tensor, rows: int = 128, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 [O, I], exponents [O/rows, I/columns]) of blocks of `rows` x `columns`, which divide the sizes."""
    blocks = w_OI.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = powers_of_two(blocks.abs().amax((1, 3)), 448.0)
    return (w_OI.float() / spread(scale, rows, columns)).to(torch.float8_e4m3fn), scale


def spread(scale: torch.Tensor, rows: int = 128, columns: int = 128) -> torch.Tensor:
    """Scales of blocks, one for each weight."""
    return scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def published_and_plain(
    tensors: Mapping[str, torch.Tensor], block: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(BF16 tensors as DeepSeek-V4.1, or V4 with images, is published; what these stand for, tables as they are published).

    block: rows, and columns, that share a scale in FP8.
    """
    published: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        scale_name = f"{name.removesuffix('weight')}scale"
        if hollow_deepseek_v41.scale_of(name, tuple(tensor.shape), block) is None:
            published[name] = plain[name] = as_stored(name, tensor)
        elif name.endswith(hollow_deepseek_v41.TABLE):
            published[name], published[scale_name] = to_fp8(tensor, 1, 32)
            plain |= {name: published[name], scale_name: published[scale_name]}
        elif hollow_deepseek_v41.is_in_fp4(name):
            published[name], published[scale_name] = to_fp4(tensor)
            plain[name] = decode_fp4(published[name], published[scale_name])
        else:
            published[name], scale = to_fp8(tensor, block, block)
            published[scale_name] = scale
            plain[name] = (published[name].float() * spread(scale, block, block)).to(torch.bfloat16)
    return published, plain


def as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without scales in its dtype: a table of experts for tokens, FP32 that is no BF16, BF16."""
    if name.endswith(".tid2eid"):
        return torch.randint(4, tensor.shape, generator=torch.Generator().manual_seed(0))
    return tensor.float() * (1 + 2**-12) if hollow_deepseek_v41.IN_FP32.fullmatch(name) else tensor


def store_as_deepseek_v4(source: Path, folder: Path) -> Path:
    """A BF16 checkpoint of its names as the model is published."""
    folder.mkdir()
    for path in source.iterdir():
        if not path.name.endswith((".safetensors", ".index.json")):
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": hollow_deepseek_v4.QUANTIZATION})
    files: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in read_shards(source).items():
        made = files[file] = {}
        for name, tensor in tensors.items():
            if name.endswith(".tid2eid"):
                generator = torch.Generator().manual_seed(0)
                made[name] = torch.randint(config["n_routed_experts"], tensor.shape, generator=generator)
                continue
            is_fp4, is_fp8 = hollow_deepseek_v4.IN_FP4.fullmatch(name), hollow_deepseek_v4.IN_FP8.fullmatch(name)
            scale = name.removesuffix("weight") + "scale"
            if is_fp4 or is_fp8:
                made[name], made[scale] = to_fp4(tensor) if is_fp4 else to_fp8(tensor)
            else:
                made[name] = tensor
    write_shards(folder, files)
    return folder


def decoded_deepseek_v4(source: Path, folder: Path) -> Path:
    """The BF16 checkpoint that a published one stands for, by the definition of its formats."""
    shutil.copytree(source, folder)
    files = read_shards(folder)
    for tensors in files.values():
        for name in [name for name in tensors if name.endswith(".scale")]:
            weight, scale = f"{name.removesuffix('scale')}weight", tensors.pop(name)
            if tensors[weight].dtype == torch.int8:
                tensors[weight] = decode_fp4(tensors[weight], scale)
            else:
                tensors[weight] = (tensors[weight].float() * spread(scale)).to(torch.bfloat16)
    write_shards(folder, files)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {key: value for key, value in config.items() if key != "quantization_config"})
    return folder


def decode_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """BF16 [O, I] of codes [O, I/2] and exponents [O, I/32]; the first of two codes is in the low half of a byte."""
    codes = packed.view(torch.uint8)
    values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], dim=2).flatten(1)
    return (values * scale.float().repeat_interleave(32, 1)).to(torch.bfloat16)
