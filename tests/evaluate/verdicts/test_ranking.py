"""Which candidate diverges less, of a suite that asks no task: in gates.json, on the page and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from divergence_alone import GATES, SUITE, run_of_divergence_alone, without_tasks
from synthetic_run import make_measurement

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.divergence import Ranking, TextKl
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_evaluate.statistics.skewed import skewed_ratio
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.ranking import rank_candidates
from assay_reports.numbers import build_report
from assay_reports.report import render_html, render_markdown
from assay_reports.run import load_run


def sums(label: str, num_texts: int = 48) -> np.ndarray[Any, Any]:
    """Of KL; what a text costs one candidate it costs the other in part. w4a16 loses a fifth less."""
    draw = np.random.default_rng(7)
    of_texts = draw.lognormal(0, 0.8, num_texts)
    own = np.random.default_rng({"w4a16": 1, "nvfp4a16": 2, "bf16": 3}[label]).lognormal(0, 0.2, num_texts)
    return {"w4a16": 0.8, "nvfp4a16": 1.0, "bf16": 0.01}[label] * of_texts * own


def with_texts(measurement: Measurement, num_texts: int = 48, first: int = 0) -> Measurement:
    """Sums of KL by text; the unbiased ones are 3 % larger."""
    measurement = without_tasks(measurement)
    if measurement.is_reference or measurement.is_noise_floor:
        return measurement
    texts = tuple(
        TextKl(item=f"text:{first + number}", kl=kl, unbiased=1.03 * kl)
        for number, kl in enumerate(sums(measurement.label, num_texts))
    )
    assert measurement.divergence is not None
    sampled, held_out = measurement.divergence.drift
    drift = (sampled.model_copy(update={"kl_by_text": texts}), held_out)
    return measurement.model_copy(update={"divergence": measurement.divergence.model_copy(update={"drift": drift})})


def measured(label: str, **options: Any) -> Measurement:
    return with_texts(make_measurement(label, SUITE), **options)


def test_each_against_the_next_paired_by_text() -> None:
    rankings = rank_candidates([measured(label) for label in ("nvfp4a16", "bf16", "w4a16")], 0.95)
    expected = [skewed_ratio(sums("bf16"), sums("w4a16")), skewed_ratio(sums("w4a16"), sums("nvfp4a16"))]
    assert rankings == (
        Ranking(first="bf16", second="w4a16", ratio=expected[0], is_ranked=True),
        Ranking(first="w4a16", second="nvfp4a16", ratio=expected[1], is_ranked=True),
    )
    ratio = rankings[1].ratio
    assert ratio is not None and ratio.low < 0.8 < ratio.high < 1


@pytest.mark.parametrize("num_texts", [19, 20])
def test_few_texts_rank_nothing(num_texts: int) -> None:
    (ranking,) = rank_candidates([measured(label, num_texts=num_texts) for label in ("w4a16", "nvfp4a16")], 0.95)
    assert (ranking.ratio is None) == (num_texts < 20)


def test_other_texts_and_older_records_are_not_compared() -> None:
    assert rank_candidates([measured("w4a16"), measured("nvfp4a16", first=1)], 0.95) == ()
    assert rank_candidates([measured("w4a16"), without_tasks(make_measurement("nvfp4a16", SUITE))], 0.95) == ()
    assert rank_candidates([measured("w4a16").model_copy(update={"divergence": None}), measured("nvfp4a16")], 0.95) == ()


def test_a_suite_that_asks_tasks_is_not_ranked_by_divergence() -> None:
    suite = load_recipe(SuiteRecipe, "quick")
    sides = [make_measurement(label, suite) for label in ("fp8", "w4a16", "nvfp4a16")]
    assert judge(sides, load_recipe(GateRecipe, "default"), model="tiny-glm").rankings == ()


def test_what_is_not_measured_is_not_ranked() -> None:
    sides = [without_tasks(make_measurement("fp8", SUITE)), measured("w4a16"), measured("nvfp4a16"), measured("bf16")]
    broken = sides[1].divergence
    assert broken is not None
    sides[1] = sides[1].model_copy(update={"divergence": broken.model_copy(update={"num_non_finite": 3})})
    report = judge(sides, GATES, model="tiny-glm")
    assert report.overall["w4a16"] == "NOT MEASURED"
    assert [(ranking.first, ranking.second) for ranking in report.rankings] == [("bf16", "nvfp4a16")]


def test_page_report_and_command_say_it(run: Run, tmp_path: Path) -> None:
    folder = run_of_divergence_alone(tmp_path / "runs", with_texts)
    code, out, _ = run("gate", folder)
    ratio = GateReport.load(folder / "gates.json").rankings[1].ratio
    assert code == 1 and ratio is not None
    shown = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    sentence = f"w4a16 loses less than nvfp4a16: {shown} times its KL on the same texts."
    assert sentence in out.splitlines()
    report = build_report(load_run(folder))
    assert f'<p class="note">{sentence}</p>' in render_html(report)
    assert f"\n{sentence}\n" in render_markdown(report)
