"""What `vllm bench serve --save-result` writes, one object a file (vllm/benchmarks/serve.py).

Several stand in one file after `--append-result`, a line each, and in the `summary.json` of `vllm bench sweep serve`, a list in
which every run has the settings of its server and benchmark beside its results.

It does not know the hardware, nor how its server was started; `--metadata hardware=8xH200 speculation=5 ...` puts that into it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from assay.foreign_text import one_line
from assay.records.speed import SpeedRow
from assay_evaluate.speed.foreign.in_flight import in_flight
from assay_evaluate.speed.foreign.stated import (
    SPECULATION_UNKNOWN,
    Stated,
    hardware_of,
    num_gpus_of,
    one_label,
    required,
    speculation_of,
    text,
    whole,
    wrong,
)
from assay_evaluate.speed.rows import number, repeat_of, tokens_each

METADATA = ("checkpoint", "hardware", "engine", "scheme", "prompts", "speculation", "tensor", "expert", "data", "pipeline")
"""Keys of `--metadata` that are read."""
RANKS = ("tensor", "expert", "data", "pipeline")
_RESULT = re.compile(
    r"(mean|median|std|p[0-9.]+)_\w+|spec_decode_\w+|total_\w+_tokens|\w+_throughput|probe_\w+|request_goodput|ramp_up_\w+"
    r"|max_concurrency|max_concurrent_requests|max_output_tokens_per_s|(tensor|data|pipeline)[_-]parallel[_-]size"
    r"|rps_change_events|date|backend|endpoint_type|label|model_id|tokenizer_id|num_prompts|request_rate|burstiness|duration|completed|failed|rtfx"
    r"|run_number|input_lens|output_lens|ttfts|itls|generated_texts|errors|start_times|latencies|queue_times"
)
"""Keys that tell what came out, when, or what is read by name; any other is a setting of a sweep."""


def is_vllm_bench(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and "output_throughput" in first and "max_concurrency" in first


def read_vllm_bench(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """A row of one repeat for each object. AssayError: checkpoint or hardware is not stated, the file contradicts an option, or
    nobody knows how many requests were in flight."""
    objects = content if isinstance(content, list) else [content]
    if not all(is_vllm_bench(entry) for entry in objects):
        raise wrong(where, "no result of `vllm bench serve` (it has no `output_throughput` and `max_concurrency`)")
    one_label(stated, [name for entry in objects if (name := text(entry, "checkpoint") or text(entry, "model_id"))], where)
    apart = _apart(objects)
    return [
        _row(entry, stated, f"{where}, result {at}" if len(objects) > 1 else where, where, apart)
        for at, entry in enumerate(objects, 1)
    ]


def _apart(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which the objects differ, and which no column of a row holds."""
    names = dict.fromkeys(name for entry in objects for name in entry if not _RESULT.fullmatch(name) and name not in METADATA)
    return [name for name in names if len({repr(entry.get(name)) for entry in objects}) > 1]


def _row(entry: Mapping[str, Any], stated: Stated, place: str, where: str, apart: Sequence[str]) -> SpeedRow:
    repeat = repeat_of(entry, place)
    rate = None if entry.get("request_rate") == "inf" else number(entry, "request_rate")
    held = in_flight(whole(entry, "max_concurrency") or None, rate, whole(entry, "num_prompts") or None, repeat)
    if held is None:
        raise wrong(place, "was measured without --max-concurrency, so nobody knows how many requests were in flight")
    label = required(
        stated.label or text(entry, "checkpoint") or text(entry, "model_id"), "the checkpoint", "--label NAME", place
    )
    hardware = hardware_of(text(entry, "hardware"), stated, place)
    speculation = speculation_of(_told_speculation(entry), stated, place)
    notes = [SPECULATION_UNKNOWN] if speculation is None else []
    notes += [] if text(entry, "engine") else ["the version of the engine is not stated"]
    if repeat.total_tokens_s is None and number(entry, "total_token_throughput") is not None:
        notes.append("its `total_token_throughput` contradicts its tokens and duration, and is left out")
    return SpeedRow(
        checkpoint=label,
        scheme=text(entry, "scheme"),
        origin="imported",
        source=f"vllm bench serve: {where}",
        hardware=hardware,
        num_gpus=num_gpus_of(hardware),
        parallelism=_ranks(entry),
        settings={one_line(name): one_line(str(entry.get(name))) for name in apart},
        speculation=speculation,
        prompts=stated.prompts or text(entry, "prompts") or "not stated",
        prompt_tokens=tokens_each([entry], "total_input_tokens"),
        output_tokens=tokens_each([entry], "total_output_tokens"),
        concurrency=held.concurrency,
        request_rate=held.request_rate,
        engine=text(entry, "engine"),
        repeats=(repeat,),
        assumptions=(*notes, *held.notes),
        doubt=held.doubt,
    )


def _ranks(entry: Mapping[str, Any]) -> dict[str, int]:
    """As its metadata name them, or a sweep the options of its server."""
    spelt = {name: (name, f"{name}_parallel_size", f"{name}-parallel-size") for name in RANKS}
    sizes = {name: next(filter(None, (whole(entry, name) for name in names)), None) for name, names in spelt.items()}
    return {name: ranks for name, ranks in sizes.items() if ranks is not None}


def _told_speculation(entry: Mapping[str, Any]) -> int | None:
    """As its metadata say; else as many as there are positions with an acceptance rate. A result without rates says nothing."""
    if (number := whole(entry, "speculation")) is not None:
        return number
    positions = entry.get("spec_decode_per_position_acceptance_rates")
    return len(positions) if isinstance(positions, list) and positions else None
