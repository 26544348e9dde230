"""Weight loaders: `--load-format assay-strict` trusts nothing, `--load-format assay-emulate` also dequantizes.

vLLM starts with random weights where a checkpoint lacks some: by default it checks only unquantized models, and of those only
the parameters whose layers do nothing after loading, which leaves out every linear layer and every expert. Its check is also
per fused parameter, so that one expert of 256 may be missing. An MTP head without experts then drafts at 0 %.
"""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from assay_vllm import EMULATE, STRICT
from assay_vllm.census import ExpertCensus
from assay_vllm.dequantize import Dequantizer
from assay_vllm.emulate import set_static_scales

logger = init_logger("vllm.assay")


class StrictLoader(DefaultModelLoader):
    """vLLM's default loader for safetensors, in which every parameter and every expert must come from the checkpoint."""

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
        """The stream of the checkpoint; ValueError names tensors that some experts have and others lack."""
        census = ExpertCensus()
        yield from census.watch(super().get_all_weights(model_config, model))
        if self.local_expert_ids is None:  # else this rank reads only the experts it owns
            census.check(model_config.get_num_experts())

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """As vLLM, with its check switched on."""
        self.enable_weights_track = True
        super().load_weights(model, model_config)
        logger.info("%s: %s: every parameter came from the checkpoint", STRICT, type(model).__name__)

    def track_weights_loading(self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = True) -> None:
        """vLLM's check with the exemptions it makes for quantized models, which are few, whatever the model is."""
        if loaded_weights is None:
            raise ValueError(f"{type(model).__name__} does not tell which weights it loaded: use vLLM's own --load-format auto")
        super().track_weights_loading(model, loaded_weights, quantized=True)


class EmulatedLoader(StrictLoader):
    """Loads a compressed-tensors checkpoint into a model of dense layers."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The dense stream. ValueError names the tensors that a quantized module lacks."""
        dequantizer = Dequantizer(model_config.hf_config.quantization_config, model_config.dtype)
        yield from dequantizer(super().get_all_weights(model_config, model))
        activations = set_static_scales(model, dequantizer.input_scales)
        unequal = dequantizer.unequal_global_scales()
        if unequal:
            logger.warning(
                "%s: %d fused projections have unequal NVFP4 global scales, which are honoured here; vLLM's kernels would "
                "apply one scale to all. First: %s", EMULATE, len(unequal), unequal[0],
            )  # fmt: skip
        logger.info(
            "%s: %s: %d modules dequantized to %s; activations: %s",
            EMULATE,
            type(model).__name__,
            dequantizer.num_modules,
            str(model_config.dtype).removeprefix("torch."),
            ", ".join(f"{count} modules {kind}" for kind, count in sorted(activations.items())) or "not quantized",
        )
