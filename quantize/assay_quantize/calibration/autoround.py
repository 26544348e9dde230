"""AutoRound of one decoder layer (arXiv 2309.05516), through llm-compressor's `AutoRoundModifier`: rounding and clipping are
learned, so that the layer puts out what it did.

The layer gets what the tuned layers before it put out, and is held against what the untouched layers give. So two states go
from layer to layer: those of the untouched model, and those of the tuned one (`second half` of a state, see `layerwise.py`).
AutoRound runs in BF16. A gradient reaches an expert from the tokens alone that are routed to it; one that gets none is rounded
to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.quantization.calibration import apply_calibration_status
from pydantic import PrivateAttr
from torch import Tensor, nn
from transformers import PretrainedConfig

from assay_quantize.calibration.skeleton import State

UNTOUCHED = {"bits": 16, "act_bits": 16}


class TunedAlone(AutoRoundModifier):
    """A layer's weights that have a scheme are rounded, all other linears stay.

    llm-compressor names linears to leave alone by parts of names, so that `mlp.gate` takes `mlp.gate_proj` with it. And
    auto-round leaves some alone by the model's type: of GLM-5 all MLPs of layer 0, which each layer is that is handed to it.
    """

    _device: str = PrivateAttr(default="cpu")

    def tune(self, state: Any, layer: nn.Module, inputs: Iterable[State] | None) -> Iterator[State]:
        """Round the layer's weights, by the inputs that were captured. inputs: of the tuned layers before it, of each
        sequence, hidden states first; None: there are none. Gives what it puts out now, alike."""
        model, config = state.model, state.model.config
        self._device = str(next(layer.parameters()).device)
        self._q_input = None if inputs is None else _as_autoround(inputs)
        model.config = PretrainedConfig()  # of a type without rules
        try:
            self.on_sequential_epoch_end(state, None, modules=list(layer.modules()))  # type: ignore[arg-type]
        finally:
            model.config = config
        layer.to(self._device)  # auto-round leaves it in the memory of the CPU
        return _as_states(self._q_input)

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
        made: dict[str, dict[str, Any]] = super()._build_layer_config_for_autoround(wrapped_model)
        targets = self._match_autoround_targets(wrapped_model)
        others = {name: dict(UNTOUCHED) for name, module in wrapped_model.named_modules()
                  if isinstance(module, nn.Linear) and module not in targets}  # fmt: skip
        return made | others


def _as_autoround(inputs: Iterable[State]) -> Any:
    """Tensors of each sequence, hidden states in the dtype that it runs in; of what DSA passes on besides, by its name."""
    parts = list(zip(*((state[0].to(torch.bfloat16), *state[1:]) for state in inputs), strict=True))
    if len(parts) == 1:
        return list(parts[0])
    return {"hidden_states": list(parts[0]), "prev_topk_indices": list(parts[1])}


def _as_states(made: Any) -> Iterator[State]:
    parts: Sequence[Sequence[Tensor]] = list(made.values()) if isinstance(made, Mapping) else [made]
    return ((hidden.float(), *others) for hidden, *others in zip(*parts, strict=True))
