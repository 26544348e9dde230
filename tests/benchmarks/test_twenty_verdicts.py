"""A small version of benchmarks/verdicts/twenty_verdicts.py: made-up replies instead of a server's."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blank_records import item_result
from synthetic_run import make_measurement, task_of

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.power import noninferiority_power

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "verdicts"))

from twenty_verdicts import HERE, SLICES, foretell, judge_slices, judged, tables

GATES = load_recipe(GateRecipe, str(HERE / "twenty_gates.yaml"))
SUITE = load_recipe(SuiteRecipe, str(HERE / "twenty_suite.yaml"))


def measured(label: str, right: list[bool]) -> Measurement:
    items = [
        item_result(f"needle/zh/{i}", one, language="zh", prompt_tokens=768, output_tokens=20, answer="1")
        for i, one in enumerate(right)
    ]
    task = task_of("codes-zh", "needle", items, max_tokens=256)
    return make_measurement(label, load_recipe(SuiteRecipe, "quick")).model_copy(update={"tasks": (task,)})


def drawn(n: int, lost: float, gained: float, seed: int = 0) -> tuple[Measurement, Measurement]:
    """Both right in the rest."""
    at = np.random.default_rng(seed).random(n)
    return (measured("fp8", (at >= gained).tolist()), measured("w4a16", ((at < gained) | (at >= gained + lost)).tolist()))


def test_slices_share_no_item_and_are_judged_by_their_counts() -> None:
    reference, candidate = drawn(800, 0.12, 0.05)
    verdicts = judge_slices(reference, candidate, GATES, 20)
    before, after = ([item.correct for item in side.tasks[0].items] for side in (reference, candidate))
    for at, verdict in enumerate(verdicts):
        both = list(zip(before[at::20], after[at::20], strict=True))
        drop = paired_difference(both.count((True, False)), both.count((False, True)), 40)
        assert verdict == ("FAIL" if drop.low > 0.10 else "PASS" if drop.high < 0.10 else "UNDERPOWERED")
    assert len(verdicts) == 20 and len(set(verdicts)) > 1


@pytest.mark.slow
def test_power_foretells_what_slices_are_judged() -> None:
    """150 slices of 40 with a loss of 12 points: each share within four standard errors."""
    reference, candidate = drawn(6_000, 0.17, 0.05)
    [found] = judged(reference, candidate, GATES, [(150, 40)])
    counts = Counter(found.verdicts)
    foretold = {"PASS": found.foretold.passes, "FAIL": found.foretold.fails}
    for status, share in foretold.items():
        assert counts[status] / 150 == pytest.approx(share, abs=4 * (share * (1 - share) / 150) ** 0.5 + 0.03)
    assert counts["FAIL"] > 0


def test_foretold_is_the_exact_power() -> None:
    for discordance, loss in ((0.005, 0.0), (0.06, 0.02)):
        exact = noninferiority_power(0.10, discordance, 100, loss=loss)
        assert foretell(GATES, 100, discordance, loss).passes == pytest.approx(exact, abs=0.015)


def test_slices_are_those_of_the_suite() -> None:
    [task] = SUITE.tasks
    assert all(number * size == task.num_items for number, size in SLICES)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="20 slices of 40 are not the 400 items there are"):
        judged(*drawn(400, 0.1, 0.0), GATES, [(20, 40)])


def test_table() -> None:
    reference, candidate = drawn(800, 0.0, 0.0)
    assert list(tables(reference, candidate, GATES, [(8, 100)], [0.05, 0.02])) == [
        "# A real small loss, judged on disjoint items", "",
        "fp8 is right in 800 of 800 items, w4a16 in 800: it loses 0.0 points [-0.5, 0.5]; 0 lost, 0 gained, 0.0 % discordant.",
        "", "| margin | judgements | items of each | | PASS | FAIL | UNDERPOWERED |", "|---|---|---|---|---|---|---|",
        "| 5 points | 8 | 100 | seen | 100 % | 0 % | 0 % |",
        "| 5 points | 8 | 100 | foretold at this loss | 100 % | 0 % | 0 % |",
        "| 5 points | 8 | 100 | foretold before, nothing lost, 11.0 % discordant | 28 % | 0 % | 72 % |",
        "| 2 points | 8 | 100 | seen | 0 % | 0 % | 100 % |",
        "| 2 points | 8 | 100 | foretold at this loss | 0 % | 0 % | 100 % |",
        "| 2 points | 8 | 100 | foretold before, nothing lost, 11.0 % discordant | 8 % | 1 % | 91 % |",
        "", "Level 95 %; at least 30 items.",
    ]  # fmt: skip
