"""The `assay speed` command: how fast the checkpoints of a run are served; measured here or imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.errors import AssayError
from assay.foreign_text import check_label, shown
from assay.records.speed import SPEED_RECORD
from assay_cli.options import (
    JsonOption,
    ProfileOption,
    RunsOption,
    TensorParallelOption,
    choice,
    complete_run,
    refuse_runs,
    refuse_unused,
    several,
)
from assay_cli.shown.speed import print_speed
from assay_cli.terminal import emit, results, say
from assay_pipeline.speed_ladder import import_speed, measure_speed

OFF = {"off": "0"}
MOST = 4096
"""Requests in flight, tokens drafted, repeats: beyond it is a slip of the finger."""
MEASURED_ONLY = ("checkpoints", "concurrency", "output_tokens", "prompt_tokens", "profile", "tensor_parallel_size")
LADDER_ONLY = ("prompts", "repeats", "starts", "requests", "objective", "seed")
IMPORTED_ONLY = ("form", "label", "hardware", "prompt_kind")


def numbers(option: str, values: list[str] | None, least: int) -> tuple[int, ...] | None:
    """`1,4,8` as numbers from `least` on, each once, in order. None: not given."""
    if values is None:
        return None
    parsed = []
    for value in several(values) or ():
        word = OFF.get(value, value) if least == 0 else value
        if not word.isascii() or not word.isdecimal() or not least <= int(word) <= MOST:
            words = "`off` or whole numbers from 1" if least == 0 else f"whole numbers from {least}"
            raise AssayError(f"{option} {shown(value)}: takes {words} to {MOST:,}, with commas between them")
        parsed.append(int(word))
    return tuple(sorted(set(parsed)))


def speed(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TARGET", autocompletion=complete_run,
            help="A run's folder, a model's name under --runs, a checkpoint folder or a Hugging Face id.",
        ),
    ],
    checkpoints: Annotated[
        list[str] | None,
        typer.Option("--checkpoints", metavar="LABEL,...", callback=several, help="Of the run. Default: all."),
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option("--concurrency", metavar="NUMBER,...", help="Requests in flight. Default: 1,4,8 on a CPU, else 1,8,32."),
    ] = None,
    speculation: Annotated[
        list[str] | None,
        typer.Option(
            "--speculation", metavar="off|NUMBER,...",
            help="Tokens drafted a step. Default: off, and as many as the model's recipe says. With --import: of its rows.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts", metavar="KIND,...", callback=several,
            help="chat, long, code, or the name of a task that was evaluated in the run. Default: chat.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, max=1000, help="Repeats of every point, in shuffled order. Default: 3.")
    ] = None,
    starts: Annotated[
        int | None,
        typer.Option(
            "--starts", min=1, max=100,
            help="Of each server, to which repeats are dealt out; one does not show how starts differ. Default: 2.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Requests per repeat. Default: 8, or 2 for each request in flight."),
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=2, help="Longest reply. Default: 64 on a CPU, else 512.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=128, help="Length of `long` prompts. Default: 1024.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", metavar="LIMITS", help="What a good request takes, for goodput: 'ttft<2s tpot<25ms'."),
    ] = None,
    profile: ProfileOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    imported: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="Rows that another tool wrote; nothing is measured.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="FORMAT", callback=choice("vllm-bench", "inferencex", "guidellm", "table"),
            help="Format of the file: vllm-bench, inferencex, guidellm or table. Default: detected.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="LABEL|NAME=LABEL,...", callback=several,
            help="With --import: the checkpoint's label; or the run's labels for the names that the file uses, nvfp4=nvfp4a16.",
        ),
    ] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="With --import: `8xH200`, or a CPU's name.")] = None,
    prompt_kind: Annotated[
        str | None, typer.Option("--prompt-kind", help="With --import: what was asked, e.g. `random 1024/512`.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and of the order.")] = 0,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure how fast checkpoints are served, with vLLM's own benchmark, over requests in flight and drafts on and off.

    The record is RUN/speed.json; what it holds is not measured again. Defaults are those of the model's recipe, where it says
    some under `speed:`. Exit 1 if a point could not be measured though its
    format has kernels here: emulation says nothing about speed, so emulated checkpoints are left out.
    """
    refuse_runs(ctx, target)
    drafted = numbers("--speculation", speculation, 0)
    if imported is not None:
        refuse_unused(ctx, "with --import", *MEASURED_ONLY, *LADDER_ONLY)
        only_label, names = labels_of(label)
        if drafted is not None and len(drafted) > 1:
            raise AssayError("--speculation: with --import it is one number, of all rows of the file, or `off`")
        run_speed = import_speed(
            target, imported, runs=runs, form=form, label=only_label, names=names, hardware=hardware,
            num_drafted=None if drafted is None else drafted[0], prompts=prompt_kind, say=say,
        )  # fmt: skip
    else:
        from assay_evaluate.speed.ladder import parse_objective

        refuse_unused(ctx, "without --import", *IMPORTED_ONLY)
        given: dict[str, Any] = {
            "concurrency": numbers("--concurrency", concurrency, 1), "speculation": drafted,
            "prompts": None if prompts is None else tuple(prompts),
            "repeats": repeats, "starts": starts, "num_requests": requests, "output_tokens": output_tokens,
            "prompt_tokens": prompt_tokens, "objective": {} if objective is None else parse_objective(objective), "seed": seed,
        }  # fmt: skip
        options = {name: value for name, value in given.items() if value is not None}  # others are left to the default
        run_speed = measure_speed(
            target, runs=runs, checkpoints=checkpoints, profile=profile, tensor_parallel_size=tensor_parallel_size,
            options=options, say=say,
        )  # fmt: skip
    if as_json:
        emit(run_speed.record)
    else:
        print_speed(run_speed.record, run_speed.place.reference, results())
    say(f"record: {run_speed.place.run_dir / SPEED_RECORD}")
    raise typer.Exit(1 if run_speed.failed else 0)


def labels_of(given: Sequence[str] | None) -> tuple[str | None, dict[str, str]]:
    """(the label of all rows, name in the file -> label). AssayError: both, a name twice, or no label.

    `several` has taken the list apart at its commas.
    """
    values = list(given or ())
    pairs = [value.partition("=") for value in values]
    mapped = [(name.strip(), label.strip()) for name, equals, label in pairs if equals]
    names = dict(mapped)
    if (mapped and len(mapped) < len(values)) or (not mapped and len(values) > 1) or len(names) < len(mapped):
        raise AssayError("--label: takes one label, or NAME=LABEL for each name that the file uses, with commas between them")
    if any(not name or not label for name, label in mapped):
        raise AssayError(f"--label {shown(','.join(values))}: a name or a label is empty; write nvfp4=nvfp4a16")
    only_label = values[0] if values and not mapped else None
    for label in (only_label, *names.values()):
        check_label(label)
    return only_label, names
