"""Which weights a checkpoint has: the same after a copy and in other shards, others for a fine-tune; and files that say it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from command_errors import one_error, perturbed
from command_line import Run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.identity import weights_sha256
from assay_quantize.checkpoint.importance import check_weights, load_importance


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("source") / "model", num_layers=2, hidden=128, num_experts=2, mtp=False)


def importance_of(source: Path, path: Path, weights: str | None) -> Path:
    """Channel weights of one, for every weight."""
    names = [name for name, header in open_checkpoint(source).tensors.items() if len(header.shape) == 2]
    shapes = open_checkpoint(source).tensors
    ones = {name: torch.ones(shapes[name].shape[1]) for name in names}
    save_file(ones, path, None if weights is None else {"assay_weights": weights})
    return path


def test_a_copy_and_other_shards_have_the_same_weights(source: Path, tmp_path: Path) -> None:
    known = weights_sha256(open_checkpoint(source))
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    assert known is not None and weights_sha256(open_checkpoint(copy)) == known
    together = {name: tensor for path in sorted(copy.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    for path in (*copy.glob("*.safetensors"), copy / "model.safetensors.index.json"):
        path.unlink()
    save_file(together, copy / "model.safetensors", {"format": "pt"})
    assert weights_sha256(open_checkpoint(copy)) == known
    (copy / "model.safetensors").unlink()
    save_file(together | {"model.norm.weight": together["model.norm.weight"] * 2}, copy / "model.safetensors")
    assert weights_sha256(open_checkpoint(copy)) != known


def test_weights_that_are_not_here_have_no_identity(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    checkpoint = open_checkpoint(copy)
    next(copy.glob("*.safetensors")).unlink()
    assert weights_sha256(checkpoint) is None


def test_a_file_of_another_models_weights_is_refused(source: Path, tmp_path: Path) -> None:
    tuned, own = perturbed(source, tmp_path / "tuned", 1), weights_sha256(open_checkpoint(source))
    file = load_importance(importance_of(source, tmp_path / "w.safetensors", own))
    assert check_weights(file, open_checkpoint(source)) is True
    with pytest.raises(PlanError) as refused:
        check_weights(file, open_checkpoint(tuned))
    assert str(refused.value) == (
        f"{file.path}: was made from other weights than those of {tuned}, and says what enters their channels, not these: make "
        f"one with `assay calibrate {tuned} --out FILE`"
    )
    silent = load_importance(importance_of(source, tmp_path / "silent.safetensors", None))
    assert check_weights(silent, open_checkpoint(tuned)) is False


@pytest.mark.slow
def test_quantize_refuses_it_and_says_where_a_file_says_nothing(source: Path, tmp_path: Path, run: Run) -> None:
    tuned = perturbed(source, tmp_path / "tuned", 1)
    file = importance_of(source, tmp_path / "w.safetensors", weights_sha256(open_checkpoint(source)))
    asked = ("-p", "w4a16-mse", "--importance", file)
    said = one_error(run("quantize", tuned, *asked, "--out", tmp_path / "made"))
    assert said.startswith(f"{file}: was made from other weights than those of {tuned}, and says what enters their channels")
    assert not (tmp_path / "made").exists()
    code, _, said = run("quantize", source, *asked, "--out", tmp_path / "own")
    assert code == 0 and "does not say of which weights" not in said, said
    silent = importance_of(source, tmp_path / "silent.safetensors", None)
    code, _, said = run("quantize", source, "-p", "w4a16-mse", "--importance", silent, "--out", tmp_path / "other")
    assert (
        code == 0
        and f"note: {silent}: does not say of which weights it is, so nothing checks that it is of {source}"
        in " ".join(said.split())
    )
