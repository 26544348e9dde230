"""Ratios of like rows, with intervals that an independent implementation agrees with; unlike rows have none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from assay.errors import MeasureError
from assay.records.base import Interval
from assay.records.speed import SpeedRepeat, SpeedRow
from assay_evaluate.speed.foreign.read import read_imported
from assay_evaluate.speed.foreign.stated import Stated
from assay_evaluate.speed.ratio import Estimate, mean_of, output_tokens_s, pairs, ratio, tpot_s, ttft_s

PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"


def row(checkpoint: str = "w4a16", rates: tuple[float, ...] = (10.0, 11.0, 12.0), **changes: Any) -> SpeedRow:
    fields: dict[str, Any] = {
        "checkpoint": checkpoint, "origin": "measured", "source": "vllm bench serve 0.32.0", "hardware": "8xH200",
        "num_gpus": 8, "speculation": 0, "prompts": "chat", "concurrency": 1, "engine": "vllm 0.32.0",
        "repeats": [SpeedRepeat(output_tokens_s=rate) for rate in rates],
    }  # fmt: skip
    return SpeedRow(**(fields | changes))


def test_interval_of_a_mean() -> None:
    found = mean_of(row(), output_tokens_s)
    low, high = stats.t.interval(0.95, 2, loc=11.0, scale=stats.sem([10.0, 11.0, 12.0]))
    assert found is not None and found == pytest.approx((11.0, low, high, 3))
    assert found.interval == Interval(value=found.value, low=found.low, high=found.high, n=3)
    assert mean_of(row(rates=(10.0,)), output_tokens_s) == Estimate(10.0, None, None, 1)
    assert mean_of(row(), ttft_s) is None and mean_of(row(), tpot_s) is None


def test_interval_of_a_ratio() -> None:
    """Welch's t interval of the difference of logarithms, as scipy computes it."""
    ours, theirs = (20.0, 21.0, 23.0, 22.0), (10.0, 12.0, 11.0)
    found = ratio(row("nvfp4", ours), row("fp8", theirs))
    welch = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).confidence_interval(0.95)
    value = math.exp(np.mean(np.log(ours)) - np.mean(np.log(theirs)))
    assert found == pytest.approx((value, math.exp(welch.low), math.exp(welch.high), 3))
    assert ratio(row("a", (5.0, 5.0)), row("b", (10.0, 10.0))) == pytest.approx((0.5, 0.5, 0.5, 2))
    one = ratio(row("a", (5.0,)), row("b"))
    assert (one.low, one.high, one.interval) == (None, None, None)


def test_the_interval_covers_the_truth() -> None:
    """Of 400 pairs of three repeats with the same spread, 95 % +- 3.3 % (three standard errors) contain the true ratio."""
    draw = np.random.default_rng(154)
    seen = 0
    for _ in range(400):
        ours, theirs = (tuple(np.exp(draw.normal(mean, 0.05, 3))) for mean in (math.log(20), math.log(10)))
        found = ratio(row("a", ours), row("b", theirs))
        assert found.low is not None and found.high is not None
        seen += found.low <= 2.0 <= found.high
    assert 0.917 <= seen / 400 <= 0.995


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": ({"speculation": 5}, "a drafted nothing, b 5 tokens a step"),
    "unknown drafts": ({"speculation": None}, "of b nobody states whether it drafted, so it is compared with none"),
    "emulated": ({"emulated": True}, "b was emulated, which says nothing about speed"),
    "hardware": ({"hardware": "8xB200"}, "a and b differ in hardware: 8xH200 against 8xB200"),
    "GPUs": ({"num_gpus": 4}, "a and b differ in number of GPUs: 8 against 4"),
    "parallelism": ({"parallelism": {"tensor": 8}}, "a and b differ in parallelism: not stated against tensor 8"),
    "prompts": ({"prompts": "code"}, "a and b differ in prompts: chat against code"),
    "origin": ({"origin": "predicted"}, "a and b differ in origin: measured against predicted"),
    "engine": ({"engine": None}, "a and b differ in engine: vllm 0.32.0 against not stated"),
    "concurrency": ({"concurrency": 8}, "a and b differ in concurrency: 1 against 8"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_rows_have_no_ratio(what: str) -> None:
    changes, why = UNLIKE[what]
    with pytest.raises(MeasureError) as error:
        ratio(row("a"), row("b", **changes))
    assert str(error.value) == f"no ratio: {why}"


def test_other_kernels_of_one_checkpoint() -> None:
    with pytest.raises(MeasureError, match=r"^no ratio: w4a16 was served by other kernels$"):
        ratio(row(kernels=("Marlin",)), row(kernels=("Triton",)))
    assert ratio(row("w4a16", kernels=("Marlin",)), row("fp8", kernels=("Triton",))).value == pytest.approx(1.0)


def test_a_quantity_that_one_does_not_have() -> None:
    with pytest.raises(MeasureError, match=r"^no ratio: a at 1 in flight does not have this quantity$"):
        ratio(row("a"), row("b"), ttft_s)


def test_what_the_published_tables_allow() -> None:
    """+33 %, +26 % and -10 % against FP8, everyone drafting; the first card's +79 % and +69 % are refused."""
    rows = read_imported(PUBLISHED, None, Stated())
    found = {(ours.checkpoint, ours.concurrency): round(one.value, 2) for ours, _, one in pairs(rows, "fp8")}
    assert found == {
        ("w4a16", 1): 1.33, ("w4a16", 8): 1.26, ("w4a16", 32): 0.90,
        ("nvfp4", 1): 1.23, ("nvfp4", 8): 1.16, ("nvfp4", 32): 1.00,
    }  # fmt: skip
    drafted = next(one for one in rows if (one.checkpoint, one.concurrency, one.speculation) == ("w4a16", 1, 5))
    first = next(one for one in rows if (one.checkpoint, one.concurrency, one.speculation) == ("w4a16", 1, None))
    for other in ("nvfp4", "awq-int4"):
        plain = next(one for one in rows if (one.checkpoint, one.concurrency, one.speculation) == (other, 1, 0))
        with pytest.raises(MeasureError, match=rf"^no ratio: w4a16 drafted 5 tokens a step, {other} nothing$"):
            ratio(drafted, plain)
        with pytest.raises(MeasureError, match=r"^no ratio: of w4a16 nobody states whether it drafted"):
            ratio(first, plain)
