"""The `assay init` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import BaseModelOption, JsonOption, MtpOption
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.model_recipe import inferred_recipe, write_recipe


def init(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A checkpoint folder, or a Hugging Face id.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.yaml", help="Where to write it. Default: NAME.yaml in this folder.")
    ] = None,
    base_model: BaseModelOption = None,
    mtp: MtpOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model recipe of your own: family, precisions, reference and profiles, inferred from a checkpoint.

    Its path is a TARGET then, wherever a recipe's name is one.

    Example: assay init /data/my-glm
    """
    made = inferred_recipe(target, base_model, mtp)
    path = write_recipe(made, out, force=force)
    for _, sentence in made.choices:
        say(f"note: {sentence}")
    if as_json:
        emit({"file": str(path), "recipe": made.recipe.model_dump(mode="json", by_alias=True)})
    else:
        results().print(escape(str(path)))
    precision = next(iter(made.recipe.precisions), "w4a16")
    say(
        f"next: `assay plan {path} --precision {precision}` shows what would be made; "
        f"`assay run {path}` makes and judges it all"
    )
