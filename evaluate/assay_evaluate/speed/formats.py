"""What other tools write, read as imported rows: `vllm bench serve`, InferenceX, guidellm, and a table of one's own.

A reader takes the content of a file, what the user states, and the file's name. AssayError: checkpoint or hardware is not
stated, the file contradicts an option, or lacks what a row needs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.speed.rows import NOT_STATED, count, in_flight_of, number, quantiles, quantiles_of, repeat_of, tokens_each
from assay_evaluate.speed.stated import (
    Stated,
    hardware_of,
    in_flight,
    num_gpus_of,
    one_label,
    required,
    speculation_of,
    text,
    whole,
    wrong,
)
from assay_evaluate.transport.foreign_json import object_in, objects_in

SPECULATION_UNKNOWN = "whether it drafted, and how many tokens, is not stated"
ENGINE_UNKNOWN = "the version of the engine is not stated"

# ------------------------------------------------------------------------------------------------ vllm bench serve
# `--save-result` writes one object a file (vllm/benchmarks/serve.py). Several stand in one file after `--append-result`, a line
# each, and in the `summary.json` of `vllm bench sweep serve`, a list in which every run has the settings of its server and
# benchmark beside its results. It does not know the hardware, nor how its server was started;
# `--metadata hardware=8xH200 speculation=5 ...` puts that into it.
RANKS = ("tensor", "expert", "data", "pipeline")
METADATA = ("checkpoint", "hardware", "engine", "scheme", "prompts", "speculation", *RANKS)
"""Keys of `--metadata` that are read."""
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
    """A row of one repeat for each object. AssayError also: nobody knows how many requests were in flight."""
    objects = content if isinstance(content, list) else [content]
    if not all(is_vllm_bench(entry) for entry in objects):
        raise wrong(where, "no result of `vllm bench serve` (it has no `output_throughput` and `max_concurrency`)")
    one_label(stated, [name for entry in objects if (name := text(entry, "checkpoint") or text(entry, "model_id"))], where)
    names = dict.fromkeys(name for entry in objects for name in entry if not _RESULT.fullmatch(name) and name not in METADATA)
    # settings in which the objects differ, and which no column of a row holds
    apart = [name for name in names if len({repr(entry.get(name)) for entry in objects}) > 1]
    return [
        _row_of_vllm(entry, stated, f"{where}, result {at}" if len(objects) > 1 else where, where, apart)
        for at, entry in enumerate(objects, 1)
    ]


def _row_of_vllm(entry: Mapping[str, Any], stated: Stated, place: str, where: str, apart: Sequence[str]) -> SpeedRow:
    repeat = repeat_of(entry, place)
    rate = None if entry.get("request_rate") == "inf" else number(entry, "request_rate")
    held = in_flight(whole(entry, "max_concurrency") or None, rate, whole(entry, "num_prompts") or None, repeat)
    if held is None:
        raise wrong(place, "was measured without --max-concurrency, so nobody knows how many requests were in flight")
    label = required(
        stated.label or text(entry, "checkpoint") or text(entry, "model_id"), "the checkpoint", "--label NAME", place
    )
    hardware = hardware_of(text(entry, "hardware"), stated, place)
    drafted = whole(entry, "speculation")
    if drafted is None:  # as many as there are positions with an acceptance rate; a result without rates says nothing
        positions = entry.get("spec_decode_per_position_acceptance_rates")
        drafted = len(positions) if isinstance(positions, list) and positions else None
    speculation = speculation_of(drafted, stated, place)
    notes = [SPECULATION_UNKNOWN] if speculation is None else []
    notes += [] if text(entry, "engine") else [ENGINE_UNKNOWN]
    if repeat.total_tokens_s is None and number(entry, "total_token_throughput") is not None:
        notes.append("its `total_token_throughput` contradicts its tokens and duration, and is left out")
    # ranks as its metadata name them, or a sweep the options of its server
    spelt = {name: (name, f"{name}_parallel_size", f"{name}-parallel-size") for name in RANKS}
    ranks = {kind: next(filter(None, (whole(entry, name) for name in names)), None) for kind, names in spelt.items()}
    return SpeedRow(
        checkpoint=label,
        scheme=text(entry, "scheme"),
        origin="imported",
        source=f"vllm bench serve: {where}",
        hardware=hardware,
        num_gpus=num_gpus_of(hardware),
        parallelism={kind: size for kind, size in ranks.items() if size is not None},
        settings={one_line(name): one_line(str(entry.get(name))) for name in apart},
        speculation=speculation,
        prompts=stated.prompts or text(entry, "prompts") or NOT_STATED,
        prompt_tokens=tokens_each(entry, "total_input_tokens"),
        output_tokens=tokens_each(entry, "total_output_tokens"),
        concurrency=held.concurrency,
        request_rate=held.request_rate,
        engine=text(entry, "engine"),
        repeats=(repeat,),
        assumptions=(*notes, *held.notes),
        doubt=held.doubt,
    )


# ------------------------------------------------------------------------------------------------ InferenceX
# Rows as InferenceX (formerly InferenceMAX) writes them: one object, or a list of them, of its `utils/process_result.py`
# (https://github.com/SemiAnalysisAI/InferenceX). Times are in seconds, throughput is tokens a second and GPU. `spec_decoding`
# says whether there were drafts, never how many, so a row with them is compared with none unless the user states the number.
_OFF = {"none", "off", "false", "", "0"}
_TRUE = {"true", "1", "yes", "on"}


def is_inferencex(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and {"hw", "conc", "output_tput_per_gpu"} <= first.keys()


def read_inferencex(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """A row for each object. AssayError also: one has no requests in flight, GPUs or throughput.

    A model that the file has in several precisions is as many checkpoints: `zai-org/GLM-5 (fp4)`.
    """
    objects = content if isinstance(content, list) else [content]
    if not objects or not all(is_inferencex(entry) for entry in objects):
        raise wrong(where, "no rows of InferenceX (each has `hw`, `conc` and `output_tput_per_gpu`)")
    precisions: dict[str | None, set[str | None]] = defaultdict(set)
    for entry in objects:
        precisions[text(entry, "model")].add(text(entry, "precision"))
    names = [
        f"{model} ({text(entry, 'precision') or 'precision not stated'})" if model and len(precisions[model]) > 1 else model
        for entry in objects
        for model in (text(entry, "model"),)
    ]
    one_label(stated, filter(None, names), where)
    words = [
        str(entry["spec_decoding"] if "spec_decoding" in entry else entry.get("mtp", NOT_STATED)).strip().lower()
        for entry in objects
    ]
    drafted = [0 if word in _OFF else None if word == NOT_STATED else "on" for word in words]
    # An option for the rows that drafted says nothing of those that did not, where a file has both.
    has_both = "on" in drafted and 0 in drafted and bool(stated.speculation)
    rows = []
    for at, (entry, name, word, drafting) in enumerate(zip(objects, names, words, drafted, strict=True), 1):
        place = f"{where}, row {at}" if len(objects) > 1 else where
        speculation = 0 if has_both and drafting == 0 else speculation_of(drafting, stated, place)
        unknown = SPECULATION_UNKNOWN if word == NOT_STATED else f"drafts: {word}; how many tokens is not stated"
        notes = [unknown] if speculation is None else []
        rows.append(_row_of_inferencex(entry, name, speculation, notes, stated, place, where))
    return rows


def _row_of_inferencex(
    entry: Mapping[str, Any], name: str | None, speculation: int | None, notes: list[str], stated: Stated, place: str,
    where: str,
) -> SpeedRow:  # fmt: skip
    if entry.get("modality") == "image":
        raise wrong(place, "is a row of images a second, not of tokens")
    decode = whole(entry, "num_decode_gpu")
    is_split = entry.get("disagg") is not False and whole(entry, "num_prefill_gpu") is not None
    if is_split:  # a server in two parts: how each is split, and its GPUs
        gpus = {f"{part} GPUs": whole(entry, f"num_{part}_gpu") for part in ("prefill", "decode")}
        workers = {f"{part} workers": whole(entry, f"{part}_num_workers") for part in ("prefill", "decode")}
        parallelism = _ranks(entry, "prefill_", "prefill ") | _ranks(entry, "decode_", "decode ")
        parallelism |= {what: num for what, num in (gpus | workers).items() if num}
        num_gpus = (whole(entry, "num_prefill_gpu") or 0) + (decode or 0)
    else:
        parallelism = _ranks(entry)
        num_gpus = parallelism.get("tensor", 0) * parallelism.get("pipeline", 1)
    per_gpu, concurrency = number(entry, "output_tput_per_gpu"), whole(entry, "conc")
    if not num_gpus or not per_gpu or not concurrency:
        raise wrong(place, "has no number of GPUs (tp), requests in flight (conc) or throughput")
    if stated.hardware is not None and num_gpus_of(stated.hardware) not in (0, num_gpus):
        raise AssayError(f"{place}: is of {num_gpus} GPUs, and --hardware says {stated.hardware}; leave the option out")
    # Where prefill has GPUs of its own, output is counted for the GPUs that decode.
    output = per_gpu * ((decode or num_gpus) if is_split else num_gpus)
    isl, osl, total = whole(entry, "isl"), whole(entry, "osl"), number(entry, "tput_per_gpu")
    notes += ["prefill and decode ran on GPUs of their own"] if is_split and decode else []
    gpu = required(text(entry, "hw"), "the hardware", "--hardware 8xH200", place)
    ttft, tpot, end_to_end = (quantiles(entry, metric) for metric in ("ttft", "tpot", "e2el"))
    return SpeedRow(
        checkpoint=required(stated.label or name, "the checkpoint", "--label NAME", place),
        scheme=text(entry, "precision"),
        origin="imported",
        source=f"InferenceX: {where}",
        hardware=stated.hardware or f"{num_gpus}x{gpu}",
        num_gpus=num_gpus,
        parallelism=parallelism,
        speculation=speculation,
        prompts=stated.prompts or (f"random {isl}/{osl}" if isl and osl else NOT_STATED),
        prompt_tokens=isl,
        output_tokens=osl,
        concurrency=concurrency,
        engine=text(entry, "image") or text(entry, "framework"),
        repeats=(
            SpeedRepeat(
                num_completed=count(entry, "completed"),
                num_failed=count(entry, "failed"),
                in_flight=in_flight_of(output / osl if osl else None, end_to_end, ttft, tpot, osl),
                output_tokens_s=output,
                total_tokens_s=None if total is None else total * num_gpus,
                ttft_s=ttft,
                tpot_s=tpot,
                end_to_end_s=end_to_end,
            ),
        ),
        assumptions=tuple(notes),
    )


def _ranks(entry: Mapping[str, Any], prefix: str = "", words: str = "") -> dict[str, int]:
    """Kind of parallelism -> ranks. prefix: of the keys; words: of the names, for `prefill tensor`."""
    spelt = {"tensor": "tp", "expert": "ep", "pipeline": "pp"}
    ranks = {kind: whole(entry, f"{prefix}{name}") for kind, name in spelt.items()}
    if not prefix and not ranks["tensor"]:  # the database of InferenceX names the only server `decode`
        ranks = {kind: whole(entry, f"decode_{name}") for kind, name in spelt.items()}
    attends = str(entry.get(f"{prefix}dp_attention", entry.get("decode_dp_attention") if not prefix else None)).strip().lower()
    if attends in _TRUE and ranks["tensor"]:
        ranks["data attention"] = ranks["tensor"]
    return {f"{words}{kind}": num for kind, num in ranks.items() if num}


# ------------------------------------------------------------------------------------------------ guidellm
# Its report (https://github.com/vllm-project/guidellm): `benchmarks.json`, one for each rate or concurrency. What it calls
# inter-token latency is a request's (last token - first token) / (tokens - 1), which here is TPOT; what it calls time per
# output token counts the first token in (guidellm/schemas/request_stats.py). Only successful requests are read.
RATED = ("constant", "poisson", "async")
"""Strategies that send requests at a rate, however fast they are answered."""


def is_guidellm(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("benchmarks"), list) and any(
        "metrics" in entry for entry in objects_in(content, "benchmarks")
    )  # fmt: skip


def read_guidellm(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """A row for each benchmark. AssayError also: one has no throughput."""
    if not is_guidellm(content):
        raise wrong(where, "no report of guidellm (it has no `benchmarks` with `metrics`)")
    hardware = required(stated.hardware, "the hardware", "--hardware 8xH200", where)
    benchmarks, stated_model = objects_in(content, "benchmarks"), text(object_in(content, "args"), "model")
    models = [stated_model or text(object_in(object_in(entry, "config"), "backend"), "model") for entry in benchmarks]
    one_label(stated, filter(None, models), where)
    rows = []
    for at, (entry, model) in enumerate(zip(benchmarks, models, strict=True), 1):
        place = f"{where}, benchmark {at}"
        label = required(stated.label or model, "the checkpoint", "--label NAME", place)
        rows.append(_row_of_guidellm(entry, label, hardware, stated, place, where))
    return rows


def _row_of_guidellm(entry: Mapping[str, Any], label: str, hardware: str, stated: Stated, place: str, where: str) -> SpeedRow:
    metrics = object_in(entry, "metrics")
    totals = object_in(metrics, "request_totals")

    def successful(name: str) -> dict[str, Any]:
        return object_in(object_in(metrics, name), "successful")

    def latency(name: str, per_s: float) -> Quantiles | None:
        statistics = successful(name)
        p90, p99 = (number(object_in(statistics, "percentiles"), quantile) for quantile in ("p90", "p99"))
        return quantiles_of(number(statistics, "mean"), number(statistics, "median"), p90, p99, per_s)

    rate, mean_in_flight = (number(successful(name), "mean") for name in ("output_tokens_per_second", "request_concurrency"))
    concurrency, request_rate, note = _concurrency(entry, mean_in_flight)
    if not rate or concurrency is None:
        raise wrong(place, "has no successful output tokens a second, or no requests in flight")
    notes = [*([note] if note else []), ENGINE_UNKNOWN]
    notes += [SPECULATION_UNKNOWN] if stated.speculation is None else []
    return SpeedRow(
        checkpoint=label,
        origin="imported",
        source=f"guidellm: {where}",
        hardware=hardware,
        num_gpus=num_gpus_of(hardware),
        speculation=stated.speculation,
        prompts=stated.prompts or NOT_STATED,
        prompt_tokens=number(successful("prompt_token_count"), "mean"),
        output_tokens=number(successful("output_token_count"), "mean"),
        concurrency=concurrency,
        request_rate=request_rate,
        repeats=(
            SpeedRepeat(
                duration_s=number(entry, "duration"),
                num_completed=count(totals, "successful"),
                num_failed=count(totals, "errored"),
                num_incomplete=count(totals, "incomplete"),
                in_flight=mean_in_flight,
                output_tokens_s=rate,
                total_tokens_s=number(successful("tokens_per_second"), "mean"),
                ttft_s=latency("time_to_first_token_ms", 1000),
                tpot_s=latency("inter_token_latency_ms", 1000),
                end_to_end_s=latency("request_latency", 1.0),
            ),
        ),
        assumptions=tuple(notes),
    )


def _concurrency(entry: Mapping[str, Any], mean: float | None) -> tuple[int | None, float | None, str | None]:
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
    if mean is None:
        return None, None, None
    how = "as fast as they were taken" if rate is None else "at a rate"
    return max(1, round(mean)), rate, f"requests were sent {how}; {mean:.1f} were in flight on average"


# ------------------------------------------------------------------------------------------------ a table of one's own
# In YAML or JSON: `tables`, each with `every_row` (fields that all its rows share) and `rows`. Fields are those of `SpeedRow`.
# Those of its only repeat (`output_tokens_s`, `ttft_s`, ...) may stand in the row itself, and a latency may be one number,
# where nobody says whether it is a mean or a median.
_OF_REPEAT = frozenset(SpeedRepeat.model_fields)
_LATENCIES = tuple(name for name, field in SpeedRepeat.model_fields.items() if field.annotation == (Quantiles | None))


def is_table(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("tables"), list)


def read_table(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """AssayError names the row, the field and what is wrong with it."""
    if not is_table(content) or content.keys() != {"tables"}:
        raise wrong(where, "no table: it holds `tables`, a list, and nothing else")
    rows = []
    for at, table in enumerate(content["tables"], 1):
        place = f"{where}, table {at}"
        if not isinstance(table, dict) or table.keys() - {"every_row", "rows"} or not isinstance(table.get("rows"), list):
            raise wrong(place, "holds `every_row` (optional) and `rows`, a list, and nothing else")
        shared = table.get("every_row", {})
        if not isinstance(shared, dict) or not all(isinstance(row, dict) for row in table["rows"]):
            raise wrong(place, "every row, and `every_row`, is a mapping of fields")
        for number_of_row, row in enumerate(table["rows"], 1):
            rows.append(_row_of_table(shared | row, stated, f"{place}, row {number_of_row}", where))
    if not rows:
        raise wrong(where, "has no row")
    return rows


def _row_of_table(fields: Mapping[str, Any], stated: Stated, place: str, where: str) -> SpeedRow:
    given = {name: value for name, value in fields.items() if name not in _OF_REPEAT}
    single = {name: value for name, value in fields.items() if name in _OF_REPEAT}
    if "origin" in given:
        raise wrong(place, "states an `origin`: rows of a table are imported, whatever they were")
    notes = given.pop("assumptions", None) or []
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise wrong(place, "`assumptions` is a list of sentences")
    notes = list(notes)
    repeats = given.pop("repeats", None)
    if repeats is not None and single:
        raise wrong(place, f"has `repeats`, so {min(single)} belongs into one of them")
    for repeat in [single] if repeats is None else repeats if isinstance(repeats, list) else []:
        for name in _LATENCIES if isinstance(repeat, dict) else ():
            value = repeat.get(name)
            if value == 0 and type(value) is not bool:
                repeat[name] = None
                notes.append(f"{name}: 0 is no time of a request; taken for not stated")
            elif isinstance(value, int | float) and type(value) is not bool:
                repeat[name] = {"mean": value, "p50": value}
                notes.append(f"{name}: mean or median is not stated; one number is taken for both")
    if stated != Stated():
        raise wrong(place, "a table states everything itself; leave --label, --hardware, --speculation and --prompts out")
    given.setdefault("source", where)
    if isinstance(given.get("hardware"), str):
        given.setdefault("num_gpus", num_gpus_of(given["hardware"]))
    given |= {"origin": "imported", "repeats": [single] if repeats is None else repeats}
    given["assumptions"] = list(dict.fromkeys(notes))
    try:
        return SpeedRow.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise wrong(place, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


READERS: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any, Stated, str], list[SpeedRow]]]] = {
    "vllm-bench": (is_vllm_bench, read_vllm_bench),
    "inferencex": (is_inferencex, read_inferencex),
    "guidellm": (is_guidellm, read_guidellm),
    "table": (is_table, read_table),
}
"""Format -> (whether a file looks like it, reader)."""
