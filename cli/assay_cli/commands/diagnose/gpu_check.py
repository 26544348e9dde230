"""The `assay diagnose gpu-check` command: what only a GPU can show, in ten minutes on one card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assay.errors import AssayError
from assay.records.preflight.gpu_check import CHECK_NAME, FormatCheck, GpuCheck
from assay_cli.options import JsonOption, RunOption, choice, recipes
from assay_cli.terminal import emit, escape, print_rows, results, say, say_error
from assay_evaluate.serving.gpus import GPUS
from assay_pipeline.gpu_checkpoints import FORMATS, WIDE, check_on_gpu, kernels_foreseen
from assay_pipeline.places import check_places, place_for

COLOURS = {"PASS": "green", "FAIL": "bold red", "NOT SERVED": "yellow", "NOT MEASURED": "yellow"}
HEADERS = ("outcome", "precision", "kernels", "greedy", "log-probabilities (nats)", "drafts accepted", "tokens/s", "why")


def gpu_check(
    formats: Annotated[
        list[str] | None,
        typer.Option("--formats", metavar="P,...", callback=recipes("precisions"), help=f"Default: {', '.join(FORMATS)}."),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="What is not begun by then is NOT MEASURED.")] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done and which kernels are foreseen.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="|".join(GPUS), callback=choice(*GPUS), help="With --dry-run: the GPU that is meant."),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Run the program on a CPU, emulation against emulation; shows nothing about a GPU."),
    ] = False,
    run: RunOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of record and logs. Default: a new temporary folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check on one GPU what only a GPU can show: native kernels against emulation, drafts, speed.

    Exit 1 if something fails, 2 if there is no GPU or not everything was measured. With --run the report of that run cites it.
    """
    from assay_evaluate.serving.hardware import find_gpus

    check_places(run, out)
    if dry_run and self_test:
        raise AssayError("--dry-run only says what would be done, --self-test does it on a CPU: say one of them")
    if gpu is not None and not dry_run:
        raise AssayError("--gpu goes with --dry-run: what is checked is the GPU of this machine")
    if self_test and run is not None:
        raise AssayError("--self-test shows nothing about a GPU, so it belongs to no run: leave --run out")
    gpus, names = find_gpus(), formats or [*FORMATS]
    shown = results(as_json=as_json)
    if dry_run or (not gpus and not self_test):
        _say_what_would_be(names, gpu or (gpus[0].name if gpus else "H200"), shown, as_json=as_json)
        if not dry_run:
            say_error("no GPU here (nvidia-smi lists none), so nothing was checked; --self-test runs the program on a CPU")
        raise typer.Exit(0 if dry_run else 2)
    place = place_for("gpu-check", ".", run=run, out=out, say=say)
    record = check_on_gpu(names, minutes, place.logs, self_test=self_test, say=say)
    record.save(place.records / CHECK_NAME)
    if as_json:
        emit(record)
    else:
        print_check(record, shown)
    say(f"record: {place.records / CHECK_NAME}; logs of the servers: {place.logs}")
    raise typer.Exit({"PASS": 0, "FAIL": 1}.get(record.outcome, 2))


# ------------------------------------------------------------------------------------------------ without a GPU
def _say_what_would_be(names: Sequence[str], gpu: str, out: Console, *, as_json: bool) -> None:
    """Shapes, servers and kernels foreseen; what vLLM's loaders say is asked here, and needs no GPU."""
    from assay_evaluate.diagnosis.gpu_check.check import WAVE_S

    say(f"asking vLLM's loaders for {gpu} about {len(names)} precisions, without a GPU")
    kernels = kernels_foreseen(names, gpu)
    if as_json:
        emit({"gpu": gpu, "model": WIDE, "kernels": kernels})
        return
    out.print(f"on one {gpu} this would be served, each natively and emulated, with one draft token a step: {WIDE}")
    print_rows(("precision", "kernels foreseen"), [(name, escape(text)) for name, text in kernels.items()], out)
    out.print(
        "compared: greedy replies, log-probabilities, accepted drafts, prompt_logprob_token_ids, speed. "
        f"Two servers a precision; up to four precisions at once take {WAVE_S:.0f} s (an estimate)."
    )


# ------------------------------------------------------------------------------------------------ the table
def print_check(record: GpuCheck, out: Console) -> None:
    """One row for each format."""
    where = "self-test on a CPU, emulation against emulation: nothing is shown about a GPU" if record.self_test else record.gpu
    out.print(escape(f"{where}: {record.model}; {record.seconds:.0f} s"))
    print_rows(HEADERS, [_row(check) for check in record.formats], out)
    out.print(f"[{COLOURS[record.outcome]}]{record.outcome}[/]")


def _row(check: FormatCheck) -> tuple[str, ...]:
    cells = (
        check.precision,
        _kernels(check),
        _greedy(check),
        _logprobs(check),
        _drafts(check),
        _speed(check),
        "; ".join(check.reasons),
    )
    return (f"[{COLOURS[check.outcome]}]{check.outcome}[/]", *map(escape, cells))


def _kernels(check: FormatCheck) -> str:
    if check.kernels is None:
        return ""
    if check.kernels.foreseen is None:
        return f"not foreseen: {check.kernels.unknown}"
    return ", ".join(f"{each.kernel}{'' if each.line else ' MISSING'}" for each in check.kernels.foreseen)


def _greedy(check: FormatCheck) -> str:
    g = check.greedy
    return "" if g is None else f"{g.num_equal} + {g.num_ties} ties of {g.num_replies}"


def _logprobs(check: FormatCheck) -> str:
    p = check.logprobs
    return (
        "" if p is None else f"mean {p.mean_difference:.4f} (<{p.mean_bound:g}), max {p.max_difference:.3f} (<{p.max_bound:g})"
    )


def _drafts(check: FormatCheck) -> str:
    d = check.drafts
    return "" if d is None else f"{d.accepted_share:.0%}, emulated {d.emulated_share:.0%}"


def _speed(check: FormatCheck) -> str:
    s = check.speed
    return "" if s is None else f"{s.alone:.0f} alone, {s.together:.0f} at {s.num_together}"
