"""The speeds of a run: a line for each point, ratios of like points, what was not measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rich.console import Console

from assay.quantities import percent_of_events
from assay.records.speed import SpeedRecord, SpeedRow
from assay_cli.terminal import escape, print_rows

FEW_IN_FLIGHT = 0.75
"""Share of its concurrency below which the table says how many requests a row had in flight on average."""


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
