"""The `assay speed` command: how fast the checkpoints of a run are served; measured here, imported or predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from assay.errors import AssayError
from assay.foreign_text import check_label, shown
from assay.quantities import percent_of_events
from assay.records.speed import SPEED_RECORD, NotMeasured, SpeedRecord, SpeedRow
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
from assay_cli.terminal import emit, escape, print_rows, results, say
from assay_pipeline.interrupted import says_what_is_kept
from assay_pipeline.profiles import profile_for
from assay_pipeline.speed_ladder import Place, kept_in, place_of, plan_ladder, predict_in_run

OFF = {"off": "0"}
MOST = 4096
"""Requests in flight, tokens drafted, repeats: beyond it is a slip of the finger."""
MEASURED_ONLY = ("checkpoints", "concurrency", "output_tokens", "prompt_tokens", "profile", "tensor_parallel_size")
LADDER_ONLY = ("prompts", "repeats", "starts", "requests", "objective", "seed")
IMPORTED_ONLY = ("form", "label", "hardware", "prompt_kind")
PREDICTED_ONLY = ("acceptance_length",)
FROM_A_FILE, NO_FILE = "with --import", "without --import"
PREDICTED = "with --aiconfigurator"
FEW_IN_FLIGHT = 0.75
"""Share of its concurrency below which the table says how many requests a row had in flight on average."""


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
    aiconfigurator: Annotated[
        Path | None,
        typer.Option(
            "--aiconfigurator", metavar="PYTHON",
            help="Predict instead of measuring, for the GPUs of --profile: a Python that has aiconfigurator-core.",
        ),
    ] = None,
    acceptance_length: Annotated[
        float | None,
        typer.Option(
            "--acceptance-length", min=1,
            help="With --aiconfigurator: tokens that a step with drafts yields. Default: as measured or imported.",
        ),
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
    if imported is not None:
        refuse_unused(ctx, FROM_A_FILE, *MEASURED_ONLY, *LADDER_ONLY, *PREDICTED_ONLY)
        one_label, names = labels_of(label)
        rows = _rows_of_file(imported, form, one_label, hardware, prompt_kind, numbers("--speculation", speculation, 0), names)
        place = place_of(target, runs)
        rows, refused = _without_refused(rows, imported.name)
        for line in (*_strangers(rows, place), *_notes(rows)):
            say(line)
        with place.at_work():
            record = _with_rows(place.run_dir, rows, refused)
        say(f"{len(rows)} imported row{'s' if len(rows) != 1 else ''}")
    else:
        refuse_unused(ctx, NO_FILE, *IMPORTED_ONLY)
        options = _ladder_options(
            concurrency=numbers("--concurrency", concurrency, 1),
            speculation=numbers("--speculation", speculation, 0),
            prompts=None if prompts is None else tuple(prompts),
            repeats=repeats, starts=starts, num_requests=requests, output_tokens=output_tokens, prompt_tokens=prompt_tokens,
            objective=_objective(objective), seed=seed,
        )  # fmt: skip
        if aiconfigurator is not None:
            refuse_unused(ctx, PREDICTED, *LADDER_ONLY, "tensor_parallel_size")
            if profile is None:
                raise AssayError(
                    "--aiconfigurator: say for which GPUs, with --profile (8xh200, or another of recipes/profiles/)"
                )
            place = place_of(target, runs)
            record = predict_in_run(place, aiconfigurator, profile, acceptance_length, checkpoints, options)
        else:
            refuse_unused(ctx, "without --aiconfigurator", *PREDICTED_ONLY)
            place = place_of(target, runs)
            planned = plan_ladder(
                place, checkpoints, profile_for(place.target, profile, tensor_parallel_size=tensor_parallel_size), options
            )
            with says_what_is_kept(lambda: kept_in(place)):
                record = planned.measure(say)
    if as_json:
        emit(record)
    else:
        print_speed(record, place.reference, results())
    say(f"record: {place.run_dir / SPEED_RECORD}")
    raise typer.Exit(0 if imported is not None or aiconfigurator is not None or not _failed(record) else 1)


def _ladder_options(**given: Any) -> dict[str, Any]:
    """Without those that were left to the default."""
    return {name: value for name, value in given.items() if value is not None}


def _objective(text: str | None) -> dict[str, float]:
    from assay_evaluate.speed.objective import parse_objective

    return {} if text is None else parse_objective(text)


def _rows_of_file(
    path: Path,
    form: str | None,
    label: str | None,
    hardware: str | None,
    prompts: str | None,
    speculation: Sequence[int] | None,
    names: Mapping[str, str],
) -> list[SpeedRow]:
    from assay_evaluate.speed.foreign.read import read_imported
    from assay_evaluate.speed.foreign.stated import Stated, renamed

    if speculation is not None and len(speculation) > 1:
        raise AssayError("--speculation: with --import it is one number, of all rows of the file, or `off`")
    stated = Stated(label, hardware, None if speculation is None else speculation[0], prompts)
    return renamed(read_imported(path, form, stated), names, path.name)


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


def _strangers(rows: Sequence[SpeedRow], place: Place) -> Iterator[str]:
    """A line for each imported name that is none of the run's labels: nothing is joined by guessing."""
    known = [measurement.label for measurement in place.measurements if not measurement.is_noise_floor]
    for name in dict.fromkeys(row.checkpoint for row in rows):
        if known and name not in (*known, "reference"):
            yield (
                f"note: no checkpoint of the run is called {shown(name)} ({', '.join(known)}): its rows have no verdict; if it "
                f"is one of them, say --label {shown(name)}=LABEL"
            )


def _without_refused(rows: Sequence[SpeedRow], where: str) -> tuple[list[SpeedRow], list[NotMeasured]]:
    """(rows that are speeds, what the others are). AssayError: none is one; it says why of the first."""
    kept = [row for row in rows if row.why_refused is None]
    refused = [
        NotMeasured(
            checkpoint=row.checkpoint, speculation=row.speculation, concurrency=row.concurrency, prompts=row.prompts,
            reason=f"not imported from {where}: {row.why_refused}",
        )
        for row in rows if row.why_refused is not None
    ]  # fmt: skip
    if not kept:
        more = f" (and so of {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise AssayError(
            f"{where}: {rows[0].checkpoint} at {rows[0].concurrency}: {rows[0].why_refused}{more}; measure it again"
        )
    return kept, refused


def _notes(rows: Sequence[SpeedRow]) -> Iterator[str]:
    from assay_evaluate.speed.foreign.read import notes_of

    yield from (f"note: {escape(line)}" for line in notes_of(rows))


def _with_rows(run_dir: Path, rows: Sequence[SpeedRow], left_out: Sequence[NotMeasured]) -> SpeedRecord:
    from assay_evaluate.speed.rows_in_record import with_rows

    record = with_rows(SpeedRecord.load_if_there(run_dir / SPEED_RECORD), rows, left_out)
    record.save(run_dir / SPEED_RECORD)
    return record


def _failed(record: SpeedRecord) -> bool:
    """Whether something was wanted, could have been measured, and was not."""
    known = ("emulated:", "nothing drafts:", "not predicted:", "not imported")
    lost = any(row.origin == "measured" and row.why_refused is not None for row in record.rows)
    return lost or any(not point.reason.startswith(known) for point in record.not_measured)


# ------------------------------------------------------------------------------------------------ the table
def print_speed(record: SpeedRecord, reference: str, out: Console) -> None:
    """A line for each point, then the ratios of like points, then what was not measured. Intervals are of 95 %."""
    from assay_evaluate.speed import ratio
    from assay_evaluate.speed.noise import noise_of_rows

    noise = {
        quantity: noise_of_rows(record.rows, quantity) for quantity in (ratio.output_tokens_s, ratio.ttft_s, ratio.tpot_s)
    }  # fmt: skip
    apart = columns_that_differ(record.rows)
    columns = ("checkpoint", *apart, "drafts", "prompts", "in flight", "failed", "tokens/s", "TTFT", "TPOT", "accepted")
    lines = []
    for row in sorted(
        record.rows,
        key=lambda row: (row.origin, row.source, row.checkpoint, row.speculation or 0, row.prompts, row.concurrency),
    ):
        where = row.checkpoint if row.origin == "measured" else f"{row.checkpoint} ({row.origin})"
        accepted = [repeat.acceptance_length for repeat in row.repeats if repeat.acceptance_length is not None]
        lines.append((
            escape(where), *(escape(APART[column](row)) for column in apart),
            drafts(row), escape(row.prompts), in_flight(row), lost(row),
            told(ratio.mean_of(row, ratio.output_tokens_s, noise[ratio.output_tokens_s]), 1, "{:.1f}"),
            told(ratio.mean_of(row, ratio.ttft_s, noise[ratio.ttft_s]), 1e3, "{:.0f} ms"),
            told(ratio.mean_of(row, ratio.tpot_s, noise[ratio.tpot_s]), 1e3, "{:.1f} ms"),
            f"{sum(accepted) / len(accepted):.2f}" if accepted else "-",
        ))  # fmt: skip
    if lines:
        print_rows(columns, lines, out)
    for row in record.rows:
        if not row.emulated and row.speculation is not None and row.why_not_chosen is not None:
            out.print(escape(f"never chosen: {row.checkpoint} ({point_of(row, apart)}): it {row.why_not_chosen}"))
    if any(len(row.repeats) > 1 for row in record.rows):
        out.print(escape(f"95 % intervals: {noise[ratio.output_tokens_s].words}"))
    # A published reference has no row of its own where rows were imported; the FP8 release is what people compare with.
    labels = {row.checkpoint for row in record.rows}
    against = ratio.pairs(record.rows, reference if reference in labels else "fp8")
    for row, base, found in against:
        of_base = [f"{column} {APART[column](base)}" for column in apart if APART[column](base) != APART[column](row)]
        name = f"{base.checkpoint} with {', '.join(of_base)}" if of_base else base.checkpoint
        times = told(found, 1, "{:.2f}")
        out.print(escape(f"{row.checkpoint} against {name} ({point_of(row, apart)}): {times} times the tokens/s"))
    for repeat in record.not_measured:
        parts = [
            None if repeat.speculation is None else f"{repeat.speculation} drafted" if repeat.speculation else "drafts off",
            repeat.prompts,
            None if repeat.concurrency is None else f"{repeat.concurrency} in flight",
        ]
        point = ", ".join(part for part in parts if part is not None)
        out.print(escape(f"not measured: {repeat.checkpoint}{f' ({point})' if point else ''}: {repeat.reason}"))
    if not lines and not record.not_measured:
        out.print("nothing was measured or imported yet")


NOT_STATED = "not stated"
APART: dict[str, Callable[[SpeedRow], str]] = {
    "scheme": lambda row: row.scheme or NOT_STATED,
    "hardware": lambda row: row.hardware,
    "parallelism": lambda row: _listed(row.parallelism) or NOT_STATED,
    "engine": lambda row: row.engine or NOT_STATED,
    "sent": lambda row: "at once" if row.request_rate is None else f"{row.request_rate:g} a second",
    "settings": lambda row: _listed(row.settings) or NOT_STATED,
    "GPUs": lambda row: str(row.num_gpus),
    "source": lambda row: row.source,
}
"""Column -> what it says of a row: everything in which rows may differ that the table would show under equal names."""
AS_NEEDED = {"GPUs", "source"}
"""Columns that are shown only where those before them tell rows not apart."""


def columns_that_differ(rows: Sequence[SpeedRow]) -> list[str]:
    """The columns of APART that rows of one checkpoint, with equal drafts, prompts and requests in flight, need."""
    columns: list[str] = []
    for column, told_of in APART.items():
        values: dict[tuple[Hashable, ...], set[str]] = defaultdict(set)
        for row in rows:
            before = tuple(APART[earlier](row) for earlier in columns) if column in AS_NEEDED else ()
            values[row.origin, row.checkpoint, row.speculation, row.prompts, row.concurrency, before].add(told_of(row))
        if any(len(of_one_name) > 1 for of_one_name in values.values()):
            columns.append(column)
    return columns


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))


def point_of(row: SpeedRow, apart: Sequence[str]) -> str:
    """`off, chat, 8 in flight, tensor 8`. apart: columns of APART."""
    stated = (value for column in apart if (value := APART[column](row)) != NOT_STATED)
    return ", ".join([drafts(row), row.prompts, f"{row.concurrency} in flight", *stated])


def drafts(row: SpeedRow) -> str:
    """`off`, a number, `?`."""
    return "?" if row.speculation is None else str(row.speculation) if row.speculation else "off"


def in_flight(row: SpeedRow) -> str:
    """`64`, or `64 (mean 12.0)` where fewer were in flight on average."""
    mean = row.in_flight
    few = mean is not None and mean < FEW_IN_FLIGHT * row.concurrency
    return f"{row.concurrency} (mean {mean:.1f})" if few else str(row.concurrency)


def lost(row: SpeedRow) -> str:
    """Shares of requests that failed and that were cut off, `2.4 %`, `2.4 % + 4.7 % cut off`; `-`: not told."""
    failed, cut = row.failed_share, row.incomplete_share
    parts = [] if failed is None else [percent_of_events(failed) if failed else "0 %"]
    return " + ".join([*parts, *([f"{percent_of_events(cut)} cut off"] if cut else [])]) or "-"


def told(interval: Any, unit: float, form: str) -> str:
    """`95.6 [93.1, 98.2] ms`; without an interval where there is one repeat; `-` if nobody says. form: `{:.1f} ms`."""
    if interval is None:
        return "-"
    number, _, name = form.partition(" ")
    value = number.format(interval.value * unit)
    if interval.low is not None and interval.high is not None:
        value += f" [{number.format(interval.low * unit)}, {number.format(interval.high * unit)}]"
    return f"{value} {name}".rstrip()
