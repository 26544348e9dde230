"""A pack as a data set of the hub: its own files, sealed as they are, and a card."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from assay.errors import AssayError
from assay.records.base import sha256_of_file
from assay.records.pack import PACK_NAME, Pack, read_sealed
from assay.records.run import CARD
from assay_reports.publish.files import LocalFile
from assay_reports.publish.hub import check_branch, check_repository, hub_session, read_back, upload
from assay_reports.publish.places import places_of
from assay_reports.publish.publish import place_notes
from assay_reports.publish.record import PackPublication, PublishedFile
from assay_reports.report import environment

HUB_LICENCES = frozenset({
    "afl-3.0", "agpl-3.0", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-2.0", "gpl-3.0", "lgpl-3.0", "mit", "mpl-2.0", "odc-by", "openrail", "pddl", "unlicense",
})  # fmt: skip
"""Ids that the hub's metadata has (https://huggingface.co/docs/hub/repositories-licenses) and that texts have; others are
`other`, and the card says them."""


def publish_pack(
    folder: Path,
    repository: str,
    *,
    revision: str = "main",
    private: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> PackPublication:
    """Publish a sealed pack. dry_run: nothing is sent to the hub, or asked of it.

    AssayError: it is not the pack that was sealed, no name of a repository or branch; the hub refuses, breaks off, or does not
    answer when read back.
    """
    check_repository(repository)
    check_branch(revision)
    pack = read_sealed(folder)
    files = _files(folder, pack, repository)
    publication = PackPublication(
        pack=folder.absolute().name, reference=pack.reference, seal=pack.seal, repository=repository, revision=revision,
        private=private,
        files=tuple(PublishedFile(path=file.path, num_bytes=file.num_bytes, sha256=file.sha256) for file in files),
        notes=(
            *(() if pack.panel.stated.licence else ("no licence of its texts is stated: the card names none",)),
            *place_notes(files, places_of(folder)),
        ),
    )  # fmt: skip
    if dry_run:
        return publication
    with hub_session() as api:
        uploaded = upload(
            api,
            files,
            repository,
            revision=revision,
            private=private,
            repo_type="dataset",
            message=f"what candidates for {pack.reference} are screened against, made with assay",
            still_the_same=lambda: _is_sealed(folder, pack),
            if_changed="the pack changed while it was uploaded; nothing was committed; get or make it again",
            on_progress=on_progress,
        )
        on_progress("reading back what the hub holds")
        result = read_back(api, files, repository, uploaded.commit, "dataset")
    return publication.model_copy(
        update={
            "url": uploaded.url, "commit": uploaded.commit, "num_unchanged": uploaded.num_unchanged,
            "differences": result.differences, "num_read_back": result.num_whole,
            "notes": (*publication.notes, *uploaded.warnings),
        }
    )  # fmt: skip


def pack_card(pack: Pack, repository: str) -> str:
    """README.md of the data set."""
    licence = (pack.panel.stated.licence or "").strip()
    identifier = licence.lower() if licence.lower() in HUB_LICENCES else "other"
    return environment(html=False).get_template("pack.md.j2").render(
        pack=pack, repository=repository, licence=licence, identifier=identifier
    )  # fmt: skip


def _files(folder: Path, pack: Pack, repository: str) -> tuple[LocalFile, ...]:
    """Those of the seal, the record and the card, largest first."""
    hashes = pack.files | {PACK_NAME: sha256_of_file(folder / PACK_NAME)}
    of_folder = [LocalFile(name, (folder / name).stat().st_size, sha256, folder / name) for name, sha256 in hashes.items()]
    card = pack_card(pack, repository).encode()
    made = LocalFile(CARD, len(card), hashlib.sha256(card).hexdigest(), content=card)
    return (*sorted(of_folder, key=lambda file: (-file.num_bytes, file.path)), made)


def _is_sealed(folder: Path, pack: Pack) -> bool:
    try:
        return read_sealed(folder) == pack
    except AssayError:
        return False
