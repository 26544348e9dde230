"""The `assay locate` command: two checkpoints or servers, or the ranks of one, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from assay.cli.options import ProfileOption
from assay.cli.terminal import emit, escape, say, stdout
from assay.errors import AssayError
from assay.records.locate import LocateReport

if TYPE_CHECKING:
    from assay_evaluate.diagnosis.locate.locate import Side

SideArgument = typer.Argument(
    metavar="URL|TARGET",
    help="A checkpoint folder, a model recipe's name, or the URL of a vLLM that runs with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls assay_vllm.activations.ActivationWorker.",
)


def locate(
    a: Annotated[str, SideArgument],
    b: Annotated[str | None, typer.Argument(metavar="[URL|TARGET]", help="What A is compared with.")] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="Compare the tensor-parallel ranks of A.")] = False,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", min=1, help="Ranks of servers started here; default: 1, with --ranks 2.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts that both sides read.")] = 8,
    profile: ProfileOption = None,
    remedy: Annotated[
        Path | None, typer.Option("--remedy", help="Write the proposed precision recipe into this folder, if there is one.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the record (JSON) to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The record as JSON on stdout.")] = False,
) -> None:
    """Where two servers or precisions part: the first layer, expert and rank that differ. Exit 1 if they do."""
    from assay_evaluate.diagnosis.locate.locate import locate_ranks, locate_servers, write_remedy

    if ranks == (b is not None):
        raise AssayError("say two things to compare (assay locate A B), or one and --ranks")
    size = tensor_parallel or (2 if ranks else 1)

    side = _side(a, profile, size, "a")
    if b is None:
        found = locate_ranks(side, num_prompts, say)
    else:
        found = locate_servers(side, _side(b, profile, size, "b"), num_prompts, say)
    if out is not None:
        found.save(out)
    if as_json:
        emit(found)
    else:
        show(found, stdout())
    if remedy is not None and found.remedy is not None:
        say(f"recipe of the remedy: {write_remedy(found, remedy)}")
    raise typer.Exit(0 if found.first is None else 1)


def _side(text: str, profile: str | None, size: int, name: str) -> Side:
    from assay.cli.stages import profile_for
    from assay.cli.targets import local_checkpoint, resolve_target, url_in
    from assay_evaluate.diagnosis.locate.locate import Side

    if (url := url_in(text)) is not None:
        return Side(text, url=url)
    aim = resolve_target(text)
    log_path = Path("runs") / "locate" / f"{name}.log"
    return Side(
        text, checkpoint=local_checkpoint(aim.location), profile=profile_for(aim, profile), serving=aim.recipe.serving,
        tensor_parallel_size=size, log_path=log_path,
    )  # fmt: skip


def show(found: LocateReport, out: Console) -> None:
    """The sentence first, then the places that add most."""
    from assay_evaluate.diagnosis.locate.locate import worst_points

    against = f"{found.a} and {found.b}" if found.b is not None else f"ranks of {found.a}"
    out.print(escape(f"{against}: {found.num_tokens} tokens of {found.num_prompts} prompts, {found.seconds:.0f} s"))
    shown = worst_points(found.points)
    columns: list[Column | str] = [Column("place", overflow="fold", ratio=1), "rank", "adds", "distance", "RMS", "largest"]
    has_bad = any(any(point.non_finite) for point in shown)
    table = Table(*columns, *(["non-finite"] if has_bad else []), expand=True)
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
            out.print(escape(f"{cells[0]:48} rank {cells[1]}  adds {cells[2]:8} {'  '.join(cells[3:])}"), soft_wrap=True)
    if table.row_count:
        out.print(table)
    for line in found.not_compared[:5]:
        out.print(escape(f"not compared: {line}"))
    out.print(escape(found.sentence), soft_wrap=not out.is_terminal)
    if found.remedy is not None:
        out.print(escape(f"remedy: {found.remedy.sentence}"), soft_wrap=not out.is_terminal)
