"""`assay inspect`: the files that a user names, read and inspected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Track, track_nothing
from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.recipes.load import recipe_names
from assay.records.inspection import Inspection
from assay_pipeline.targets import may_be_on_the_hub, no_such_folder, resolve_target, take_up_family_of

if TYPE_CHECKING:
    from assay_quantize.inspection.files import Files

_HUB_PAGE = re.compile(r"https?://huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)(/(tree|resolve|blob)/(?P<revision>[^/?#]+))?/?")


def inspect(
    target: str,
    *,
    source: str | None = None,
    deep: bool = False,
    headers_only: bool = False,
    kept: bool = True,
    track: Track = track_nothing,
) -> Inspection:
    """Inspect the checkpoint that `target` names. Reads, and writes nothing.

    source: the base it was made from, named the same way. deep: read the weights too. headers_only: read no data at all.
    Without either, scales of a folder are read and those of a hub id or URL are not. kept: compare kept tensors with the
    base's, byte for byte. CheckpointError: nothing can be read.
    """
    from assay_quantize.inspection.inspect import inspect as inspect_files

    if deep and headers_only:
        raise CheckpointError("--deep and --headers-only: one reads all of the data and the other none; give one of them")
    files = files_of(target)
    if files.is_local and Path(files.location).is_dir():
        take_up_family_of(Path(files.location))
    base = None if source is None else files_of(source)
    scales = deep or (files.is_local and not headers_only)
    return inspect_files(files, source=base, scales=scales, weights=deep, kept=kept, track=track)


def files_of(text: str) -> Files:
    """The files that `text` names. CheckpointError says what was tried."""
    from assay_quantize.inspection.files import FolderFiles, HubFiles, UrlFiles

    if (page := _HUB_PAGE.fullmatch(text)) is not None:
        return HubFiles(page["id"], page["revision"] or "main")
    if text.startswith(("http://", "https://")):
        return UrlFiles(text)
    if text in recipe_names("models"):
        location = resolve_target(text).location
        return FolderFiles(Path(location.path)) if location.path is not None else HubFiles(str(location.hub), location.revision)
    folder = Path(text).expanduser()
    if folder.exists() or not may_be_on_the_hub(text):
        if not folder.exists():
            raise CheckpointError(no_such_folder(text, folder))
        return FolderFiles(folder)
    return HubFiles(shown(text))
