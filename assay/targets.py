"""TARGET of a command line -> a model recipe and the checkpoint it is about.

A target is the name of a model recipe, a checkpoint folder, or a Hugging Face id. A folder or id without a recipe gets one made
from its config.json: same precisions and reference as tiny-glm, the quick suite, speculation if it carries an MTP head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from assay.errors import AssayError, CheckpointError, PlanError
from assay.families import family_of
from assay.recipes import Family, Location, ModelRecipe, Reference, Serving, load_recipe, recipe_names, recipes_dir
from assay.safe_files import MAX_JSON_BYTES, read_json_object

REASONING_PARSERS: dict[str, str] = {
    "glm4_moe": "glm45",
    "glm_moe_dsa": "glm45",
    "deepseek_v3": "deepseek_r1",
    "qwen3_moe": "qwen3",
    "qwen3_next": "deepseek_r1",
}
"""Family -> vLLM's reasoning parser, used for a model without a recipe whose chat template has a thinking section."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Target:
    """What a command is about. `location.path` is absolute or relative to the working directory."""

    recipe: ModelRecipe
    location: Location


def resolve_target(text: str) -> Target:
    """The model that `text` names; AssayError says what was tried."""
    if text in recipe_names("models"):
        recipe = load_recipe(ModelRecipe, text)
        return Target(recipe, _from_repository(recipe.source))
    if text.endswith((".yaml", ".yml")):
        recipe = load_recipe(ModelRecipe, text)
        return Target(recipe, _from_repository(recipe.source))
    folder = Path(text).expanduser()
    if folder.exists() or text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        if not folder.exists():
            known = ", ".join(recipe_names("models"))
            raise CheckpointError(
                f"{text}: no such folder, and no model recipe of that name; known recipes: {known}; "
                "or give a Hugging Face id such as zai-org/GLM-4.5-Air"
            )
        if not folder.is_dir():
            raise CheckpointError(f"{text}: is a file; give the checkpoint's folder (with config.json and *.safetensors)")
        config = read_json_object(folder, "config.json")
        return Target(
            _recipe_for(folder.resolve().name, Location(path=str(folder)), config, folder),
            Location(path=str(folder)),
        )
    return _hub_target(text)


def local_checkpoint(location: Location) -> Path:
    """The folder of `location`; a hub id is downloaded into the Hugging Face cache first (weights included)."""
    if location.path is not None:
        return Path(location.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    assert location.hub is not None
    try:
        return Path(
            snapshot_download(
                location.hub, revision=location.revision, ignore_patterns=["*.py", "*.bin", "*.pt", "*.pth", "*.gguf"]
            )
        )
    except RepositoryNotFoundError:
        raise CheckpointError(f"{location.hub}: no such model on the hub (or HF_TOKEN may not see it)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{location.hub}: cannot be downloaded: {reason}; give a local folder, or try again when the hub answers"
        ) from None


def _hub_target(hub_id: str) -> Target:
    from assay_quantize.hub import open_hub_checkpoint

    for name in recipe_names("models"):
        recipe = load_recipe(ModelRecipe, name)
        if recipe.source.hub == hub_id:
            return Target(recipe, recipe.source)
    location = Location(hub=hub_id)
    config = open_hub_checkpoint(hub_id).config
    return Target(_recipe_for(hub_id.split("/")[1], location, config, None), location)


def _from_repository(location: Location) -> Location:
    """A recipe's relative path is relative to the repository, whatever the working directory."""
    if location.path is None or Path(location.path).is_absolute():
        return location
    folder = recipes_dir().parent / location.path
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; this recipe's checkpoint ships with the repository, not with the wheel"
        )
    # Relative where possible: records name the source, and should read alike on every machine.
    return Location(path=str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder))


def _recipe_for(name: str, location: Location, config: dict[str, Any], folder: Path | None) -> ModelRecipe:
    """A recipe for a checkpoint that has none. What is guessed here is printed by `assay plan` and kept in the records."""
    try:
        family = cast(Family, family_of(config))
    except PlanError as problem:
        raise PlanError(f"{folder or location.hub}/{problem}") from None
    declared = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    has_mtp = bool(declared) or (folder is not None and _has_mtp_tensors(folder))
    return ModelRecipe(
        schema=1,
        name=_safe_name(name),
        description=f"Made from the config of {name}.",
        source=location,
        family=family,
        reference=Reference(precision="fp8"),
        precisions=("fp8", "w4a16", "nvfp4a16"),
        include_source=not config.get("quantization_config"),  # an FP8 source is its own FP8 reference
        suite="full",
        profiles=("8xb200", "8xh200", "4xh200", "8xrtx-pro-6000", "cpu-emulated"),
        serving=Serving(
            reasoning_parser=REASONING_PARSERS[family] if folder is not None and _thinks(folder) else None,
            num_speculative_tokens=1 if has_mtp else None,
        ),
    )  # fmt: skip


def _has_mtp_tensors(folder: Path) -> bool:
    """Whether the index lists `mtp.*` tensors: Qwen3-Next carries an MTP block that its config does not declare."""
    return '"mtp.' in _text(folder / "model.safetensors.index.json")


def _thinks(folder: Path) -> bool:
    """Whether the chat template mentions a thinking section."""
    return any("</think>" in _text(folder / name) for name in ("chat_template.jinja", "tokenizer_config.json"))


def _text(path: Path) -> str:
    """The text of a small file; empty when there is none."""
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def source_label(config: dict[str, Any]) -> Literal["bf16", "fp16", "fp32", "source"]:
    """What the source is called in a run: its dtype, or `source` when it is published in FP8."""
    if config.get("quantization_config"):
        return "source"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    labels: dict[str, Literal["bf16", "fp16", "fp32"]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if dtype not in labels:
        raise AssayError(f"config.json: dtype {dtype!r} is not one of {', '.join(labels)}")
    return labels[dtype]


def run_name(text: str) -> str:
    """The run folder's name for what was given as MODEL: the recipe's name, or the last part of a path or hub id."""
    if text in recipe_names("models"):
        return text
    return _safe_name(Path(text).expanduser().resolve().name if Path(text).exists() else text.rstrip("/").split("/")[-1])


def _safe_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name).strip(".-") or "model"


def gates_for(recipe: ModelRecipe, suite: str) -> str:
    """Which gates go with a suite: the model's own with its own suite, else those of the suite's name, else `default`.

    A model whose recipe says `full` may be tried with `quick`, and without GPUs it is: gates on tasks that nobody asks would
    be NOT MEASURED.
    """
    if suite == recipe.suite:
        return recipe.gates
    return suite if suite in recipe_names("gates") else "default"
