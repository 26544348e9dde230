"""A checkpoint with one weak layer: the largest weights of its routed experts, eight times as large.

A group's scale follows its largest weight, so that all others of the group are rounded eight times as coarsely. The checkpoint
with the outliers is its own reference: nothing is wrong with it but that this layer is hard to round.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARE = 1 / 128
"""Of an expert's weights: one in each group of 128, on average."""
TIMES = 8


def plant_outliers(source: Path, folder: Path, layer: int) -> Path:
    """A copy of `source` in `folder` with outliers in the routed experts of `layer`."""
    shutil.copytree(source, folder)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, weight in tensors.items():
            if f"layers.{layer}.mlp.experts." in name and name.endswith(".weight"):
                bound = weight.float().abs().flatten().kthvalue(int(weight.numel() * (1 - SHARE))).values
                tensors[name] = torch.where(weight.float().abs() > bound, weight * TIMES, weight)
        save_file(tensors, path, {"format": "pt"})
    return folder
