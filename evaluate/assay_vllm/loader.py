"""Weight loaders: `--load-format assay-strict` trusts nothing, `--load-format assay-emulate` also dequantizes.

vLLM starts with random weights where a checkpoint lacks some: by default it checks only unquantized models, and of those only
the parameters whose layers do nothing after loading, which leaves out every linear layer and every expert. Its check is also
per fused parameter, so that one expert of 256 may be missing. An MTP head without experts then drafts at 0 %.

`enable_weights_track` switches that check on for quantized models too, but then it refuses whole checkpoints: exemptions.py.
"""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from assay_vllm import EMULATE, STRICT
from assay_vllm.census import ExpertCensus
from assay_vllm.dequantize import Dequantizer
from assay_vllm.emulate import CACHE_SCALES, is_rounding, set_cache_scales, set_static_scales
from assay_vllm.exemptions import exempt_parameters

logger = init_logger("vllm.assay")


class StrictLoader(DefaultModelLoader):
    """vLLM's default loader for safetensors, in which every parameter in use and every expert must come from the checkpoint."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._stored: set[str] = set()
        """Names of all tensors that were read for the model."""

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> tuple[str, list[str], bool, str]:
        # The base class knows a fixed list of formats; ours is safetensors on disk.
        own, self.load_config.load_format = self.load_config.load_format, "safetensors"
        try:
            prepared: tuple[str, list[str], bool, str] = super()._prepare_weights(*args, **kwargs)
            return prepared
        finally:
            self.load_config.load_format = own

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors the model loads; ValueError names those that some experts have and others lack."""
        census = ExpertCensus()
        yield from census.watch(self._wanted(super().get_all_weights(model_config, model), model))
        if self.local_expert_ids is None:  # else this rank reads only the experts it owns
            census.check(model_config.get_num_experts())

    def _wanted(self, stream: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream without the tensors that were read only because one that the model loads is in the same shard.

        An MTP draft says by `is_unused_checkpoint_weight` what it does not load, and vLLM drops the shards that hold only such
        tensors (`filter_safetensors_files_by_weight_name` in vllm/model_executor/model_loader/weight_utils.py). Of a layer of
        the target that is cut by a shard boundary, a part is left over: neither complete, nor the draft's concern.
        """
        is_unused = getattr(model, "is_unused_checkpoint_weight", None)
        self._stored = set()
        for name, tensor in stream:
            self._stored.add(name)
            if is_unused is None or not is_unused(name):
                yield name, tensor

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """As vLLM, with its check switched on."""
        self.enable_weights_track = True
        super().load_weights(model, model_config)
        logger.info("%s: %s: every parameter in use came from the checkpoint", STRICT, type(model).__name__)

    def track_weights_loading(self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = True) -> None:
        """vLLM's check with the exemptions it makes for quantized models, which are few, whatever the model is, and ours."""
        if loaded_weights is None:
            raise ValueError(f"{type(model).__name__} does not tell which weights it loaded: use vLLM's own --load-format auto")
        if any(name.endswith(CACHE_SCALES) for name in self._stored):
            check_cache_scales((name for name, _ in model.named_parameters()), loaded_weights)
        exempt = exempt_parameters(model, self._stored)
        super().track_weights_loading(model, loaded_weights | exempt, quantized=True)
        if absent := sorted(exempt - loaded_weights):
            what = f"{len(absent)} parameters are neither stored nor used, first {absent[0]}"
            logger.info("%s: %s: %s", STRICT, type(model).__name__, what)


def check_cache_scales(parameters: Iterable[str], loaded: Collection[str]) -> None:
    """ValueError: some scales of the KV cache came from the checkpoint and others did not: vLLM takes 1 for them in silence."""
    scales = {name for name in parameters if name.endswith(CACHE_SCALES)}
    missing = sorted(scales - set(loaded))
    if missing and len(missing) < len(scales):
        raise ValueError(
            f"{len(missing)} of {len(scales)} scales of the KV cache are not in the checkpoint, first {missing[0]}; vLLM takes "
            "1 for them"
        )


class EmulatedLoader(StrictLoader):
    """Loads a compressed-tensors checkpoint into a model of dense layers."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The dense stream. ValueError names the tensors that a quantized module lacks."""
        dequantizer = Dequantizer(model_config.hf_config.quantization_config, model_config.dtype)
        cache_scales: dict[str, torch.Tensor] = {}
        yield from dequantizer(_without_cache_scales(super().get_all_weights(model_config, model), cache_scales))
        activations = set_static_scales(model, dequantizer.input_scales)
        if unequal := dequantizer.unequal_global_scales():
            logger.warning(
                "%s: %d fused projections have unequal NVFP4 global scales, which are honoured here; vLLM's kernels would "
                "apply one scale to all. First: %s", EMULATE, len(unequal), unequal[0],
            )  # fmt: skip
        num_rounding, num_scaled = sum(map(is_rounding, model.modules())), set_cache_scales(model, cache_scales)
        scaled = f", {num_scaled} by scales of theirs" if num_scaled else ""
        cache = f"; KV cache: {num_rounding} layers float8 tensor static{scaled}" if num_rounding else ""
        logger.info(
            "%s: %s: %d modules dequantized to %s; activations: %s%s",
            EMULATE,
            type(model).__name__,
            dequantizer.num_modules,
            str(model_config.dtype).removeprefix("torch."),
            ", ".join(f"{count} modules {kind}" for kind, count in sorted(activations.items())) or "not quantized",
            cache,
        )


def _without_cache_scales(
    stream: Iterable[tuple[str, torch.Tensor]], cache_scales: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream without scales of the KV cache, which vLLM has no parameters for here; they go into `found`."""
    for name, tensor in stream:
        if name.endswith(CACHE_SCALES):
            cache_scales[name] = tensor.clone()
        else:
            yield name, tensor
