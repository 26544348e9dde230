"""Small checkpoints in the formats of publishers, with what they declare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import StoredCheckpoint, open_stored

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2,
    "hidden_size": 128, "moe_intermediate_size": 64,
}  # fmt: skip


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_stored(
    folder: Path, tensors: dict[str, torch.Tensor], declared: dict[str, Any] | None, **files: dict[str, Any]
) -> Path:  # fmt: skip
    """A folder with one shard. declared: its quantization_config; None: it has none. files: stem of a JSON file -> what is in
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = QWEN3_MOE if declared is None else {**QWEN3_MOE, "quantization_config": declared}
    for stem, data in {"config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(data))
    return folder


def opened(folder: Path) -> StoredCheckpoint:
    """The checkpoint, its headers read as every command reads them."""
    return open_stored(open_checkpoint(folder, allow_quantized=True))


def assert_slabs_agree(stored: StoredCheckpoint, name: str) -> None:
    """Rows that are read alone are those of the whole weight, wherever they begin."""
    whole = stored.read_weight(name)
    rows = whole.shape[0]
    for begin, end in ((0, 1), (rows // 3, rows // 2 + 1), (rows - 1, rows)):
        assert torch.equal(stored.read_weight(name, (begin, end)), whole[begin:end]), (name, begin, end)
    slabs = list(stored.slabs(name, num_bytes=1))
    assert torch.equal(torch.cat([slab for _, _, slab in slabs]), whole), name
    assert [begin for begin, _, _ in slabs[1:]] == [end for _, end, _ in slabs[:-1]], name
