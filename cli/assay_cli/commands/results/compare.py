"""The `assay compare` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from assay import quantities
from assay.errors import AssayError
from assay.foreign_text import shown
from assay.records.divergence import TextMean
from assay.records.screening import is_screening, load_screening
from assay_cli.options import JsonOption, RunsOption, complete_run, refuse_runs
from assay_cli.shown.screening import print_screening_comparison
from assay_cli.shown.verdicts import COLOURS
from assay_cli.terminal import emit, escape, print_rows, results, say
from assay_pipeline.run_folders import find_run

if TYPE_CHECKING:
    from assay.records.verdict import Overall
    from assay_evaluate.verdicts.run_comparison import CheckpointComparison, MeasuredRun, RunComparison, TaskComparison


def compare(
    ctx: typer.Context,
    first: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_run,
            help="A run's folder, or a model's name under --runs; or what `assay screen` wrote.",
        ),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="RUN", autocompletion=complete_run, help="The run that it is compared with.")
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", autocompletion=complete_run, help="More runs, for the first as well."),
    ] = None,
    runs: RunsOption = Path("runs"),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PAGE.html", help="Write all of them onto one page as well: one file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side: their scores, and what was lost from the first to each other on the same questions.

    Says what differs in models, questions and serving. Gives no verdict; exits 0. --json is of two runs.

    Of two screenings: what changed in the KL of each candidate, if reference, texts and numerics are the same.
    """
    from assay_evaluate.verdicts.run_comparison import compare_runs

    if second is None:
        raise AssayError(f"compare {shown(first)}: only one run is named; name the run that it is compared with as well")
    others = [second, *(more or ())]
    if screened := [name for name in (first, *others) if is_screening(Path(name))]:
        _compare_screenings([first, *others], screened, out, as_json=as_json)
        return
    if as_json and len(others) > 1:
        raise AssayError(f"compare: --json compares two runs, and {len(others) + 1} are named; compare them two at a time")
    refuse_runs(ctx, first, *others)
    folders = [find_run(name, runs) for name in (first, *others)]
    for number, folder in enumerate(folders):
        same = next((earlier for earlier in folders[:number] if earlier.resolve() == folder.resolve()), None)
        if same is not None:
            raise AssayError(
                f"{(first, *others)[folders.index(same)]} and {others[number - 1]} are the same run, {same}; name two"
            )
    measured = [_measured(folder) for folder in folders]
    compared = [compare_runs(measured[0], measurement) for measurement in measured[1:]]
    if out is not None:
        _write_page(out, folders, compared)
    if as_json:
        emit(compared[0])
        return
    for comparison in compared:
        show(comparison, results())
    if out is not None:
        say(f"page: {out}")


def _compare_screenings(names: list[str], screened: list[str], out: Path | None, *, as_json: bool) -> None:
    from assay_evaluate.verdicts.screening_comparison import compare_screenings

    if len(screened) < len(names):
        other = next(name for name in names if name not in screened)
        raise AssayError(
            f"{screened[0]} is a screening and {other} is none: what is served and what is screened have other numerics, and "
            "are not compared; name two screenings, or two runs"
        )
    if len(names) > 2 or out is not None:
        what = "--out is for runs" if out is not None else f"{len(names)} screenings are named"
        raise AssayError(f"compare: {what}; screenings are compared two at a time, without a page")
    first, second = (load_screening(Path(name)) for name in names)
    comparison = compare_screenings((names[0], names[1]), first, second)
    if as_json:
        emit(comparison)
    else:
        print_screening_comparison(comparison, results())


def _write_page(out: Path, folders: list[Path], compared: list[RunComparison]) -> None:
    from assay_reports.compare import comparison_of, reports_of, write_comparison

    reports = reports_of(folders)
    sides = [
        comparison_of(name, comparison.model_dump(mode="json"))
        for (name, _), comparison in zip(reports[1:], compared, strict=True)
    ]
    write_comparison(out, reports, sides)


def _measured(run_dir: Path) -> MeasuredRun:
    from assay_evaluate.verdicts.run_comparison import MeasuredRun
    from assay_reports.run import load_run

    run = load_run(run_dir)
    if not run.measurements:
        raise AssayError(f"{run_dir}: nothing was measured yet; run `assay evaluate` first")
    return MeasuredRun(str(run_dir), run.measurements, run.gates)


# ------------------------------------------------------------------------------------------------ as text
def show(comparison: RunComparison, out: Console) -> None:
    """What is compared, what differs, then a row for each number."""
    from assay_reports.compare import differences_of

    for name, side in (("first", comparison.first), ("second", comparison.second)):
        out.print(escape(f"{name:7} {side.run}: {side.model}, reference {side.reference}, suite {side.suite}"))
    for line in differences_of(comparison.model_dump(mode="json")):
        out.print(escape(line))
    rows = [row for checkpoint in comparison.checkpoints for row in _rows(checkpoint)]
    print_rows(("checkpoint", "", "first", "second", "second against first"), rows, out)
    for (task, reason), labels in _not_paired(comparison).items():
        out.print(escape(f"{task} of {', '.join(labels)}: not paired: {reason}"))


def _not_paired(comparison: RunComparison) -> dict[tuple[str, str], list[str]]:
    """(task, why) -> checkpoints."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for checkpoint in comparison.checkpoints:
        for task in checkpoint.tasks:
            if task.not_paired is not None:
                reasons.setdefault((task.task, task.not_paired), []).append(checkpoint.label)
    return reasons


def _rows(checkpoint: CheckpointComparison) -> list[tuple[str, ...]]:
    from assay_reports.text import nats_interval, percent, percent_interval

    same = checkpoint.checkpoint_sha256[0] == checkpoint.checkpoint_sha256[1]
    sizes = ["not known" if num_bytes is None else quantities.size(num_bytes) for num_bytes in checkpoint.checkpoint_bytes]
    others = (
        "" if None in checkpoint.checkpoint_bytes else "other weights"
    )  # of servers alone, identities of two runs always differ
    rows: list[tuple[str, ...]] = [(escape(checkpoint.label), "size", *sizes, "the same checkpoint" if same else others)]
    if any(checkpoint.verdicts):
        rows.append(
            ("", "verdict", *(_verdict(*given) for given in zip(checkpoint.verdicts, checkpoint.is_reference, strict=True)), "")
        )
    rows += [
        ("", escape(task.task), *(escape(percent_interval(score)) for score in task.scores), _lost(task))
        for task in checkpoint.tasks
    ]

    def nats(means: tuple[TextMean | None, ...]) -> list[str]:
        return [escape(nats_interval(mean)) for mean in means]

    if any(checkpoint.kl_unbiased_mean):
        rows.append(("", "KL, unbiased, nats", *nats(checkpoint.kl_unbiased_mean), checkpoint.kl_not_compared or ""))
    if any(checkpoint.kl_mean):
        rows.append(("", "KL, lower bound, nats", *nats(checkpoint.kl_mean), checkpoint.kl_not_compared or ""))
    if any(rate is not None for rate in checkpoint.acceptance):
        rows.append(("", "drafts accepted", *map(percent, checkpoint.acceptance), ""))
    return rows


def _verdict(status: Overall | None, is_reference: bool) -> str:
    if status is None:
        return "reference" if is_reference else "not judged"
    return f"[{COLOURS[status]}]{status}[/]"


def _lost(task: TaskComparison) -> str:
    """`loses 1.5 points (95 % interval: 0.9 gained to 4.2 lost), 200 pairs`."""
    if task.lost is None:
        return "not paired"
    lost = task.lost
    name, ends = quantities.interval_name(lost.level, lost.coverage), quantities.lost_or_gained(lost.low, lost.high)
    return f"{quantities.change(lost.value)} ({name}: {ends}), {task.num_pairs} pairs"
