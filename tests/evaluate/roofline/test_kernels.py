"""The table of kernels against what vLLM's own loaders chose for the shipped models (docs/models.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.roofline.devices import DEVICES, device_named
from assay_evaluate.roofline.kernels import RUNS_AS, format_of, runs_as
from assay_quantize.formats.schemes import SCHEMES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def chosen() -> list[tuple[str, str, str]]:
    """(profile, checkpoint, kernel of the experts) of the table under "What vLLM's loaders say"."""
    lines = PAGE.read_text(encoding="utf-8").split("## What vLLM's loaders say")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(profile, row[2], row[3]) for row in rows if len(row) == 6 and row[0] != "models" for profile in row[1].split(", ")]


def test_vllm_chose_a_kernel_of_the_table() -> None:
    rows = chosen()
    assert len(rows) > 40
    for profile_name, checkpoint, kernel in rows:
        device = device_named(load_recipe(ProfileRecipe, profile_name).hardware.gpu)
        scheme = "fp8_block"
        if checkpoint != "reference":
            recipe = load_recipe(PrecisionRecipe, checkpoint)
            scheme = recipe.scheme_of("routed_expert", None) or ""
        runs = runs_as(scheme, device.architecture if device else None)
        assert runs is not None and kernel in runs.kernels, (profile_name, checkpoint, kernel)


def test_every_scheme_and_gpu_is_in_the_table() -> None:
    for scheme in (None, *SCHEMES):
        for device in DEVICES.values():
            assert runs_as(scheme, device.architecture) is not None, scheme
    assert len(RUNS_AS) == 8 * 3


@pytest.mark.parametrize(
    ("scheme", "gpu", "words"),
    [
        ("nvfp4", "H200", "as W4A16 (MARLIN)"), ("nvfp4", "B200", "native (FLASHINFER_TRTLLM)"),
        ("w4a16_g32", "H200", "native (MARLIN)"), ("mxfp8", "H100", "as W8A16 (MARLIN)"), (None, "H200", "native (TRITON)"),
        ("w8a8", "B200", "refused"),
    ],
)  # fmt: skip
def test_what_a_format_runs_as(scheme: str | None, gpu: str, words: str) -> None:
    runs = runs_as(scheme, DEVICES[gpu].architecture)
    assert runs is not None and runs.words == words


@pytest.mark.parametrize(
    ("scheme", "gpu", "computes"),
    [
        ("mxfp4", "RTX PRO 6000", "W4A4"), ("mxfp8", "RTX PRO 6000", "W8A8"), ("mxfp8", "B200", "W8A8"),
        ("nvfp4", "H200", "W4A16"), ("mxfp4", "H200", "W4A16"), ("w8a8", "B200", ""),
    ],
)  # fmt: skip
def test_what_linear_layers_run_as(scheme: str, gpu: str, computes: str) -> None:
    """As vLLM's loaders chose, replayed for GLM-4.7 with all roles in the scheme: Marlin is what only unpacks."""
    runs = runs_as(scheme, DEVICES[gpu].architecture, experts=False)
    assert runs is not None and (runs.computes, runs.native) == (computes, computes in ("W4A4", "W8A8"))


def test_what_is_not_in_the_table() -> None:
    assert format_of("w4afp8") is None and runs_as("w4afp8", "sm90") is None and runs_as("fp8", None) is None
    assert device_named("MI300X") is None
