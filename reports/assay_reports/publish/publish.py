"""`publish`: look, refuse, upload, read back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from assay.records.verdict import Status
from assay.records.verification import is_as_verified
from assay_reports.cards.serving import recipe_of
from assay_reports.publish.files import find_files
from assay_reports.publish.hub_upload import check_branch, check_repository, hub_session, upload
from assay_reports.publish.places import places_of
from assay_reports.publish.read_back import read_back
from assay_reports.publish.record import Publication, PublishedFile
from assay_reports.publish.refusals import check_label, notes, place_notes, refusals, status_of
from assay_reports.run import load_run


def publish(
    run_dir: Path,
    label: str,
    repository: str,
    *,
    revision: str = "main",
    private: bool = False,
    despite: Collection[Status] = (),
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Publication:
    """Publish the checkpoint `label` of a run. dry_run, or something refused: nothing is sent to the hub, or asked of it.

    AssayError: no such checkpoint, no name of a repository or branch; the hub refuses, breaks off, or does not answer when read
    back.
    """
    check_repository(repository)
    check_branch(revision)
    run = load_run(run_dir)
    check_label(run, label, run_dir)
    here = places_of(run_dir)
    files = find_files(run, label, repository, here)
    found = Publication(
        run=run_dir.name,
        label=label,
        status=status_of(run, label),
        checkpoint_sha256=run.manifests[label].checkpoint_sha256,
        repository=repository,
        revision=revision,
        private=private,
        files=tuple(PublishedFile(path=file.path, num_bytes=file.num_bytes, sha256=file.sha256) for file in files),
        refused=refusals(run, label, files, despite, here),
        notes=(*notes(run, label, recipe_of(run.plans[label].model)), *place_notes(files, here)),
    )
    if dry_run or found.refused:
        return found
    folder, verified = run.checkpoints[label], run.verifications[label]
    with hub_session() as api:
        sent = upload(
            api,
            files,
            repository,
            revision=revision,
            private=private,
            message=f"{run.plans[label].model} quantized to {run.plans[label].precision} with assay",
            still_the_same=lambda: is_as_verified(folder, verified),
            on_progress=on_progress,
        )
        on_progress("reading back what the hub holds")
        seen = read_back(api, files, repository, sent.commit)
    return found.model_copy(
        update={
            "url": sent.url,
            "commit": sent.commit,
            "num_unchanged": sent.num_unchanged,
            "differences": seen.differences,
            "num_read_back": seen.num_whole,
            "notes": (*found.notes, *sent.warnings),
        }
    )
