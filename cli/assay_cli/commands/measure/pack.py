"""The `assay pack` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.records.screening import StatedTexts
from assay_cli.commands.measure.screen import (
    TEXT,
    ArithmeticOption,
    DeviceOption,
    LengthOption,
    MemoryOption,
    RunnerOption,
    WorkersOption,
    memory_bytes_of,
    passes_by,
)
from assay_cli.options import FamilyOption, JsonOption
from assay_cli.shown.screening import print_pack
from assay_cli.terminal import emit, results, say
from assay_pipeline.comparison.packing import pack as make_pack
from assay_pipeline.comparison.screening import shipped_panel


def pack(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="Folder or hub id of the checkpoint to compare with.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the pack.")],
    text: Annotated[list[Path] | None, TEXT] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="NUMBER", help="Tokens that are scored.")] = 200_000,
    length: LengthOption = None,
    arithmetic: ArithmeticOption = "fp32",
    device: DeviceOption = "cpu",
    memory: MemoryOption = None,
    head: Annotated[bool, typer.Option("--head/--no-head", help="Hold the head, or its hash alone.")] = True,
    runner: RunnerOption = "local",
    workers: WorkersOption = None,
    text_source: Annotated[str | None, typer.Option("--text-source", help="Where the texts come from, for the record.")] = None,
    text_licence: Annotated[str | None, typer.Option("--text-licence", help="Their licence.")] = None,
    text_date: Annotated[str | None, typer.Option("--text-date", help="When they were written.")] = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what candidates are screened against, once: they then need neither the reference nor its texts.

    Example: assay pack GLM-4.5-Air --text replies.jsonl --out GLM-4.5-Air-pack
    """
    record = make_pack(
        reference, text=text or [shipped_panel()], out=out, num_tokens=tokens, length=length,
        arithmetic="bf16" if arithmetic == "bf16" else "fp32", device=device,
        memory_bytes=memory_bytes_of(memory), with_head=head,
        stated=StatedTexts(source=text_source, licence=text_licence, date=text_date),
        workers=passes_by(runner, workers), say=say,
    )  # fmt: skip
    if as_json:
        emit(record)
    else:
        print_pack(record, out, results())
