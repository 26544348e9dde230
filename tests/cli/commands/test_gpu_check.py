"""`assay diagnose gpu-check`: which formats it checks."""

from __future__ import annotations

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_pipeline.gpu_checkpoints import FORMATS
from assay_quantize.formats.schemes import SCHEMES


def test_every_scheme_is_checked_once() -> None:
    schemes = [scheme for name in FORMATS for scheme in load_recipe(PrecisionRecipe, name).schemes]
    assert sorted(schemes) == sorted(SCHEMES.keys() - {"fp8_static"}), "that one needs a calibration file"
