"""Predicted rows in a choice: they fill what was not measured, are not chosen over it, and say so."""

from __future__ import annotations

import pytest

from assay.records.speed import Quantiles, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.choice.choose import ChoiceRequest, choose
from assay_evaluate.choice.rows import on_hardware
from assay_evaluate.speed.rows import with_rows

LATENCIES = {(1, 0): (186.3, 11422.2), (32, 0): (3702.1, 19502.9), (1, 5): (186.3, 13155.1), (32, 5): (3702.1, 32627.6)}
"""(requests in flight, drafts) -> ms of prompts and of replies, of a wave of requests, with 2.4 tokens a step."""


def predicted() -> SpeedRecord:
    """Of FP8 on 8xH200; W4A16 has no row."""
    rows = []
    for (concurrency, drafts), (prompts_ms, replies_ms) in LATENCIES.items():
        accepted = 2.4 if drafts else 1.0
        tpot = replies_ms / accepted / 511 / 1000
        repeat = SpeedRepeat(
            output_tokens_s=concurrency * 512 / seconds(prompts_ms, replies_ms, accepted),
            ttft_s=Quantiles(mean=prompts_ms / 1000, p50=prompts_ms / 1000),
            tpot_s=Quantiles(mean=tpot, p50=tpot),
            acceptance_length=accepted if drafts else None,
        )
        rows.append(
            SpeedRow(
                checkpoint="fp8", scheme="fp8", origin="predicted", source="tables of kernels", hardware="8xH200", num_gpus=8,
                parallelism={"tensor": 8}, speculation=drafts, prompts="1024/512 tokens", prompt_tokens=1024,
                output_tokens=512, concurrency=concurrency, repeats=(repeat,),
            )
        )  # fmt: skip
    return with_rows(None, rows)


def row(checkpoint: str, concurrency: int, tokens_s: float, **more: str) -> SpeedRow:
    given = {"origin": "measured", "source": "vllm bench serve 0.32.0", "engine": "vllm 0.32.0", "hardware": "8xH200"} | more
    return SpeedRow.model_validate(
        {
            "checkpoint": checkpoint, "num_gpus": 8, "speculation": 5, "prompts": "chat", "concurrency": concurrency,
            "repeats": [SpeedRepeat(output_tokens_s=tokens_s)], **given,
        }
    )  # fmt: skip


def seconds(prompts_ms: float, replies_ms: float, accepted: float = 1.0) -> float:
    return (prompts_ms + replies_ms / accepted) / 1000


def test_a_prediction_fills_a_cell_and_is_not_chosen() -> None:
    """It is faster than what was measured at 1 and 32 streams, and stands beside it with the faster of both speculations."""
    measured = SpeedRecord(rows=(row("w4a16", 1, 80.0), row("w4a16", 32, 600.0)))
    record = with_rows(measured, predicted().rows)
    assert [entry.origin for entry in record.rows] == ["measured", "measured", *["predicted"] * 4]
    choice = choose(on_hardware(record.rows, None), None, ChoiceRequest(usd_per_gpu_hour=3.5))
    assert choice.recommendation == "quality was not measured (--quality assumed): w4a16 with MTP from 1 to 32 streams"
    assert (choice.origin, [pick.setup for pick in choice.picks]) == ("measured", ["w4a16 with MTP"] * 2)
    drafting = {at: at * 512 / seconds(*times, 2.4) for at, times in ((1, (186.3, 13155.1)), (32, (3702.1, 32627.6)))}
    assert [cell.model_dump(exclude_defaults=True) for cell in choice.cells if cell.state == "predicted"] == [
        {
            "setup": "fp8", "concurrency": at, "state": "predicted", "why": "not measured",
            "output_tokens_s": pytest.approx(speed), "tokens_s_user": pytest.approx(speed / at),
            "tpot_s": pytest.approx(step / 2.4 / 511 / 1000), "source": "tables of kernels, 5 tokens drafted a step",
        }
        for (at, speed), step in zip(drafting.items(), (13155.1, 32627.6), strict=True)
    ]  # fmt: skip
    assert drafting[1] == pytest.approx(90.3, abs=0.1) and drafting[32] == pytest.approx(947.2, abs=0.1)
    assert {regret.setup for regret in choice.regrets} == {"w4a16 with MTP"} and choice.refused == ()


def test_imports_come_before_predictions_too() -> None:
    imported = [row("nvfp4", at, speed, origin="imported", source="a page") for at, speed in ((1, 50.0), (32, 400.0))]
    choice = choose(with_rows(predicted(), imported).rows, None, ChoiceRequest())
    assert (choice.origin, {pick.setup for pick in choice.picks}) == ("imported", {"nvfp4 with MTP"})


def test_predictions_alone_are_chosen_among_and_said_to_be_predictions() -> None:
    """At both numbers of streams drafting is predicted to be faster."""
    record = predicted()
    choice = choose(record.rows, None, ChoiceRequest(concurrency=(1, 32)))
    assert choice.recommendation == (
        "quality was not measured (--quality assumed): predicted, not measured: fp8 with MTP from 1 to 32 streams"
    )
    speeds = {(cell.setup, cell.concurrency): cell.output_tokens_s for cell in choice.cells}
    assert speeds == {
        ("fp8 with MTP", 1): pytest.approx(90.3, abs=0.1), ("fp8 with MTP", 32): pytest.approx(947.2, abs=0.1),
        ("fp8 without MTP", 1): pytest.approx(512 / seconds(186.3, 11422.2)),
        ("fp8 without MTP", 32): pytest.approx(32 * 512 / seconds(3702.1, 19502.9)),
    }  # fmt: skip
    assert [pick.chance_best is not None and 0.5 < pick.chance_best < 1 for pick in choice.picks] == [True, True]


def test_predicting_again_replaces() -> None:
    record = predicted()
    assert with_rows(record, record.rows, record.not_measured) == record
