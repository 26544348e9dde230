"""Kernels foreseen against the lines of a log, as vLLM 0.32 writes them."""

from __future__ import annotations

import pytest
from replayed import HOPPER, replayed

from assay.records.preflight.gpu_check import ForeseenKernel, Kernels
from assay_evaluate.diagnosis.gpu_check.judgement import compare_kernels, foreseen_refusal, is_named_in, keeps_activations


def test_a_kernel_is_named_by_its_backend_or_its_class() -> None:
    foreseen = replayed(("linear", "w4a16", "MacheteLinearKernel"), ("experts", "w4a16", "MARLIN (MarlinExperts)"))
    assert compare_kernels(foreseen, HOPPER) == Kernels(
        foreseen=(
            ForeseenKernel(what="linear", kernel="MacheteLinearKernel", line=HOPPER[0]),
            ForeseenKernel(what="experts", kernel="MARLIN (MarlinExperts)", line=HOPPER[3]),
        ),
        unknown=None,
        chosen=HOPPER,
    )


def test_a_kernel_that_ran_for_the_draft_alone_is_not_named() -> None:
    foreseen = replayed(("experts", "fp8_block", "TRITON (TritonExperts)"))
    result = compare_kernels(foreseen, HOPPER)
    assert result.foreseen is not None and result.foreseen[0].line is None
    assert is_named_in("Using TRITON Fp8 MoE backend", "TRITON (TritonExperts)")
    assert not is_named_in("Selected CutlassFP8ScaledMMLinearKernel for X", "FP8ScaledMMLinearKernel"), "whole words"


def test_what_is_not_foreseen_says_why() -> None:
    assert compare_kernels("no serving environment", HOPPER) == Kernels(
        foreseen=None, unknown="no serving environment", chosen=HOPPER
    )
    result = compare_kernels(replayed(("linear", "mxfp4", None), finding=("unknown", "vLLM asks torch.ops")), ())
    assert (result.foreseen, result.unknown) == (None, "vLLM asks torch.ops; M: chosen later")
    assert compare_kernels(replayed(), ()).unknown == "the replay found no quantized module"


def test_a_refusal_is_foreseen() -> None:
    assert foreseen_refusal(replayed(finding=("kernel", "no kernel for it"))) == "no kernel for it"
    assert foreseen_refusal(replayed(finding=("unknown", "who knows"))) is None
    assert foreseen_refusal(replayed()) is None and foreseen_refusal("not replayed") is None


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (("Using MarlinNvFp4LinearKernel for NVFP4 GEMM", "Using 'MARLIN' NvFp4 MoE backend", *HOPPER[-2:]), True),
        (("Using MarlinMxfp8LinearKernel for MXFP8 GEMM", "Using 'MARLIN' MxFp8 MoE backend"), True),
        (("Using X for MXFP4 GEMM", "Using MarlinExperts for MXFP4 MoE"), None),
        (("Using FlashInferCuteDslNvFp4LinearKernel for NVFP4 GEMM", "Using 'FLASHINFER_TRTLLM' NvFp4 MoE backend"), False),
        (("Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8", "Using TRITON Fp8 MoE backend"), False),
        (("Using FlashInferCuteDslNvFp4LinearKernel for NVFP4 GEMM", "Using 'MARLIN' NvFp4 MoE backend"), None),
        (HOPPER[-2:], None),
        (("Using MarlinNvFp4LinearKernel for NVFP4 GEMM",), None),
    ],
)  # fmt: skip
def test_marlin_keeps_activations(lines: tuple[str, ...], kept: bool | None) -> None:
    assert keeps_activations(lines) is kept
