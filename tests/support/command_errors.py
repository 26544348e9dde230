"""What tests of the command line share: the one line of an error, and a fine-tune of the same shape."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def one_error(run_result: tuple[int, str, str]) -> str:
    """The single line of an error, which exits 2 and prints nothing else."""
    code, out, err = run_result
    assert (code, out) == (2, "")
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0].removeprefix("error: ")


def perturbed(source: Path, folder: Path, seed: int) -> Path:
    """A fine-tune of `source`: every name, shape, size and config alike, and every weight another."""
    generator = torch.Generator().manual_seed(seed)
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: t + 0.01 * torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return folder
