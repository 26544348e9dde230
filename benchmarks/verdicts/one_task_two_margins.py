"""How much one task may lose under the claim about the whole: what suite `full` passes and costs at each limit.

    python benchmarks/verdicts/one_task_two_margins.py

The chances of `assay power full --model glm-5`, drawn by the rules of the gates, with other limits of `whole:`. The committed
result is one_task_two_margins.md beside this file, and the program prints it. No model and no server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out

from full_decides import shipped

from assay.recipes.gate import WholeGate
from assay_evaluate.preflight.power import lasting_passes, suite_power
from assay_evaluate.preflight.power_designs import Assumptions, gated_tasks, rules_of
from assay_evaluate.statistics.joint.chances import draw_path, expected_value, resolve

PARTS = (0.25, 0.5, 0.75, 1.0)
LIMITS = ((0.5, 2.0), (0.5, 1.75), (0.5, 1.5), (0.5, 1.25), (0.5, 1.0), (0.33, 2.0))


def lines() -> Iterator[str]:
    suite, gates = shipped()
    yield "# How much one task may lose"
    yield ""
    yield "`python benchmarks/verdicts/one_task_two_margins.py`"
    yield ""
    yield "Suite `full` as GLM-5 is asked, 4,000 draws a cell (a standard error of 0.8 points at most). Copy: an identical"
    yield "checkpoint. Lasting: one that changes for good which items are right, in half of what differs, and loses nothing on"
    yield "balance. One margin: it loses just the margin of one task; least and most over the ten tasks. Two margins: the most"
    yield "over the tasks. All are shares of PASS. Replies: of a copy to all tasks, on average."
    yield ""
    yield "| max_mean_use | max_task | copy | lasting | one margin | two margins | replies |"
    yield "|---|---|---|---|---|---|---|"
    for mean_use, most in LIMITS:
        changed = gates.model_copy(update={"whole": WholeGate(max_mean_use=mean_use, max_task=most)})
        found = suite_power(suite, changed)
        assert found is not None, "every task of `full` has a known number of items"
        once = [one.candidate_passes for one in found.alone_at_margin]
        twice = [one.candidate_passes for one in found.alone_at_twice]
        lossless = found.all_gates.lossless
        replies = sum(
            expected_value(stops, [look.num_items * look.candidate_samples for look in one.design.looks])
            for stops, one in zip(lossless.stops, found.gated, strict=True)
        )
        half = lasting_passes(found, changed)["0.5"]
        cells = [f"{100 * lossless.passes:.1f} %", f"{100 * half:.1f} %", f"{100 * min(once):.0f} to {100 * max(once):.0f} %"]
        cells += [f"{100 * max(twice):.1f} %", f"{replies:,.0f}"]
        yield f"| {mean_use:g} | {most:g} | {' | '.join(cells)} |"


def of_every_margin() -> Iterator[str]:
    """By the shipped gates: how a loss that is spread over all tasks is judged, and whether any task fails by itself."""
    suite, gates = shipped()
    gated, rules = gated_tasks(suite, gates, Assumptions())[0], rules_of(gates)
    yield ""
    yield "## A part of every margin lost, by the shipped gates"
    yield ""
    yield "| lost | PASS | FAIL | some task FAILs, at most |"
    yield "|---|---|---|---|"
    for part in PARTS:
        paths = [draw_path(one.design, part * one.design.margin, rules, of=len(gated)) for one in gated]
        found = resolve(paths, rules)
        cells = (found.passes, found.fails, min(1.0, sum(found.fails_alone)))
        yield f"| {part:g} of every margin | {' | '.join(f'{100 * cell:.1f} %' for cell in cells)} |"


def main() -> None:
    for line in (*lines(), *of_every_margin()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
