"""Files of a repository on the hub in the Hugging Face cache, each with the size and the hash that the hub states of it.

`hf_hub_download` compares neither: what comes is renamed into place if it is as long as the answer said, and what lies in the
cache is taken for right.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from tqdm import tqdm  # type: ignore[import-untyped]

import assay
from assay.errors import AssayError, CheckpointError
from assay.file_data import content_differs, data_of_files
from assay.hub_errors import HUB_ERRORS, hub_error
from assay_quantize.checkpoint.hub import HubFile, Repository, altered


class Stopped(Exception):
    """The download was called off."""


def file_in_cache(repository: Repository, name: str) -> Path:
    """The file `name` of a repository, downloaded if it is not there, and checked; what differs is fetched once more.

    Raises CheckpointError: no size or hash is stated, twice another content than stated (which is removed from the cache), the
    hub does not answer, the disk is full.
    """
    hub_id, stated = repository.shown_id, repository.files[name]
    if stated.num_bytes is None or not stated.has_hash:
        raise CheckpointError(
            f"{hub_id}/{name}: the hub states no size or no hash of it, so a damaged download could not be told from a whole "
            "one; download it by other means and name the file"
        )
    for anew in (False, True):
        path = _fetched(repository, name, stated.num_bytes, anew=anew)
        how = _differs_from(stated, path)
        if not how:
            return path
    with suppress(OSError):  # others would take it for right
        blob = path.resolve()
        path.unlink()
        blob.unlink(missing_ok=True)
    raise altered(hub_id, name, how)


def _fetched(repository: Repository, name: str, num_bytes: int, *, anew: bool) -> Path:
    try:
        return Path(
            hf_hub_download(
                repository.hub_id,
                name,
                repo_type=repository.kind,
                revision=repository.revision,
                force_download=anew,
                tqdm_class=silent_bar(lambda: False, num_bytes, f"{repository.shown_id}/{name}"),
                library_name="assay",
                library_version=assay.__version__,
            )
        )
    except AssayError:
        raise
    except HUB_ERRORS as error:
        raise hub_error(repository.shown_id, error, name) from None


def _differs_from(stated: HubFile, path: Path) -> str:
    """As `hub.difference`, remembered."""
    num_bytes = path.stat().st_size
    if num_bytes != stated.num_bytes:
        return f"{num_bytes} bytes where the hub states {stated.num_bytes}"
    what = differs(path.parent, path.name, stated.content)
    return what and f"its {what} is not the one the hub states"


def differs(folder: Path, name: str, data: str) -> str:
    """`content_differs` of a file; remembered: a run makes many checkpoints of one source."""
    [stamp] = data_of_files(folder, [name]).values()
    return _hash_differs(folder / name, stamp, data)


@functools.cache
def _hash_differs(path: Path, stamp: str, data: str) -> str:
    """stamp: of the file, so that what was written to since is read again."""
    with path.open("rb") as file:
        return content_differs(data, os.fstat(file.fileno()).st_size, file)


def silent_bar(is_stopped: Callable[[], bool], num_bytes: int | None, where: str) -> type[Any]:
    """What `hf_hub_download` takes for a progress bar: it shows nothing, and ends a transfer that is called off or too long."""

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.received = options.get("initial", 0)
            self.thread = threading.get_ident()

        def update(self, n: float | None = 1) -> None:
            self.received += n or 0
            if threading.get_ident() != self.thread:
                return  # hf_xet reports from a thread of its own: an error there ends nothing
            if is_stopped():
                raise Stopped
            if num_bytes is not None and self.received > num_bytes:
                raise CheckpointError(f"{where}: more than the {num_bytes} bytes that the hub states were sent; try again")

    return SilentBar
