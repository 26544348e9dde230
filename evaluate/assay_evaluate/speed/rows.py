"""From the JSON of `vllm bench serve` to `SpeedRepeat` and `SpeedRow`.

TPOT is taken, never ITL: under speculation several tokens arrive in one chunk, and the time between chunks is no time of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay.errors import MeasureError
from assay.records.speed import MOST_COUNT, Quantiles, SpeedRepeat

WHERE = "vllm bench serve"


def number(found: Mapping[str, Any], name: str) -> float | None:
    """A finite number under `name`; None: there is none."""
    value = found.get(name)
    if not isinstance(value, int | float) or type(value) is bool:
        return None
    try:
        told = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return told if math.isfinite(told) else None


def count(found: Mapping[str, Any], name: str) -> int | None:
    """A count under `name`; None: there is none."""
    value = found.get(name)
    return value if type(value) is int and 0 <= value <= MOST_COUNT else None


def quantiles(found: Mapping[str, Any], metric: str) -> Quantiles | None:
    """`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms`, ... in seconds. None: there is no mean or no median."""
    mean, median = number(found, f"mean_{metric}_ms"), number(found, f"median_{metric}_ms")
    if mean is None or median is None:
        return None
    p90, p99 = number(found, f"p90_{metric}_ms"), number(found, f"p99_{metric}_ms")
    return Quantiles(
        mean=mean / 1000, p50=median / 1000, p90=None if p90 is None else p90 / 1000, p99=None if p99 is None else p99 / 1000
    )


def repeat_of(
    found: Mapping[str, Any], where: str, *, memory_bytes: int | None = None, energy_j: float | None = None
) -> SpeedRepeat:  # fmt: skip
    """One result of `vllm bench serve`. where: for the MeasureError: it has no output throughput, or every request failed."""
    rate = number(found, "output_throughput")
    completed = count(found, "completed")
    if rate is None or rate <= 0 or completed == 0:
        failed = count(found, "failed")
        why = "no request was answered" if completed == 0 else "it has no `output_throughput`"
        raise MeasureError(f"{where}: {why}" + (f" ({failed} failed)" if completed == 0 and failed else ""))
    # A reply of one token has no time per output token: vLLM takes it as 0, and so is the mean if all are so short.
    tpot = quantiles(found, "tpot")
    return SpeedRepeat(
        duration_s=number(found, "duration"),
        num_completed=completed,
        num_failed=count(found, "failed"),
        output_tokens_s=rate,
        total_tokens_s=number(found, "total_token_throughput"),
        ttft_s=quantiles(found, "ttft"),
        tpot_s=None if tpot is not None and tpot.mean == 0 else tpot,
        end_to_end_s=quantiles(found, "e2el"),
        acceptance_length=number(found, "spec_decode_acceptance_length"),
        goodput_requests_s=number(found, "request_goodput"),
        memory_bytes=memory_bytes,
        energy_j=energy_j,
    )


def tokens_each(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean number of tokens a request (`total_input_tokens`, `total_output_tokens`); None: not told."""
    pairs = [(number(one, name), count(one, "completed")) for one in results]
    known = [(total, completed) for total, completed in pairs if total is not None and completed]
    return sum(total for total, _ in known) / sum(completed for _, completed in known) if known else None
