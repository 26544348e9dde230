"""The tables of drift: few texts, the sign of a change, structural tokens, and flips of items that share a question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page
from scipy import stats
from statsmodels.stats.proportion import proportion_confint
from synthetic_run import make_drift, make_run, task_of

from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay.records.measurement import ItemResult, Measurement
from assay_reports.numbers import flips
from assay_reports.report import write_report


def page(folder: Path, change_of_probability: Estimate | None) -> str:
    def change(measurement: Measurement) -> Measurement:
        if measurement.divergence is None:
            return measurement
        drift = make_drift("all", 0.1, 0.9)
        if change_of_probability is not None:
            drift = drift.model_copy(update={"probability_change_mean": change_of_probability})
        return measurement.model_copy(update={"divergence": measurement.divergence.model_copy(update={"drift": (drift,)})})

    run_dir = make_run(folder, change=change)
    write_report(run_dir)
    return (run_dir / "report" / "index.html").read_text(encoding="utf-8")


def test_a_change_of_probability_has_its_own_sign(tmp_path: Path) -> None:
    """Candidate minus reference already: 2.0 points less. With few texts it has no interval."""
    columns = Page(page(tmp_path, None)).table("Drift, table 1 of tiny-glm")
    assert columns.rows[0][14] == "change, points"
    assert columns.row("w4a16", "sampled texts")[14] == "-2.0 [-2.6, -1.4]"
    few = Page(page(tmp_path, Estimate(value=-0.02, n=12))).table("Drift, table 1 of tiny-glm")
    assert few.row("w4a16", "sampled texts")[14] == "-2.0 (12 texts)"


def test_structural_tokens_have_a_table_and_a_sentence(tmp_path: Path) -> None:
    text = page(tmp_path, None)
    assert (3, "Structural tokens") in Page(text).headings
    table = Page(text).table("Drift, table 3 of tiny-glm")
    assert [row[:2] for row in table.rows if row[0] == "w4a16"] == [["w4a16", name] for name in ("all", "end", "thinking")]
    markdown = (tmp_path / "tiny-glm" / "report" / "report.md").read_text(encoding="utf-8").splitlines()
    sentence = next(line for line in markdown if line.startswith("- w4a16: end-of-text probability"))
    assert " (significantly lower: -2.1 [-3.1, -1.1] points over 48 ends)" in sentence
    assert sentence.endswith("; elsewhere 0.00065 vs 0.00065 a token.")
    assert f"<li>{sentence.removeprefix('- ')}</li>" in text


# ------------------------------------------------------------------------------------------------ flips
def answered(run_dir: Path, label: str, wrong: set[int], *, share: bool) -> Measurement:
    """12 questions, each in five languages; `wrong` are wrong in all of them. share: translations are one cluster."""
    items = [
        ItemResult(
            item=f"{language}-{question}", language="en", correct=question not in wrong, truncated=False, wrong_script=False,
            finish_reason="stop", prompt_tokens=20, output_tokens=30, answer="1",
            cluster=f"question-{question}" if share else None,
        )
        for language in range(5)
        for question in range(12)
    ]  # fmt: skip
    measurement = Measurement.load(run_dir / "measurements" / f"{label}.json")
    return measurement.model_copy(update={"tasks": (task_of("grade-school", "lm_eval", items),)})


def wilson_of(share: float, effective: float, multiple: float) -> tuple[float, float]:
    """statsmodels' Wilson interval at this number of values and standard errors to each side."""
    low, high = proportion_confint(share * effective, effective, 2 * stats.norm.sf(multiple), method="wilson")
    return float(low), float(high)


def test_flips_of_translations_are_flips_of_questions(tmp_path: Path) -> None:
    """Three of twelve questions flip in all five languages: 12 questions were asked, not 60."""
    run_dir = make_run(tmp_path)

    def flip_rate(share: bool) -> Interval:
        reference, candidate = (
            answered(run_dir, label, wrong, share=share) for label, wrong in (("fp8", set()), ("w4a16", {0, 1, 2}))
        )
        [found] = flips(reference, candidate, 0.95)
        assert (found.num_pairs, found.num_lost, found.num_gained) == (60, 15, 0)
        return found.flip_rate

    alone, together = flip_rate(False), flip_rate(True)
    assert (alone.value, alone.n, together.value, together.n) == (0.25, 60, 0.25, 12)
    assert (alone.low, alone.high) == pytest.approx(wilson_of(0.25, 60, stats.norm.ppf(0.975)))
    assert (together.low, together.high) == pytest.approx(wilson_of(0.25, 12, stats.t.ppf(0.975, 11)))


def test_flips_of_several_samples_are_flips_of_items(tmp_path: Path) -> None:
    """15 of 60 items flip in each of four samples: 60 items were asked, not 240."""
    run_dir = make_run(tmp_path)
    sides = []
    for label, wrong in (("fp8", set()), ("w4a16", {0, 1, 2})):
        one = answered(run_dir, label, wrong, share=False)
        items = [replace(item, sample=sample) for item in one.tasks[0].items for sample in range(4)]
        sides.append(one.model_copy(update={"tasks": (task_of("grade-school", "lm_eval", items),)}))
    [found] = flips(sides[0], sides[1], 0.95)
    assert (found.num_pairs, found.num_lost, found.num_gained) == (240, 60, 0)
    assert (found.flip_rate.value, found.flip_rate.n) == (0.25, 60)
    assert (found.flip_rate.low, found.flip_rate.high) == pytest.approx(wilson_of(0.25, 60, stats.t.ppf(0.975, 59)))
