"""`assay init`: a model recipe of one's own, inferred from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from assay.errors import AssayError
from assay.foreign_text import shown
from assay.recipes.load import recipe_names
from assay.recipes.model import ModelRecipe
from assay.records.base import write_text_atomically
from assay_pipeline.targets import Target, resolve_source

COMMENTS = {
    "source": "A folder (path; a relative one starts at this file), or a model on the hub (hub, revision).",
    "base_model": "Its id on the hub, which cards name.",
    "family": "How the architecture names its tensors: `assay recipes families`.",
    "reference": "What candidates are compared with: a precision that is made here, or `release: {hub: OWNER/NAME}`.",
    "mtp": "Every precision leaves the MTP block out.",
    "precisions": "Candidates: `assay recipes precisions` describes them; auto-4.5bpw is a mix that the run chooses.",
    "include_source": "Serve and measure the source itself too.",
    "suite": "What is measured: `assay recipes suites`.",
    "profiles": "How vLLM is run, best first; the first whose hardware is here is taken: `assay recipes profiles`.",
    "serving": "Flags that the model itself needs, whatever the hardware.",
}


def inferred_recipe(target: str, base_model: str | None = None, mtp: str | None = None) -> Target:
    """The recipe of a checkpoint folder or a hub id, with an absolute path. AssayError: it has one that ships with assay."""
    resolved = resolve_source(target, base_model, mtp)
    shipped, name = recipe_names("models"), resolved.recipe.name
    if target in shipped or (name in shipped and resolved.location.path is None):
        raise AssayError(f"{shown(target)}: assay ships the recipe {name} for it; use that name as TARGET")
    if name in shipped:
        raise AssayError(
            f"{shown(target)}: the folder is called as a recipe that ships with assay; if it is that model, use {name} as "
            "TARGET, else give the folder another name"
        )
    if target.endswith((".yaml", ".yml")):
        raise AssayError(f"{shown(target)}: is a recipe already; give a checkpoint folder or a Hugging Face id")
    source = resolved.location
    if source.path is not None:
        source = source.model_copy(update={"path": str(Path(source.path).resolve())})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"source": source}))


def recipe_text(target: Target) -> str:
    """The recipe as YAML, with a comment before what is worth a look. Fields at their default are left out."""
    written = target.recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"suite": target.recipe.suite}
    lines = [f"# Inferred by `assay init {target.typed}`; change what is wrong."]
    for key, value in written.items():
        if key in COMMENTS:
            lines.append(f"# {COMMENTS[key]}")
        flow = yaml.safe_dump([value], sort_keys=False, default_flow_style=True, allow_unicode=True, width=10_000)
        lines.append(f"{key}: {flow.strip()[1:-1]}")
    return "\n".join(lines) + "\n"


def write_recipe(target: Target, file: Path | None = None, *, force: bool = False) -> Path:
    """Write it. file: its name is the recipe's; None: NAME.yaml here. AssayError: it exists already, unless `force`."""
    path = file or Path(f"{target.recipe.name}.yaml")
    if path.exists() and not force:
        raise AssayError(f"{path}: exists already; --force overwrites it, --out FILE names another")
    if not path.parent.is_dir():
        raise AssayError(f"{path}: there is no folder {path.parent}; make it, or give another name with --out")
    named = target.recipe.model_copy(update={"name": path.stem})
    text = recipe_text(replace(target, recipe=ModelRecipe.model_validate(named.model_dump(by_alias=True))))
    write_text_atomically(path, text)
    return path
