"""vLLM plugin: strict loading of weights, emulation of formats the hardware lacks, a repair of sampling on CPUs, and
log-probabilities of prompts as arrays.

    python -m vllm.entrypoints.openai.api_server --model DIR --load-format assay-strict
    python -m vllm.entrypoints.openai.api_server --model DIR --quantization assay-emulate --load-format assay-emulate

Emulation serves compressed-tensors checkpoints with their quantized values on any device: weights are dequantized once while
they stream in; activations are quantized and dequantized at the input of every quantized matrix product. What is scored is the
number format, not a kernel, and nothing is said about speed. vLLM calls `register` in every one of its processes.

In: a checkpoint folder, through vLLM. Out: a served model, or an error that names what is missing. May import vLLM, torch and
compressed-tensors, but no other package of this repository: it is installed beside vLLM without their dependencies.
"""

from __future__ import annotations

EMULATE = "assay-emulate"
STRICT = "assay-strict"


def register() -> None:
    """Entry point `vllm.general_plugins`: makes the names above known to vLLM. Idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if EMULATE in QUANTIZATION_METHODS:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from assay_vllm.cpu_sampling import repair
    from assay_vllm.emulate import EmulatedConfig
    from assay_vllm.loader import EmulatedLoader, StrictLoader
    from assay_vllm.packed_logprobs import install

    repair()
    install()
    register_model_loader(STRICT)(StrictLoader)
    register_model_loader(EMULATE)(EmulatedLoader)
    register_quantization_config(EMULATE)(EmulatedConfig)
