"""From the JSON of `vllm bench serve` to `SpeedRepeat` and `SpeedRow`, and rows that were not measured here into a record.

TPOT is taken, never ITL: under speculation several tokens arrive in one chunk, and the time between chunks is no time of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from assay.errors import AssayError, MeasureError
from assay.foreign_text import one_line
from assay.records.speed import MOST_COUNT, NotMeasured, Quantiles, SpeedRecord, SpeedRepeat, SpeedRow

WHERE = "vllm bench serve"
NOT_STATED = "not stated"
"""Prompts of an imported row that does not say what was asked."""
ROUNDED = 0.05
"""Share by which a rate may differ from tokens over seconds: files hold rounded numbers."""


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """A finite number under `name`; None: there is none."""
    value = fields.get(name)
    if not isinstance(value, int | float) or type(value) is bool:
        return None
    try:
        value_as_float = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return value_as_float if math.isfinite(value_as_float) else None


def count(fields: Mapping[str, Any], name: str) -> int | None:
    """A count under `name`; None: there is none."""
    value = fields.get(name)
    return value if type(value) is int and 0 <= value <= MOST_COUNT else None


def quantiles(fields: Mapping[str, Any], metric: str, per_s: float = 1.0) -> Quantiles | None:
    """`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms`, ... in seconds. None: there is no mean or no median, or it is 0.

    A time of 0 was not measured: vLLM writes it of TPOT where every reply has one token, of TTFT where nothing was streamed.
    """
    mean, median, p90, p99 = (number(fields, f"{name}_{metric}") for name in ("mean", "median", "p90", "p99"))
    return quantiles_of(mean, median, p90, p99, per_s)


def quantiles_of(
    mean: float | None, median: float | None, p90: float | None, p99: float | None, per_s: float = 1.0
) -> Quantiles | None:  # fmt: skip
    """In seconds, `per_s` of what is told. None: mean or median is not told, or 0, which no request takes."""
    if not mean or not median:
        return None
    above = [None if value is None else value / per_s for value in (p90, p99)]
    return Quantiles(mean=mean / per_s, p50=median / per_s, p90=above[0], p99=above[1])


def in_flight_of(
    completed_s: float | None, end_to_end: Quantiles | None, ttft: Quantiles | None, tpot: Quantiles | None,
    output_tokens: float | None,
) -> float | None:  # fmt: skip
    """Mean number of requests in flight, by Little's law: completed requests a second, times the mean seconds of one.

    Where a file has no end-to-end time it is TTFT + TPOT * (tokens - 1). None: that is not told either.
    """
    if end_to_end is not None:
        each_s = end_to_end.mean
    elif ttft is not None and tpot is not None and output_tokens is not None and output_tokens >= 1:
        each_s = ttft.mean + tpot.mean * (output_tokens - 1)
    else:
        return None
    in_flight = None if completed_s is None else completed_s * each_s
    return in_flight if in_flight is not None and in_flight <= MOST_COUNT else None


def repeat_of(
    fields: Mapping[str, Any], where: str, *, memory_bytes: int | None = None, energy_j: float | None = None,
    server_start: int | None = None,
) -> SpeedRepeat:  # fmt: skip
    """One result of `vllm bench serve`.

    where: for the MeasureError: it has no output throughput, or one that its tokens and seconds contradict, or every request
    failed.
    """
    rate, duration_s = number(fields, "output_throughput"), number(fields, "duration")
    completed, requested, failed = (count(fields, name) for name in ("completed", "num_prompts", "failed"))
    if rate is None or rate <= 0 or completed == 0:
        reason = "no request was answered" if completed == 0 else "it has no `output_throughput`"
        raise MeasureError(f"{where}: {reason}" + (f" ({failed} failed)" if completed == 0 and failed else ""))
    tokens = count(fields, "total_output_tokens")
    if tokens is not None and duration_s and abs(math.log(max(tokens, 1) / duration_s / rate)) > ROUNDED:
        raise MeasureError(
            f"{where}: it says {rate:,.6g} tokens/s, and {tokens:,} tokens in {duration_s:,.6g} s are "
            f"{tokens / duration_s:,.6g}; one of them is wrong"
        )
    ttft, tpot, end_to_end = (quantiles(fields, f"{metric}_ms", per_s=1000) for metric in ("ttft", "tpot", "e2el"))
    tokens_each = tokens / completed if tokens is not None and completed else None
    total_s, prompts = number(fields, "total_token_throughput"), count(fields, "total_input_tokens")
    if total_s and duration_s and tokens and prompts is not None:
        is_off = abs(math.log((tokens + prompts) / duration_s / total_s)) > ROUNDED
        total_s = None if is_off else total_s
    return SpeedRepeat(
        duration_s=duration_s,
        num_completed=completed,
        num_failed=failed,
        # Before it told of failures, a result had fewer completed requests than prompts.
        num_incomplete=max(0, requested - completed)
        if requested is not None and completed is not None and failed is None
        else None,
        in_flight=in_flight_of(
            completed / duration_s if completed and duration_s else None, end_to_end, ttft, tpot, tokens_each
        ),
        peak_in_flight=count(fields, "max_concurrent_requests") or None,
        server_start=server_start,
        output_tokens_s=rate,
        total_tokens_s=total_s,
        ttft_s=ttft,
        tpot_s=tpot,
        end_to_end_s=end_to_end,
        acceptance_length=number(fields, "spec_decode_acceptance_length"),
        goodput_requests_s=number(fields, "request_goodput"),
        memory_bytes=memory_bytes,
        energy_j=energy_j,
    )


def tokens_each(result: Mapping[str, Any], name: str) -> float | None:
    """Mean number of tokens a request (`total_input_tokens`, `total_output_tokens`); None: not told."""
    total, completed = number(result, name), count(result, "completed")
    return None if total is None or not completed else total / completed


def with_rows(record: SpeedRecord | None, rows: Sequence[SpeedRow], left_out: Sequence[NotMeasured] = ()) -> SpeedRecord:
    """The record with rows that were imported or predicted; they replace those of the same point and source.

    AssayError: two of them are one point. left_out: what has no row, and why; said once.
    """
    points = {row.point for row in rows}
    kept = [] if record is None else [row for row in record.rows if row.point not in points]
    before = SpeedRecord(rows=()) if record is None else record
    noted = (*before.not_measured, *(entry for entry in left_out if entry not in before.not_measured))
    try:
        return SpeedRecord.model_validate(
            {**before.model_dump(), "rows": [entry.model_dump() for entry in (*kept, *rows)], "not_measured": noted}
        )
    except ValidationError as error:
        raise AssayError(one_line(error.errors()[0]["msg"])) from None
