"""Our strict loader, fed with meta tensors; what it hands over is followed to the parameters that take it."""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from assay_vllm.loader import StrictLoader
from assay_vllm.replay.headers import DTYPES, Shards, in_layers
from assay_vllm.replay.stand_ins import replaced

_NAME = "_assay_name"


def _name_of(tensor: torch.Tensor) -> str | None:
    """Of the checkpoint's tensor that this is, or is a part of: some classes sort all of them before they cut a rank's part."""
    whole = tensor if tensor._base is None else tensor._base
    name: str | None = getattr(tensor, _NAME, None) or getattr(whole, _NAME, None)
    return name


class ReplayLoader(StrictLoader):
    """The loader of the server, but for where tensors come from.

    layers: `shards` hold only these layers (`model.layers.3`) and what is in no layer, and no other parameter is asked for;
    None: everything.
    """

    def __init__(self, load_config: LoadConfig, shards: Shards, layers: Collection[str] | None) -> None:
        super().__init__(load_config)
        self._shards, self._layers = shards, layers
        self.at: str | None = None
        """The tensor that was handed over last."""
        self.taken: dict[str, list[str]] = {}
        """Tensor of the checkpoint -> parameters of the model that took it."""
        self.inside = 0
        """Loaders of parameters that are running."""
        self.converted: set[str] = set()
        """Modules of the checkpoint whose weight the model's loader made into another dtype: FP8 dequantized to BF16."""
        self._dtype: torch.dtype | None = None

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As vLLM: without shards in which the model wants nothing (`filter_safetensors_files_by_weight_name`)."""
        unused = source.is_unused_weight
        shards = {file: tensors for file, tensors in self._shards.items() if unused is None or not all(map(unused, tensors))}
        for tensors in (shards or self._shards).values():
            for name, (dtype, shape) in tensors.items():
                tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
                setattr(tensor, _NAME, name)
                self.at, self._dtype = name, tensor.dtype
                yield source.prefix + name, tensor

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As the server does. ValueError and whatever vLLM raises: the checkpoint is refused."""
        for name, parameter in model.named_parameters():
            self._follow(name, parameter)
        with replaced(torch.Tensor, "copy_", self._copy_into(model)):
            super().load_weights(model, model_config)
        self.at = None

    def track_weights_loading(self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = True) -> None:
        """The check of the server; parameters of layers that were not loaded are not asked for."""
        self.at = None
        if loaded_weights is not None and self._layers is not None:
            names = (name for name, _ in model.named_parameters())
            loaded_weights = loaded_weights | {name for name in names if not in_layers(name, self._layers)}
        super().track_weights_loading(model, loaded_weights, quantized)

    def _follow(self, name: str, parameter: Any) -> None:
        load: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)

        @functools.wraps(load)
        def followed(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                result = load(*args, **kwargs)
            finally:
                self.inside -= 1
            if result is not False:  # an expert of another rank
                weight: torch.Tensor = args[1] if len(args) > 1 else kwargs["loaded_weight"]
                stored = _name_of(weight) or self.at
                if stored is not None:
                    self.taken.setdefault(stored, []).append(name)
                if stored is not None and not hasattr(weight, _NAME) and weight.dtype != self._dtype:
                    self.converted.add(stored.rpartition(".")[0])
            return result

        parameter.weight_loader = followed

    def _copy_into(self, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        """`Tensor.copy_`, which also follows what a model copies into its parameters itself, without their loaders: attention
        sinks of gpt-oss and MiMo-V2; and into buffers, by which some models multiply: `layer_scalar` of Gemma 4."""
        held = itertools.chain(model.named_buffers(), model.named_parameters())
        names = {tensor.untyped_storage()._cdata: name for name, tensor in held}
        copy = torch.Tensor.copy_

        def followed(tensor: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = copy(tensor, source, *args, **kwargs)
            if not self.inside:
                name = names.get(tensor.untyped_storage()._cdata)
                stored = _name_of(source) or self.at
                if name is not None and stored is not None:
                    self.taken.setdefault(stored, []).append(name)
            return result

        return followed
