"""The report of guidellm (https://github.com/vllm-project/guidellm): `benchmarks.json`, one for each rate or concurrency.

What it calls inter-token latency is a request's (last token - first token) / (tokens - 1), which here is TPOT; what it calls
time per output token counts the first token in (guidellm/schemas/request_stats.py). Only successful requests are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.speed.foreign.stated import (
    SPECULATION_UNKNOWN,
    Stated,
    num_gpus_of,
    one_label,
    required,
    text,
    whole,
    wrong,
)
from assay_evaluate.speed.rows import count, number, quantiles_of
from assay_evaluate.transport.foreign_json import object_in, objects_in


def is_guidellm(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("benchmarks"), list) and any(
        "metrics" in entry for entry in objects_in(content, "benchmarks")
    )  # fmt: skip


def read_guidellm(content: Mapping[str, Any], stated: Stated, where: str) -> list[SpeedRow]:
    """A row for each benchmark. AssayError: hardware or checkpoint is not stated, or a benchmark has no throughput."""
    if not is_guidellm(content):
        raise wrong(where, "no report of guidellm (it has no `benchmarks` with `metrics`)")
    hardware = required(stated.hardware, "the hardware", "--hardware 8xH200", where)
    stated_model = text(object_in(content, "args"), "model")
    models = {
        stated_model or text(object_in(object_in(entry, "config"), "backend"), "model")
        for entry in objects_in(content, "benchmarks")
    }
    one_label(stated, [model for model in models if model], where)
    rows = []
    for at, entry in enumerate(objects_in(content, "benchmarks"), 1):
        place = f"{where}, benchmark {at}"
        model = stated_model or text(object_in(object_in(entry, "config"), "backend"), "model")
        label = required(stated.label or model, "the checkpoint", "--label NAME", place)
        rows.append(_row(entry, label, hardware, stated, place, where))
    return rows


def _row(entry: Mapping[str, Any], label: str, hardware: str, stated: Stated, place: str, where: str) -> SpeedRow:
    metrics = object_in(entry, "metrics")
    rate = number(_successful(metrics, "output_tokens_per_second"), "mean")
    concurrency, request_rate, note = _concurrency(entry, metrics)
    if not rate or concurrency is None:
        raise wrong(place, "has no successful output tokens a second, or no requests in flight")
    totals = object_in(metrics, "request_totals")
    notes = [*([note] if note else []), "the version of the engine is not stated"]
    notes += [SPECULATION_UNKNOWN] if stated.speculation is None else []
    return SpeedRow(
        checkpoint=label,
        origin="imported",
        source=f"guidellm: {where}",
        hardware=hardware,
        num_gpus=num_gpus_of(hardware),
        speculation=stated.speculation,
        prompts=stated.prompts or "not stated",
        prompt_tokens=number(_successful(metrics, "prompt_token_count"), "mean"),
        output_tokens=number(_successful(metrics, "output_token_count"), "mean"),
        concurrency=concurrency,
        request_rate=request_rate,
        repeats=(
            SpeedRepeat(
                duration_s=number(entry, "duration"),
                num_completed=count(totals, "successful"),
                num_failed=count(totals, "errored"),
                num_incomplete=count(totals, "incomplete"),
                in_flight=number(_successful(metrics, "request_concurrency"), "mean"),
                output_tokens_s=rate,
                total_tokens_s=number(_successful(metrics, "tokens_per_second"), "mean"),
                ttft_s=_quantiles(metrics, "time_to_first_token_ms", 1000),
                tpot_s=_quantiles(metrics, "inter_token_latency_ms", 1000),
                end_to_end_s=_quantiles(metrics, "request_latency", 1.0),
            ),
        ),
        assumptions=tuple(notes),
    )


RATED = ("constant", "poisson", "async")
"""Strategies that send requests at a rate, however fast they are answered."""


def _concurrency(entry: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[int | None, float | None, str | None]:
    """(requests in flight, requests a second at which they were sent, a note).

    In flight: the streams of a concurrent strategy, one of a synchronous, else the mean that was seen.
    """
    rate = None
    for holder in (object_in(entry, "config"), object_in(entry, "args")):
        strategy = object_in(holder, "strategy")
        if strategy.get("type_") == "synchronous":
            return 1, None, None
        if (streams := whole(strategy, "streams")) and strategy.get("type_") == "concurrent":
            return streams, None, None
        if strategy.get("type_") in RATED and rate is None:
            rate = number(strategy, "rate")
    mean = number(_successful(metrics, "request_concurrency"), "mean")
    if mean is None:
        return None, None, None
    how = "as fast as they were taken" if rate is None else "at a rate"
    return max(1, round(mean)), rate, f"requests were sent {how}; {mean:.1f} were in flight on average"


def _successful(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    return object_in(object_in(metrics, name), "successful")


def _quantiles(metrics: Mapping[str, Any], name: str, per_s: float) -> Quantiles | None:
    statistics = _successful(metrics, name)
    percentiles = object_in(statistics, "percentiles")
    p90, p99 = number(percentiles, "p90"), number(percentiles, "p99")
    return quantiles_of(number(statistics, "mean"), number(statistics, "median"), p90, p99, per_s)
