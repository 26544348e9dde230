"""The data folder: where published files lie, whether they are the published ones, and how they get there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import constants

from assay.records.base import sha256_of, sha256_of_file
from assay_evaluate.tasks.published.pins import PINS, PinnedFile, SourceName
from assay_evaluate.transport.download import NotDownloaded, download, find_problem

AT_ONCE = 8
"""Downloads of the files of one source."""
LOOK_S = 10


def data_folder() -> Path:
    """`ASSAY_DATA`, else `assay` in the user's cache. A folder for each source is in it: `essays`, `squad`, `hotpotqa`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("ASSAY_DATA") or f"{cache}/assay").expanduser().absolute()


def folder_of(source: SourceName) -> Path:
    """The folder of a source, of which nothing need be there."""
    return data_folder() / source


def source_sha256(source: SourceName) -> str:
    """Of the published files, whether they are here or not."""
    return sha256_of({file.name: file.sha256 for file in PINS[source]})


def missing(source: SourceName) -> tuple[PinnedFile, ...]:
    """Files that are not in their place, or not the published ones."""

    def is_published(file: PinnedFile) -> bool:
        path = folder_of(source) / file.name
        try:
            return path.stat().st_size == file.num_bytes and sha256_of_file(path) == file.sha256
        except OSError:
            return False

    return tuple(file for file in PINS[source] if not is_published(file))


def get(source: SourceName) -> str | None:
    """Download what is missing of a source. Why that cannot be done, in one line; None: all of it is in its place."""
    lacking = missing(source)
    if not lacking:
        return None
    if constants.HF_HUB_OFFLINE:
        return f"{_count(source, lacking)} not in {folder_of(source)}, and HF_HUB_OFFLINE is set"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reasons = [reason for reason in pool.map(lambda file: _get(source, file), lacking) if reason is not None]
    return f"{_count(source, lacking)} not in {folder_of(source)}, and {reasons[0]}" if reasons else None


def _get(source: SourceName, file: PinnedFile) -> str | None:
    try:
        download(file.urls, folder_of(source) / file.name, file.num_bytes, file.sha256)
    except NotDownloaded as error:
        return str(error)
    except OSError as error:
        return f"{folder_of(source)} cannot be written: {error.strerror}"
    return None


def look(source: SourceName) -> tuple[bool, str]:
    """(whether a run would have the source, what was found). Nothing is downloaded; the hash is that of what is here."""
    lacking = missing(source)
    if not lacking:
        return True, f"in {folder_of(source)}"
    where = f"{_count(source, lacking)} not in {folder_of(source)}"
    if constants.HF_HUB_OFFLINE:
        return False, f"{where}, and HF_HUB_OFFLINE is set"
    reasons = []
    for url in lacking[0].urls:
        reason = find_problem(url, LOOK_S)
        if reason is None:
            size = f"{sum(file.num_bytes for file in lacking) / 1e6:.1f} MB"
            return True, f"{where}; {url} has it: {size}, read when the run begins"
        reasons.append(f"{url}: {reason}")
    return False, f"{where}, and {'; '.join(reasons)}"


def remedy(source: SourceName) -> str:
    """What to do where a source cannot be downloaded."""
    files = PINS[source]
    what = f"{files[0].name} from {files[0].urls[-1]}" if len(files) == 1 else (
        f"the {len(files)} files of {files[0].urls[-1].rpartition('/')[0]}"
    )  # fmt: skip
    return f"put {what} into {folder_of(source)} (another data folder: ASSAY_DATA)"


def _count(source: SourceName, lacking: Sequence[PinnedFile]) -> str:
    if len(PINS[source]) == 1:
        return f"{lacking[0].name} is"
    return f"{len(lacking)} of {len(PINS[source])} files are"
