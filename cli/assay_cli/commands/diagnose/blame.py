"""The `assay blame` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.commands.measure.screen import ArithmeticOption, DeviceOption, MemoryOption, memory_bytes_of
from assay_cli.options import FamilyOption, JsonOption, ProfileOption, choice
from assay_cli.shown.blame import print_blame
from assay_cli.terminal import emit, results, say
from assay_pipeline.blaming.blame import Question
from assay_pipeline.blaming.blame import blame as find_causes


def blame(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN | REFERENCE CANDIDATE",
            help="The folder of a run that measured the candidate; or the folders of two checkpoints.",
        ),
    ],
    candidate: Annotated[
        str | None,
        typer.Option("--candidate", metavar="LABEL", help="Of the run. Default: the only one that has not passed."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE|RUN",
            help="As for `assay screen`. Default: what the run's reference wrote, else assay's own pages and code.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="NUMBER", help="Tokens that are scored.")] = 8_000,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, metavar="NUMBER",
            help="Tokens of one text that are scored, at most. Default: a 40th of --tokens; replies of a run are whole.",
        ),
    ] = None,
    arithmetic: ArithmeticOption = "fp32",
    device: DeviceOption = "cpu",
    memory: MemoryOption = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype", metavar="auto|fp8", callback=choice("auto", "fp8"),
            help="Of the candidate, as of vLLM. auto: as the checkpoint says.",
        ),
    ] = "auto",
    anyway: Annotated[bool, typer.Option("--anyway", help="Find shares also of a candidate that is within the limit.")] = False,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", metavar="NAME[:KEY=VALUE,...]",
            help="Of a run: also serve the candidate this other way, and ask it what it lost; as of `assay judge`.",
        ),
    ] = None,
    profile: ProfileOption = None,
    max_hours: Annotated[
        float | None, typer.Option("--max-hours", min=0.0, help="Do not begin what is estimated to take longer.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the record, and of what a killed command goes on from.")
    ] = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Say which part of a candidate lost what it lost, and the cheapest change that mends it: no server, no GPU needed.

    Weights by role and layers, rounding of activations, KV cache and config.json are switched between candidate and reference,
    in 8 to about 40 passes over the texts. Exit 0: nothing to blame; 1: a cause was found, or it is undecided.

    Example: assay blame runs/glm-5 --candidate w4a16
    """
    question = Question(
        text=tuple(text or ()), num_tokens=tokens, length=length, arithmetic="bf16" if arithmetic == "bf16" else "fp32",
        device=device, kv_cache_dtype="fp8" if kv_cache_dtype == "fp8" else "auto", anyway=anyway,
        variants=tuple(variant or ()), profile=profile, max_hours=max_hours,
        memory_bytes=memory_bytes_of(memory),
    )  # fmt: skip
    record, path = find_causes(checkpoints, question, candidate=candidate, out=out, say=say)
    if as_json:
        emit(record)
    else:
        print_blame(record, results())
    say(f"record: {path}")
    if record.word != "nothing to blame" or any(cause.share.low > 0 for cause in record.serving):
        raise typer.Exit(1)
