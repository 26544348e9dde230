"""The wide twin computes what the small model computes; transformers is the judge. Its MTP head is judged by a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe
from transformers import AutoModelForCausalLM

from assay.errors import AssayError
from assay.records.base import sha256_of_file
from assay_evaluate.diagnosis.gpu_check.widened import FOR_KERNELS, Widths, widen

TRAINED = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(20, 84)[None]).logits
    return result


@pytest.mark.slow
@pytest.mark.parametrize("widths", [Widths(hidden=4, dense=2, expert=4, heads=2), Widths(), Widths(expert=2)])
def test_the_twin_computes_the_same(tmp_path: Path, widths: Widths) -> None:
    narrow, wide = logits(TRAINED), logits(widen(TRAINED, tmp_path / "wide", widths))
    assert narrow.std() > 1  # trained: logits are apart
    torch.testing.assert_close(wide, narrow, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_shapes_suit_the_kernels(tmp_path: Path) -> None:
    """Marlin wants multiples of 128; DeepGEMM leaves experts up to 512 wide to Triton."""
    tensors = load_file(widen(TRAINED, tmp_path / "wide") / "model.safetensors")
    shapes = {tuple(tensor.shape) for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    assert shapes == {(1024, 1024), (512, 1024), (1024, 2048), (2048, 1024)}
    assert sum(tensor.nbytes for tensor in tensors.values()) < 300e6
    assert tensors["model.layers.1.mlp.experts.0.gate_proj.weight"].shape[0] > 512


@pytest.mark.slow
def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "tiny")
    made = [widen(source, tmp_path / name, Widths(hidden=2)) / "model.safetensors" for name in "ab"]
    assert len({sha256_of_file(path) for path in made}) == 1


@pytest.mark.slow
def test_no_channel_finds_its_twin_at_a_fixed_distance(tmp_path: Path) -> None:
    """A kernel that reads a wrong group of 128 channels must get other weights."""
    wide = load_file(widen(TRAINED, tmp_path / "wide", FOR_KERNELS) / "model.safetensors")
    for name in ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        groups = wide[name].unflatten(1, (-1, 128)).float()
        same = [torch.equal(groups[:, a], groups[:, b]) for a in range(groups.shape[1]) for b in range(a)]
        assert same and not any(same)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(AssayError, match="is a qwen3_moe; only glm4_moe checkpoints can be widened"):
        widen(tmp_path, tmp_path / "wide")


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "tiny", shards=1)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.g_proj.weight": torch.ones(2, 2)}, source / "model.safetensors")
    with pytest.raises(AssayError, match=r"g_proj.weight: a tensor whose axes are not known here"):
        widen(source, tmp_path / "wide")
