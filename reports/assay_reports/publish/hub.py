"""The hub: files are uploaded, one commit names them all, and they are read back. Until the commit the repository is as it was.

Large files go one group at a time. Whoever downloads meanwhile sees the old revision or the whole new one, never half a
checkpoint. State is on the hub alone: a command that was killed is started again, and what the hub's storage already has is not
sent twice. (`upload_large_folder` of `HfApi` commits in parts, so that config.json can be there before the weights; it is
deprecated besides.) What the hub answers to a failure becomes one line that says what to do. Tokens are in no message.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import httpx
from huggingface_hub import CommitOperationAdd, HfApi, RepoFile, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import (
    HFValidationError,
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
    http_backoff,
    logging,
    validate_repo_id,
)

import assay
from assay.errors import AssayError
from assay.foreign_text import shown
from assay.hub_errors import HUB_ERRORS, first_line, hub_address
from assay.hub_session import guard_hub
from assay.records.run import CARD
from assay_reports.publish.files import WEIGHT_SUFFIXES, LocalFile

RepoType = Literal["model", "dataset"]
_BRANCH = re.compile(r"[A-Za-z0-9_./-]{1,200}")
FILES_AT_ONCE = 4
"""Uploaded side by side; a group that is whole is not sent again after an interruption."""
SMALL_BYTES = 8 << 20
"""Up to this size a file is read before it is sent."""
REAL_HUB = "https://huggingface.co"
WHOLE_BYTES = 8 << 20
"""A file up to this size is downloaded whole when it is read back."""
FIRST_BYTES = 65_536
"""Of a larger one, of which the hub states a SHA-256, computed when it was sent: these hold a shard's header."""
KEPT = "run the same command again: what was uploaded is kept"
REFUSALS: dict[int, str] = {
    401: "does not know who you are (HTTP 401); log in (hf auth login), or set HF_TOKEN to a token that may write",
    402: "wants to be paid first (HTTP 402): the storage of this account is full; make room on the hub",
    403: "does not let you write there (HTTP 403); use a token with the right to write, and an owner that is yours",
    404: "has no such repository or branch, or hides it from you (HTTP 404); check the name, log in (hf auth login)",
    409: f"says that somebody else changes it at the same time (HTTP 409); {KEPT}",
    412: f"says that somebody else has changed it meanwhile (HTTP 412); {KEPT}",
    429: f"is asked too often (HTTP 429); wait some minutes, then {KEPT}",
}


# ------------------------------------------------------------------------------------------------ uploading
class Uploaded(NamedTuple):
    """commit: that holds the files. num_unchanged: files that were there before. left: the hub's warnings, if it has any."""

    url: str
    commit: str
    num_unchanged: int
    warnings: tuple[str, ...]


def check_repository(repository: str) -> None:
    """AssayError if this is no `owner/name`."""
    try:
        validate_repo_id(repository)
        is_id = "/" in repository
    except HFValidationError:
        is_id = False
    if not is_id:
        raise AssayError(f"{repository}: is not a repository id; use OWNER/NAME, e.g. zai-org/GLM-5")


def check_branch(revision: str) -> None:
    """AssayError if git would not take this as the name of a branch, or if it has other letters than most names."""
    parts = revision.split("/")
    odd = any(part[:1] in ("", ".", "-") or part.endswith((".", ".lock")) for part in parts)
    if odd or not _BRANCH.fullmatch(revision) or ".." in revision:
        raise AssayError(
            f"--revision {shown(repr(revision))}: is no name of a branch, which has letters, digits, `.`, `_`, `-`, / "
            "between them, at most 200 in all: write main, or v1.0"
        )


@contextmanager
def hub_session() -> Iterator[HfApi]:
    """The hub, asked quietly: no bars, no warnings with signed addresses in the midst of our lines.

    Another hub than huggingface.co (HF_ENDPOINT) need not have Xet's storage, and is spoken to by git-LFS, which all have.
    """
    guard_hub()
    bars, verbosity, xet = not are_progress_bars_disabled(), logging.get_verbosity(), constants.HF_HUB_DISABLE_XET
    disable_progress_bars()
    logging.set_verbosity(logging.ERROR)
    constants.HF_HUB_DISABLE_XET = xet or constants.ENDPOINT != REAL_HUB
    try:
        yield HfApi(endpoint=constants.ENDPOINT, library_name="assay", library_version=assay.__version__)
    finally:
        constants.HF_HUB_DISABLE_XET = xet
        logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()


def _list_files(api: HfApi, repository: str, revision: str, repo_type: RepoType) -> dict[str, RepoFile]:
    """Path -> what the hub states of it, at a branch or commit."""
    tree = api.list_repo_tree(repository, recursive=True, revision=revision, repo_type=repo_type)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


def upload(
    api: HfApi,
    files: Sequence[LocalFile],
    repository: str,
    *,
    revision: str,
    private: bool,
    repo_type: RepoType = "model",
    message: str,
    still_the_same: Callable[[], bool],
    if_changed: str,
    on_progress: Callable[[str], None],
) -> Uploaded:
    """Make the repository if it is not there, upload, and commit once.

    still_the_same: asked before the commit, whether the files are those that were checked; if_changed: what is said if not.
    AssayError, one line: the hub refuses (login, rights, quota, rate, a conflicting push), breaks off, or holds weights of
    something else.
    """
    try:
        api.create_repo(repository, private=True if private else None, repo_type=repo_type, exist_ok=True)
        if private and not api.repo_info(repository, repo_type=repo_type).private:
            raise AssayError(f"{repository}: exists and is public; make it private on the hub first, or leave --private out")
        if revision != constants.DEFAULT_REVISION:
            api.create_branch(repository, branch=revision, repo_type=repo_type, exist_ok=True)
        _check_metadata(api, files, repository, repo_type)
        remote = _list_files(api, repository, revision, repo_type)
        _refuse_strangers(remote, files, repository)
        changed = [file for file in files if not _is_same(remote.get(file.path), file)]
        operations = _send(api, changed, repository, revision, repo_type, on_progress)
        if not still_the_same():
            raise AssayError(f"{repository}: {if_changed}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = api.create_commit(repository, operations, commit_message=message, revision=revision, repo_type=repo_type)
    except HUB_ERRORS as error:
        if isinstance(error, AssayError):
            raise
        raise _publish_error(repository, error) from None
    lines = tuple(" ".join(str(warning.message).split()) for warning in caught if issubclass(warning.category, UserWarning))
    place = f"datasets/{repository}" if repo_type == "dataset" else repository
    return Uploaded(f"{api.endpoint}/{place}", done.oid, len(files) - len(changed), lines)


def _is_same(remote: RepoFile | None, file: LocalFile) -> bool:
    """By the hash that the hub states: of a large file its SHA-256, of others git's."""
    if remote is None or remote.size != file.num_bytes:
        return False
    return remote.lfs.sha256 == file.sha256 if remote.lfs is not None else remote.blob_id == _git_hash(file.read())


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _check_metadata(api: HfApi, files: Sequence[LocalFile], repository: str, repo_type: RepoType) -> None:
    """What `create_commit` asks as well, after the hours that an upload takes: whether the hub takes the card's metadata."""
    card = next(file for file in files if file.path == CARD).read().decode()
    answer = http_backoff(
        "POST", f"{api.endpoint}/api/validate-yaml", json={"content": card, "repoType": repo_type}, headers=build_hf_headers()
    )
    if answer.status_code == 400:
        messages = "; ".join(str(error.get("message")) for error in answer.json().get("errors", ()))
        raise AssayError(f"{repository}: the hub refuses the card's metadata: {shown(messages)}; report this to assay")
    hf_raise_for_status(answer)


def _refuse_strangers(remote: dict[str, RepoFile], files: Sequence[LocalFile], repository: str) -> None:
    paths = {file.path for file in files}
    strangers = sorted(path for path in remote if path.endswith(WEIGHT_SUFFIXES) and path not in paths)
    if strangers:
        named = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise AssayError(
            f"{repository}: holds weights of something else ({named}); name another repository, or delete them there"
        )


def _send(
    api: HfApi, files: Sequence[LocalFile], repository: str, revision: str, repo_type: RepoType,
    on_progress: Callable[[str], None],
) -> list[CommitOperationAdd]:  # fmt: skip
    """What the commit will name; large files are in the hub's storage then."""
    operations: list[CommitOperationAdd] = []
    for begin in range(0, len(files), FILES_AT_ONCE):
        part = files[begin : begin + FILES_AT_ONCE]
        group = [_addition(file) for file in part]
        api.preupload_lfs_files(
            repository, group, revision=revision, repo_type=repo_type, num_threads=FILES_AT_ONCE, free_memory=True
        )
        for file, addition in zip(part, group, strict=True):
            _check_read(file, addition.upload_info.sha256.hex())
        operations += group
        on_progress(f"{begin + len(group)} of {len(files)} files uploaded")
    return operations


def _addition(file: LocalFile) -> CommitOperationAdd:
    """Of a large file the path: the library hashes it while it reads it, or right before."""
    if file.source is not None and file.num_bytes > SMALL_BYTES:
        return CommitOperationAdd(file.path, str(file.source))
    content = file.read()
    _check_read(file, hashlib.sha256(content).hexdigest())
    return CommitOperationAdd(file.path, content)


def _check_read(file: LocalFile, sha256: str) -> None:
    """AssayError: what was read of it for the upload is not what the manifest says. Its stamp does not see a failing disk."""
    if sha256 != file.sha256:
        raise AssayError(
            f"{file.source or file.path}: the bytes that were read to upload it have another SHA-256 than the manifest says; "
            "nothing was committed; verify it again"
        )


# ------------------------------------------------------------------------------------------------ reading back
class ReadBack(NamedTuple):
    """differences: one line a file. num_whole: files that were downloaded whole."""

    differences: tuple[str, ...]
    num_whole: int


def read_back(api: HfApi, files: Sequence[LocalFile], repository: str, commit: str, repo_type: RepoType = "model") -> ReadBack:
    """Compare every file at `commit`. AssayError: the hub does not answer, so nothing is known."""
    try:
        differences = tuple(_differences(api, files, repository, commit, repo_type))
    except HUB_ERRORS as error:
        raise _publish_error(repository, error) from None
    return ReadBack(differences, sum(file.num_bytes <= WHOLE_BYTES for file in files))


def _differences(api: HfApi, files: Sequence[LocalFile], repository: str, commit: str, repo_type: RepoType) -> Iterator[str]:
    remote = _list_files(api, repository, commit, repo_type)
    for file in files:
        stated = remote.get(file.path)
        if stated is None:
            yield f"{file.path}: is not there"
        elif stated.size != file.num_bytes:
            yield f"{file.path}: has {stated.size} bytes there, {file.num_bytes} here"
        elif stated.lfs is not None and stated.lfs.sha256 != file.sha256:
            yield f"{file.path}: SHA-256 there {stated.lfs.sha256[:12]}..., here {file.sha256[:12]}..."
        elif stated.lfs is None and stated.blob_id != _git_hash(file.read()):
            yield f"{file.path}: the hub states another hash of its content"
        elif not _same_bytes(file, repository, commit, repo_type):
            yield f"{file.path}: its hash is right, and other bytes are downloaded"


def _same_bytes(file: LocalFile, repository: str, commit: str, repo_type: RepoType) -> bool:
    is_whole = file.num_bytes <= WHOLE_BYTES
    headers = build_hf_headers() | ({} if is_whole else {"range": f"bytes=0-{FIRST_BYTES - 1}"})
    url = hf_hub_url(repository, file.path, revision=commit, repo_type=repo_type)
    answer = http_backoff("GET", url, headers=headers, follow_redirects=True)
    hf_raise_for_status(answer)
    if is_whole:
        return hashlib.sha256(answer.content).hexdigest() == file.sha256
    return answer.content[:FIRST_BYTES] == file.read(FIRST_BYTES)


# ------------------------------------------------------------------------------------------------ failures
def _publish_error(repository: str, error: Exception) -> AssayError:
    """`error`, one of HUB_ERRORS, as the user is told it."""
    cause, endpoint = error, hub_address()
    # the library says which file it was about, and keeps the reason as the cause
    while isinstance(cause, RuntimeError) and not isinstance(cause, httpx.HTTPError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    if isinstance(cause, LocalTokenNotFoundError):
        return AssayError(f"{repository}: {endpoint} {REFUSALS[401]}")
    if isinstance(cause, OfflineModeIsEnabled):
        return AssayError(f"{repository}: HF_HUB_OFFLINE is set; unset it to publish")
    if isinstance(cause, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return AssayError(f"{repository}: {endpoint!r} (HF_ENDPOINT) is not a URL; write it like https://huggingface.co")
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return AssayError(f"{repository}: {endpoint} {REFUSALS.get(status, f'answered HTTP {status}; {KEPT}')}")
    if isinstance(cause, httpx.HTTPError):
        return AssayError(f"{repository}: the connection to {endpoint} broke off ({first_line(cause)}); {KEPT}")
    return AssayError(f"{repository}: cannot be published: {first_line(cause)}; {KEPT}")
