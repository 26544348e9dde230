"""Rows as InferenceX (formerly InferenceMAX) writes them: one object, or a list of them, of its `utils/process_result.py`.

https://github.com/SemiAnalysisAI/InferenceX. Times are in seconds, throughput is tokens a second and GPU. `spec_decoding` says
whether there were drafts, never how many, so a row with them is compared with none unless the user states the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.speed.foreign.stated import SPECULATION_UNKNOWN, Stated, required, text, whole, wrong
from assay_evaluate.speed.rows import number

_OFF = {"none", "off", "false", "", "0"}


def is_inferencex(found: Any) -> bool:
    first = found[0] if isinstance(found, list) and found else found
    return isinstance(first, dict) and {"hw", "conc", "output_tput_per_gpu"} <= first.keys()


def read_inferencex(found: Any, stated: Stated, where: str) -> list[SpeedRow]:
    """A row for each object. AssayError: one has no hardware, requests in flight, GPUs or throughput."""
    objects = found if isinstance(found, list) else [found]
    if not objects or not all(is_inferencex(one) for one in objects):
        raise wrong(where, "no rows of InferenceX (each has `hw`, `conc` and `output_tput_per_gpu`)")
    return [_row(one, stated, f"{where}, row {at}" if len(objects) > 1 else where, where) for at, one in enumerate(objects, 1)]


def _row(found: Mapping[str, Any], stated: Stated, here: str, where: str) -> SpeedRow:
    if found.get("modality") == "image":
        raise wrong(here, "is a row of images a second, not of tokens")
    prefill, decode = whole(found, "num_prefill_gpu"), whole(found, "num_decode_gpu")
    is_disaggregated = prefill is not None
    ranks = {kind: whole(found, name) for kind, name in (("tensor", "tp"), ("expert", "ep"), ("pipeline", "pp"))}
    num_gpus = (prefill or 0) + (decode or 0) if is_disaggregated else (ranks["tensor"] or 0) * (ranks["pipeline"] or 1)
    per_gpu, concurrency = number(found, "output_tput_per_gpu"), whole(found, "conc")
    if not num_gpus or not per_gpu or not concurrency:
        raise wrong(here, "has no number of GPUs (tp), requests in flight (conc) or throughput")
    total = number(found, "tput_per_gpu")
    # Where prefill has GPUs of its own, output is counted for the GPUs that decode.
    output = per_gpu * ((decode or num_gpus) if is_disaggregated else num_gpus)
    isl, osl = whole(found, "isl"), whole(found, "osl")
    told = str(found["spec_decoding"] if "spec_decoding" in found else found.get("mtp", "not stated")).lower()
    speculation = stated.speculation if stated.speculation is not None else 0 if told in _OFF else None
    notes = [] if speculation is not None else [f"drafts: {told}; how many tokens is not stated"]
    notes = [SPECULATION_UNKNOWN] if notes and told == "not stated" else notes
    notes += ["prefill and decode ran on GPUs of their own"] if is_disaggregated and decode else []
    gpu = required(text(found, "hw"), "the hardware", "--hardware 8xH200", here)
    engine = text(found, "image") or text(found, "framework")
    return SpeedRow(
        checkpoint=required(stated.label or text(found, "model"), "the checkpoint", "--label NAME", here),
        scheme=text(found, "precision"),
        origin="imported",
        source=f"InferenceX: {where}",
        hardware=stated.hardware or f"{num_gpus}x{gpu}",
        num_gpus=num_gpus,
        parallelism={kind: count for kind, count in ranks.items() if count and not is_disaggregated},
        speculation=speculation,
        prompts=stated.prompts or (f"random {isl}/{osl}" if isl and osl else "not stated"),
        prompt_tokens=isl,
        output_tokens=osl,
        concurrency=concurrency,
        engine=engine,
        repeats=(
            SpeedRepeat(
                output_tokens_s=output,
                total_tokens_s=None if total is None else total * num_gpus,
                ttft_s=_quantiles(found, "ttft"),
                tpot_s=_quantiles(found, "tpot"),
                end_to_end_s=_quantiles(found, "e2el"),
            ),
        ),
        assumptions=tuple(notes),
    )


def _quantiles(found: Mapping[str, Any], metric: str) -> Quantiles | None:
    mean, median = number(found, f"mean_{metric}"), number(found, f"median_{metric}")
    if mean is None or median is None:
        return None
    return Quantiles(mean=mean, p50=median, p90=number(found, f"p90_{metric}"), p99=number(found, f"p99_{metric}"))
