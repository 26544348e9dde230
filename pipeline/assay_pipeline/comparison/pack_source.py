"""Where a pack lies: a folder, or a data set of the hub that is put into one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from assay.callbacks import Say, say_nothing
from assay.errors import CheckpointError
from assay.installation import data_home
from assay.quantities import and_more, size
from assay.recipes.model import HUB_ID
from assay.records.pack import PACK_NAME, Pack


def pack_folder(named: str | Path, say: Say = say_nothing) -> Path:
    """The folder of a pack; of OWNER/NAME on the hub one in this user's data, downloaded once for each commit.

    Every file is compared with the hash that the hub states; whether they are the pack that was sealed is seen when it is
    opened. AssayError: no such folder or data set, it is no pack, the hub does not answer, the disk is full.
    """
    folder = Path(named)
    if folder.exists() or folder.parent.name == "" or folder.parent.is_dir() or not re.fullmatch(HUB_ID, str(named)):
        return folder
    from assay_quantize.checkpoint.hub import Repository, file_in_cache

    repository = Repository(str(named), kind="dataset")
    if PACK_NAME not in repository.files:
        raise CheckpointError(
            f"{repository.shown_id}: has no {PACK_NAME}, so it is no pack; give one that `assay publish` uploaded"
        )
    place = data_home() / "packs" / str(named).replace("/", "--") / repository.revision
    if (place / PACK_NAME).is_file():
        return place
    names = sorted(Pack.load(file_in_cache(repository, PACK_NAME)).files)
    if lacking := [name for name in names if name not in repository.files]:
        raise CheckpointError(f"{repository.shown_id}: lacks {and_more(lacking)} of the pack; it was not uploaded whole")
    say(f"{named}: {len(names)} files, {size(sum(repository.files[name].num_bytes or 0 for name in names))}")
    for name in (*names, PACK_NAME):  # the record last
        stored, path = file_in_cache(repository, name).resolve(), place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            os.link(stored, path)
        except OSError:  # another file system
            shutil.copyfile(stored, path)
    return place
