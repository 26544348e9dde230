"""The `assay sensitivity` command: what it costs to quantize one part of a model, layer by layer and role by role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.calibrated.texts import MAX_LENGTH
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe, SchemeName
from assay.records.diagnosis.sensitivity import SENSITIVITY_NAME
from assay_cli.options import JsonOption, OutFolderOption, ProfileOption, RunOption, TargetArgument, choice, choices, several
from assay_cli.shown.sensitivity import show
from assay_cli.terminal import emit, results, say
from assay_pipeline.interrupted import interruptible
from assay_pipeline.places import check_places, place_for
from assay_pipeline.sensitivity.by_layer import estimate_hours
from assay_pipeline.sensitivity.measure import find_sensitivity
from assay_pipeline.sensitivity.request import Asked, Proxy, check_asked

DEFAULT_SCHEMES = ("w4a16", "w4a16_g32", "nvfp4a16", "fp8_block")
SCHEMES = tuple(name for name in get_args(SchemeName) if name != "fp8_static")
"""All but the one whose scales need a calibration file; its weights are those of fp8_channel."""


def sensitivity(
    target: TargetArgument,
    schemes: Annotated[
        list[str] | None,
        typer.Option(
            "--schemes",
            metavar="NAME,...",
            callback=choices(*SCHEMES),
            help=f"Of {', '.join(SCHEMES)}; `all`: all of them. Default: {', '.join(DEFAULT_SCHEMES)}.",
        ),
    ] = None,
    proxy: Annotated[
        str,
        typer.Option(
            "--proxy",
            metavar="|".join(get_args(Proxy)),
            callback=choice(*get_args(Proxy)),
            help="kl: the divergence itself, part by part, in transformers; fisher: an estimate from one backward pass; "
            "hidden: relative squared error of the states behind the part's layer, one layer in memory at a time; weights: "
            "relative squared error of the weights, without running a model.",
        ),
    ] = "kl",
    observer: Annotated[
        str,
        typer.Option(
            "--observer",
            metavar="minmax|mse",
            callback=choice("minmax", "mse"),
            help="How scales are found, as in a precision.",
        ),
    ] = "minmax",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="none|gptq",
            callback=choice("none", "gptq"),
            help="How INT4 weights are rounded. gptq: as `w4a16-gptq` does it, by a calibration of each INT4 scheme on the "
            "model's own text; `assay recipe` then proposes a calibrated recipe.",
        ),
    ] = "none",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE,...",
            callback=several,
            help="Plain text, or .jsonl with text, prompt or messages; own: what the model samples by itself. Default: the "
            "texts of the reference of --run; without, the model's own replies to generated questions.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Tokens that are read.")] = 16_384,
    length: Annotated[
        int, typer.Option("--length", min=8, max=MAX_LENGTH, help="Longest reply, and length of pieces of --text, in tokens.")
    ] = 256,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            "--mix",
            metavar="RECIPE,...",
            callback=several,
            help="Also measure these precisions with all their parts quantized at once: `assay recipe` then goes by that, and "
            "not by sums of parts. `assay recipe --mix` writes one.",
        ),
    ] = None,
    served: Annotated[
        int,
        typer.Option(
            "--served",
            min=0,
            metavar="N",
            help="Also serve N parts, spread over the order that the proxy gives: a checkpoint and a server for each.",
        ),
    ] = 0,
    profile: ProfileOption = None,
    scores: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE,...",
            callback=several,
            help="Scores of AutoRound's AutoScheme (its JSON cache) or of ModelOpt's AutoQuantize (`candidate_stats` as JSON), "
            "to be compared with ours.",
        ),
    ] = None,
    show_scheme: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="NAME",
            callback=choice(*SCHEMES),
            help="Scheme of the map that is printed. Default: the first of --schemes.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampled text, drawn texts and intervals.")] = 0,
    by_layer: Annotated[
        bool | None,
        typer.Option(
            "--by-layer/--whole",
            help="Proxy kl: hold one layer in memory at a time, with states on the disk, or the whole model; the same figures. "
            "Default: by layer where the model does not fit.",
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory of the process, such as 6GiB. Default: what is free.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="With --estimate: hours on a machine, named as for `assay plan`; no weight is read."),
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would cost.")] = False,
    run: RunOption = None,
    out: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what it costs to quantize each layer's attention, experts and MLPs by themselves, in nats and in bytes.

    The model runs in transformers, whole or one layer at a time, but for --proxy weights. An interrupted run resumes.
    """
    from assay_pipeline.profiles import profile_for
    from assay_pipeline.targets import resolve_source
    from assay_quantize.engine.budget import parse_memory
    from assay_quantize.estimate.show import print_sensitivity

    check_places(run, out)
    chosen = tuple(schemes or DEFAULT_SCHEMES)
    if show_scheme is not None and show_scheme not in chosen:
        raise AssayError(f"--map {show_scheme}: is not measured; say one of --schemes ({', '.join(chosen)})")
    resolved = resolve_source(target)
    place = place_for("sensitivity", ".", run=run, out=out, say=say)
    asked = Asked(
        target=resolved,
        schemes=chosen,
        proxy=proxy,  # type: ignore[arg-type]  # checked by its callback
        observer=observer,  # type: ignore[arg-type]  # likewise
        method=method,  # type: ignore[arg-type]  # likewise
        run=run, text=() if text == ["own"] else tuple(map(Path, text or ())), num_tokens=tokens, length=length, served=served,
        profile=profile_for(resolved, profile) if served else None, scores=tuple(map(Path, scores or ())),
        seed=seed, keep=place.records / "sensitivity", only_estimate=estimate, by_layer=by_layer,
        memory_bytes=None if memory is None else parse_memory(memory), hardware=hardware,
        own=text == ["own"], mixes=tuple(load_recipe(PrecisionRecipe, name) for name in mix or ()), say=say,
    )  # fmt: skip
    check_asked(asked)
    if hardware is not None:
        hours, whole_bytes = estimate_hours(asked)
        print_sensitivity(hours, results())
        if whole_bytes is not None:
            results().print(f"  whole in FP32 the model takes {size(whole_bytes)}")
        return
    with interruptible(lambda: f"what was measured is kept in {asked.keep}; the same command goes on from there"):
        record = find_sensitivity(asked)
    if record is None:
        return
    record.save(place.records / SENSITIVITY_NAME)
    if as_json:
        emit(record)
    else:
        show(record, results(), show_scheme)
    say(f"record: {place.records / SENSITIVITY_NAME}")
