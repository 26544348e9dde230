"""The `assay publish` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.quantities import size
from assay.records.pack import PACK_NAME
from assay.records.verdict import Overall
from assay_cli.options import JsonOption, RunsOption, ScreeningOption, complete_run, named_run, several
from assay_cli.terminal import console, emit, escape, print_rows, results, say
from assay_pipeline.gate_choice import registered_gates
from assay_pipeline.interrupted import interruptible
from assay_pipeline.run_folders import find_run, holds_records

if TYPE_CHECKING:
    from assay_reports.publish.record import PackPublication, Publication

KEPT = "what was uploaded is kept on the hub; the same command goes on"
OVERRULED: dict[str, Overall] = {status.upper().replace(" ", "-"): status for status in get_args(Overall) if status != "PASS"}
"""As it is typed -> verdict."""


def publish(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/PRECISION]|PACK",
            autocompletion=complete_run,
            help="A run, and which of its checkpoints, if it has several: runs/tiny-glm/w4a16, or tiny-glm/w4a16. "
            "Or what `assay pack` wrote: it becomes a data set.",
        ),
    ],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the hub. It is made if it is not there.")],
    revision: Annotated[str, typer.Option("--revision", metavar="BRANCH", help="Branch; made if it is not there.")] = "main",
    private: Annotated[bool, typer.Option("--private", help="Make a private repository; refuse one that is public.")] = False,
    despite: Annotated[
        list[str] | None,
        typer.Option(
            "--despite",
            metavar="STATUS,...",
            callback=several,
            help="Publish though the verdict is FAIL, UNDERPOWERED, NOT-MEASURED or NOT-FAILED. The card says so all the same.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List files, bytes and what would be refused; ask nothing of the hub.")
    ] = False,
    screening: ScreeningOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Upload a checkpoint with its card, manifest and report, or a pack, to the Hugging Face hub, and read back what it holds.

    Only what passed is published, and only the very files that were verified. The commit comes last and names all files: an
    interrupted upload leaves the repository as it was, and the same command goes on. Exit 1 if the hub holds something else
    afterwards, or if --dry-run finds that it would be refused.
    """
    from assay_reports.publish.packs import publish_pack
    from assay_reports.publish.publish import publish as run_publish

    if (Path(run) / PACK_NAME).is_file():
        if despite or screening is not None:
            option = "--despite" if despite else "--screening"
            raise AssayError(f"{option}: a pack has no verdict; leave it out")
        with interruptible(lambda: KEPT):
            packed = publish_pack(Path(run), repository, revision=revision, private=private, dry_run=dry_run, on_progress=say)
        emit(packed) if as_json else _print(packed, f"pack of {packed.reference}", dry_run=dry_run)
        if packed.differences:
            raise typer.Exit(1)
        return
    allowed = _statuses(despite or [])
    run_dir, label = _checkpoint(ctx, run, runs)
    registered_gates(run_dir)  # what `assay gate` refuses is not published either
    with interruptible(lambda: KEPT):
        made = run_publish(
            run_dir,
            label,
            repository,
            revision=revision,
            private=private,
            despite=allowed,
            screening=screening,
            dry_run=dry_run,
            on_progress=say,
        )
    if made.refused and not dry_run:
        raise AssayError("; ".join(refusal.reason for refusal in made.refused))
    if as_json:
        emit(made)
    else:
        _print(made, f"{made.label}, {made.status}", dry_run=dry_run)
        for refusal in made.refused:
            results().print(escape(f"would be refused: {refusal.reason}"))
    if made.refused or made.differences:
        raise typer.Exit(1)


def _statuses(named: list[str]) -> frozenset[Overall]:
    statuses = []
    for word in named:
        typed = word.strip().upper().replace(" ", "-").replace("_", "-")
        if typed not in OVERRULED:
            near = did_you_mean(word.upper(), list(OVERRULED))
            raise AssayError(f"--despite {shown(word)}: no such verdict; {near}allowed: {', '.join(OVERRULED)}")
        statuses.append(OVERRULED[typed])
    return frozenset(statuses)


def _checkpoint(ctx: typer.Context, named: str, runs: Path) -> tuple[Path, str]:
    """(run, label). AssayError: there is no such run, or it has several checkpoints and none was named."""
    before, _, last = named.rstrip("/").rpartition("/")
    if before and not holds_records(Path(named)):
        for folder in (Path(before), runs / before):
            if holds_records(folder) and (folder / last).is_dir():
                return folder, last
    try:
        run_dir = named_run(ctx, named, runs)
    except AssayError:
        if not before:
            raise
        try:
            return find_run(before, runs), last
        except AssayError:
            pass
        raise
    made = sorted(path.parent.name for path in run_dir.glob("*/plan.json"))
    if len(made) != 1:
        what = f"has several checkpoints: {', '.join(made)}; name one" if made else "has no checkpoint; name a run that has"
        raise AssayError(f"{run_dir}: {what}, as in {run_dir.name}/{made[0] if made else 'w4a16'}")
    return run_dir, made[0]


def _print(made: Publication | PackPublication, what: str, *, dry_run: bool) -> None:
    out = results()
    if dry_run:
        print_rows(("file", "size"), [(escape(file.path), size(file.num_bytes)) for file in made.files], out)
    for line in made.notes:
        console.print(escape(f"note: {line}"))
    total = f"{len(made.files)} files, {size(made.num_bytes)}"
    if made.url is None:
        out.print(escape(f"{what}: {total} for {made.repository} ({made.revision}); nothing was uploaded"))
    else:
        unchanged_text = f", {made.num_unchanged} of them there before" if made.num_unchanged else ""
        out.print(escape(f"{made.url}/tree/{made.commit}: {what}: {total}{unchanged_text}"))
    for difference in made.differences:
        out.print(escape(f"not what was uploaded: {difference}"))
    if made.url is not None and not made.differences:
        others = len(made.files) - made.num_read_back
        rest = f"; of {others} larger ones the hub's SHA-256 and the first bytes" if others else ""
        out.print(escape(f"read back: {made.num_read_back} files are the same{rest}"))
