"""Small checkpoints stored as MiMo-V2.5 and V2.6 are: FP8 blocks of each rank's share of joined attention, experts in MXFP4."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import hollow
import torch
from deepseek_v4_checkpoints import decode_fp4, to_fp4
from tiny_checkpoints import read_shards, write_json, write_shards

BLOCK = 128
Rows = tuple[int, int, int]


def rows_of(config: dict[str, Any], weight_rows: int) -> Rows:
    """Rows of queries, keys and values in a joined tensor."""
    heads, key, value = (config[name] for name in ("num_attention_heads", "head_dim", "v_head_dim"))
    kv_heads = (weight_rows - heads * key) // (key + value)
    return heads * key, kv_heads * key, kv_heads * value


def to_fp8_blocks(w_OI: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 [O, I], FP32 [ceil(O/block), ceil(I/block)])."""
    scale = torch.stack([
        torch.stack([piece.float().abs().amax() / 448 for piece in rows.split(block, 1)]) for rows in w_OI.split(block, 0)
    ])  # fmt: skip
    return (w_OI.float() / spread(scale, w_OI, block)).to(torch.float8_e4m3fn), scale


def spread(scale: torch.Tensor, like: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Scales of blocks, one for each weight."""
    return scale.repeat_interleave(block, 0)[: like.shape[0]].repeat_interleave(block, 1)[:, : like.shape[1]]


def join(w_OI: torch.Tensor, rows: Rows, ranks: int) -> list[torch.Tensor]:
    """The share of each rank of queries, keys and values that lie one behind the other."""
    parts = [part.chunk(ranks) for part in w_OI.split(list(rows))]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]


def part_by_name(shares: list[torch.Tensor], rows: Rows, ranks: int) -> dict[str, torch.Tensor]:
    """q_proj, k_proj and v_proj from the shares of all ranks."""
    parts = [share.split([count // ranks for count in rows]) for share in shares]
    return {f"{name}_proj": torch.cat([part[at] for part in parts]) for at, name in enumerate("qkv")}


def store_as_mimo(source: Path, folder: Path, *, mxfp4: bool = False) -> Path:
    """A BF16 checkpoint of its names as MiMo-V2.5 is published; mxfp4: with experts as V2.6 has them."""
    folder.mkdir()
    for path in source.iterdir():
        if not path.name.endswith((".safetensors", ".index.json")):
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    ignored = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(config["num_hidden_layers"])]
    quantization = {**hollow.FP8_BLOCKS, "store_dtype": "mxfp4" if mxfp4 else "fp8", "ignored_layers": ignored}
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    ranks = config["num_key_value_heads"]
    files: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in read_shards(source).items():
        made = files[file] = {}
        for name, tensor in tensors.items():
            if not name.startswith("model.") or ".o_proj." in name or not hollow.IN_FP8.fullmatch(name):
                made[name] = tensor
            elif mxfp4 and ".mlp.experts." in name:
                codes, scale = to_fp4(tensor)
                made[name], made[f"{name}_scale"] = codes.view(torch.uint8), scale.view(torch.uint8)
            else:
                shares = join(tensor, rows_of(config, tensor.shape[0]), ranks) if ".qkv_proj." in name else [tensor]
                stored = [to_fp8_blocks(share) for share in shares]
                made[name] = torch.cat([codes for codes, _ in stored])
                made[f"{name}_scale_inv"] = torch.cat([scale for _, scale in stored])
    write_shards(folder, files)
    return folder


def decoded_mimo(source: Path, folder: Path) -> Path:
    """The BF16 checkpoint that a published one stands for, queries, keys and values apart."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    write_json(folder / "config.json", {key: value for key, value in config.items() if key != "quantization_config"})
    files = read_shards(source)
    every = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in every.items():
        if tensor.dtype == torch.uint8 and name.endswith(".weight"):
            made[name] = decode_fp4(tensor.view(torch.int8), every[f"{name}_scale"].view(torch.float8_e8m0fnu))
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = every[f"{name}_scale_inv"]
            ranks = config["num_key_value_heads"] if ".qkv_proj." in name else 1
            assert scale.shape[0] == ranks * math.ceil(tensor.shape[0] / ranks / BLOCK)
            pairs = zip(tensor.chunk(ranks), scale.chunk(ranks), strict=True)
            shares = [(codes.float() * spread(of_share, codes)).to(torch.bfloat16) for codes, of_share in pairs]
            if ".qkv_proj." not in name:
                made[name] = shares[0]
            else:
                parts = part_by_name(shares, rows_of(config, tensor.shape[0]), ranks)
                made |= {name.replace("qkv_proj", part): rows for part, rows in parts.items()}
        elif not name.endswith(("_scale", "_scale_inv")):
            made[name] = tensor
    write_shards(folder, {"model.safetensors": made})
    return folder
