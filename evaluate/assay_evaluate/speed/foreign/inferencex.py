"""Rows as InferenceX (formerly InferenceMAX) writes them: one object, or a list of them, of its `utils/process_result.py`.

https://github.com/SemiAnalysisAI/InferenceX. Times are in seconds, throughput is tokens a second and GPU. `spec_decoding` says
whether there were drafts, never how many, so a row with them is compared with none unless the user states the number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from assay.errors import AssayError
from assay.records.speed import SpeedRepeat, SpeedRow
from assay_evaluate.speed.foreign.stated import (
    SPECULATION_UNKNOWN,
    Stated,
    num_gpus_of,
    one_label,
    required,
    speculation_of,
    text,
    whole,
    wrong,
)
from assay_evaluate.speed.rows import count, in_flight_of, number, quantiles_of

_OFF = {"none", "off", "false", "", "0"}
_NOT_STATED = "not stated"
_TRUE = {"true", "1", "yes", "on"}


def is_inferencex(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and {"hw", "conc", "output_tput_per_gpu"} <= first.keys()


def read_inferencex(content: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """A row for each object. AssayError: one has no hardware, requests in flight, GPUs or throughput, or contradicts an option.

    A model that the file has in several precisions is as many checkpoints: `zai-org/GLM-5 (fp4)`.
    """
    objects = content if isinstance(content, list) else [content]
    if not objects or not all(is_inferencex(entry) for entry in objects):
        raise wrong(where, "no rows of InferenceX (each has `hw`, `conc` and `output_tput_per_gpu`)")
    names = _names(objects)
    one_label(stated, filter(None, names), where)
    words = [_drafting(entry) for entry in objects]
    drafted = [0 if word in _OFF else None if word == _NOT_STATED else "on" for word in words]
    # An option for the rows that drafted says nothing of those that did not, where a file has both.
    has_both = "on" in drafted and 0 in drafted and bool(stated.speculation)
    rows = []
    for at, (entry, name, drafting) in enumerate(zip(objects, names, drafted, strict=True), 1):
        place = f"{where}, row {at}" if len(objects) > 1 else where
        drafts = 0 if has_both and drafting == 0 else speculation_of(drafting, stated, place)
        rows.append(_row(entry, name, drafts, stated, place, where))
    return rows


def _names(objects: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """What each object's checkpoint is called; with its precision where the file has several of the model."""
    precisions: dict[str | None, set[str | None]] = defaultdict(set)
    for entry in objects:
        precisions[text(entry, "model")].add(text(entry, "precision"))
    return [
        f"{model} ({text(entry, 'precision') or 'precision not stated'})" if model and len(precisions[model]) > 1 else model
        for entry in objects
        for model in (text(entry, "model"),)
    ]


def _drafting(entry: Mapping[str, Any]) -> str:
    return str(entry["spec_decoding"] if "spec_decoding" in entry else entry.get("mtp", _NOT_STATED)).strip().lower()


def _row(
    entry: Mapping[str, Any], name: str | None, speculation: int | None, stated: Stated, place: str, where: str
) -> SpeedRow:  # fmt: skip
    if entry.get("modality") == "image":
        raise wrong(place, "is a row of images a second, not of tokens")
    is_split = entry.get("disagg") is not False and whole(entry, "num_prefill_gpu") is not None
    decode = whole(entry, "num_decode_gpu")
    parallelism = _split(entry) if is_split else _ranks(entry)
    num_gpus = (
        (whole(entry, "num_prefill_gpu") or 0) + (decode or 0)
        if is_split
        else parallelism.get("tensor", 0) * parallelism.get("pipeline", 1)
    )
    per_gpu, concurrency = number(entry, "output_tput_per_gpu"), whole(entry, "conc")
    if not num_gpus or not per_gpu or not concurrency:
        raise wrong(place, "has no number of GPUs (tp), requests in flight (conc) or throughput")
    if stated.hardware is not None and num_gpus_of(stated.hardware) not in (0, num_gpus):
        raise AssayError(f"{place}: is of {num_gpus} GPUs, and --hardware says {stated.hardware}; leave the option out")
    # Where prefill has GPUs of its own, output is counted for the GPUs that decode.
    output = per_gpu * ((decode or num_gpus) if is_split else num_gpus)
    isl, osl = whole(entry, "isl"), whole(entry, "osl")
    word, notes = _drafting(entry), list[str]()
    if speculation is None:
        notes.append(SPECULATION_UNKNOWN if word == _NOT_STATED else f"drafts: {word}; how many tokens is not stated")
    notes += ["prefill and decode ran on GPUs of their own"] if is_split and decode else []
    gpu = required(text(entry, "hw"), "the hardware", "--hardware 8xH200", place)
    total = number(entry, "tput_per_gpu")
    ttft, tpot, end_to_end = (
        quantiles_of(mean, median, p90, p99)
        for mean, median, p90, p99 in (
            [number(entry, f"{name}_{metric}") for name in ("mean", "median", "p90", "p99")]
            for metric in ("ttft", "tpot", "e2el")
        )
    )
    return SpeedRow(
        checkpoint=required(stated.label or name, "the checkpoint", "--label NAME", place),
        scheme=text(entry, "precision"),
        origin="imported",
        source=f"InferenceX: {where}",
        hardware=stated.hardware or f"{num_gpus}x{gpu}",
        num_gpus=num_gpus,
        parallelism=parallelism,
        speculation=speculation,
        prompts=stated.prompts or (f"random {isl}/{osl}" if isl and osl else "not stated"),
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


def _split(entry: Mapping[str, Any]) -> dict[str, int]:
    """Of a server in two parts: the GPUs of each, and how each is split."""
    gpus = {f"{part} GPUs": whole(entry, f"num_{part}_gpu") for part in ("prefill", "decode")}
    workers = {f"{part} workers": whole(entry, f"{part}_num_workers") for part in ("prefill", "decode")}
    return {
        **(_ranks(entry, "prefill_", "prefill ") | _ranks(entry, "decode_", "decode ")),
        **{name: num for name, num in (gpus | workers).items() if num},
    }
