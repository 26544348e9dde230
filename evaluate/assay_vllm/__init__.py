"""vLLM plugin: serve compressed-tensors checkpoints with their quantized values on a device that lacks the kernels.

    python -m vllm.entrypoints.openai.api_server --model DIR --quantization assay-emulate --load-format assay-emulate

Weights are dequantized once while they stream in; activations are quantized and dequantized at the input of every quantized
matrix product. What is scored is the number format, not a kernel, and nothing is said about speed. Importing this package is
light: vLLM calls `register` in every one of its processes, also when nothing is emulated.
"""

from __future__ import annotations

NAME = "assay-emulate"


def register() -> None:
    """Entry point `vllm.general_plugins`: makes `--quantization` and `--load-format assay-emulate` known. Idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if NAME in QUANTIZATION_METHODS:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from assay_vllm.emulate import EmulatedConfig
    from assay_vllm.loader import EmulatedLoader

    register_quantization_config(NAME)(EmulatedConfig)
    register_model_loader(NAME)(EmulatedLoader)
