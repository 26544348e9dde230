"""The `assay family` command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.errors import AssayError
from assay.recipes.load import recipe_names
from assay.records.base import write_text_atomically
from assay.safe_files import read_json_object
from assay_cli.options import JsonOption, completes
from assay_cli.terminal import emit, say

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint


def family(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|TARGET",
            autocompletion=completes("models"),
            help="A config.json, or a folder with nothing else; or a model recipe's name, a checkpoint folder or a hub id, "
            "whose headers say more.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the file; it must not exist yet.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draft the file of a family that assay does not know, from vLLM's own classes and a checkpoint's headers or config.json.

    Reads no weights; needs the serving environment, and no GPU. Roles are guessed: review the file before you use it.
    """
    from assay_evaluate.serving.family_draft import as_yaml, draft_family

    if out is not None and out.exists():
        raise AssayError(f"{out}: exists already; it may have been reviewed. Give another name, or delete it")
    if out is not None and not out.parent.is_dir():
        raise AssayError(f"{out}: there is no folder {out.parent}; make it, or give another name")
    if (config := _config_alone(target)) is not None:
        read = read_json_object(config.parent, config.name)
        say(f"building vLLM's classes for {config} and asking their loaders for names")
        draft, source = draft_family(read, None), str(config)
    else:
        checkpoint = _headers_of(target)
        say(f"building vLLM's classes for {target} and loading {len(checkpoint.tensors):,} names into them")
        headers = {name: (header.dtype, header.shape) for name, header in checkpoint.tensors.items()}
        draft, source = draft_family(checkpoint.config, headers), checkpoint.location
    text = as_yaml(draft if out is None else replace(draft, name=out.stem), source)  # a family is called as its file is
    if out is not None:
        write_text_atomically(out, text, only_new=True)
        say(f"wrote {out}")
    if as_json:
        emit({"name": draft.name, "vllm": draft.vllm, "classes": dict(draft.classes), "file": text})
    elif out is None:
        print(text, end="")


def _config_alone(text: str) -> Path | None:
    """The config.json that was named, or lies in a folder without weights; None: it is a checkpoint, or something else."""
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix != ".json":
            raise AssayError(
                f"{text}: is no config.json; name one, or a checkpoint's folder, a hub id or a model recipe: "
                f"{', '.join(recipe_names('models'))}"
            )
        return path
    return path / "config.json" if (path / "config.json").is_file() and not any(path.glob("*.safetensors*")) else None


def _headers_of(text: str) -> Checkpoint:
    """A checkpoint of any architecture by its headers: of a model recipe, in a folder or on the hub."""
    from assay_pipeline.targets import may_be_on_the_hub, no_such_folder, open_source, resolve_target
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.hub import open_hub_checkpoint

    if text in recipe_names("models"):
        return open_source(resolve_target(text))
    folder = Path(text).expanduser()
    if folder.exists():
        return open_checkpoint(folder)
    if not may_be_on_the_hub(text):
        raise AssayError(no_such_folder(text, folder))
    return open_hub_checkpoint(text)
