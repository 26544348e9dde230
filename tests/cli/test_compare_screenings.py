"""`assay compare` of two screenings: ranked only where reference, texts and numerics are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from screenings import make_screened, make_screening, mean
from synthetic_run import make_run

from assay.records.divergence import Estimate
from assay.records.screening import AppliedFloor, Numerics, Screened, Screening
from assay_evaluate.verdicts.screening_comparison import ScreenedChange, ScreeningComparison, compare_screenings

BEFORE = make_screening(
    make_screened("gptq", mean(0.020, 0.018, 0.022)),
    make_screened("awq", mean(0.040, 0.035, 0.046)),
    make_screened("gone", mean(0.05, 0.04, 0.06)),
    make_screened("old-name", mean(0.06, 0.05, 0.07)),
)
AFTER = make_screening(
    make_screened("gptq", mean(0.010, 0.008, 0.012), weights_sha256="1" * 64),
    make_screened("awq", mean(0.043, 0.039, 0.049), weights_sha256="2" * 64),
    make_screened("new-name", mean(0.06, 0.05, 0.07), weights_sha256=BEFORE.candidates[3].weights_sha256),
    make_screened("new", mean(0.1, 0.09, 0.12), word="FAIL"),
)


def test_what_changed() -> None:
    comparison = compare_screenings(("a", "b"), BEFORE, AFTER)
    assert comparison.differences == ()
    assert [(change.label, change.change, change.ratio, change.not_compared) for change in comparison.candidates] == [
        ("gptq", "less", 0.5, None),
        ("awq", "not told apart", pytest.approx(1.075), None),
        ("gone", None, None, "only in the first"),
        ("old-name", "the same weights", 1.0, None),
        ("new", None, None, "only in the second"),
    ]
    assert compare_screenings(("b", "a"), AFTER, BEFORE).candidates[0].change == "more"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"reference_sha256": "c" * 64}, "other references: checkpoints aaaaaaaaaaaa and cccccccccccc"),
        (
            {"panel": AFTER.panel.model_copy(update={"sha256": "d" * 64, "num_texts": 40})},
            "other texts: 100 (bbbbbbbbbbbb) and 40 (dddddddddddd)",
        ),
        (
            {"numerics": Numerics(arithmetic="bf16", device="NVIDIA H200", torch="2.13.0+cpu", transformers="5.14.0")},
            "other numerics: arithmetic fp32, second bf16; device cpu, second NVIDIA H200",
        ),
    ],
)
def test_figures_that_mean_something_else_are_not_ranked(changes: dict[str, object], difference: str) -> None:
    comparison = compare_screenings(("a", "b"), BEFORE, AFTER.model_copy(update=changes))
    assert comparison.differences == (difference,)
    assert {(change.change, change.ratio) for change in comparison.candidates} == {(None, None)}
    assert comparison.candidates[0].not_compared == "figures of other references, texts or numerics are not ranked"


def alone(candidate: Screened) -> Screening:
    return make_screening(candidate)


@pytest.mark.parametrize(
    ("second", "change", "not_compared", "note"),
    [
        (
            make_screened("awq", mean(0.01, 0.009, 0.011), floor=AppliedFloor(cause="torch", kl=1e-4)), None,
            "computed otherwise than its reference in one of the two, or in another way", None,
        ),
        (
            make_screened("awq", mean(0.05, 0.047, 0.054), fp8_kv_cache=True), "more", None,
            "keys and values were rounded in the second alone",
        ),
        (make_screened("awq", Estimate(value=0.001, n=10), weights_sha256="3" * 64), "not told apart", None, None),
    ],
)  # fmt: skip
def test_what_differs_for_one_candidate(
    second: Screened, change: str | None, not_compared: str | None, note: str | None
) -> None:
    (result,) = compare_screenings(("a", "b"), alone(BEFORE.candidates[1]), alone(second)).candidates
    assert isinstance(result, ScreenedChange)
    assert (result.change, result.not_compared, result.note) == (change, not_compared, note)


def test_what_is_printed(run: Run) -> None:
    BEFORE.save(Path("before/screening.json"))
    AFTER.save(Path("after/screening.json"))
    code, out, err = run("compare", "before", "after/screening.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == [
        "first   before: reference /data/models/GLM-4.5-Air; 100 texts, 10,000 tokens; fp32 on cpu",
        "second  after/screening.json: reference /data/models/GLM-4.5-Air; 100 texts, 10,000 tokens; fp32 on cpu",
        "same reference, texts and numerics",
    ]
    assert [re.split(r" {2,}", line.rstrip()) for line in lines[3:]] == [
        ["candidate", "first: KL, nats", "second: KL, nats", "second against first"],
        [
            "gptq", "not failed 0.0200 (0.0180 to 0.0220)", "not failed 0.0100 (0.0080 to 0.0120)",
            "loses less: 0.50 times the KL",
        ],
        [
            "awq", "not failed 0.0400 (0.0350 to 0.0460)", "not failed 0.0430 (0.0390 to 0.0490)",
            "not told apart by these intervals; one screening of both pairs the texts",
        ],
        ["gone", "not failed 0.0500 (0.0400 to 0.0600)", "not compared: only in the first"],
        ["old-name", "not failed 0.0600 (0.0500 to 0.0700)", "not failed 0.0600 (0.0500 to 0.0700)", "the same weights"],
        ["new", "FAIL 0.1000 (0.0900 to 0.1200)", "not compared: only in the second"],
    ]  # fmt: skip
    code, out, _ = run("compare", "before", "after", "--json")
    assert code == 0
    assert ScreeningComparison.model_validate_json(out) == compare_screenings(("before", "after"), BEFORE, AFTER)


def test_what_is_not_compared(run: Run) -> None:
    BEFORE.save(Path("before/screening.json"))
    AFTER.save(Path("after/screening.json"))
    run_dir = make_run(Path("runs"))
    assert one_error(run("compare", "before", run_dir)) == (
        f"before is a screening and {run_dir} is none: what is served and what is screened have other numerics, and are not "
        "compared; name two screenings, or two runs"
    )
    two = "screenings are compared two at a time, without a page"
    assert one_error(run("compare", "before", "after", "before")) == f"compare: 3 screenings are named; {two}"
    assert one_error(run("compare", "before", "after", "--out", "page.html")) == f"compare: --out is for runs; {two}"
    Path("after/screening.json").write_text("{}")
    assert "not a Screening record of schema 1" in one_error(run("compare", "before", "after"))
