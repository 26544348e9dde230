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
from assay_evaluate.speed.imported import read_imported
from assay_evaluate.speed.noise import noise_of, noise_of_rows
from assay_evaluate.speed.ratio import Estimate, mean_of, output_tokens_s, pairs, ratio, tpot_s, ttft_s
from assay_evaluate.speed.stated import Stated

PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"


def row(
    checkpoint: str = "w4a16", rates: tuple[float, ...] = (10.0, 11.0, 12.0), starts: tuple[int, ...] = (), **changes: Any
) -> SpeedRow:  # fmt: skip
    """starts: of the server, of each repeat; (): not told."""
    repeats = zip(rates, starts or [None] * len(rates), strict=True)
    fields: dict[str, Any] = {
        "checkpoint": checkpoint, "origin": "measured", "source": "vllm bench serve 0.32.0", "hardware": "8xH200",
        "num_gpus": 8, "speculation": 0, "prompts": "chat", "concurrency": 1, "engine": "vllm 0.32.0",
        "repeats": [SpeedRepeat(output_tokens_s=rate, server_start=start) for rate, start in repeats],
    }  # fmt: skip
    return SpeedRow(**(fields | changes))


def test_interval_of_a_mean() -> None:
    """Three repeats of one start: their own spread, drawn towards the assumed 2 %, and 3 % for starts."""
    estimate = mean_of(row(), output_tokens_s)
    logs = np.log([10.0, 11.0, 12.0])
    squares = float(((logs - logs.mean()) ** 2).sum())
    typical = (squares + 4 * 0.02**2) / 6
    error = math.sqrt(ASSUMED**2 + (squares + 4 * typical) / 6 / 3)
    low, high = np.exp(logs.mean() + np.array([-1, 1]) * stats.t.ppf(0.975, 4) * error)
    assert estimate is not None and estimate == pytest.approx((math.exp(logs.mean()), low, high, 3), rel=1e-6)
    assert estimate.interval == Interval(value=estimate.value, low=estimate.low, high=estimate.high, n=3)
    assert mean_of(row(rates=(10.0,)), output_tokens_s) == Estimate(pytest.approx(10.0), None, None, 1)
    assert mean_of(row(), ttft_s) is None and mean_of(row(), tpot_s) is None


ASSUMED = noise_of([]).start
"""Standard deviation of starts where nothing was restarted."""


def test_what_is_assumed_of_starts() -> None:
    assert abs(ASSUMED - 0.03) < 0.0003
    assert noise_of([]).words == (
        "no setup was measured in two starts of its server: that starts differ by 3 % is assumed, and repeats by 2 %"
    )


def test_starts_count_alike() -> None:
    """Two repeats of a slow start and one of a fast one: the mean of the two starts, not of the three repeats."""
    entry = row(rates=(100.0, 100.0, 121.0), starts=(0, 0, 1))
    assert entry.tokens_s == pytest.approx(110.0) == pytest.approx(mean_of(entry, output_tokens_s)[0])  # type: ignore[index]
    told = noise_of_rows([entry, row("fp8", (100.0, 100.0, 110.0), starts=(0, 0, 1))], output_tokens_s)
    assert told.num_restarted == 2 and told.start > 0.05
    assert told.words.startswith("starts of a server differ by ") and "from 2 setups started more than once" in told.words


def test_a_ratio_is_of_geometric_means() -> None:
    reference, candidate = (20.0, 21.0, 23.0, 22.0), (10.0, 12.0, 11.0)
    estimate = ratio(row("nvfp4", reference), row("fp8", candidate))
    value = math.exp(np.mean(np.log(reference)) - np.mean(np.log(candidate)))
    assert estimate.value == pytest.approx(value) and estimate.n == 3
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low * estimate.high == pytest.approx(value**2) and estimate.low < 0.93 * value
    entry = ratio(row("a", (5.0,)), row("b"))
    assert (entry.low, entry.high, entry.interval) == (None, None, None)


def test_the_interval_covers_the_truth() -> None:
    """Of 300 pairs whose starts differ by 3 % and repeats by 1 %: about 95 % contain the true ratio; Welch's t over the repeats
    of one start contained it in 50 %."""
    draw = np.random.default_rng(154)

    def drawn(label: str, mean: float) -> SpeedRow:
        effects = draw.normal(0, 0.03, 2)
        return row(label, tuple(np.exp(mean + effects[[0, 0, 1]] + draw.normal(0, 0.01, 3))), starts=(0, 0, 1))

    observed = 0
    for _ in range(300):
        estimate = ratio(drawn("a", math.log(20)), drawn("b", math.log(10)))
        assert estimate.low is not None and estimate.high is not None
        observed += estimate.low <= 2.0 <= estimate.high
    assert 0.93 <= observed / 300 <= 0.995


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
    changes, reason = UNLIKE[what]
    with pytest.raises(MeasureError) as error:
        ratio(row("a"), row("b", **changes))
    assert str(error.value) == f"no ratio: {reason}"


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
    results = {
        (reference.checkpoint, reference.concurrency): round(entry.value, 2) for reference, _, entry in pairs(rows, "fp8")
    }
    assert results == {
        ("w4a16", 1): 1.33, ("w4a16", 8): 1.26, ("w4a16", 32): 0.90,
        ("nvfp4", 1): 1.23, ("nvfp4", 8): 1.16, ("nvfp4", 32): 1.00,
    }  # fmt: skip
    drafted = next(entry for entry in rows if (entry.checkpoint, entry.concurrency, entry.speculation) == ("w4a16", 1, 5))
    first = next(entry for entry in rows if (entry.checkpoint, entry.concurrency, entry.speculation) == ("w4a16", 1, None))
    for other in ("nvfp4", "awq-int4"):
        plain = next(entry for entry in rows if (entry.checkpoint, entry.concurrency, entry.speculation) == (other, 1, 0))
        with pytest.raises(MeasureError, match=rf"^no ratio: w4a16 drafted 5 tokens a step, {other} nothing$"):
            ratio(drafted, plain)
        with pytest.raises(MeasureError, match=r"^no ratio: of w4a16 nobody states whether it drafted"):
            ratio(first, plain)
