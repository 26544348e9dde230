"""AutoRound of one decoder layer (arXiv 2309.05516), through llm-compressor's `AutoRoundModifier`: rounding and clipping are
learned, so that the layer puts out what it did.

The layer gets what the tuned layers before it put out, and is compared with what the untouched layers give. So two states go
from layer to layer: those of the untouched model, and those of the tuned one (`layerwise.py`). AutoRound runs in BF16. A
gradient reaches an expert from the tokens alone that are routed to it; one that gets none is rounded to the nearest.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from auto_round.algorithms.quantization.sign_round import quantizer
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.quantization.calibration import apply_calibration_status
from pydantic import PrivateAttr
from torch import Tensor, nn
from transformers import PretrainedConfig

from assay_quantize.calibration.one_layer import State

UNTOUCHED = {"bits": 16, "act_bits": 16}
FP16_SCALES = (1e-4, 6e4)
"""Magnitudes of a group's largest weight between which its scale, an eighth of that, is learned in FP16, as auto-round does by
itself: FP16 ends at 65,504, and auto-round has at least 1e-5 there. Others are learned in FP32."""


class TunedAlone(AutoRoundModifier):
    """A layer's weights that have a scheme are rounded, all other linears stay.

    llm-compressor names linears to leave alone by parts of names, so that `mlp.gate` takes `mlp.gate_proj` with it. And
    auto-round leaves some alone by the model's type: of GLM-5 all MLPs of layer 0, which each layer is that is handed to it.
    It also casts the whole layer to BF16, where the biases of routers no longer tell experts apart (GLM-5.1 has 34.5 with
    differences of 0.1): these are put back whenever they are used.
    """

    _device: str = PrivateAttr(default="cpu")

    def tune(self, state: Any, layer: nn.Module, inputs: Iterable[State] | None) -> tuple[Iterator[State], bool]:
        """Round the layer's weights, by the inputs that were captured. inputs: of the tuned layers before it, of each
        sequence, hidden states first; None: there are none. Gives what it puts out now, in that form, and whether any step was
        better than none: with losses that are not finite none is, and weights are rounded to the nearest."""
        model, config = state.model, state.model.config
        self._device = str(next(layer.parameters()).device)
        self._q_input = None if inputs is None else _as_autoround(inputs)
        model.config = PretrainedConfig()  # of a type without rules
        collect: Callable[..., Any] = quantizer.collect_best_params
        with _process_as_it_was(), _kept_exact(layer, self._match_autoround_targets(layer)), patch.object(
            quantizer, "collect_best_params", side_effect=collect
        ) as collected:  # fmt: skip
            try:
                self.on_sequential_epoch_end(state, None, modules=list(layer.modules()))  # type: ignore[arg-type]
            finally:
                model.config = config
        layer.to(self._device)  # auto-round leaves it in the memory of the CPU
        return _as_states(self._q_input), bool(collected.called)

    def _update_device_map_for_dp(self, ar_kwargs: dict[str, Any]) -> None:
        """It would take a GPU wherever there is one."""
        ar_kwargs["device_map"] = self._device

    def start_calibration(self, model: nn.Module) -> None:
        """Without a look at embeddings and output head, which are not the layer's."""
        for module in self._match_autoround_targets(model):
            apply_calibration_status(module)

    def get_unquantized_layer_names(self, wrapped_model: nn.Module) -> list[str]:
        return []

    def _match_autoround_targets(self, model: nn.Module) -> set[nn.Module]:
        return {module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None}

    def _build_layer_config_for_autoround(self, wrapped_model: nn.Module) -> dict[str, dict[str, Any]]:
        targets = self._match_autoround_targets(wrapped_model)
        config: dict[str, dict[str, Any]] = {}
        for name, module in wrapped_model.named_modules():
            if module in targets:
                config[name] = self._quant_scheme_to_autoround_config(module.quantization_scheme)
                if not _has_fp16_scales(module.weight, config[name]["group_size"]):
                    config[name]["scale_dtype"] = torch.float32
            elif isinstance(module, nn.Linear):
                config[name] = dict(UNTOUCHED)
        return config


def _has_fp16_scales(weight_OI: Tensor, group_size: int) -> bool:
    """Whether all of a weight's groups are, or all but zeros, as large as `FP16_SCALES`."""
    rows = weight_OI.data.flatten(1)
    groups = rows if group_size < 1 else rows.reshape(len(rows), -1, group_size)
    largest = groups.abs().amax(-1)
    least, most = FP16_SCALES
    return bool(((largest == 0) | ((largest >= least) & (largest <= most))).all())


@contextmanager
def _kept_exact(layer: nn.Module, targets: set[nn.Module]) -> Iterator[None]:
    """Whenever a module is used, its buffers (of routers the biases, to which scores are added) have their dtype and values,
    and so do its parameters that are not rounded, where BF16 cannot hold them."""
    with ExitStack() as stack:
        for module in layer.modules():
            if module in targets:
                continue
            own = module.named_parameters(recurse=False)
            exact = {name: value.data for name, value in own if _is_beyond_bf16(value.data)}
            exact |= {name: value.data for name, value in module.named_buffers(recurse=False) if value.is_floating_point()}
            if exact:
                stack.callback(module.register_forward_pre_hook(_putting_back(exact)).remove)
        yield


def _is_beyond_bf16(value: Tensor) -> bool:
    return value.is_floating_point() and not torch.equal(value.to(torch.bfloat16).to(value.dtype), value)


def _putting_back(exact: Mapping[str, Tensor]) -> Callable[..., None]:
    def put_back(module: nn.Module, *_: Any) -> None:
        for name, value in exact.items():
            getattr(module, name).data = value

    return put_back


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Afterwards. auto-round seeds everything, asks for deterministic algorithms and for other numbers on the screen."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    is_deterministic, warns_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    gpus = range(torch.cuda.device_count())
    with torch.random.fork_rng(gpus), patch.dict(os.environ):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
            vars(torch._tensor_str.PRINT_OPTS).update(options)


def _as_autoround(inputs: Iterable[State]) -> Any:
    """Tensors of each sequence, hidden states in the dtype that it runs in; of what DSA passes on besides, by its name."""
    parts = list(zip(*((state[0].to(torch.bfloat16), *state[1:]) for state in inputs), strict=True))
    if len(parts) == 1:
        return list(parts[0])
    return {"hidden_states": list(parts[0]), "prev_topk_indices": list(parts[1])}


def _as_states(outputs: Any) -> Iterator[State]:
    parts: Sequence[Sequence[Tensor]] = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
    return ((hidden.float(), *others) for hidden, *others in zip(*parts, strict=True))
