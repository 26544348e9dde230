"""`publish`: look, refuse, upload, read back.

What stands against publishing a checkpoint: a verdict can be overruled by name; that files are not as verified cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from assay.errors import AssayError
from assay.recipes.model import ModelRecipe
from assay.records.manifest import MANIFEST
from assay.records.verdict import Overall
from assay.records.verification import is_as_verified
from assay.safe_files import stays_inside
from assay.secret_text import holds_secret
from assay_reports.cards.licence import find_licence
from assay_reports.cards.metadata import base_model_of
from assay_reports.cards.screened import screening_of
from assay_reports.cards.serving import recipe_of
from assay_reports.publish.files import REPORT_FOLDER, WEIGHT_SUFFIXES, LocalFile, find_files
from assay_reports.publish.hub import check_branch, check_repository, hub_session, read_back, upload
from assay_reports.publish.places import Places, places_in, places_of
from assay_reports.publish.record import Publication, PublishedFile, Refusal
from assay_reports.run import Run, load_run

MAX_SEARCHED_BYTES = 64 << 20
"""Of a text that is searched for keys and tokens."""
NOT_SEARCHED = frozenset({"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", f"{REPORT_FOLDER}/index.html"})
"""Vocabularies: tens of thousands of pieces of text, some of which look like anything. The page: it says what report.json says,
which is searched, and the rest of it are scripts."""


def publish(
    run_dir: Path,
    label: str,
    repository: str,
    *,
    revision: str = "main",
    private: bool = False,
    despite: Collection[Overall] = (),
    screening: Path | None = None,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Publication:
    """Publish the checkpoint `label` of a run. dry_run, or something refused: nothing is sent to the hub, or asked of it.

    screening: record that the card repeats, or its folder; None: the run's own, if it has one. AssayError: no such checkpoint,
    no name of a repository or branch; the screening is of other weights; the hub refuses, breaks off, or does not answer when
    read back.
    """
    check_repository(repository)
    check_branch(revision)
    run = load_run(run_dir)
    _check_label(run, label, run_dir)
    if screening is not None:
        run = replace(run, screening=screening_of(screening, {label: run.manifests[label].checkpoint_sha256}))
    here = places_of(run_dir)
    files = find_files(run, label, repository, here)
    publication = Publication(
        run=run_dir.name,
        label=label,
        status=_status_of(run, label),
        checkpoint_sha256=run.manifests[label].checkpoint_sha256,
        repository=repository,
        revision=revision,
        private=private,
        files=tuple(PublishedFile(path=file.path, num_bytes=file.num_bytes, sha256=file.sha256) for file in files),
        refused=_refusals(run, label, files, despite, here),
        notes=(*_notes(run, label, recipe_of(run.plans[label].model)), *place_notes(files, here)),
    )
    if dry_run or publication.refused:
        return publication
    folder, verified = run.checkpoints[label], run.verifications[label]
    with hub_session() as api:
        uploaded = upload(
            api,
            files,
            repository,
            revision=revision,
            private=private,
            message=f"{run.plans[label].model} quantized to {run.plans[label].precision} with assay",
            still_the_same=lambda: is_as_verified(folder, verified),
            if_changed="the checkpoint changed while it was uploaded; nothing was committed; verify it again",
            on_progress=on_progress,
        )
        on_progress("reading back what the hub holds")
        result = read_back(api, files, repository, uploaded.commit)
    return publication.model_copy(
        update={
            "url": uploaded.url,
            "commit": uploaded.commit,
            "num_unchanged": uploaded.num_unchanged,
            "differences": result.differences,
            "num_read_back": result.num_whole,
            "notes": (*publication.notes, *uploaded.warnings),
        }
    )


# ------------------------------------------------------------------------------------------------ what stands against it
def _check_label(run: Run, label: str, run_dir: Path) -> None:
    """AssayError: the run has no finished checkpoint of this name."""
    made = sorted(run.plans.keys() & run.manifests.keys())
    if label not in made:
        raise AssayError(
            f"{run_dir / label}: no finished checkpoint there (plan.json and checkpoint/{MANIFEST} are needed); of this run "
            f"can be published: {', '.join(made) or 'none'}"
        )


def _status_of(run: Run, label: str) -> Overall:
    """The verdict on these very bytes: one on an older checkpoint of that name does not count, and the reference has none."""
    measured = run.measurement_of(label)
    return "NOT MEASURED" if measured is None or measured.is_reference else run.status(label)


def _refusals(
    run: Run, label: str, files: Sequence[LocalFile], despite: Collection[Overall], here: Places
) -> tuple[Refusal, ...]:
    """All reasons at once. despite: statuses that the user publishes knowingly; the card says them all the same. here: folders
    of this machine, which nothing that was made to be published may name."""
    reasons = (*_not_verified(run, label), *_unfit(run.checkpoints[label], files), *_place_in_made(files, here))
    status = _status_of(run, label)
    is_overruled = status == "PASS" or status in despite
    verdict = [] if is_overruled else [Refusal(reason=_verdict(run, label, status), despite=status)]
    return (*verdict, *(Refusal(reason=reason) for reason in reasons))


def _verdict(run: Run, label: str, status: Overall) -> str:
    reason = {
        "FAIL": "it lost more than its gates allow (FAIL)",
        "UNDERPOWERED": "whether it lost more than its gates allow is undecided (UNDERPOWERED)",
        "not failed": "its divergence is within its limits, and no task was asked (not failed)",
        "NOT MEASURED": "no verdict is about these files (NOT MEASURED)",
    }[status]
    if run.reference is not None and run.reference.label == label:
        reason = "it is the reference of its run, and nobody judged what it lost itself (NOT MEASURED)"
    return f"{label}: {reason}; publish it knowingly with --despite {status.upper().replace(' ', '-')}"


def _not_verified(run: Run, label: str) -> Iterator[str]:
    folder, manifest, record = run.checkpoints[label], run.manifests[label], run.verifications.get(label)
    again = f"`assay verify {folder}` does"
    if record is None:
        yield f"{folder}: was not verified; {again}"
    elif record.checkpoint_sha256 != manifest.checkpoint_sha256:
        yield f"{folder}: the verification that is there is about other files; {again} it again"
    elif not record.passed:
        yield f"{folder}: verification found {len(record.damages)} damages ({record.damages[0].where}); make it again"
    elif not is_as_verified(folder, record):
        yield f"{folder}: files have changed, or come in, since they were verified; {again} it again"


def _unfit(folder: Path, files: Sequence[LocalFile]) -> Iterator[str]:
    for file in files:
        if file.source is not None:
            if not file.source.is_file():
                yield f"{file.source}: is missing"
                continue
            if file.source.is_symlink() and not stays_inside(file.source, folder):
                yield f"{file.source}: is a link that leads out of the checkpoint's folder; put the file itself there"
                continue
            if file.source.stat().st_size != file.num_bytes:
                yield f"{file.source}: has {file.source.stat().st_size} bytes, the manifest says {file.num_bytes}"
                continue
        if _is_searched(file) and holds_secret(file.read().decode("utf-8", errors="replace")):
            yield f"{file.path}: holds what looks like a key or token; remove it at its source, then make the file again"


def _place_in_made(files: Sequence[LocalFile], here: Places) -> Iterator[str]:
    for file in files:
        if file.content is not None and (place := next(places_in(file.content.decode(errors="replace"), here), None)):
            yield f"{file.path}: names {place}, a folder of this machine; take the name out of what the run was called with"


def place_notes(files: Sequence[LocalFile], here: Places) -> Iterator[str]:
    """Files that are published as they came with the source, and name a folder of this machine."""
    for file in files:
        if file.source is None or not file.source.is_file() or not _is_searched(file):
            continue
        if place := next(places_in(file.read().decode("utf-8", errors="replace"), here), None):
            yield f"{file.path} names {place}, a folder of this machine, as the source's file of that name does"


def _is_searched(file: LocalFile) -> bool:
    return not file.path.endswith(WEIGHT_SUFFIXES) and file.path not in NOT_SEARCHED and file.num_bytes <= MAX_SEARCHED_BYTES


def _notes(run: Run, label: str, recipe: ModelRecipe | None) -> tuple[str, ...]:
    """What the repository will lack, in lines; none of it keeps it from being published."""
    lines = []
    if find_licence(run.checkpoints[label], recipe) is None:
        lines.append("no licence is known: the card states none, though that of the source holds; add it on the hub")
    if base_model_of(run.plans[label], recipe) is None:
        lines.append(
            "the source was a local folder: the card names no base_model; "
            "`assay quantize` again with --base-model OWNER/NAME names it"
        )
    return tuple(lines)
