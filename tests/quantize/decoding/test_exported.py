"""Checkpoints that the libraries themselves made (tests/support/exported): decoded to their values, and damage is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_checkpoints import assert_slabs_agree, opened

from assay.records.inspection import Finding
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect

EXPORTED = Path(__file__).parents[2] / "support" / "exported"
FOLDERS = sorted(path.name for path in EXPORTED.iterdir() if path.is_dir() and (path / "expected.safetensors").exists())
HEALTHY = {name: ["dtype_disagrees"] for name in ("autoround-auto_awq", "autoround-auto_gptq")}
"""What AutoRound does: it writes `dtype: float16` for these formats and stores what it kept as BF16."""


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one folder without what is expected."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(EXPORTED / request.param, folder, ignore=shutil.ignore_patterns("expected.safetensors"))
    return folder


@pytest.mark.parametrize(("checkpoint", "name"), [(name, name) for name in FOLDERS], indirect=["checkpoint"])
def test_values_are_the_librarys(checkpoint: Path, name: str) -> None:
    expected = load_file(EXPORTED / name / "expected.safetensors")
    with opened(checkpoint) as stored:
        assert stored.problems == ()
        for weight, values in expected.items():
            assert torch.equal(stored.read_weight(weight).to(values.dtype), values), weight
            assert not stored.weight(weight).is_plain
            assert_slabs_agree(stored, weight)


@pytest.mark.parametrize(("checkpoint", "name"), [(name, name) for name in FOLDERS], indirect=["checkpoint"])
def test_a_damage_is_found(checkpoint: Path, name: str) -> None:
    """Nothing but HEALTHY is found as it is made; one scale that is NaN, and an embedding of zeros, are found as well."""
    healthy = HEALTHY.get(name, [])
    assert [finding.defect for finding in _findings(checkpoint)] == healthy
    shard = checkpoint / "model.safetensors"
    tensors = load_file(shard)
    module = "model.layers.0.self_attn.k_proj"
    scale = next(key for key in tensors if key.startswith(f"{module}.") and "scale" in key)
    tensors[scale].view(-1)[0] = torch.nan
    tensors["model.embed_tokens.weight"].zero_()
    save_file(tensors, shard)
    found = {finding.defect: [place.where for place in finding.places] for finding in _findings(checkpoint)}
    assert {defect: places for defect, places in found.items() if defect not in healthy} == {
        "scale_not_finite": [scale], "weight_all_zero": ["model.embed_tokens.weight"],
    }  # fmt: skip


def _findings(folder: Path) -> list[Finding]:
    result = inspect(FolderFiles(folder), weights=True)
    return [finding for finding in result.findings if finding.severity != "note"]
