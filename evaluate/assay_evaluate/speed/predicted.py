"""Predicted rows where nothing was measured: NVIDIA's AIConfigurator, which has tables of measured kernels and needs no GPU.

`aiconfigurator-core` has 600 MB of tables, so it is no dependency: the user names a Python that has it. A wave of requests is
modelled as one: all prompts are read, then all replies written, `decode_ms` / accepted tokens a step. On the published
GLM-5.2-FP8 on 8xH200 (examples/glm-5.2-speed) that gives 90, 381 and 947 tokens/s at 1, 8 and 32 in flight; measured were 94,
394 and 921.

W4A16 is never predicted: for GLM-5.2 AIConfigurator 0.12 gives it FP8's time a token at one stream, where it was 33 % faster,
and half of what was measured at 8 and 32.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import one_line
from assay.recipes.profile import ProfileRecipe
from assay.records.speed import NotMeasured, Quantiles, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.speed.ladder import Ladder
from assay_evaluate.speed.rows import number
from assay_evaluate.transport.foreign_json import NotJson, objects_in, read_json

_PREDICTOR = Path(__file__).with_name("_predictor.py")
TIMEOUT_S = 600
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "RTX PRO 6000": "rtx_pro_6000_server"}
"""`gpu` of a profile -> AIConfigurator's system."""
QUANT = {"bf16": "bfloat16", "fp8": "fp8_block", "nvfp4": "nvfp4"}
"""Scheme -> its modes of GEMM and experts. Others are not predicted."""
WRONG_SIGN = (
    "AIConfigurator has the sign of W4A16 wrong (GLM-5.2 on 8xH200: FP8's TPOT at one stream, half of what was measured at 8 "
    "and 32); see the roofline"
)
NOT_PREDICTED = "not predicted:"
"""How reasons begin that there is no prediction."""
NO_ACCEPTANCE = "how many drafts are accepted is neither measured nor given (--acceptance-length)"


def why_not_predicted(scheme: str | None) -> str | None:
    """One line; None: it is predicted."""
    if scheme is not None and (scheme.startswith("w4a16") or scheme == "nvfp4a16"):
        return WRONG_SIGN
    if scheme not in QUANT:
        return f"AIConfigurator is asked for {', '.join(QUANT)} only, not for {scheme or 'a checkpoint of unknown scheme'}"
    return None


def predict(
    schemes: Mapping[str, str | None],
    model: str,
    profile: ProfileRecipe,
    ladder: Ladder,
    interpreter: Path,
    acceptance: Mapping[int, float],
) -> tuple[list[SpeedRow], list[NotMeasured]]:
    """Rows for every label, speculation and concurrency. model: folder with config.json, or hub id.

    acceptance: drafts a step -> tokens that a step yields. MeasureError: the Python cannot be run or has no
    `aiconfigurator-core`, or the profile's GPU is not one of `SYSTEMS`.
    """
    gpu = profile.hardware.gpu or ""
    if gpu not in SYSTEMS:
        raise MeasureError(f"profile {profile.name}: AIConfigurator knows {', '.join(SYSTEMS)}, not {gpu or 'a CPU'}")
    rows: list[SpeedRow] = []
    left_out: list[NotMeasured] = []
    for label, scheme in schemes.items():
        if (refusal := why_not_predicted(scheme)) is not None:
            left_out.append(NotMeasured(checkpoint=label, reason=f"{NOT_PREDICTED} {refusal}"))
            continue
        known = [drafts for drafts in ladder.speculation if drafts == 0 or drafts in acceptance]
        left_out += [
            NotMeasured(checkpoint=label, speculation=drafts, reason=f"{NOT_PREDICTED} {NO_ACCEPTANCE}")
            for drafts in ladder.speculation if drafts not in known
        ]  # fmt: skip
        points = [(drafts, concurrency) for drafts in known for concurrency in ladder.concurrency]
        question = {
            "model": model,
            "system": SYSTEMS[gpu],
            "quant": QUANT[str(scheme)],
            "ranks": _ranks(profile),
            "kv": "fp8" if str(profile.flags.get("kv-cache-dtype", "")).startswith("fp8") else "bfloat16",
            "points": [[c, drafts, ladder.prompt_tokens, ladder.output_tokens] for drafts, c in points],
        }
        version, answers = _ask(interpreter, question)
        refusals = {str(answer["error"]) for answer in answers if "error" in answer}
        if answers and len(refusals) == 1 and all("error" in answer for answer in answers):
            left_out.append(NotMeasured(checkpoint=label, reason=_refused(refusals.pop())))
            continue
        for (drafts, concurrency), answer in zip(points, answers, strict=True):
            prefill, decode = number(answer, "prefill_ms"), number(answer, "decode_ms")
            if not prefill or not decode:
                reason = _refused(str(answer.get("error", "no latency")))
                left_out.append(NotMeasured(checkpoint=label, speculation=drafts, concurrency=concurrency, reason=reason))
                continue
            accepted = acceptance[drafts] if drafts else 1.0
            rows.append(_row(label, str(scheme), profile, ladder, drafts, concurrency, prefill, decode, accepted, version))
    return rows, left_out


def _refused(reason: str) -> str:
    return f"{NOT_PREDICTED} AIConfigurator: {one_line(reason)[:200]}"


def _ask(interpreter: Path, question: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """(version, an answer for each point)."""
    try:
        answer = subprocess.run(
            [str(interpreter), "-I", str(_PREDICTOR)],
            input=json.dumps(question), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasureError(f"{interpreter}: cannot be run ({error}); name a Python that has aiconfigurator-core") from None
    last = (answer.stdout.strip().splitlines() or [""])[-1]
    if answer.returncode != 0:
        reason = one_line((answer.stderr.strip().splitlines() or ["no output"])[-1])
        raise MeasureError(f"{interpreter}: {reason}; name a Python that has it: `pip install aiconfigurator-core`")
    try:
        content = read_json(last.encode())
    except NotJson as error:
        raise MeasureError(f"{interpreter}: {one_line(str(error))}") from None
    answers = objects_in(content, "points")
    if len(answers) != len(question["points"]):
        raise MeasureError(f"{interpreter}: answered {len(answers)} of {len(question['points'])} points")
    return str(content.get("version")), answers


def _ranks(profile: ProfileRecipe) -> dict[str, int]:
    tensor = int(profile.flags.get("tensor-parallel-size", 1))
    data = int(profile.flags.get("data-parallel-size", 1))
    is_expert = bool(profile.flags.get("enable-expert-parallel"))
    return {
        "tp_size": tensor,
        "pp_size": int(profile.flags.get("pipeline-parallel-size", 1)),
        "attention_dp_size": data,
        "moe_tp_size": 1 if is_expert else tensor * data,
        "moe_ep_size": tensor * data if is_expert else 1,
    }


def _row(
    label: str, scheme: str, profile: ProfileRecipe, ladder: Ladder, drafts: int, concurrency: int, prefill_ms: float,
    decode_ms: float, accepted: float, version: str,
) -> SpeedRow:  # fmt: skip
    """A wave of `concurrency` requests: prompts, then replies."""
    reply, ranks = ladder.output_tokens, _ranks(profile)
    seconds = (prefill_ms + decode_ms / accepted) / 1000
    tpot, ttft = decode_ms / accepted / (reply - 1) / 1000, prefill_ms / 1000
    num_gpus = ranks["tp_size"] * ranks["attention_dp_size"] * ranks["pp_size"]
    kinds = {"tensor": ranks["tp_size"], "data": ranks["attention_dp_size"], "pipeline": ranks["pp_size"]}
    kinds["expert"] = ranks["moe_ep_size"]
    notes = ["a wave of requests: all prompts, then all replies; the time to the first token is that of the whole wave"]
    if drafts:
        notes.append(f"a step yields {accepted:.2f} tokens of {drafts} drafted")
    return SpeedRow(
        checkpoint=label,
        scheme=scheme,
        origin="predicted",
        source=f"AIConfigurator {version}",
        hardware=f"{num_gpus}x{profile.hardware.gpu}",
        num_gpus=num_gpus,
        parallelism={kind: count for kind, count in kinds.items() if count > 1},
        speculation=drafts,
        prompts=f"{ladder.prompt_tokens}/{reply} tokens",
        prompt_tokens=ladder.prompt_tokens,
        output_tokens=reply,
        concurrency=concurrency,
        repeats=(
            SpeedRepeat(
                output_tokens_s=concurrency * reply / seconds,
                ttft_s=Quantiles(mean=ttft, p50=ttft),
                tpot_s=Quantiles(mean=tpot, p50=tpot),
                end_to_end_s=Quantiles(mean=seconds, p50=seconds),
                acceptance_length=accepted if drafts else None,
            ),
        ),
        assumptions=tuple(notes),
    )


def acceptance_of(record: SpeedRecord | None, given: float | None, speculation: Sequence[int]) -> dict[int, float]:
    """Drafts a step -> tokens a step: as given, else the mean of the record's rows that were not predicted."""
    lengths: dict[int, float] = {}
    for drafts in speculation:
        known = [
            repeat.acceptance_length
            for row in (() if record is None else record.rows)
            for repeat in row.repeats
            if row.speculation == drafts and row.origin != "predicted" and repeat.acceptance_length is not None
        ]
        if drafts and (given is not None or known):
            lengths[drafts] = given if given is not None else sum(known) / len(known)
    return lengths
