"""INT4 weights as GPTQ leaves them: one calibration of the whole model for each INT4 scheme, from which parts are taken.

`assay quantize` calibrates a mix as a whole, one layer after the other, so that a layer's inputs have the errors of the layers
before it. Here each scheme is calibrated in every part at once, and a part's weights are taken out of that. So a part's damage
is that of weights which were fitted to inputs with the errors of *this* scheme before it, though it stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from assay.callbacks import Say
from assay.recipes.calibrated.methods import INTEGERS, GptqCalibration
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.plan.planner import make_plan
from assay_quantize.sensitivity.parts import Layout


@dataclass(frozen=True)
class CalibratedWeights:
    """Of each INT4 scheme the files with its weights, and which weights those are. sha256: identity of all of them."""

    files: Mapping[str, CalibratedFiles] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, TensorPlan]] = field(default_factory=dict)
    sha256: str | None = None

    def of(self, scheme: str, name: str) -> TensorPlan | None:
        """The weight as it was planned for the calibration. None: it was rounded without one."""
        return self.tensors.get(scheme, {}).get(name)


@contextmanager
def calibrated_weights(
    layout: Layout, source: Path, folder: Path, options: GptqCalibration, say: Say
) -> Iterator[CalibratedWeights]:
    """Calibrate every INT4 scheme of `layout` on the model's own text, in `folder`; what is finished there is not done again.

    Needs the model in memory for the text. Raises QuantizeError like `calibration.layerwise.calibrate_layers`.
    """
    from assay_quantize.calibration.layerwise import calibrate_layers
    from assay_quantize.calibration.text import Text

    files: dict[str, CalibratedFiles] = {}
    tensors: dict[str, dict[str, TensorPlan]] = {}
    digests = []
    first: Path | None = None
    try:
        for scheme, of_scheme in layout.plans.items():
            if scheme not in INTEGERS:
                continue
            asked = of_scheme.precision_recipe | {"calibration": options.model_dump(mode="json")}
            recipe = PrecisionRecipe.model_validate(asked)
            plan = make_plan(layout.checkpoint, recipe, model=of_scheme.model, family=layout.family)
            work = folder / f"{options.method}-{scheme}-{sha256_of([asked, dict(layout.checkpoint.data)])[:16]}"
            say(f"{options.method} of {scheme} in every part")
            # the same text for all: it is written once
            made = calibrate_layers(plan, source, work, Text((), options.seed), tokens_of=first, report=say)
            first = first or work
            digests.append([scheme, made.layers])
            files[scheme] = CalibratedFiles(work, made.layers)
            tensors[scheme] = {one.name: one for of_layer in calibrated_tensors(plan).values() for one in of_layer}
        yield CalibratedWeights(files, tensors, sha256_of(digests))
    finally:
        for one in files.values():
            one.close()
