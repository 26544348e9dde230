"""The `assay choose` command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assay.quantities import percent_short
from assay.records.base import Interval
from assay.records.choice.record import CHOICE_RECORD, Cell, Choice, Pick
from assay_cli.options import JsonOption, RunsOption, choice, complete_run, completes, named_run, refuse_unused
from assay_cli.terminal import emit, escape, print_rows, results, say
from assay_pipeline.hardware.choice_inputs import make_choice


def choose(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_run,
            help="A run's folder, or its name under --runs. It may be left out with --speed FILE --quality assumed.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="As the speeds name it (8xH200), or cpu. Default: the only one. A profile's name without speeds: the roofline "
            "predicts.",
        ),
    ] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="LIMITS", help="`ttft<2s tpot<25ms`: what misses it is not chosen.")
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option("--concurrency", metavar="N,...", help="Numbers of streams. Default: all that were measured."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0.0, max=1e6, help="Dollars for an hour of one GPU (of the machine, on a CPU)."),
    ] = None,
    speed: Annotated[
        list[Path] | None,
        typer.Option("--speed", metavar="FILE", help="More speeds: a record, a table (docs/choosing.md), another tool's."),
    ] = None,
    prompts: Annotated[str | None, typer.Option("--prompts", help="Kind of prompts. Default: that of the most rows.")] = None,
    quality: Annotated[
        str,
        typer.Option(
            "--quality", metavar="gates|assumed", callback=choice("gates", "assumed"),
            help="gates: by the run's verdicts. assumed: nobody measured it, and the first line says so.",
        ),
    ] = "gates",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="TARGET", autocompletion=completes("models"),
            help="Model whose precisions the speeds are of: floors beside them without plans of a run.",
        ),
    ] = None,
    context: Annotated[
        str, typer.Option("--context", metavar="TOKENS", help="Of each stream, where the roofline predicts; 8k is 8192.")
    ] = "8k",
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Say which checkpoint to deploy at which number of streams: measured speed joined with measured quality.

    Exit 1: nothing can be recommended. The record is RUN/choice.json.
    """
    run_dir = None
    if run is not None:
        run_dir = named_run(ctx, run, runs)
    else:
        refuse_unused(ctx, "without RUN", "runs")
    made = make_choice(
        run_dir, hardware=hardware, slo=slo, concurrency=None if concurrency is None else ",".join(concurrency), price=price,
        speed=speed or (), prompts=prompts, is_quality_assumed=quality == "assumed", model=model, context=context, say=say,
    )  # fmt: skip
    if as_json:
        emit(made)
    else:
        print_choice(made, results())
    if run_dir is not None:
        say(f"record: {run_dir / CHOICE_RECORD}")
    raise typer.Exit(0 if any(pick.setup is not None for pick in made.picks) else 1)


# ------------------------------------------------------------------------------------------------ printed
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "end_to_end_s": "end to end"}


def print_choice(choice_record: Choice, out: Console) -> None:
    """The recommendation, a row for each number of streams, then what it rests on."""
    out.print(f"[bold]{escape(choice_record.recommendation)}[/]")
    limits = ", ".join(f"{LATENCIES[name]} up to {_seconds(most)}" for name, most in choice_record.objective.items())
    about = [
        choice_record.hardware,
        f"prompts {choice_record.prompts}",
        choice_record.engine or "engine not stated",
        f"{choice_record.origin} speeds",
    ]
    out.print(escape("; ".join(about + ([limits] if limits else []))))
    cells = {(cell.setup, cell.concurrency): cell for cell in choice_record.cells}
    columns = ("streams", "choice", "tokens/s", "expected", "per user", "TTFT", "TPOT", "$ per M tokens", "next best")
    print_rows(columns, [tuple(map(escape, _row(pick, cells))) for pick in choice_record.picks], out)
    for line in _below(choice_record):
        out.print(escape(line))


def _row(pick: Pick, cells: dict[tuple[str, int], Cell]) -> tuple[str, ...]:
    if pick.setup is None:
        return str(pick.concurrency), "none", *[""] * 7
    cell = cells[pick.setup, pick.concurrency]
    speed = cell.output_tokens_s or 0.0
    noise = "" if cell.interval is None else f" ± {_half(cell.interval)}"
    price = cell.usd_per_million_tokens
    return (
        str(pick.concurrency),
        pick.setup,
        f"{speed:,.1f}{noise}",
        _expected(pick),
        f"{cell.tokens_s_user or 0.0:,.1f}",
        "not known" if cell.ttft_s is None else _seconds(cell.ttft_s),
        "not known" if cell.tpot_s is None else _seconds(cell.tpot_s) + (" *" if cell.tpot_derived else ""),
        "no price" if price is None else f"{price:.2f}",
        _next(pick, cells),
    )


def _expected(pick: Pick) -> str:
    """`488 (451 to 520)`: what the pick will run at, as far as its noise and the luck of the fastest tell."""
    expected = pick.expected_tokens_s
    if expected is None:
        return "not known"
    value, low, high = (
        f"{end:,.1f}" if expected.value < 10 else f"{end:,.0f}" for end in (expected.value, expected.low, expected.high)
    )
    return f"{value} ({low} to {high})"


def _next(pick: Pick, cells: dict[tuple[str, int], Cell]) -> str:
    if pick.next_best is None:
        return "no other"
    speed = cells[pick.next_best, pick.concurrency].output_tokens_s or 0.0
    lead = f"the choice {100 * (pick.ratio - 1):+.1f} %" if pick.ratio is not None else "no ratio: unlike rows"
    single = min(cells[name, pick.concurrency].num_repeats for name in (str(pick.setup), pick.next_best)) < 2
    sure = "" if pick.chance_best is None else f", best in {100 * pick.chance_best:.0f} % of draws"
    sure += ", one run each" if single else ""
    return f"{pick.next_best}: {speed:,.1f} ({lead}{sure})"


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _half(interval: Interval) -> str:
    """Half the width, never as a power of ten."""
    half = (interval.high - interval.low) / 2
    return f"{half:,.0f}" if half >= 10 else f"{half:.2g}"


def _streams(count: int) -> str:
    return f"{count} {'stream' if count == 1 else 'streams'}"


def _below(record: Choice) -> Iterator[str]:
    """One line each."""
    from assay_evaluate.choice.sentences import nothing

    yield from (f"none at {pick.concurrency}: {pick.why_none}" for pick in record.picks if pick.setup is None)
    yield from record.within_noise
    for flip in record.flips:
        none = nothing([flip], bool(record.objective))
        names = [name or none for name in (flip.before, flip.after)]
        at = f"flip: {names[0]} to {names[1]} at about {flip.at:.1f} streams, "
        if flip.gap is not None:
            yield f"{at}{flip.gap}"
            continue
        where = f"between speeds at {flip.between[0]} and {flip.between[1]}"
        if flip.low is not None and flip.high is not None:
            sure = f"95 % of draws: {flip.low:.1f} to {flip.high:.1f}; {100 * (flip.chance or 0):.0f} % of draws have it"
        elif flip.chance is not None:
            sure = "no draw has it"
        else:
            sure = "nothing was drawn, so its range is not known"
        yield f"{at}{where} ({sure})"
    if (single := record.one_for_all) is not None and len(record.picks) > 1:
        share = "" if single.relative is None else f" ({percent_short(single.relative)})"
        cost = "" if single.usd_per_million_tokens is None else f", {single.usd_per_million_tokens:.2f} $ per M tokens dearer"
        misses = f"; misses the objective at {', '.join(map(str, single.misses))}" if single.misses else ""
        least = f"at most {single.worst_tokens_s:,.1f} tokens/s{share} less than the best{cost}, at {_streams(single.at)}"
        first = "nowhere slower than the choice" if single.misses else "the best wherever there is a choice"
        yield f"one for all: {single.setup}, {least if single.worst_tokens_s > 0 else first}{misses}"
    if record.noise is not None:
        yield f"noise: {record.noise}"
    for state in ("measured", "imported", "predicted"):
        if count := sum(cell.state == state for cell in record.cells):
            yield f"{state}: {count} of {len(record.cells)} cells"
    reasons: dict[tuple[str, str], list[int]] = {}
    for cell in record.cells:
        if cell.state == "missing" or (cell.state == "predicted" and record.origin != "predicted"):
            reasons.setdefault((cell.setup, f"{cell.state}: {cell.why}"), []).append(cell.concurrency)
    for (setup, reason), points in reasons.items():
        yield f"{setup} at {', '.join(map(str, points))}: {reason}"
    decided = (single for single in record.quality if not single.may_be_chosen and single.word == "FAIL")
    yield from (f"{single.checkpoint} {single.word}: {single.detail}" for single in decided)
    yield from record.if_passed
    yield from record.undecided
    yield from record.refused
    yield from (f"set aside: {line}" for line in record.set_aside)
    yield from (f"{cell.setup} at {cell.concurrency}: {cell.flag}" for cell in record.cells if cell.flag is not None)
    if any(cell.tpot_derived for cell in record.cells):
        yield "* from tokens/s, the length of replies and TTFT"
