"""Picks, flips, regret and cost against a computation of its own: dictionaries, bisection, no numpy, nothing of `assay`.

Three ladders made by hand (a lead that changes three times; drafts that pay with few streams only, under an objective; a setup
that is known in the middle only) and the published table of GLM-5.2 on eight H200.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from assay.records.choice.record import Choice
from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.choice.choose import ChoiceRequest, choose
from assay_evaluate.speed.imported import read_imported
from assay_evaluate.speed.stated import Stated

PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"


class Point(NamedTuple):
    """tokens_s: of every repeat. tpot_s: None: not limited."""

    tokens_s: tuple[float, ...]
    tpot_s: float | None = None


Ladder = dict[str, dict[int, Point]]
"""Setup -> streams -> what was measured."""

TWICE: Ladder = {
    "fp8": {1: Point((90.0, 92.0)), 4: Point((300.0, 310.0)), 16: Point((700.0, 705.0)), 64: Point((1900.0, 1910.0))},
    "w4a16": {1: Point((120.0, 121.0)), 4: Point((290.0, 291.0)), 16: Point((820.0, 822.0)), 64: Point((1500.0, 1502.0))},
}
DRAFTS: Ladder = {
    "w4a16 with MTP": {1: Point((125.0,), 0.008), 8: Point((500.0,), 0.016), 32: Point((830.0,), 0.0385)},
    "w4a16 without MTP": {1: Point((80.0,), 0.0125), 8: Point((460.0,), 0.0174), 32: Point((960.0,), 0.0333)},
    "nvfp4 with MTP": {1: Point((116.0,), 0.0086), 8: Point((455.0,), 0.0175), 32: Point((925.0,), 0.0346)},
}
MIDDLE: Ladder = {
    "fp8": {2: Point((100.0,)), 8: Point((350.0,)), 32: Point((900.0,)), 128: Point((2000.0,))},
    "w4a16": {8: Point((400.0,)), 32: Point((850.0,))},
    "nvfp4": {2: Point((90.0,)), 8: Point((330.0,)), 32: Point((950.0,)), 128: Point((1990.0,))},
}
GLM: Ladder = {
    "w4a16 with MTP": {1: Point((125.7,)), 8: Point((495.7,)), 32: Point((828.4,))},
    "nvfp4 with MTP": {1: Point((116.3,)), 8: Point((455.5,)), 32: Point((925.2,))},
    "fp8 with MTP": {1: Point((94.4,)), 8: Point((394.2,)), 32: Point((921.4,))},
}
"""As published: of one table, every model with five drafted tokens."""


# ------------------------------------------------------------------------------------------------ on its own
def value(points: dict[int, Point], streams: float, of: str) -> float | None:
    """Between two rows linear in the logarithms; None beyond them, or where a row does not have it."""
    known = sorted(points)
    if not known[0] <= streams <= known[-1]:
        return None
    below = max(at for at in known if at <= streams)
    above = min(at for at in known if at >= streams)
    ends = []
    for at in (below, above):
        point = points[at]
        logs = [math.log(tokens_) for tokens_ in point.tokens_s] if of == "tokens_s" else [math.log(point.tpot_s or math.nan)]
        ends.append(sum(logs) / len(logs))
    share = 0.0 if below == above else math.log(streams / below) / math.log(above / below)
    return math.exp(ends[0] + share * (ends[1] - ends[0]))


def best(ladder: Ladder, streams: float, most_tpot_s: float | None) -> str | None:
    results = []
    for name, points in ladder.items():
        speed = value(points, streams, "tokens_s")
        if speed is not None and (most_tpot_s is None or (value(points, streams, "tpot_s") or math.inf) <= most_tpot_s):
            results.append((speed, name))
    return max(results)[1] if results else None


def flips_of(ladder: Ladder, most_tpot_s: float | None) -> list[tuple[str | None, str | None, float]]:
    """Every place where the best changes, by halving between 4,000 places."""
    known = sorted({at for points in ladder.values() for at in points})
    low, high = math.log(known[0]), math.log(known[-1])
    places = sorted({math.exp(low + (high - low) * number / 20_000) for number in range(20_001)} | set(map(float, known)))
    made = []
    for left, right in itertools.pairwise(places):
        left, right = min(left, known[-1]), min(right, known[-1])
        before, after = (best(ladder, at, most_tpot_s) for at in (left, right))
        if before == after:
            continue
        for _ in range(60):
            middle = math.sqrt(left * right)
            left, right = (middle, right) if best(ladder, middle, most_tpot_s) == before else (left, middle)
        made.append((before, after, left))
    return made


def mean(ladder: Ladder, name: str, at: int) -> float:
    """Geometric, as `value` has it."""
    values = ladder[name][at].tokens_s
    return math.prod(values) ** (1 / len(values))


def worst_of(ladder: Ladder, most_tpot_s: float | None) -> dict[str, tuple[float, int]]:
    """Setup that is known wherever there is a best -> (largest share of tokens/s that it lacks there, streams)."""
    picks = {at: best(ladder, at, most_tpot_s) for at in sorted({at for points in ladder.values() for at in points})}
    results = {}
    for name, points in ladder.items():
        if all(at in points for at, pick in picks.items() if pick is not None):
            behind = {at: 1 - mean(ladder, name, at) / mean(ladder, pick, at) for at, pick in picks.items() if pick is not None}
            at = max(behind, key=lambda one: behind[one])
            results[name] = (behind[at], at)
    return results


def usd(ladder: Ladder, name: str, at: int, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Of a million tokens: GPU-hours that they take, times the price."""
    return 1e6 / mean(ladder, name, at) / 3600 * num_gpus * usd_per_gpu_hour


# ------------------------------------------------------------------------------------------------ compared with it
def rows_of(ladder: Ladder) -> list[SpeedRow]:
    rows = []
    for name, points in ladder.items():
        for at, point in points.items():
            more: dict[str, Any] = {}
            if point.tpot_s is not None:
                more["tpot_s"] = Quantiles(mean=point.tpot_s, p50=point.tpot_s)
            rows.append(
                SpeedRow(
                    checkpoint=name.split()[0], speculation=5 if name.endswith("with MTP") else 0, concurrency=at,
                    origin="measured", prompts="chat", hardware="8xH200", num_gpus=8, source="by hand",
                    repeats=tuple(SpeedRepeat(output_tokens_s=tokens_, **more) for tokens_ in point.tokens_s),
                )
            )  # fmt: skip
    return rows


def summary(result: Choice) -> dict[str, Any]:
    entry = result.one_for_all
    return {
        "picks": {pick.concurrency: pick.setup for pick in result.picks},
        "flips": [(flip.before, flip.after) for flip in result.flips],
        "one for all": None if entry is None else entry.setup,
    }


@pytest.mark.parametrize(
    ("ladder", "most_tpot_s", "picks", "flips", "one_for_all"),
    [
        (TWICE, None, {1: "w4a16", 4: "fp8", 16: "w4a16", 64: "fp8"},
         [("w4a16", "fp8", 3.3), ("fp8", "w4a16", 5.6), ("w4a16", "fp8", 27.7)], "w4a16"),
        (DRAFTS, None, {1: "w4a16 with MTP", 8: "w4a16 with MTP", 32: "w4a16 without MTP"},
         [("w4a16 with MTP", "w4a16 without MTP", 13.3)], "nvfp4 with MTP"),
        (DRAFTS, 0.034, {1: "w4a16 with MTP", 8: "w4a16 with MTP", 32: "w4a16 without MTP"},
         [("w4a16 with MTP", "w4a16 without MTP", 13.3)], "w4a16 without MTP"),
        (DRAFTS, 0.025, {1: "w4a16 with MTP", 8: "w4a16 with MTP", 32: None},
         [("w4a16 with MTP", "w4a16 without MTP", 13.3), ("w4a16 without MTP", None, 17.3)], "w4a16 with MTP"),
        (MIDDLE, None, {2: "fp8", 8: "w4a16", 32: "nvfp4", 128: "fp8"},
         [("fp8", "w4a16", 8.0), ("w4a16", "nvfp4", 19.3), ("nvfp4", "fp8", 113.8)], "fp8"),
        (GLM, None, {1: "w4a16 with MTP", 8: "w4a16 with MTP", 32: "nvfp4 with MTP"},
         [("w4a16 with MTP", "nvfp4 with MTP", 14.6)], "nvfp4 with MTP"),
    ],
    ids=["twice", "drafts", "drafts 34 ms", "drafts 25 ms", "middle", "glm-5.2"],
)  # fmt: skip
def test_a_choice_is_what_another_computation_says(
    ladder: Ladder, most_tpot_s: float | None, picks: dict[int, str | None],
    flips: list[tuple[str | None, str | None, float]], one_for_all: str,
) -> None:  # fmt: skip
    objective = None if most_tpot_s is None else {"tpot_s": most_tpot_s}
    choice = choose(rows_of(ladder), None, ChoiceRequest(objective=objective, usd_per_gpu_hour=3.5))
    assert summary(choice) == {"picks": picks, "flips": [flip[:2] for flip in flips], "one for all": one_for_all}
    assert {at: best(ladder, at, most_tpot_s) for at in picks} == picks

    exact = flips_of(ladder, most_tpot_s)
    assert [flip[:2] for flip in exact] == [flip[:2] for flip in flips]
    step = math.log(max(picks) / min(picks)) / 399
    for reference, candidate, (_, _, stated) in zip(choice.flips, exact, flips, strict=True):
        assert abs(math.log(reference.at / candidate[2])) <= step and round(candidate[2], 1) == stated

    assert {
        (cell.setup, cell.concurrency): cell.usd_per_million_tokens for cell in choice.cells if cell.state == "measured"
    } == {(name, at): pytest.approx(usd(ladder, name, at, 3.5, 8)) for name, points in ladder.items() for at in points}
    worst = worst_of(ladder, most_tpot_s)
    assert {regret.setup for regret in choice.regrets} == worst.keys()
    for regret in choice.regrets:
        share, at = worst[regret.setup]
        pick = str(picks[at])
        assert (regret.at, regret.worst_tokens_s) == (at, pytest.approx(share * mean(ladder, pick, at)))
        alike = regret.setup.endswith("without MTP") == pick.endswith("without MTP")
        assert regret.relative == (pytest.approx(share) if alike else None), "drafting is of one ratio with not drafting never"
        dearer = usd(ladder, regret.setup, at, 3.5, 8) - usd(ladder, pick, at, 3.5, 8)
        assert regret.usd_per_million_tokens == pytest.approx(dearer, abs=1e-9)


def test_the_table_above_is_the_published_one() -> None:
    rows = [row for row in read_imported(PUBLISHED, None, Stated()) if row.speculation == 5]
    told: Ladder = {}
    for row in rows:
        told.setdefault(f"{row.checkpoint} with MTP", {})[row.concurrency] = Point((row.repeats[0].output_tokens_s,))
    assert told == GLM
