"""The checkpoints of a screening: folders, and repositories of the hub, which are read layer by layer as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say
from assay.errors import AssayError, CheckpointError
from assay.foreign_text import safe_name, shown
from assay.quantities import size
from assay.records.base import sha256_of_file
from assay.records.run import folder_name
from assay.safe_files import read_json_object
from assay.secret_text import hide_password
from assay_pipeline.comparison.checkpoints import foreign_in
from assay_pipeline.comparison.damage import damage_in, damage_in_repository, damage_note
from assay_pipeline.targets import may_be_on_the_hub, no_such_folder, take_up_family_of

if TYPE_CHECKING:
    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.remote.hub_mirror import HubMirror


@dataclass(frozen=True)
class ScreenSource:
    """A checkpoint. location: its folder or hub id; folder: as on the disk, of a repository without data."""

    location: str
    folder: Path
    mirror: HubMirror | None = None

    @contextmanager
    def opened(self) -> Iterator[StoredCheckpoint]:
        """As the weights it stands for, whatever its format is."""
        from assay_quantize.checkpoint.checkpoint import open_checkpoint
        from assay_quantize.decoding.open_stored import open_stored

        take_up_family_of(self.folder)
        checkpoint = replace(open_checkpoint(self.folder, allow_quantized=True), location=self.location)
        with open_stored(checkpoint, reader=self.mirror) as stored:
            yield stored

    def sha256(self) -> str:
        """Identity of its weights; the same of a folder and of the repository that it was downloaded from."""
        from assay_evaluate.run.identity import checkpoint_sha256

        return checkpoint_sha256(self.folder, sha256_of_file if self.mirror is None else self.mirror.file_sha256)

    def foreign(self) -> str | None:
        """How it is quantized, if it is a quantized copy of its model (`foreign_in`)."""
        return foreign_in(self.folder)

    def damage(self) -> str | None:
        """What is damaged, in a clause; of a repository as far as headers and small files show."""
        return damage_in(self.folder) if self.mirror is None else damage_in_repository(self.location, self.mirror.commit)

    def damage_note(self, damage: str) -> str:
        return damage_note(self.location, damage)


def check_place(text: str) -> None:
    """Before torch is imported and anything is written. AssayError: `text` is no checkpoint's folder, and no hub id."""
    if "://" in text:
        raise AssayError(
            f"{shown(hide_password(text))}: is an address, and weights are read here; give a checkpoint's folder, or "
            "compare servers with `assay judge`"
        )
    folder = Path(text).expanduser()
    if not folder.exists() and may_be_on_the_hub(text):
        return
    if not folder.is_dir():
        raise CheckpointError(no_such_folder(text, folder) if not folder.exists() else f"{text}: give a checkpoint's folder")
    read_json_object(folder, "config.json")


def check_out(out: Path, checkpoints: Iterable[Path]) -> None:
    """AssayError: `out` lies in one of the folders, whose files are its identity."""
    for folder in checkpoints:
        if out.resolve().is_relative_to(folder.resolve()):
            raise AssayError(f"{out}: lies in the checkpoint {folder}, to which nothing is written; give another --out")


def label_of(text: str) -> str:
    """What a checkpoint is called in a screening."""
    folder = Path(text).expanduser()
    return folder_name(folder) if folder.exists() else safe_name(text.split("/")[1])


def source_of(text: str, place: Path, say: Say) -> ScreenSource:
    """A checkpoint that `check_place` let pass. place: where a repository's files lie, if it is on the hub and nowhere here.

    CheckpointError: as of `HubMirror`.
    """
    folder = Path(text).expanduser()
    if folder.exists():
        return ScreenSource(str(folder), folder)
    if (here := downloaded(text)) is not None:
        return ScreenSource(str(here), here)
    from assay_quantize.remote.hub_mirror import HubMirror

    mirror = HubMirror(text, place, say)
    say(f"{text}: {size(mirror.num_bytes)} come from the hub, a shard when its layers are run; at commit {mirror.commit[:12]}")
    return ScreenSource(text, mirror.folder, mirror)


def downloaded(hub_id: str) -> Path | None:
    """The folder of a repository that lies whole in the Hugging Face cache; None: it does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from assay_quantize.checkpoint.checkpoint import open_checkpoint

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        open_checkpoint(folder, allow_quantized=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError, AssayError):
        return None
    return folder
