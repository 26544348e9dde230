"""The `assay family` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.cli.options import JsonOption, TargetArgument
from assay.cli.terminal import emit, say

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint


def family(
    target: TargetArgument,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the file; it must not exist yet.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draft the file of a family that assay does not know, from vLLM's own classes and the headers of a checkpoint.

    Reads headers only; needs the serving environment, and no GPU. Roles are guessed: review the file before you use it.
    """
    from assay.errors import AssayError
    from assay_evaluate.serving.family_draft import as_yaml, draft_family

    if out is not None and out.exists():
        raise AssayError(f"{out}: exists already; it may have been reviewed. Give another name, or delete it")
    checkpoint = _headers_of(target)
    say(f"building vLLM's classes for {target} and loading {len(checkpoint.tensors):,} names into them")
    draft = draft_family(checkpoint.config, {name: (one.dtype, one.shape) for name, one in checkpoint.tensors.items()})
    text = as_yaml(draft, checkpoint.location)
    if out is not None:
        out.write_text(text, encoding="utf-8")
        say(f"wrote {out}")
    if as_json:
        emit({"name": draft.name, "vllm": draft.vllm, "classes": dict(draft.classes), "file": text})
    elif out is None:
        print(text, end="")


def _headers_of(text: str) -> Checkpoint:
    """A checkpoint of any architecture by its headers: of a model recipe, in a folder or on the hub."""
    from assay.cli.targets import open_source, resolve_target
    from assay.recipes.load import recipe_names
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.hub import open_hub_checkpoint

    if text in recipe_names("models"):
        return open_source(resolve_target(text))
    folder = Path(text).expanduser()
    return open_checkpoint(folder) if folder.exists() or "/" not in text else open_hub_checkpoint(text)
