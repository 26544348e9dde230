"""Whether the shipped suite `full` decides: how often it is right and wrong, and what it costs.

    python benchmarks/verdicts/full_decides.py [--runs 1000] [--seed 1]

Simulated runs of suite and gates `full` as GLM-5 is asked (simulated_full.py): whole runs, round by round, until nothing more
is asked. No model and no server. The committed result is full_decides.md beside this file, and the program prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out

from simulated_full import KINDS, Design, Kind, Outcome, designs_of, every_task, print_lines, simulate

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe, TaskBase
from assay.recipes.suite_files import as_model_asks
from assay_evaluate.preflight.cost import prompt_tokens, rates_on, reply_tokens, workload_of
from assay_evaluate.preflight.known_tasks import DISCORDANCE_RANGE, num_items
from assay_evaluate.roofline.weights import ServedWeights
from assay_pipeline.gate_choice import gates_of_suite, load_gates

MODEL, PROFILE = "glm-5", "8xh200"
EXPERTS, SHARED = 725e9, 19e9
"""Weights of GLM-5's routed experts (75 layers of 256), and all others: 744 B, 40 B active, of 8 experts a token."""
WEIGHTS = {
    "reference": ServedWeights(int(SHARED), int(EXPERTS), int(40e9), 256, 8),
    "candidate": ServedWeights(int(SHARED), int(0.53 * EXPERTS), int(40e9), 256, 8),
}
"""In FP8, and with experts of 4 bits."""
BEFORE = {"mmlu-pro": {"limit": 100}, "ruler": {"lengths_tokens": (4096, 16384, 32768, 65536), "num_items": 25}}
"""Suite `full` before tasks were asked in rounds: every item once, and once more of the reference."""


def shipped() -> tuple[SuiteRecipe, GateRecipe]:
    suite = as_model_asks(load_recipe(SuiteRecipe, "full"), load_recipe(ModelRecipe, MODEL).sampling)
    return suite, load_gates(gates_of_suite(suite), suite)


# ------------------------------------------------------------------------------------------------ what it costs
@dataclass(frozen=True)
class Cost:
    """GPU-hours of the reference and one candidate: of `full` before rounds, and the mean of simulated runs."""

    before: float
    now: float
    server_starts: float
    """Mean number of starts of the reference's server; the candidate's is started as often."""

    @property
    def share(self) -> float:
        return self.now / self.before


def gpu_hours(suite: SuiteRecipe, designs: Sequence[Design], found: Sequence[Outcome]) -> Cost:
    """At the middle of the preflight's rates. Texts, probes and starts of servers count on both sides."""
    once = [task.model_copy(update={"num_samples": 1} | BEFORE.get(task.name, {})) for task in suite.tasks]
    before_suite = suite.model_copy(update={"tasks": tuple(once)})
    asked = {one.name: one for one in designs}
    before = _fixed(before_suite) + _start("reference") + _start("candidate")
    for task in once:
        count = num_items(task)
        assert count is not None, "the items of every task of `full` are known"
        before += count * (2 * _per_reply(task, "reference") + _per_reply(task, "candidate"))
    each = {name: [_per_reply(one.task, side) for side in WEIGHTS] for name, one in asked.items()}
    starting, hours = [_start(side) for side in WEIGHTS], 0.0
    for run in found:
        hours += sum(number * one for number, one in zip(run.starts, starting, strict=True))
        for name, (ours, theirs) in run.asked.items():
            one = asked[name]
            hours += one.items[ours] * one.looks[ours].reference_samples * each[name][0]
            hours += one.items[theirs] * one.looks[theirs].candidate_samples * each[name][1]
    starts = sum(run.starts[0] for run in found) / len(found)
    return Cost(before, _fixed(suite) + hours / len(found), starts)


@functools.cache
def _rates(side: str) -> tuple[float, float, float]:
    """GPU-hours of a prompt token, of an output token and of a start, in the middle of their ranges."""
    profile = load_recipe(ProfileRecipe, PROFILE)
    found = rates_on(profile, WEIGHTS[side], load_recipe(ModelRecipe, MODEL).serving)
    assert found is not None, "the shipped profile names a GPU of the table"
    reading, writing, start = (math.sqrt(a * b) for a, b in (found.prompt_tokens_s, found.output_tokens_s, found.start_s))
    gpus = profile.hardware.num_gpus / 3600
    return gpus / reading, gpus / writing, gpus * start


def _hours(prompt: float, output: float, side: str) -> float:
    reading, writing, _ = _rates(side)
    return prompt * reading + output * writing


def _per_reply(task: TaskBase, side: str) -> float:
    return _hours(prompt_tokens(task), reply_tokens(task, thinks=True), side)


def _start(side: str) -> float:
    return _rates(side)[2]


def _fixed(suite: SuiteRecipe) -> float:
    """Texts for divergence, written once, read twice by the reference and once by the candidate, and probes of both."""
    work = workload_of(suite, load_recipe(ModelRecipe, MODEL).serving)
    loads = {"reference": work.writing + work.scoring.times(2) + work.probes, "candidate": work.scoring + work.probes}
    return sum(_hours(load.prompt_tokens, load.output_tokens, side) for side, load in loads.items())


# ------------------------------------------------------------------------------------------------ the tables
def share(found: Sequence[Outcome], word: str, of: str = "overall") -> float:
    """Of the runs in which the overall verdict, the whole or a task is `word`."""
    return sum((one.tasks.get(of) or getattr(one, of)) == word for one in found) / len(found)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def assumptions(suite: SuiteRecipe, designs: Sequence[Design], num_runs: int, seed: int) -> Iterator[str]:
    error = 100 * math.sqrt(0.025 * 0.975 / num_runs)
    yield "# Does suite `full` decide?"
    yield ""
    yield f"`python benchmarks/verdicts/full_decides.py --runs {num_runs} --seed {seed}`"
    yield ""
    yield (
        f"{num_runs} runs a row, half as many of a candidate that lost nothing: a rate of 2.5 "
        f"% has a standard error of {error:.1f} %, one of 50 %"
    )
    yield f"{math.sqrt(2500 / num_runs):.1f} %. Suite and gates are the shipped ones, asked as GLM-5's card says."
    yield ""
    yield "## Assumed"
    yield ""
    yield (
        "Items and replies are drawn anew for every run: losses are of such items. Populations of items, all with the accuracy"
    )
    yield "and discordance below (two replies of the reference to one item differ so often, on average):"
    yield ""
    for kind, what in KINDS.items():
        yield f"- {kind}: {what}"
    yield ""
    yield (
        "Questions of RULER that stand at every length are clusters. Gates on divergence, acceptance, truncation, verbosity and"
    )
    yield (
        "probes are taken to pass, and every reply to come. Boundaries are computed for growths of information rounded to 5 %."
    )
    yield (
        f"Hours: {MODEL} on {PROFILE}, the middle of the preflight's rates and lengths of replies, starts of servers, texts and"
    )
    yield "probes included; RULER's `longest` counts as its longest stated length."
    yield ""
    yield "| task | margin | accuracy | discordance | items | replies of the reference + candidate at each look |"
    yield "|---|---|---|---|---|---|"
    for one in designs:
        items = " / ".join(f"{n}" for n in dict.fromkeys(one.items))
        looks = ", ".join(f"{look.reference_samples} + {look.candidate_samples}" for look in one.looks)
        shares = f"{100 * one.margin:.3g} % | {100 * one.accuracy:.3g} % | {100 * one.discordance:.2g} %"
        yield f"| {one.name} | {shares} | {items} | {looks} |"
    yield ""


def lossless(suite: SuiteRecipe, designs: Sequence[Design], gates: GateRecipe, num_runs: int, seed: int) -> Iterator[str]:
    yield "## A candidate that lost nothing"
    yield ""
    yield (
        "Cost: GPU-hours of reference and candidate, as a share of those of `full` before "
        "rounds (every item once, MMLU-Pro with"
    )
    yield "100 of each subject, RULER with 25 at each of four lengths from 4K to 64K, and once more of the reference)."
    yield ""
    yield (
        "| items | asked until | PASS | FAIL | the whole alone: PASS | effective length: "
        "PASS | servers started | GPU-hours | cost |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    rows: list[tuple[str, Kind, GateRecipe, Sequence[Design]]] = [(kind, kind, gates, designs) for kind in ("even", "sure")]
    rows.append(("even", "even", every_task(gates), designs))
    for factor in DISCORDANCE_RANGE:
        scaled = [dataclasses.replace(one, discordance=factor * one.discordance) for one in designs]
        rows.append((f"even, {factor:.2g} times the discordance", "even", gates, scaled))
    for name, kind, recipe, population in rows:
        found = simulate(population, recipe, {}, kind, num_runs, seed)
        cost = gpu_hours(suite, designs, found)
        told = [percent(share(found, "PASS")), percent(share(found, "FAIL")), percent(share(found, "PASS", "whole"))]
        told += [percent(share(found, "PASS", "effective_length")), f"{cost.server_starts:.2f}"]
        told += [f"{cost.now:.0f} of {cost.before:.0f}", f"{cost.share:.2f}"]
        yield f"| {name} | {recipe.stopping.until} | {' | '.join(told)} |"
    yield ""
    yield "An identical copy is the first row: with sampling its replies differ as two runs of the reference do."
    yield ""


def at_the_limits(designs: Sequence[Design], gates: GateRecipe, num_runs: int, seed: int) -> Iterator[str]:
    yield "## At the limits: any PASS of the claim is false"
    yield ""
    yield "| truth | items | claim | false PASS | overall PASS | overall FAIL |"
    yield "|---|---|---|---|---|---|"

    def row(truth: str, losses: dict[str, float], kind: Kind, claim: str, runs: int) -> str:
        found = simulate(designs, gates, losses, kind, runs, seed)
        told = [share(found, "PASS", claim), share(found, "PASS"), share(found, "FAIL")]
        return f"| {truth} | {kind} | {claim} | {' | '.join(map(percent, told))} |"

    half = {one.name: one.margin / 2 for one in designs}
    for kind in KINDS:
        yield row("half of every margin lost", half, kind, "whole", num_runs)
    for name in ("gpqa-diamond", "aime", "gsm8k"):
        margin = next(one.margin for one in designs if one.name == name)
        yield row(f"two margins of {name} lost", {name: 2 * margin}, "even", "whole", num_runs)
        yield row(f"the margin of {name} lost", {name: margin}, "even", name, num_runs)
    yield ""


def losses(designs: Sequence[Design], gates: GateRecipe, num_runs: int, seed: int) -> Iterator[str]:
    yield "## Candidates that lost something"
    yield ""
    yield f"{num_runs} runs a row."
    yield ""
    yield "| truth | items | PASS | FAIL | UNDERPOWERED |"
    yield "|---|---|---|---|---|"
    gpqa = {"gpqa-diamond": 0.10}
    rows: list[tuple[str, dict[str, float], Kind]] = [("10 points of GPQA lost, nothing else", gpqa, kind) for kind in KINDS]
    rows += [
        (f"{name} of every margin lost", {one.name: part * one.margin for one in designs}, "even")
        for name, part in (("a quarter", 0.25), ("all", 1.0))
    ]
    for truth, lost, kind in rows:
        found = simulate(designs, gates, lost, kind, num_runs, seed)
        told = " | ".join(percent(share(found, word)) for word in ("PASS", "FAIL", "UNDERPOWERED"))
        yield f"| {truth} | {kind} | {told} |"


def lines(num_runs: int, seed: int) -> Iterator[str]:
    suite, gates = shipped()
    designs = designs_of(suite, gates)
    yield from assumptions(suite, designs, num_runs, seed)
    yield from lossless(suite, designs, gates, num_runs // 2, seed)
    yield from at_the_limits(designs, gates, num_runs, seed)
    yield from losses(designs, gates, num_runs // 2, seed)


if __name__ == "__main__":
    print_lines(lines, __doc__)
