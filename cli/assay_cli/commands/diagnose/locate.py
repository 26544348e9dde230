"""The `assay diagnose locate` command: two checkpoints or servers, or the ranks of one, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from assay.errors import AssayError
from assay.records.diagnosis.locate import LocateReport
from assay_cli.options import CHECKPOINT_FORM, URL_FORM, ApiKeyOption, JsonOption, OutFolderOption, ProfileOption, refuse_unused
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.diagnosing import locate as find_difference
from assay_pipeline.targets import url_in

SideArgument = typer.Argument(
    metavar="A",
    help="A checkpoint folder, a model recipe's name, or the URL of a vLLM that runs with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls assay_vllm.activations.ActivationWorker.",
)


HEADERS = ("rank", "adds", "apart by", "RMS A, B", "largest A, B")


def locate(
    ctx: typer.Context,
    a: Annotated[str, SideArgument],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="What A is compared with: likewise a checkpoint or a URL.")
    ] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="Compare the tensor-parallel ranks of A.")] = False,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "-tp", "--tensor-parallel-size", min=1, help="Ranks of servers started here. Default: 1; with --ranks: 2."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts that both sides read.")] = 8,
    profile: ProfileOption = None,
    api_key_env: ApiKeyOption = None,
    remedy: Annotated[
        Path | None,
        typer.Option("--remedy", metavar="DIR", help="Write the proposed precision recipe into this folder, if there is one."),
    ] = None,
    out: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the first layer, expert and rank in which two servers, precisions or ranks differ. Exit 1 if any do."""
    from assay_evaluate.diagnosis.locate.locate import write_remedy

    if ranks == (b is not None):
        raise AssayError("say two things to compare (assay diagnose locate A B), or one and --ranks")
    if all(url_in(text) for text in (a, b) if text is not None):
        refuse_unused(ctx, URL_FORM, "profile", "tensor_parallel")
    if not any(url_in(text) for text in (a, b) if text is not None):
        refuse_unused(ctx, CHECKPOINT_FORM, "api_key_env")
    if b is None or url_in(b):
        refuse_unused(ctx, "unless B is a checkpoint folder, whose precision could be changed", "remedy")
    report, record = find_difference(
        a, b, tensor_parallel_size=tensor_parallel, num_prompts=num_prompts, profile=profile, api_key_env=api_key_env, out=out,
        say=say,
    )  # fmt: skip
    if as_json:
        emit(report)
    else:
        show(report, results())
    say(f"record: {record}")
    if remedy is not None and report.remedy is not None:
        say(f"recipe of the remedy: {write_remedy(report, remedy)}")
    raise typer.Exit(0 if report.first is None else 1)


def show(report: LocateReport, out: Console) -> None:
    """The sentence first, then the places that add most."""
    from assay_evaluate.diagnosis.locate.locate import worst_points

    against = f"{report.a} and {report.b}" if report.b is not None else f"ranks of {report.a}"
    out.print(escape(f"{against}: {report.num_tokens} tokens of {report.num_prompts} prompts, {report.seconds:.0f} s"))
    shown = worst_points(report.points)
    if shown:
        out.print(
            "The places that add most error. Relative to the size of a place's output: what it adds, and how far apart A and B "
            "are there; then the RMS and the largest value of A and of B."
        )
    columns: list[Column | str] = [Column("place", overflow="fold", ratio=1), *HEADERS]
    has_bad = any(any(point.non_finite) for point in shown)
    table = Table(*columns, *(["non-finite"] if has_bad else []), expand=True)
    if shown and not out.is_terminal:
        out.print(f"{'place':48} {HEADERS[0]:6}  {HEADERS[1]:8}  {'  '.join(HEADERS[2:])}", soft_wrap=True)
    for point in shown:
        sizes = (f"{point.rms[0]:.3g} {point.rms[1]:.3g}", f"{point.max_abs[0]:.3g} {point.max_abs[1]:.3g}")
        cells = [
            point.name.removeprefix("model.layers."),
            str(point.rank),
            f"{point.added:.3g}",
            f"{point.distance:.3g}",
            *sizes,
        ]
        if has_bad:
            cells.append(f"{point.non_finite[0]} {point.non_finite[1]}")
        if out.is_terminal:
            table.add_row(*map(escape, cells))
        else:
            out.print(escape(f"{cells[0]:48} {cells[1]:6}  {cells[2]:8}  {'  '.join(cells[3:])}"), soft_wrap=True)
    if table.row_count:
        out.print(table)
    for line in report.not_compared[:5]:
        out.print(escape(f"not compared: {line}"))
    out.print(escape(report.sentence), soft_wrap=not out.is_terminal)
    if report.remedy is not None:
        out.print(escape(f"remedy: {report.remedy.sentence}"), soft_wrap=not out.is_terminal)
