"""What cut-off replies do to a candidate that lost nothing, and to one that loops: by the rules of suite and gates `full`.

    python benchmarks/verdicts/cut_replies.py [--runs 400] [--seed 1]

Measurements of both sides are drawn and judged by `verdicts/replies/truncation.py`, as a run's are. No model and no server. The
committed result is cut_replies.md beside this file, and the program prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python may be run with PYTHONSAFEPATH
from full_decides import percent, shipped
from simulated_full import Design, designs_of

from assay.recipes.gate import GateRecipe, TruncationGate
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.verdicts.truncation import allowance, judge_truncation, too_much_truncation

SHARES = (0.0, 0.001, 0.0033, 0.01, 0.02, 0.05, 0.10)
"""Of the replies to every task, cut off on either side."""
LOOPING = ((0.0, 0.01), (0.0, 0.03), (0.0, 0.30), (0.01, 0.04))
"""Shares of replies that loop: reference, candidate."""
SIDES = ("reference", "candidate")
WORDS = ("PASS", "FAIL", "UNDERPOWERED", "NOT MEASURED")
COLUMNS = (f"gate: {WORDS[0]}", *WORDS[1:])


def replies(rng: np.random.Generator, n: int, cut: float, *, loops: bool) -> tuple[ItemResult, ...]:
    """One reply to each of n items; all are right, so that a verdict follows from the cut ones alone."""
    found = rng.random(n) < cut
    return tuple(
        ItemResult(
            item=f"i{i}", language="en", correct=True, truncated=bool(one), wrong_script=False, prompt_tokens=None,
            output_tokens=None, answer=None, finish_reason="length" if one else "stop", loops=loops and bool(one),
        )
        for i, one in enumerate(found)
    )  # fmt: skip


def drawn(
    label: str, rng: np.random.Generator, designs: list[Design], cut: float, *, loops: bool = False
) -> Measurement:  # fmt: skip
    """Of the first look, one reply to each item: what is cut off does not depend on how often an item is asked."""
    tasks = []
    for one in designs:
        items = replies(rng, one.items[0], cut, loops=loops)
        num_cut = sum(item.truncated for item in items)
        tasks.append(
            TaskResult(
                task=one.name, kind=one.task.kind, num_items=len(items), num_failed=0, num_truncated=num_cut,
                accuracy=wilson(len(items), len(items)), mean_output_tokens=None, max_tokens=one.task.max_tokens, items=items,
            )
        )  # fmt: skip
    return Measurement.model_construct(label=label, tasks=tuple(tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    suite, gates = shipped()
    for line in lines(designs_of(suite, gates), gates, options.runs, options.seed):
        print(line, flush=True)


def lines(designs: list[Design], gates: GateRecipe, num_runs: int, seed: int) -> Iterator[str]:
    gate = next(one for one in gates.gates if isinstance(one, TruncationGate))
    error = 100 * (0.025 * 0.975 / num_runs) ** 0.5
    yield "# Cut-off replies under gates `full`"
    yield ""
    yield f"`python benchmarks/verdicts/cut_replies.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield f"{num_runs} runs a row: a rate of 2.5 % has a standard error of {error:.1f} %. One reply to each item of the"
    yield "first look, each cut off independently of the others."
    yield ""
    yield "## A candidate that lost nothing"
    yield ""
    yield "Both sides have the same share of their replies cut off, none of which loops. Beside the name of a task: what may be"
    yield "cut off of the reference (a third of the margin, at most 5 %). Below it: how often the score is NOT MEASURED for the"
    yield "reference surely has more cut off. The gate on truncation is NOT MEASURED as soon as one task is."
    yield ""
    yield row("cut off", *(f"{one.name} ({100 * allowance(gates, one.name):.2g} %)" for one in designs), *COLUMNS)
    yield "|---" * (1 + len(designs) + len(COLUMNS)) + "|"
    for share in SHARES:
        rng = np.random.default_rng(seed)
        too_small, said = dict.fromkeys((one.name for one in designs), 0), dict.fromkeys(WORDS, 0)
        for _ in range(num_runs):
            reference, candidate = drawn("reference", rng, designs, share), drawn("candidate", rng, designs, share)
            for task in reference.tasks:
                too_small[task.task] += too_much_truncation(gates, reference, task) is not None
            said[judge_truncation(gate, reference, candidate, gates, frozenset()).status] += 1
        yield row(f"{100 * share:.2g} %", *(percent(n / num_runs) for n in (*too_small.values(), *said.values())))
    yield ""
    yield "## A candidate that loops"
    yield ""
    yield f"In every task alike; {100 * gate.max_excess:g} % more than the reference are allowed."
    yield ""
    yield row("reference loops in", "candidate loops in", *COLUMNS)
    yield "|---" * (2 + len(COLUMNS)) + "|"
    for shares in LOOPING:
        rng, said = np.random.default_rng(seed), dict.fromkeys(WORDS, 0)
        for _ in range(num_runs):
            ours, theirs = (drawn(side, rng, designs, one, loops=True) for side, one in zip(SIDES, shares, strict=True))
            said[judge_truncation(gate, ours, theirs, gates, frozenset()).status] += 1
        yield row(*(f"{100 * one:.2g} %" for one in shares), *(percent(n / num_runs) for n in said.values()))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
