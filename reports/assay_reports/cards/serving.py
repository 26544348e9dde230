"""The command that serves a checkpoint as it was measured, and the commands that make and measure it again."""

from __future__ import annotations

import shlex
from typing import Any

from assay.foreign_text import one_line
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.serving import MODEL_FLAGS, Fingerprint, as_arguments
from assay_reports.schema import Report
from assay_reports.sentences import card as english

MEASURING_FLAGS = frozenset(
    {
        "enable-per-request-metrics", "per-request-spec-decode-metrics", "disable-uvicorn-access-log", "max-logprobs",
        "model-loader-extra-config",
    }
)  # fmt: skip
"""What only a measurement needs; a deployment does without."""
ASSAY_LOAD_FORMATS = frozenset({"assay-strict", "assay-emulate"})
"""Those of the plugin that checks what is loaded; a vLLM without it does not know them, and loads the same weights."""
FOLDER = "PATH_OF_THIS_FOLDER"


def serve_command(fingerprint: Fingerprint | None, recipe: ModelRecipe | None, *, has_mtp: bool, place: str = FOLDER) -> str:
    """`vllm serve PLACE` with the flags it was measured with; emulated or unmeasured, with the model's own flags only.

    has_mtp: the checkpoint can draft. place: its folder, or its id on the hub.
    """
    if fingerprint is None:
        flags, speculation = _recipe_flags(recipe, has_mtp)
    elif fingerprint.emulated:
        flags = {name: value for name, value in fingerprint.flags.items() if name in MODEL_FLAGS}
        speculation = fingerprint.speculation
    else:
        flags = {name: value for name, value in fingerprint.flags.items() if name not in MEASURING_FLAGS}
        flags |= fingerprint.checkpoint_flags
        if flags.get("load-format") in ASSAY_LOAD_FORMATS:
            del flags["load-format"]
        speculation = fingerprint.speculation
    if speculation:
        flags |= {"speculative-config": speculation}
    lines: list[str] = []
    for word in ["vllm", "serve", place, *as_arguments(flags)]:
        if word.startswith("--") or not lines:
            lines.append(_quoted(word))
        else:
            lines[-1] += f" {_quoted(word)}"
    return " \\\n  ".join(lines)


def _quoted(word: str) -> str:
    """For a shell, on one line: a line break inside could end the block of code that the command stands in."""
    return shlex.quote(one_line(word))


def _recipe_flags(recipe: ModelRecipe | None, has_mtp: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    if recipe is None:
        return {}, None
    serving = recipe.serving
    flags: dict[str, Any] = {"reasoning-parser": serving.reasoning_parser, "tool-call-parser": serving.tool_call_parser}
    flags = {name: value for name, value in flags.items() if value} | serving.vllm
    count = serving.num_speculative_tokens if has_mtp else None
    return flags, {"method": "mtp", "num_speculative_tokens": count} if count else None


def served_on(fingerprint: Fingerprint) -> str:
    """`8 x NVIDIA H200, 1.5 TB of memory`: what the fingerprint says of the machine, in one line."""
    return ", ".join(f"{name} {value}" for name, value in sorted(fingerprint.hardware.items())) or english.UNKNOWN_HARDWARE


def environment_words(fingerprint: Fingerprint) -> str:
    """`VLLM_USE_DEEP_GEMM_E8M0=0`: variables that it was served with, as they stand before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(fingerprint.environment.items()))


def recipe_of(model: str) -> ModelRecipe | None:
    return load_recipe(ModelRecipe, model) if model in recipe_names("models") else None


def reproduction(plan: Plan, base_model: str | None, measured: Measurement | None, report: Report | None) -> str:
    """Commands that make the checkpoint again and, if it was measured, measure it as it was."""
    target = plan.model if plan.model in recipe_names("models") else base_model or "FOLDER_OF_THE_SOURCE"
    known = plan.precision in recipe_names("precisions")
    precision = plan.precision if known else f"{plan.precision}.yaml"
    lines = [f"assay quantize {_quoted(target)} --precision {_quoted(precision)}"]
    if measured is not None and report is not None and report.reference != plan.precision:
        again = f"assay evaluate {_quoted(target)} --precisions {_quoted(precision)}"
        lines.append(f"{again} --suite {_quoted(report.suite)} --profile {_quoted(measured.fingerprint.profile)}")
    return "\n".join(lines)
