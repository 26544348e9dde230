"""The `assay diagnose locate` command: two checkpoints or servers, or the ranks of one, layer by layer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from assay.errors import AssayError
from assay.foreign_text import safe_name
from assay.records.diagnosis.locate import LocateReport
from assay.records.run import folder_name
from assay_cli.options import CHECKPOINT_FORM, URL_FORM, ApiKeyOption, JsonOption, OutFolderOption, ProfileOption, refuse_unused
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.places import place_for, run_holding
from assay_pipeline.profiles import profile_for
from assay_pipeline.targets import Target, local_checkpoint, resolve_target, url_in

SideArgument = typer.Argument(
    metavar="A",
    help="A checkpoint folder, a model recipe's name, or the URL of a vLLM that runs with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls assay_vllm.activations.ActivationWorker.",
)


RECORD = "location.json"
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
    from assay_evaluate.diagnosis.locate.locate import Side, locate_ranks, locate_servers, write_remedy
    from assay_evaluate.serving.api_key import bearer

    if ranks == (b is not None):
        raise AssayError("say two things to compare (assay diagnose locate A B), or one and --ranks")
    if all(url_in(text) for text in (a, b) if text is not None):
        refuse_unused(ctx, URL_FORM, "profile", "tensor_parallel")
    if not any(url_in(text) for text in (a, b) if text is not None):
        refuse_unused(ctx, CHECKPOINT_FORM, "api_key_env")
    headers = bearer(api_key_env, "--api-key-env")
    if b is None or url_in(b):
        refuse_unused(ctx, "unless B is a checkpoint folder, whose precision could be changed", "remedy")
    targets = {name: _checkpoint_of(text) for name, text in (("a", a), ("b", b)) if text is not None and not url_in(text)}
    profiles = {name: profile_for(target, profile) for name, (target, _) in targets.items()}
    its_run = next((run for _, folder in reversed(targets.values()) if (run := run_holding(folder)) is not None), None)
    compared = "-".join(_name_of(text) for text in (a, b) if text is not None)
    new_place = functools.partial(place_for, "locate", f"locate/{compared}", run=its_run, out=out)
    place = new_place() if targets else None  # before servers are started: their logs go there

    def side(name: str, text: str) -> Side:
        if name not in targets:
            return Side(text, url=url_in(text), headers=headers)
        assert place is not None
        target, folder = targets[name]
        return Side(
            text, checkpoint=folder, profile=profiles[name], serving=target.recipe.serving,
            tensor_parallel_size=tensor_parallel or (2 if ranks else 1), log_path=place.logs / f"vllm-locate-{name}.log",
        )  # fmt: skip

    if b is None:
        report = locate_ranks(side("a", a), num_prompts, say)
    else:
        report = locate_servers(side("a", a), side("b", b), num_prompts, say)
    place = place or new_place()
    report.save(place.records / RECORD)
    if as_json:
        emit(report)
    else:
        show(report, results())
    say(f"record: {place.records / RECORD}")
    if remedy is not None and report.remedy is not None:
        say(f"recipe of the remedy: {write_remedy(report, remedy)}")
    raise typer.Exit(0 if report.first is None else 1)


def _name_of(text: str) -> str:
    return safe_name(text) if url_in(text) else folder_name(Path(text).expanduser())


def _checkpoint_of(text: str) -> tuple[Target, Path]:
    target = resolve_target(text)
    return target, local_checkpoint(target.location, say=say)


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
