"""Whether the hub holds what was uploaded: its list of files against ours, and its bytes against ours.

Small files are downloaded whole. Of large ones the hub states a SHA-256, computed when they were sent; their first bytes are
read, which hold a shard's header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import httpx
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from assay.hub_errors import HUB_ERRORS
from assay_reports.publish.files import LocalFile
from assay_reports.publish.hub_refusals import publish_error
from assay_reports.publish.hub_upload import git_hash, list_files

WHOLE_BYTES = 8 << 20
"""A file up to this size is downloaded whole."""
FIRST_BYTES = 65_536


class ReadBack(NamedTuple):
    """differences: one line a file. num_whole: files that were downloaded whole."""

    differences: tuple[str, ...]
    num_whole: int


def read_back(api: HfApi, files: Sequence[LocalFile], repository: str, commit: str) -> ReadBack:
    """Compare every file at `commit`. AssayError: the hub does not answer, so nothing is known."""
    try:
        differences = tuple(_differences(api, files, repository, commit))
    except HUB_ERRORS as error:
        raise publish_error(repository, error) from None
    return ReadBack(differences, sum(file.num_bytes <= WHOLE_BYTES for file in files))


def _differences(api: HfApi, files: Sequence[LocalFile], repository: str, commit: str) -> Iterator[str]:
    there = list_files(api, repository, commit)
    for file in files:
        stated = there.get(file.path)
        if stated is None:
            yield f"{file.path}: is not there"
        elif stated.size != file.num_bytes:
            yield f"{file.path}: has {stated.size} bytes there, {file.num_bytes} here"
        elif stated.lfs is not None and stated.lfs.sha256 != file.sha256:
            yield f"{file.path}: SHA-256 there {stated.lfs.sha256[:12]}..., here {file.sha256[:12]}..."
        elif stated.lfs is None and stated.blob_id != git_hash(file.read()):
            yield f"{file.path}: the hub states another hash of its content"
        elif not _same_bytes(file, repository, commit):
            yield f"{file.path}: its hash is right, and other bytes are downloaded"


def _same_bytes(file: LocalFile, repository: str, commit: str) -> bool:
    if file.num_bytes <= WHOLE_BYTES:
        content = _download(file, repository, commit, {}).content
        return hashlib.sha256(content).hexdigest() == file.sha256
    assert file.source is not None or file.content is not None
    answer = _download(file, repository, commit, {"range": f"bytes=0-{FIRST_BYTES - 1}"})
    return answer.content[:FIRST_BYTES] == _first_bytes(file)


def _first_bytes(file: LocalFile) -> bytes:
    if file.content is not None:
        return file.content[:FIRST_BYTES]
    assert file.source is not None
    with file.source.open("rb") as opened:
        return opened.read(FIRST_BYTES)


def _download(file: LocalFile, repository: str, commit: str, headers: dict[str, str]) -> httpx.Response:
    url = hf_hub_url(repository, file.path, revision=commit)
    answer = http_backoff("GET", url, headers={**build_hf_headers(), **headers}, follow_redirects=True)
    hf_raise_for_status(answer)
    return answer
