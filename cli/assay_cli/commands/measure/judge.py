"""The `assay judge` command: the quick look of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from assay.errors import AssayError
from assay_cli.commands.measure.screen import TEXT, DeviceOption, MemoryOption, memory_bytes_of
from assay_cli.options import (
    ApiKeyOption,
    FamilyOption,
    GatesOption,
    JsonOption,
    LimitOption,
    NameOption,
    ProfileOption,
    RunsOption,
    TasksOption,
    TensorParallelOption,
    VariantOption,
    completes,
    named,
    recipe,
)
from assay_cli.progress import track
from assay_cli.shown.link import print_link
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import emit, results, say
from assay_pipeline.comparison.link import judge_link, server_url
from assay_pipeline.evaluating import evaluate, prepare
from assay_pipeline.judging import load_report, passed


def judge(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE",
            help="What to compare with: a server's URL, or a checkpoint folder; LABEL= before it names it. Alone: the "
            "checkpoint to judge, a folder or a Hugging Face id, which is not served.",
        ),
    ],
    candidates: Annotated[
        list[str] | None, typer.Argument(metavar="CANDIDATE", help="What to judge: URLs or folders.")
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            "--suite", metavar="NAME|FILE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ] = "first-look",
    variant: VariantOption = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    again: Annotated[
        list[str] | None,
        typer.Option("--again", metavar="LABEL", help="Measure this label anew, whatever was answered before."),
    ] = None,
    gates: GatesOption = None,
    api_key_env: ApiKeyOption = None,
    profile: ProfileOption = None,
    family: FamilyOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Of one checkpoint: folder or pack of its base. Default: the base that it names, if it is in the hub's cache.",
        ),
    ] = None,
    text: Annotated[list[Path] | None, TEXT] = None,
    device: DeviceOption = "cpu",
    memory: MemoryOption = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, metavar="NUMBER", help="Tokens that one checkpoint and its base are compared on.")
    ] = 20_000,
    out: Annotated[
        Path | None, typer.Option("--out", help="Of one checkpoint: folder of the record, and to go on from when killed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare candidates with a reference in minutes: the same questions to each, a verdict with its interval, a report.

    One checkpoint alone is inspected and compared with its base token by token, without a server (docs/screen.md).

    Exit 1 unless every candidate is PASS, 2 on an error; `rows` of --json tell FAIL, UNDERPOWERED and NOT MEASURED apart.
    `assay evaluate` asks the same way for as long as a decision needs.

    `--variant` compares ways of serving one checkpoint, none of them with other weights (docs/how-to/variants.md).

    Example: assay judge http://localhost:8000 http://localhost:8001
    """
    from assay_reports.page.first_screen import first_screen

    alone = {"--base": base, "--text": text, "--memory": memory, "--device": None if device == "cpu" else device, "--out": out}
    num_compared = 1 + len(candidates or ()) + len(variant or ())
    if num_compared > 1 and (given := [option for option, value in alone.items() if value is not None]):
        raise AssayError(f"{given[0]}: is for one checkpoint alone, and {num_compared} were given; leave it out")
    if num_compared == 1:
        _judge_one(reference, base, text or (), tokens, device, memory_bytes_of(memory), out, as_json=as_json)
        return
    evaluation = prepare(
        reference=reference, candidates=candidates or (), variants=variant or (), suite=suite, tasks=tasks, limit=limit,
        gates=gates, api_key_env=api_key_env, profile=profile,
        tensor_parallel_size=tensor_parallel_size, runs=runs, name=name, say=say,
    )  # fmt: skip
    judged = evaluate(evaluation, runs=runs, name=name, again=again or (), say=say)
    if as_json:
        emit(load_report(judged.run_dir))
    else:
        print_summary(judged.gates, judged.measurements, results())
    if not passed(judged.gates):
        for step in first_screen(load_report(judged.run_dir)).steps:
            say(f"next: {step.sentence}{f': `{step.command}`' if step.command else ''}")
    say(f"report: {judged.run_dir / 'report' / 'index.html'}")
    if not passed(judged.gates):
        raise typer.Exit(1)


def _judge_one(
    target: str, base: str | None, text: Sequence[Path], num_tokens: int, device: str, memory_bytes: int | None,
    out: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    if (url := server_url(target)) is not None:
        raise AssayError(f"{url}: is a server, and what to compare it with is missing; write `assay judge REFERENCE {url}`")
    answer = judge_link(
        target, base=base, text=text, num_tokens=num_tokens, device=device, memory_bytes=memory_bytes, out=out, say=say,
        track=track,
    )  # fmt: skip
    if as_json:
        emit(answer)
    else:
        print_link(answer, results())
    if answer.is_refused:
        raise typer.Exit(1)
