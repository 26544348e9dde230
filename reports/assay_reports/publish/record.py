"""What `assay publish` prints: the files of a publication, what stands against it, and what the hub was found to hold."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record
from assay.records.verdict import Overall


class PublishedFile(Part):
    """One file of the repository."""

    path: str
    num_bytes: int
    sha256: str


class Refusal(Part):
    """Why a checkpoint is not published. despite: the status that `--despite` would have to name; None: nothing lifts it."""

    reason: str
    despite: Overall | None = None


class _Uploaded(Record):
    """What goes into one repository, and what came of it."""

    repository: str
    revision: str
    private: bool
    files: tuple[PublishedFile, ...]
    notes: tuple[str, ...] = ()
    """What a reader of the repository will miss, such as a licence."""
    url: str | None = None
    """None: nothing was uploaded (`--dry-run`)."""
    commit: str | None = None
    num_unchanged: int = 0
    """Files that the repository already held."""
    differences: tuple[str, ...] = ()
    """Where the hub holds something else than was uploaded. Empty: it holds the same."""
    num_read_back: int = 0
    """Files that were downloaded again and compared; of the others the hub's hashes, and the first bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Publication(_Uploaded):
    """Of one checkpoint in one repository."""

    kind: Literal["publication"] = "publication"
    run: str
    """Name of the run's folder."""
    label: str
    status: Overall
    """The verdict on these very bytes. NOT MEASURED: nobody judged them; also of the reference of a run."""
    checkpoint_sha256: str
    refused: tuple[Refusal, ...] = ()
    """Empty in what was uploaded."""


class PackPublication(_Uploaded):
    """Of one pack in one data set."""

    kind: Literal["pack publication"] = "pack publication"
    pack: str
    """Name of its folder."""
    reference: str
    seal: str
