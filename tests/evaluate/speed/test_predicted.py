"""Rows that AIConfigurator predicts: from latencies that a stand-in for it answers; never of W4A16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_aiconfigurator import LATENCIES, fake_aiconfigurator

from assay.errors import MeasureError
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.records.speed import NotMeasured, Quantiles, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.speed.imported import read_imported
from assay_evaluate.speed.ladder import Ladder
from assay_evaluate.speed.predicted import NO_ACCEPTANCE, WRONG_SIGN, acceptance_of, predict
from assay_evaluate.speed.stated import Stated

PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"
PROFILE = load_recipe(ProfileRecipe, "8xh200")
LADDER = Ladder(concurrency=(1, 32), speculation=(0, 5), prompt_tokens=1024, output_tokens=512)


def test_rows_of_a_wave_of_requests(tmp_path: Path) -> None:
    rows, left_out = predict({"fp8": "fp8"}, "zai-org/GLM-5.2-FP8", PROFILE, LADDER, fake_aiconfigurator(tmp_path), {5: 2.4})
    assert left_out == [] and [(row.speculation, row.concurrency) for row in rows] == [(0, 1), (0, 32), (5, 1), (5, 32)]
    seconds = (3702.1 + 32627.6 / 2.4) / 1000
    tpot = 32627.6 / 2.4 / 511 / 1000
    assert rows[-1] == SpeedRow(
        checkpoint="fp8", scheme="fp8", origin="predicted", source="AIConfigurator 0.12.0", hardware="8xH200", num_gpus=8,
        parallelism={"tensor": 8}, speculation=5, prompts="1024/512 tokens", prompt_tokens=1024, output_tokens=512,
        concurrency=32,
        repeats=(
            SpeedRepeat(
                output_tokens_s=32 * 512 / seconds,
                ttft_s=Quantiles(mean=3702.1 / 1000, p50=3702.1 / 1000),
                tpot_s=Quantiles(mean=tpot, p50=tpot),
                end_to_end_s=Quantiles(mean=seconds, p50=seconds),
                acceptance_length=2.4,
            ),
        ),
        assumptions=(
            "a wave of requests: all prompts, then all replies; the time to the first token is that of the whole wave",
            "a step yields 2.40 tokens of 5 drafted",
        ),
    )  # fmt: skip
    published = {row.concurrency: row for row in read_imported(PUBLISHED, None, Stated()) if row.checkpoint == "fp8"}
    measured = {1: 94.4, 32: 921.4}
    assert published.keys() >= measured.keys()
    for row in rows[2:]:
        assert row.repeats[0].output_tokens_s == pytest.approx(measured[row.concurrency], rel=0.05)


def test_what_is_asked(tmp_path: Path) -> None:
    predict({"nvfp4": "nvfp4"}, "here", PROFILE, LADDER, fake_aiconfigurator(tmp_path), {})
    import json

    assert json.loads((tmp_path / "asked.json").read_text()) == {
        "model": "here", "system": "h200_sxm", "quant": "nvfp4", "kv": "fp8", "points": [[1, 0, 1024, 512], [32, 0, 1024, 512]],
        "ranks": {"tp_size": 8, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 8, "moe_ep_size": 1},
    }  # fmt: skip


def test_what_is_never_predicted(tmp_path: Path) -> None:
    schemes = {"a": "w4a16", "b": "nvfp4a16", "c": None, "d": "w8a8"}
    rows, left_out = predict(schemes, "m", PROFILE, LADDER, tmp_path / "nothing", {5: 2.4})
    others = "not predicted: AIConfigurator is asked for bf16, fp8, nvfp4 only, not for"
    assert (rows, left_out) == ([], [
        NotMeasured(checkpoint="a", reason=f"not predicted: {WRONG_SIGN}"),
        NotMeasured(checkpoint="b", reason=f"not predicted: {WRONG_SIGN}"),
        NotMeasured(checkpoint="c", reason=f"{others} a checkpoint of unknown scheme"),
        NotMeasured(checkpoint="d", reason=f"{others} w8a8"),
    ])  # fmt: skip


def test_what_is_left_out(tmp_path: Path) -> None:
    rows, left_out = predict({"fp8": "fp8"}, "m", PROFILE, LADDER, fake_aiconfigurator(tmp_path), {})
    assert {row.speculation for row in rows} == {0}
    assert left_out == [NotMeasured(checkpoint="fp8", speculation=5, reason=f"not predicted: {NO_ACCEPTANCE}")]
    rows, left_out = predict({"fp8": "fp8"}, "m", PROFILE, LADDER, fake_aiconfigurator(tmp_path, {}), {5: 2.4})
    assert (rows, left_out) == (
        [], [NotMeasured(checkpoint="fp8", reason="not predicted: AIConfigurator: MissingSystemFlopsError: no")]
    )  # fmt: skip
    some = {point: told for point, told in LATENCIES.items() if point != (32, 5)}
    rows, left_out = predict({"fp8": "fp8"}, "m", PROFILE, LADDER, fake_aiconfigurator(tmp_path, some), {5: 2.4})
    assert len(rows) == 3 and [(entry.speculation, entry.concurrency) for entry in left_out] == [(5, 32)]


def test_a_python_without_it(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"No module named 'aiconfigurator_core'; name a Python that has it"):
        predict({"fp8": "fp8"}, "m", PROFILE, LADDER, Path(sys.executable), {})
    with pytest.raises(MeasureError, match=r"nothing: cannot be run"):
        predict({"fp8": "fp8"}, "m", PROFILE, LADDER, tmp_path / "nothing", {})
    on_cpu = load_recipe(ProfileRecipe, "cpu-emulated")
    with pytest.raises(
        MeasureError, match=r"^profile cpu-emulated: AIConfigurator knows H100, H200, B200, RTX PRO 6000, not a CPU$"
    ):
        predict({"fp8": "fp8"}, "m", on_cpu, LADDER, tmp_path, {})


def test_how_many_drafts_are_accepted() -> None:
    record = SpeedRecord(rows=tuple(read_imported(PUBLISHED, None, Stated())))
    assert acceptance_of(record, None, (0, 3, 5)) == {5: pytest.approx(2.4)}
    assert acceptance_of(record, 3.0, (0, 3, 5)) == {3: 3.0, 5: 3.0}
    assert acceptance_of(None, None, (0, 5)) == {}
