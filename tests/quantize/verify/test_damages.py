"""The damages of tests/support/damages.py, a few precisions of them; `make damages` tries all."""

from __future__ import annotations

from pathlib import Path

import pytest
from damages import OF_CALIBRATED, OF_THE_FOLDER, OF_WEIGHTS, Damage, damaged_copies, make_calibrated, make_checkpoints

from assay_quantize.verify.verify import verify

Checkpoints = tuple[Path, dict[str, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("damages"), ("w4a16-asym", "nvfp4-fp8-attention"))


@pytest.mark.slow
@pytest.mark.parametrize("damages", [OF_WEIGHTS, OF_THE_FOLDER], ids=["of weights", "of the folder"])
def test_every_damage_is_found(made: Checkpoints, tmp_path: Path, damages: tuple[Damage, ...]) -> None:
    """With the manifest left by anybody; with its hashes forged with the source, or without where the folder shows it."""
    source, checkpoints = made
    missed = []
    for precision, damage, copy in damaged_copies(checkpoints, damages, tmp_path):
        if verify(copy.folder).passed:
            missed.append((precision, damage.name, "no source, manifest left"))
        copy.forge()
        if verify(copy.folder, source=source).passed:
            missed.append((precision, damage.name, "source, manifest forged"))
        if not damage.needs_source and verify(copy.folder).passed:
            missed.append((precision, damage.name, "no source, manifest forged"))
    assert missed == []


@pytest.mark.slow
def test_every_damage_of_calibrated_weights_is_found(tmp_path: Path) -> None:
    """With digests of layers forged as well, but for those that another text would have given; with the digests left, all, but
    for what only the source contradicts."""
    source, checkpoints = make_calibrated(tmp_path, ("gptq", "awq"))
    for checkpoint in checkpoints.values():
        assert verify(checkpoint, source=source).damages == ()
    missed = []
    for kind, damage, copy in damaged_copies(checkpoints, OF_CALIBRATED, tmp_path):
        if verify(copy.folder, source=source if damage.is_claim else None).passed:
            missed.append((kind, damage.name, "manifest left"))
        copy.forge()
        if verify(copy.folder, source=source).passed and kind not in damage.beyond:
            missed.append((kind, damage.name, "source, manifest forged"))
    assert missed == []
