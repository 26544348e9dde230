"""`--load-format assay-emulate`: vLLM's default loader with a dequantizer in its stream and the strict check always on."""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from assay_vllm import NAME
from assay_vllm.dequantize import Dequantizer
from assay_vllm.emulate import set_static_scales

logger = init_logger(f"vllm.{NAME}")


class EmulatedLoader(DefaultModelLoader):
    """Loads a compressed-tensors checkpoint into a model of dense layers; every parameter must come from it."""

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
        """The dense stream. ValueError names the tensors that a quantized module lacks."""
        dequantizer = Dequantizer(model_config.hf_config.quantization_config, model_config.dtype)
        yield from dequantizer(super().get_all_weights(model_config, model))
        activations = set_static_scales(model, dequantizer.input_scales)
        unequal = dequantizer.unequal_global_scales()
        if unequal:
            logger.warning(
                "%s: %d fused projections have unequal NVFP4 global scales, which are honoured here; vLLM's kernels would "
                "apply one scale to all. First: %s", NAME, len(unequal), unequal[0],
            )  # fmt: skip
        logger.info(
            "%s: %s: %d modules dequantized to %s; activations: %s",
            NAME,
            type(model).__name__,
            dequantizer.num_modules,
            str(model_config.dtype).removeprefix("torch."),
            ", ".join(f"{count} modules {kind}" for kind, count in sorted(activations.items())) or "not quantized",
        )

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """As vLLM, but a parameter that is not in the checkpoint is an error (vLLM checks unquantized models only)."""
        self.enable_weights_track = True
        super().load_weights(model, model_config)
