"""The `assay screen` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import FamilyOption, JsonOption, choice
from assay_cli.shown.screening import print_screening
from assay_cli.terminal import emit, results, say
from assay_pipeline.comparison.screen_cost import Most
from assay_pipeline.comparison.screen_workers import PassWorkers
from assay_pipeline.comparison.screening import PAGE_NAME
from assay_pipeline.comparison.screening import screen as run_screening

TEXT = typer.Option(
    "--text", metavar="FILE|RUN",
    help="Plain text, or JSON lines with `text`, or with `prompt` and `reply`; or the folder of a run, for what its reference "
    "wrote there: long replies of the reference tell most. "
    "Several times for several files. Default: assay's own pages and code.",
)  # fmt: skip
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length", min=2, metavar="NUMBER",
        help="Tokens of one text that are scored, at most. Default: a 40th of --tokens, since intervals are over texts; at "
        "most 2,048.",
    ),
]  # fmt: skip
ArithmeticOption = Annotated[
    str,
    typer.Option(
        "--arithmetic", metavar="fp32|bf16", callback=choice("fp32", "bf16"),
        help="What the model computes in. Figures of different arithmetic are not ranked.",
    ),
]  # fmt: skip
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda", callback=choice("cpu", "cuda"), help="Where the model computes.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE",
        help="Memory of the process, or of the GPU, such as 8GiB: a layer that does not fit has its experts in groups. "
        "Default: what is free.",
    ),
]  # fmt: skip
RunnerOption = Annotated[
    str,
    typer.Option(
        "--runner", metavar="local|ray", callback=choice("local", "ray"),
        help="What runs the texts. ray: the Ray cluster that RAY_ADDRESS names, else one on this machine; the same figures.",
    ),
]  # fmt: skip
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, help="Threads. With Ray: of each task, as of this process. Default: as PyTorch takes them."
    ),
]


def passes_by(runner: str, workers: int | None) -> PassWorkers:
    """What these two options say."""
    return PassWorkers("ray" if runner == "ray" else "local", workers)


def memory_bytes_of(memory: str | None) -> int | None:
    """QuantizeError: it is no size."""
    from assay_quantize.engine.budget import parse_memory

    return None if memory is None else parse_memory(memory)


def screen(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="[REFERENCE] CANDIDATE...",
            help="Folders or hub ids of checkpoints, in any format; the first is what the others are compared with, unless "
            "--pack is.",
        ),
    ],
    pack: Annotated[
        str | None,
        typer.Option(
            "--pack",
            metavar="FOLDER|OWNER/NAME",
            help="What `assay pack` made of the reference: stands for it and brings the texts. Or where it was published.",
        ),
    ] = None,
    text: Annotated[list[Path] | None, TEXT] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="NUMBER", help="Tokens that are scored.")] = 20_000,
    length: LengthOption = None,
    arithmetic: ArithmeticOption = "fp32",
    device: DeviceOption = "cpu",
    memory: MemoryOption = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype",
            metavar="auto|fp8",
            callback=choice("auto", "fp8"),
            help="Of candidates, as of vLLM. auto: as each checkpoint says.",
        ),
    ] = "auto",
    all_texts: Annotated[
        bool, typer.Option("--all-texts", help="Look at all texts, also where a quarter of them decides.")
    ] = False,
    max_hours: Annotated[
        float | None, typer.Option("--max-hours", min=0.0, help="Do not begin what is estimated to take longer.")
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", min=0.0, help="Do not begin what is estimated to cost more dollars, at --price."),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0.0, max=1e6, help="Dollars for an hour of this machine, or of the cluster.")
    ] = None,
    runner: RunnerOption = "local",
    workers: WorkersOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the record, and of what a killed screening goes on from.")
    ] = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how far candidates are from the reference, token by token, layer by layer: no server, no GPU needed.

    FAIL: the divergence surely exceeds what its bits allow (exit 1, as for a candidate that `assay inspect` finds damaged, or
    whose config.json or tokenizer is another model's).
    Nothing here says PASS: tasks do.

    Example: assay screen GLM-4.5-Air GLM-4.5-Air-AWQ --text replies.jsonl
    """
    record, path = run_screening(
        checkpoints, pack=pack, text=text or (), num_tokens=tokens, length=length,
        arithmetic="bf16" if arithmetic == "bf16" else "fp32", device=device,
        kv_cache_dtype="fp8" if kv_cache_dtype == "fp8" else "auto",
        all_texts=all_texts, most=Most(hours=max_hours, usd=max_cost, price=price),
        memory_bytes=memory_bytes_of(memory), workers=passes_by(runner, workers), out=out, say=say,
    )  # fmt: skip
    if as_json:
        emit(record)
    else:
        print_screening(record, results())
    say(f"record: {path}")
    say(f"page: {path.with_name(PAGE_NAME)}")
    if record.refused:
        raise typer.Exit(1)
