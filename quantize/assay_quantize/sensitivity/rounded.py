"""A part's weights as a scheme stores them, and activations as its kernels round them; both back in FP32.

Weights go through the quantizer's own kernels (`kernels.quantize_rows`), with the largest magnitude of the fused group where a
scheme needs one: they are what `assay quantize` would write. Activations are rounded as vLLM's kernels do it, which is
compressed-tensors' rule (the tests compare) but for MXFP4, whose kernel rounds the scale up.

INT4 weights can be as GPTQ leaves them: one calibration of the whole model for each INT4 scheme, from which parts are taken.
`assay quantize` calibrates a mix as a whole, one layer after the other, so that a layer's inputs have the errors of the layers
before it. Here each scheme is calibrated in every part at once, and a part's weights are taken out of that. So a part's damage
is that of weights which were fitted to inputs with the errors of *this* scheme before it, though it stands alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.recipes.calibrated.methods import INTEGERS, GptqCalibration
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.diagnosis.sensitivity import WorstTensor
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.decoding.activations import InputRounding, RoundedInputs, round_activations
from assay_quantize.decoding.compressed_tensors_format import activation_rule
from assay_quantize.decoding.stored_weight import ActivationRule
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels import amax_rows, quantize_rows
from assay_quantize.kernels import reference as definition
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.slabs import amax_key, amax_members
from assay_quantize.sensitivity.parts import Key, Layout

MOST_NAMED = 5
"""Weights of a part that a record names."""


# ------------------------------------------------------------------------------------------------ weights of a calibration
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
        for scheme, uniform_plan in layout.plans.items():
            if scheme not in INTEGERS:
                continue
            requested = uniform_plan.precision_recipe | {"calibration": options.model_dump(mode="json")}
            recipe = PrecisionRecipe.model_validate(requested)
            plan = make_plan(layout.checkpoint, recipe, model=uniform_plan.model, family=layout.family)
            work = folder / f"{options.method}-{scheme}-{sha256_of([requested, dict(layout.checkpoint.data)])[:16]}"
            say(f"{options.method} of {scheme} in every part")
            # the same text for all: it is written once
            record = calibrate_layers(plan, source, work, Text((), options.seed), tokens_of=first, report=say)
            first = first or work
            digests.append([scheme, record.layers])
            files[scheme] = CalibratedFiles(work, record.layers)
            tensors[scheme] = {tensor.name: tensor for of_layer in calibrated_tensors(plan).values() for tensor in of_layer}
        yield CalibratedWeights(files, tensors, sha256_of(digests))
    finally:
        for layers in files.values():
            layers.close()


# ------------------------------------------------------------------------------------------------ weights
class Rounder:
    """Weights of a checkpoint, plain and rounded. Close `reader` yourself."""

    def __init__(self, layout: Layout, reader: SourceReader, calibrated: CalibratedWeights | None = None) -> None:
        """calibrated: weights that are not rounded here, but taken from a calibration."""
        self._layout, self._reader = layout, reader
        self._calibrated = calibrated or CalibratedWeights()
        self._tensors = {scheme: {tensor.name: tensor for tensor in plan.tensors} for scheme, plan in layout.plans.items()}

    @property
    def calibration_sha256(self) -> str | None:
        """Identity of the calibrated weights. None: there are none."""
        return self._calibrated.sha256

    def weights(self, key: Key, scheme: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, w_OI as it is, w_OI as `scheme` gives it back), FP32, of every weight of the part.

        A weight that the source stores in this scheme already comes back as it is. QuantizeError: a weight is not finite.
        """
        plan = self._layout.plans[scheme]
        tensors = [self._tensors[scheme][name] for name in self._layout.weights[key]]
        tensors = [tensor for tensor in tensors if tensor.scheme is not None]
        largest = {group: self._amax(members) for group, members in amax_members(plan, tensors).items()}
        for tensor in tensors:
            rows = self._reader.read_rows(tensor, 0, tensor.shape[0])
            plain = definition.to_torch(rows, tensor.logical_dtype).float()
            if tensor.action != "quantize":
                yield tensor.name, plain, plain
                continue
            if (calibrated := self._calibrated.of(scheme, tensor.name)) is not None:
                parts = self._calibrated.files[scheme].rows(calibrated, 0, tensor.shape[0])
                yield tensor.name, plain, definition.dequantize_rows(parts, rows, tensor.logical_dtype, scheme)
                continue
            amax, dtype = largest.get(amax_key(tensor) or "", (None, None))
            quantized = quantize_rows(
                rows, tensor.logical_dtype, scheme, amax=amax, amax_dtype=dtype, observer=self._layout.observer
            )
            _check_finite(quantized.squared_norm, tensor)
            yield tensor.name, plain, _back(quantized.parts, rows, tensor.logical_dtype, scheme)

    def _amax(self, members: list[TensorPlan]) -> tuple[float, str]:
        dtypes = {member.logical_dtype for member in members}
        largest = 0.0
        for member in members:
            amax = amax_rows(self._reader.read_rows(member, 0, member.shape[0]), member.logical_dtype)
            _check_finite(amax, member)
            largest = max(largest, amax)
        return largest, min(dtypes) if len(dtypes) == 1 else "F32"


def _check_finite(value: float, tensor: TensorPlan) -> None:
    if not math.isfinite(value):
        raise QuantizeError(f"{tensor.name}: holds NaN or infinity; it cannot be quantized, nor its part be measured")


def _back(parts: dict[str, Any], rows: Any, dtype: str, scheme: str) -> Tensor:
    """Kernels with quantized activations apply plain scales to FP32 sums, so that value * scale is not rounded to BF16."""
    row = SCHEMES[scheme]
    if row.layout != "plain":
        return definition.dequantize_rows(parts, rows, dtype, scheme)
    stored = torch.from_numpy(parts["weight"])
    values = stored.view(torch.float8_e4m3fn) if row.weight_dtype == "F8_E4M3" else stored
    return scaled(values, definition.to_torch(parts["weight_scale"], dtype), scheme)


def scaled(values_OI: Tensor, scale: Tensor, scheme: str) -> Tensor:
    """Codes of layout `plain` times their scales, in FP32."""
    row, (rows, columns) = SCHEMES[scheme], values_OI.shape
    wide = scale.float().repeat_interleave(row.block_rows, 0)[:rows].repeat_interleave(row.group_size or columns, 1)
    return values_OI.float() * wide[:, :columns]


def relative_error(rounded: Iterable[tuple[str, Tensor, Tensor]]) -> tuple[float, tuple[WorstTensor, ...]]:
    """Proxy `weights`: (||rounded - plain||^2 / ||plain||^2 of the part, the weights with the largest shares of the error).

    It knows nothing of activations nor of what comes behind a layer: only its order means something, and that within one role
    rather than between roles. It is no divergence, and runs no model, so that any size of model will do.
    """
    errors, norm = {}, 0.0
    for name, plain, back in rounded:
        errors[name] = float(torch.linalg.vector_norm(back - plain, dtype=torch.float64)) ** 2
        norm += float(torch.linalg.vector_norm(plain, dtype=torch.float64)) ** 2
    return (sum(errors.values()) / norm if norm else 0.0), largest_shares(errors)


def largest_shares(values: Mapping[str, float]) -> tuple[WorstTensor, ...]:
    """The largest shares, at most `MOST_NAMED`; none where everything is 0."""
    total = sum(values.values())
    if not total:
        return ()
    order = sorted(values, key=lambda name: (-values[name], name))[:MOST_NAMED]
    return tuple(WorstTensor(name=name, share=values[name] / total) for name in order if values[name])


# ------------------------------------------------------------------------------------------------ activations
@functools.cache
def input_args(scheme: str) -> Any:
    """compressed-tensors' arguments for the inputs of a weight; None: they stay in 16 bits."""
    return compressed_tensors_scheme(scheme).input_activations


@functools.cache
def input_rule(scheme: str) -> ActivationRule:
    """`input_args` as the decoder of checkpoints has it. Scales that a calibration stores are those of the inputs at hand."""
    args = input_args(scheme)
    rule = activation_rule(scheme, None if args is None else args.model_dump())
    return rule if rule.kind != "static" else rule._replace(kind="dynamic", granularity="token", scale=None)


def round_inputs(x: Tensor, scheme: str, global_scale: float | None = None) -> Tensor:
    """Inputs [..., I] as the kernels of a scheme round them; those of a weight-only scheme as they are.

    global_scale: what a calibration stored as `input_global_scale` of NVFP4; None: the scheme's constant.
    """
    return round_activations(x, _rounding(scheme, global_scale))


def _rounding(scheme: str, global_scale: float | None) -> InputRounding:
    return InputRounding(input_rule(scheme), global_scale or SCHEMES[scheme].input_global_scale)


class RoundInputs(RoundedInputs):
    """While it is entered, inputs of every `linear` whose weight begins at one of the addresses are rounded."""

    def __init__(self, scheme_of: Mapping[int, str], global_scale_of: Mapping[int, float] | None = None) -> None:
        """Both by address; the latter as in `round_inputs`."""
        factors = global_scale_of or {}
        super().__init__({address: _rounding(scheme, factors.get(address)) for address, scheme in scheme_of.items()})
