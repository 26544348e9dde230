"""What `estimand: these_items` changes: errors and power of one task in rounds, beside `such_items`.

    python benchmarks/verdicts/these_items.py [--runs 1000] [--seed 1]

these_items: sets of items are drawn that lose exactly what is said; only replies are drawn anew. such_items: items are drawn
anew as well. Populations, looks and boundaries are those of full_decides.py, without Holm. A look with one reply of a candidate
is judged by the interval for such items under both. No model and no server. The committed result is these_items.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out

from full_decides import shipped
from simulated_full import KINDS, Bools, Design, Floats, Kind, designs_of, draw_chances, print_lines

from assay.recipes.gate import Estimand, GateRecipe
from assay_evaluate.statistics.fixed_items import fixed_items
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.sequential import nominal_levels
from assay_evaluate.tasks.looks import Look, planned_shares
from assay_evaluate.verdicts.scores import spendings_of

ALPHA, SNAPPED = 0.025, 50
TASKS = ("gpqa-diamond", "aime", "gsm8k")


def exact_population(rng: np.random.Generator, one: Design, kind: Kind, loss: float) -> tuple[Floats, Floats]:
    """Chances of the two sides on one set of items that loses `loss` exactly."""
    ours, theirs = draw_chances(rng, one.items[-1], kind, one, 0.0)
    if kind == "even" or loss == 0:
        return ours, ours * (1 - loss / ours.mean())
    left = loss * len(ours)
    for place in rng.permutation(len(ours)):
        taken = min(float(ours[place]), left)
        theirs[place], left = ours[place] - taken, left - taken
    return ours, theirs


def decide(ours: Bools, theirs: Bools, one: Design, gates: GateRecipe, estimand: Estimand) -> str:
    """PASS, FAIL or UNDERPOWERED, over the planned looks."""
    times, growths, before = planned_shares(one.looks), [1.0], 0.0
    spendings = spendings_of(gates.stopping)
    for number, look in enumerate(one.looks):
        variance, interval = _seen(ours, theirs, look, estimand)
        if number:
            growths.append(growths[-1] * round(SNAPPED * before / variance) / SNAPPED)
        before = variance
        for_pass, for_fail = (nominal_levels(times[: number + 1], growths, ALPHA, spending)[-1] for spending in spendings)
        if interval(1 - 2 * for_pass)[1] < one.margin:
            return "PASS"
        if interval(1 - 2 * for_fail)[0] > one.margin:
            return "FAIL"
    return "UNDERPOWERED"


def _seen(ours: Bools, theirs: Bools, look: Look, estimand: Estimand):  # type: ignore[no-untyped-def]
    """(variance, level -> ends of the interval) at a look, as `Pairs` has them."""
    r, c = look.reference_samples, look.candidate_samples
    before, after = ours[:, :r].mean(axis=1), theirs[:, :c].mean(axis=1)
    fixed = None
    if estimand == "these_items":
        fixed = fixed_items(before, after, np.full(len(before), r), np.full(len(after), c))
    d, n = before - after, len(before) + 2
    variance = ((d @ d + 1) / n - (d.sum() / n) ** 2) / n if fixed is None else fixed.standard_error**2

    def ends(level: float) -> tuple[float, float]:
        found = graded_difference(before, after, level=level) if fixed is None else fixed.interval(level)
        return found.low, found.high

    return float(variance), ends


def shares(
    one: Design, gates: GateRecipe, kind: Kind, loss: float, estimand: Estimand, num_runs: int, seed: int
) -> tuple[float, float]:  # fmt: skip
    """(PASS, FAIL)"""
    rng = np.random.default_rng(seed)
    words, num_sets = [], 10
    for run in range(num_runs):
        if estimand == "such_items":
            chances = draw_chances(rng, one.items[-1], kind, one, loss)
        elif run % (num_runs // num_sets) == 0:
            chances = exact_population(rng, one, kind, loss)
        most = max(look.reference_samples for look in one.looks)
        ours, theirs = (rng.random((len(side), most)) < side[:, None] for side in chances)
        words.append(decide(ours, theirs, one, gates, estimand))
    return words.count("PASS") / num_runs, words.count("FAIL") / num_runs


def lines(num_runs: int, seed: int) -> Iterator[str]:
    suite, gates = shipped()
    designs = {one.name: one for one in designs_of(suite, gates)}
    yield "# These items, or such items"
    yield ""
    yield f"`python benchmarks/verdicts/these_items.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"One task alone, in rounds, without Holm; {num_runs} runs a row. These items: ten sets of items that lose exactly"
    yield "what is said, each with a tenth of the runs. Populations:"
    yield ""
    for kind, what in KINDS.items():
        yield f"- {kind}: {what}"
    yield ""
    yield "| task, margin | items | interval for | margin lost: PASS | FAIL | none lost: PASS | FAIL | 2.5 margins lost: FAIL |"
    yield "|---|---|---|---|---|---|---|---|"
    estimands: tuple[Estimand, ...] = ("such_items", "these_items")
    for name in TASKS:
        one = designs[name]
        for kind in KINDS:
            for estimand in estimands:
                at_margin, lossless, beyond = (
                    shares(one, gates, kind, times * one.margin, estimand, num_runs, seed) for times in (1.0, 0.0, 2.5)
                )
                told = " | ".join(f"{100 * value:.1f} %" for value in (*at_margin, *lossless, beyond[1]))
                yield f"| {name}, {100 * one.margin:.2g} points | {kind} | {estimand} | {told} |"


if __name__ == "__main__":
    print_lines(lines, __doc__)
