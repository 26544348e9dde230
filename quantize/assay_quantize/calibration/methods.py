"""llm-compressor's modifiers, applied to one decoder layer at a time: what `oneshot` does with them, without its pipeline.

Its sequential pipeline needs the whole model, keeps inputs of layers in memory, and cannot go on after a kill. So the
pipeline is ours (`layerwise.py`), and the arithmetic is theirs: hooks, Hessians, searches, scales, rounding and packing are
calls of llm-compressor 0.14 and compressed-tensors, in the order in which `SequentialPipeline` makes them. A test holds the
result against `oneshot`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from llmcompressor.modifiers.gptq import GPTQModifier, gptq_quantize
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, factorize_hessian, make_empty_hessian
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from torch import Tensor, nn

from assay.errors import QuantizeError
from assay.foreign_text import shown
from assay.recipes.calibrated.methods import (
    AutoRoundCalibration,
    AwqCalibration,
    AwqGptqCalibration,
    Calibrated,
    GptqCalibration,
    SmoothQuantCalibration,
)
from assay.records.plan import TensorPlan
from assay_quantize.calibration.memory import weights_at_once
from assay_quantize.calibration.one_layer import State
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import compressed_tensors_scheme, module_of
from assay_quantize.plan.calibrated import smoothings

OBSERVERS = {"minmax": "memoryless_minmax", "mse": "memoryless_mse"}
"""`observer` of a recipe -> llm-compressor's. Its search is not that of `w4a16-mse` (`kernels/search_reference.py`)."""


@dataclass
class _SharedHessian:
    """A Hessian of modules that have the same inputs. last_input: that was added last, kept so that no other one has its
    address. batches: how many were added."""

    hessian: Tensor
    num_samples: Tensor
    last_input: Tensor | None = None
    batches: int = 0
    members: dict[nn.Module, int] = field(default_factory=dict)


class SharedGPTQ(GPTQModifier):
    """GPTQ whose modules with the same input (q, k and v; gate and up of all experts, as every expert sees every token) share
    one Hessian, which is computed once: the same numbers in a fraction of time and memory."""

    _groups: dict[nn.Module, _SharedHessian] = PrivateAttr(default_factory=dict)
    _recent: list[_SharedHessian] = PrivateAttr(default_factory=list)

    def calibrate_module(self, module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        inputs = args[0]
        group = self._groups.get(module)
        if group is None:
            group = next((other for other in self._recent if other.batches == 1 and other.last_input is inputs), None)
            if group is None:
                device: Any = module.weight.device
                group = _SharedHessian(make_empty_hessian(module, device=device), torch.zeros((), device=device))
                self._recent.append(group)
            self._groups[module] = group
            group.members[module] = 0
        if group.last_input is not inputs:
            group.hessian, group.num_samples = accumulate_hessian(inputs, module, group.hessian, group.num_samples)
            group.last_input, group.batches = inputs, group.batches + 1
        group.members[module] += 1
        self._hessians[module], self._num_samples[module] = group.hessian, group.num_samples

    def compress_modules(self) -> None:
        for group in self._recent:
            group.last_input = None
            assert set(group.members.values()) == {group.batches}, "modules with one Hessian had different inputs"
        self._recent.clear()
        self._groups.clear()
        with patch.object(gptq_quantize, "factorize_hessian", _factorized):
            super().compress_modules()  # type: ignore[no-untyped-call]


def _factorized(weights: Tensor, hessians: Tensor, dampening: float, fell_back: Tensor) -> Tensor:
    """llm-compressor's factors, but for two things. Columns whose inputs were all zero keep their weights, which it would make
    zero, though other text may need them: they are rounded to the nearest, and the other columns do not change. And where
    inputs were too large to be squared, weights are rounded to the nearest, as where it cannot factorize: it would end with an
    error. [number of weights, ...]"""
    diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1)
    diagonal.masked_fill_(diagonal == 0, 1.0)
    unit = torch.eye(hessians.shape[-1], dtype=hessians.dtype, device=hessians.device)
    is_lost = ~(torch.isfinite(hessians).flatten(1).all(1) & torch.isfinite(diagonal.sum(1)))
    hessians[is_lost] = unit
    try:
        factors: Tensor = factorize_hessian(weights, hessians, dampening, fell_back)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        factors, is_lost = hessians, torch.ones_like(fell_back)
    is_lost |= ~torch.isfinite(factors).flatten(1).all(1)
    factors[is_lost] = unit
    # no column is corrected for another: whoever verifies the weights must know that all are rounded to the nearest
    fell_back |= is_lost | ~(factors.triu(1) != 0).flatten(1).any(1)
    return factors


@dataclass(frozen=True)
class LayerResult:
    """tensors: output of the plan -> its value, in the memory of the CPU. fell_back: weights that could only be rounded to
    the nearest. tuned: what the layer puts out after AutoRound, of each sequence; empty under other methods."""

    tensors: dict[str, Tensor]
    fell_back: tuple[str, ...]
    tuned: Iterable[State] = ()


class Method:
    """One layer's calibration: inputs pass in each of its `watches`, then `finish`."""

    def __init__(self, options: Calibrated, observer: str, tensors: Sequence[TensorPlan]) -> None:
        """tensors: those of the layer that are calibrated."""
        rounded = [tensor for tensor in tensors if tensor.action == "quantize"]
        self._tensors = {module_of(tensor.name): tensor for tensor in rounded}
        self._smoothed = [tensor for tensor in tensors if tensor.action != "quantize"]
        self._schemes: dict[str, Any] = {}
        groups = {}
        for number, scheme in enumerate(sorted({str(tensor.scheme) for tensor in rounded})):
            group: Any = compressed_tensors_scheme(scheme)
            # one target that is all these modules: compressed-tensors compares each module with each target, in Python and
            # several times for a layer: with 768 names a pass takes 0.67 s, with one expression 0.027 s (decision 189)
            names = [name for name, tensor in self._tensors.items() if tensor.scheme == scheme]
            group.targets = [f"re:(?:{'|'.join(map(re.escape, names))})$"]
            group.weights.observer = OBSERVERS[observer]
            groups[f"group_{number}"] = self._schemes[scheme] = group
        self._rounding: Any = _rounding(options, groups, weights_at_once(rounded))
        self._is_tuned = isinstance(options, AutoRoundCalibration)
        self._scaling: Any = None
        """What scales weights before they are rounded."""
        scaled = smoothings(options.method, rounded, self._smoothed)
        if isinstance(options, SmoothQuantCalibration):
            pairs: list[tuple[Any, ...] | list[Any]] = [[list(smoothing.balance), smoothing.smooth] for smoothing in scaled]
            self._scaling = SmoothQuantModifier(smoothing_strength=options.strength, mappings=pairs)
        elif isinstance(options, AwqCalibration | AwqGptqCalibration):
            mappings = [AWQMapping(smoothing.smooth, list(smoothing.balance)) for smoothing in scaled]
            self._scaling = AWQModifier(
                mappings=mappings, n_grid=options.grid, duo_scaling=options.duo_scaling, offload_device=None
            )

    def watches(self, model: Any) -> Iterator[AbstractContextManager[None]]:
        """One for each time that all inputs have to pass: what passes inside it is what the method sees. GPTQ after AWQ has to
        see inputs as AWQ scaled them, so they pass twice."""
        from llmcompressor.core import active_session

        self._state = state = active_session().state
        state.model, state.loss_masks, state.sequential_prefetch = model, None, False
        self._scaled = self._scaling is None
        state.data.calib = ()  # SmoothQuant asks whether there is any
        modifiers = [self._rounding] if self._scaling is None else [self._scaling, self._rounding]
        for modifier in modifiers:
            modifier.on_initialize(state)
        if self._scaling is not None and isinstance(self._rounding, SharedGPTQ):
            yield _watched(model, [self._scaling], state, every_expert=True)
            self._scale(model)
            modifiers = [self._rounding]
        yield _watched(model, modifiers, state, every_expert=not self._is_tuned)

    def _scale(self, model: Any) -> None:
        """Afterwards norms and routers are what is stored, in the dtype that they had."""
        from llmcompressor.utils.helpers import DisableQuantization

        with torch.no_grad(), DisableQuantization(model), ExitStack() as stack:
            if not torch.accelerator.is_available():  # AWQ pins inputs for copies to a GPU
                stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda *args, **kwargs: None))
            try:
                self._scaling.on_sequential_epoch_end(self._state, None)
            except Exception as problem:
                if type(problem) is not Exception:  # AWQ raises a bare one where no scales give a finite loss
                    raise
                raise QuantizeError(f"{shown(problem)}; take a precision without scaling: w4a16-gptq") from None
        self._scaling.on_calibration_end(self._state, None)
        for tensor in self._smoothed:
            parameter = model.get_parameter(tensor.name)
            parameter.data = parameter.data.to(TORCH_DTYPES[tensor.outputs[0].dtype]).to(parameter.dtype)
        self._scaled = True

    def finish(self, model: Any, layer: nn.Module, tuned: Iterable[State] | None = None) -> LayerResult:
        """Round the weights. They are rounded as the source has them: in its dtype, which is that of the scales; by AutoRound,
        in BF16. tuned: what the layers before it put out after AutoRound, of each sequence.

        Afterwards the layer's weights are those that llm-compressor passes inputs of the next layer through, in the dtype that
        they had: under GPTQ what the checkpoint will give, else the scaled ones before they are rounded. AutoRound leaves its
        own: inputs of the next layer have to be made before.
        """
        from llmcompressor.utils.helpers import DisableQuantization

        if not self._scaled:
            self._scale(model)
        modules = {name: model.get_submodule(name) for name in self._tensors}
        dtype = next(iter(modules.values())).weight.dtype
        tensors: dict[str, Tensor] = {}
        for tensor in self._smoothed:
            (output,) = tensor.outputs
            tensors[output.name] = model.get_parameter(tensor.name).data.to(TORCH_DTYPES[output.dtype]).to("cpu")
        put_out: Iterable[State] = ()
        fell_back: Sequence[str] = ()
        if self._is_tuned:
            with plain_forward(model):
                put_out, is_better = self._rounding.tune(self._state, layer, tuned)
            fell_back = () if is_better else tuple(self._tensors)
        else:
            for name, module in modules.items():
                module.weight.data = module.weight.data.to(TORCH_DTYPES[self._tensors[name].logical_dtype])
            with torch.no_grad(), DisableQuantization(model):
                self._rounding.on_sequential_epoch_end(self._state, None, modules=list(layer.modules()))
        if isinstance(self._rounding, SharedGPTQ):
            fell_back = tuple(self._rounding._rtn_fallback_module_names)
        for name, module in modules.items():
            tensors |= self._packed(self._tensors[name], module)
        self._rounding.on_calibration_end(self._state, None)
        for module in modules.values():
            module.weight.data = module.weight.data.to(dtype)
        self._state.model = None
        return LayerResult(tensors, tuple(sorted(fell_back)), put_out)

    def _packed(self, tensor: TensorPlan, module: nn.Module) -> dict[str, Tensor]:
        """The weight as compressed-tensors stores it, by the names of the plan."""
        from compressed_tensors.compressors import BaseCompressor

        scheme = self._schemes[str(tensor.scheme)]
        dtype = TORCH_DTYPES[tensor.logical_dtype]
        given = {"weight": module.weight.data, "weight_scale": module.weight_scale.data.to(dtype)}
        if not scheme.weights.symmetric:
            given["weight_zero_point"] = module.weight_zero_point.data
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format.value))
        packed = compressor.compress(given, scheme)
        if isinstance(self._rounding, SharedGPTQ):
            module.weight.data = compressor.decompress(packed, scheme)["weight"].to(dtype)
        prefix = module_of(tensor.name)
        parts = {f"{prefix}.{part}": value.to("cpu").contiguous() for part, value in packed.items()}
        return {output.name: parts[output.name] for output in tensor.outputs}


def _rounding(options: Calibrated, groups: Mapping[str, Any], at_once: int) -> Any:
    """What rounds weights: GPTQ, AutoRound, or to the nearest."""
    if isinstance(options, AutoRoundCalibration):
        from assay_quantize.calibration.autoround import TunedAlone  # it changes transformers when it is imported

        return TunedAlone(
            config_groups=dict(groups), iters=options.iterations, batch_size=options.batch, enable_torch_compile=False
        )
    if isinstance(options, GptqCalibration | AwqGptqCalibration):
        order = None if options.activation_order == "none" else options.activation_order
        return SharedGPTQ(
            config_groups=dict(groups),
            block_size=options.block_size,
            dampening_frac=options.dampening,
            actorder=order,
            batched_quantization=at_once,
        )
    return QuantizationModifier(config_groups=dict(groups))


@contextmanager
def _watched(model: Any, modifiers: Sequence[Any], state: Any, *, every_expert: bool) -> Iterator[None]:
    """every_expert: sees every token, which changes nothing but last bits in what a layer puts out."""
    from llmcompressor.modeling.moe.context import moe_calibration_context
    from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context

    for modifier in modifiers:
        modifier.on_calibration_start(state, None)
    experts = moe_calibration_context() if every_expert else nullcontext()
    with calibration_forward_context(model), DisableQuantization(model), experts:
        yield


@contextmanager
def plain_forward(model: Any) -> Iterator[None]:
    """No hooks, the real routing, and no rounding on the way: the weights are what the checkpoint will give already."""
    from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context

    with calibration_forward_context(model), DisableQuantization(model):
        yield
