"""Which kernel vLLM takes for quantized experts on a GPU, and whether that computes in the format or only unpacks it.

From vLLM 0.32 (`fused_moe/oracle/*.py`, `experts/*._supports_current_device`). docs/models.md has what vLLM's own loaders chose
for each shipped model; a test holds this table against it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from assay_evaluate.roofline.devices import Architecture

Format = Literal["bf16", "w4a16", "fp8", "nvfp4a16", "nvfp4", "mxfp4", "mxfp8", "w8a8"]


class RunsAs(NamedTuple):
    """native: computes as the format says; else `computes` is another format, and a score taken there is one of that.

    computes: empty: vLLM takes a kernel whose compiled code refuses the GPU.

    kernels: vLLM's names of the backends it takes, the first by default.
    """

    native: bool
    computes: str
    kernels: tuple[str, ...]

    @property
    def words(self) -> str:
        """`native (MARLIN)`, `as W4A16 (MARLIN)`, `refused`."""
        if not self.computes:
            return "refused"
        return f"{'native' if self.native else f'as {self.computes}'} ({self.kernels[0]})"


_MARLIN_W4 = RunsAs(True, "W4A16", ("MARLIN",))
_BF16 = RunsAs(True, "BF16", ("TRITON",))
_INT8 = RunsAs(True, "W8A8", ("TRITON",))
_NO_INT8 = RunsAs(False, "", ("TRITON",))
"""Linear layers in INT8 have no compiled kernel for Blackwell (docs/preflight.md, `loading`)."""
RUNS_AS: dict[tuple[Format, Architecture], RunsAs] = {
    ("bf16", "sm90"): _BF16,
    ("bf16", "sm100"): RunsAs(True, "BF16", ("FLASHINFER_TRTLLM", "TRITON")),
    ("bf16", "sm120"): _BF16,
    ("w4a16", "sm90"): _MARLIN_W4,
    ("w4a16", "sm100"): _MARLIN_W4,
    ("w4a16", "sm120"): _MARLIN_W4,
    ("fp8", "sm90"): RunsAs(True, "W8A8", ("TRITON", "VLLM_CUTLASS", "FLASHINFER_CUTLASS")),
    ("fp8", "sm100"): RunsAs(True, "W8A8", ("FLASHINFER_TRTLLM", "VLLM_CUTLASS", "TRITON")),
    ("fp8", "sm120"): RunsAs(True, "W8A8", ("TRITON", "DEEPGEMM")),
    ("nvfp4a16", "sm90"): _MARLIN_W4,
    ("nvfp4a16", "sm100"): _MARLIN_W4,
    ("nvfp4a16", "sm120"): _MARLIN_W4,
    ("nvfp4", "sm90"): RunsAs(False, "W4A16", ("MARLIN",)),
    ("nvfp4", "sm100"): RunsAs(True, "W4A4", ("FLASHINFER_TRTLLM",)),
    ("nvfp4", "sm120"): RunsAs(True, "W4A4", ("VLLM_CUTLASS",)),
    ("mxfp4", "sm90"): RunsAs(False, "W4A16", ("MARLIN",)),
    ("mxfp4", "sm100"): RunsAs(True, "W4A4", ("FLASHINFER",)),
    ("mxfp4", "sm120"): RunsAs(False, "W4A16", ("MARLIN",)),
    ("mxfp8", "sm90"): RunsAs(False, "W8A16", ("MARLIN",)),
    ("mxfp8", "sm100"): RunsAs(True, "W8A8", ("FLASHINFER_TRTLLM",)),
    ("mxfp8", "sm120"): RunsAs(False, "W8A16", ("MARLIN",)),
    ("w8a8", "sm90"): _INT8,
    ("w8a8", "sm100"): _NO_INT8,
    ("w8a8", "sm120"): _NO_INT8,
}
"""(format of the routed experts, GPU) -> what runs. FLASHINFER_CUTLASS: FP8 blocks under expert parallelism on Hopper."""
LINEAR: dict[tuple[Format, Architecture], RunsAs] = {
    ("mxfp4", "sm120"): RunsAs(True, "W4A4", ("FlashInferMxFp4LinearKernel",)),
    ("mxfp8", "sm120"): RunsAs(True, "W8A8", ("FlashInferCutlassMxfp8LinearKernel",)),
}
"""Where linear layers fare otherwise than experts: FlashInfer's kernels for them take every GPU from SM 100 on."""


def format_of(scheme: str | None) -> Format | None:
    """Of a scheme as plans and precision recipes name it (`w4a16_g32`, `fp8_block`); None as scheme: unquantized.

    None as result: no format that the table knows.
    """
    name = (scheme or "bf16").lower().replace("-", "_")
    for format_ in ("nvfp4a16", "nvfp4", "mxfp4", "mxfp8", "w4a16", "w8a8", "fp8", "bf16"):
        if name == format_ or name.startswith(f"{format_}_"):
            return format_
    return None


def runs_as(scheme: str | None, architecture: Architecture | None, *, experts: bool = True) -> RunsAs | None:
    """experts: of routed experts, else of linear layers. None: the scheme or the GPU is not in the table."""
    format_ = format_of(scheme)
    if format_ is None or architecture is None:
        return None
    return (RUNS_AS if experts else RUNS_AS | LINEAR)[format_, architecture]
