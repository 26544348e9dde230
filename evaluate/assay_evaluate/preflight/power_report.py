"""The power of a suite as a record, and as the table that `assay power` prints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from assay.quantities import percent_short, points_short
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe, SweTask
from assay.records.preflight.power import CheckpointCost, GatePower, NeededFor, PowerReport, TogetherPower
from assay_evaluate.diagnosis.probes.planned import Load
from assay_evaluate.preflight.cost import cost_of, span, tokens, workload_of
from assay_evaluate.preflight.known_tasks import LENGTH_RANGE
from assay_evaluate.preflight.power import (
    ENOUGH,
    WANTED,
    SuitePower,
    Together,
    advice,
    cut_passes,
    lasting_passes,
    lossless_passes,
)
from assay_evaluate.preflight.power_designs import FROM_TABLE, Assumptions, needed, rules_of
from assay_evaluate.roofline.weights import ServedWeights
from assay_evaluate.statistics.joint.chances import NUM_DRAWS, SEED, expected_value
from assay_evaluate.statistics.power import POWER

COLUMNS = (
    "gate", "items", "replies", "differ", "copy: PASS", "loses the margin: PASS", "FAIL", "candidate PASS", "loses twice: FAIL",
    "candidate PASS", "replies of a candidate",
)  # fmt: skip
NEEDED_COLUMNS = ("to pass 4 times in 5", "true loss", "items", "or replies to each", "all gates: items", "or replies to each")
HEADERS_NEEDED = "they need --model: the headers of its weights say what a server reads and computes"


# ------------------------------------------------------------------------------------------------ the record
def gate_powers(power: SuitePower, assumptions: Assumptions) -> Iterator[GatePower]:
    """One for each score gate, in their order."""
    chances = power.all_gates.lossless
    for at, (gate, _, design) in enumerate(power.gated):
        replies = [look.num_items * look.candidate_samples for look in design.looks]
        last, margin, twice = design.looks[-1], power.alone_at_margin[at], power.alone_at_twice[at]
        yield GatePower(
            task=gate.task, required=gate.required, max_drop=gate.max_drop, claim=gate.claim, num_items=last.num_items,
            num_replies=(last.reference_samples, last.candidate_samples), num_looks=len(design.looks),
            num_clusters=len(design.cluster_sizes) or None, discordance=design.assumed.discordance,
            reply_noise=design.assumed.noise, assumed_from=assumptions.source(gate.task),
            lossless_passes=chances.passes_alone[at], at_margin_passes=margin.passes, at_margin_fails=margin.fails,
            at_margin_candidate_passes=margin.candidate_passes, at_twice_passes=twice.passes,
            at_twice_fails=twice.fails, at_twice_candidate_passes=twice.candidate_passes,
            mean_candidate_replies=expected_value(chances.stops[at], replies),
        )  # fmt: skip


def needed_for(suite_power: SuitePower, gates: GateRecipe, assumptions: Assumptions) -> Iterator[NeededFor]:
    """Of every gate without any loss, then of those whose loss an earlier run has seen."""
    rules, together = rules_of(gates), WANTED ** (1 / len(suite_power.gated))
    lossless = [(gated_task, 0.0) for gated_task in suite_power.gated]
    observed = [(gated_task, assumptions.losses.get(gated_task.gate.task, 0.0)) for gated_task in suite_power.gated]
    for (gate, task, design), loss in [*lossless, *((gated_task, loss) for gated_task, loss in observed if loss > 0)]:
        can_repeat = isinstance(task, SweTask) or task.temperature > 0
        alone, of_all = (needed(design, rules, power, loss=loss, can_repeat=can_repeat) for power in (POWER, together))
        yield NeededFor(
            task=gate.task, loss=loss, items=alone.items, replies=alone.replies, items_together=of_all.items,
            replies_together=of_all.replies,
        )  # fmt: skip


def together_power(
    gates: Together, *, whole: bool, lasting: dict[str, float] | None = None, cut: float | None = None
) -> TogetherPower:  # fmt: skip
    return TogetherPower(
        num_gates=len(gates.lossless.passes_alone), whole=whole, lossless_passes=gates.lossless.passes,
        lossless_fails=gates.lossless.fails, lossless_passes_range=(gates.noisier.passes, gates.steadier.passes),
        at_margin_passes=gates.at_margin.passes, at_margin_fails=gates.at_margin.fails, at_twice_passes=gates.at_twice.passes,
        at_twice_fails=gates.at_twice.fails, lasting_passes=lasting or {}, cut_passes=cut,
    )  # fmt: skip


def report_of(
    power: SuitePower,
    suite: SuiteRecipe,
    gates: GateRecipe,
    assumptions: Assumptions,
    *,
    serving: Serving,
    weights: Mapping[str, ServedWeights | None],
    profile: ProfileRecipe | None,
    own_texts: bool,
    no_gpu_hours: str | None,
    model: str | None,
    notes: Sequence[str],
    started: float,
) -> PowerReport:
    """Everything that the command prints. weights: label -> what is served, the reference first; None: not known.

    Costs are of as many rounds as a candidate takes that loses nothing, on average. started: by time.monotonic().
    """
    whole = gates.whole is not None
    is_noise = all(gated_task.design.assumed.noise == 1 for gated_task in power.gated)
    lasting, cut = lasting_passes(power, gates) if is_noise else {}, cut_passes(power, gates)
    kinds = dict.fromkeys(gate.kind for gate in gates.gates if not isinstance(gate, ScoreGate))
    stops = {gated_task.gate.task: stop for gated_task, stop in zip(power.gated, power.all_gates.lossless.stops, strict=True)}
    work = workload_of(suite, serving, own_texts=own_texts, stopping=gates.stopping, stops=stops)
    costs = []
    for number, (label, held) in enumerate(weights.items()):
        load = work.candidate if number else work.reference
        cost = None if profile is None or profile.endpoints else cost_of(label, load, held, profile, serving)
        least, most = (round(factor * load.output_tokens) for factor in LENGTH_RANGE)
        costs.append(CheckpointCost(
            label=label, num_requests=load.num_requests, prompt_tokens=load.prompt_tokens, output_tokens=(least, most),
            hours=None if cost is None else cost.hours, gpu_hours=None if cost is None else cost.gpu_hours,
        ))  # fmt: skip
    return PowerReport(
        suite=suite.name, gate_recipe=gates.name, model=model, profile=None if profile is None else profile.name,
        level=gates.level, num_draws=NUM_DRAWS, seed=SEED, gates=tuple(gate_powers(power, assumptions)),
        together=together_power(power.all_gates, whole=whole, lasting=lasting, cut=cut),
        required_only=None if power.required is None else together_power(power.required, whole=whole),
        needed=tuple(needed_for(power, gates, assumptions)),
        unknown=power.unknown, taken_to_pass=tuple(kinds), costs=tuple(costs), no_gpu_hours=no_gpu_hours,
        would_raise=advice(power, gates, assumptions), notes=tuple(notes),
        seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ in words
def rows(report: PowerReport) -> list[list[str]]:
    """Of the table under `COLUMNS`: one for each gate, then all together, then the required ones alone."""
    lines = []
    for gate in report.gates:
        reference, candidate = gate.num_replies
        replies = f"{reference}" if reference == candidate else f"{reference} + {candidate}"
        alone = gate.at_margin_candidate_passes
        lines.append([
            f"{gate.task}{'' if gate.required else ' (optional)'}, margin {points_short(gate.max_drop)}", f"{gate.num_items:,}",
            replies if gate.num_looks == 1 else f"up to {replies}", f"{percent_short(gate.discordance)}",
            percent_short(gate.lossless_passes), percent_short(gate.at_margin_passes), percent_short(gate.at_margin_fails),
            "–" if alone is None else percent_short(alone), percent_short(gate.at_twice_fails),
            percent_short(gate.at_twice_candidate_passes), f"{gate.mean_candidate_replies:,.0f}",
        ])  # fmt: skip
    for name, gates in (("together", report.together), ("required alone", report.required_only)):
        if gates is not None:
            with_whole = ", with the whole" if gates.whole else ""
            lines.append([
                f"{name}: {gates.num_gates} gate{'s' if gates.num_gates > 1 else ''}{with_whole}", "", "", "",
                percent_short(gates.lossless_passes), percent_short(gates.at_margin_passes),
                percent_short(gates.at_margin_fails), percent_short(gates.at_margin_passes),
                percent_short(gates.at_twice_fails), percent_short(gates.at_twice_passes), "",
            ])  # fmt: skip
    return lines


def needed_rows(report: PowerReport) -> list[list[str]]:
    """Of the table under `NEEDED_COLUMNS`."""
    return [
        [row.task, f"{points_short(row.loss)} points" if row.loss else "none",
         *("no number" if number is None else f"{number:,}" for number in
           (row.items, row.replies, row.items_together, row.replies_together))]
        for row in report.needed
    ]  # fmt: skip


def sentences(report: PowerReport) -> Iterator[str]:
    """Below the table: the headline, what the columns mean, the assumptions, the cost, and what would raise the power."""
    together, required = report.together, report.required_only
    headline = lossless_passes(
        together.lossless_passes, None if required is None else required.lossless_passes, together.lossless_passes_range
    )
    yield f"{headline[0].upper()}{headline[1:]}."
    yield from _no_copies(report.together)
    yield (
        "In the row of a gate the candidate loses at that task alone, in that of all together at every task; `candidate PASS` "
        "is the overall verdict on it. What is neither PASS nor FAIL is UNDERPOWERED. A gate passes, and fails, a loss of just "
        f"its margin with {percent_short((1 - report.level) / 2)} or less by construction; the overall verdict does what its "
        "column says."
    )
    less = "; with the claim about the whole fewer do" if report.together.whole else ""
    yield f"What is needed is for a PASS of that gate alone, and for one of all gates together, each by itself{less}."
    if report.taken_to_pass:
        yield f"Taken to pass: {', '.join(report.taken_to_pass)}; and every reply to come."
    yield from _assumptions(report)
    if report.unknown:
        yield f"In no chance, for how many items they have is not known here: {', '.join(report.unknown)}."
    yield from _costs(report)
    weakest = min(report.gates, key=lambda gate: gate.lossless_passes)
    if report.would_raise is not None:
        yield f"Weakest: {weakest.task}, {percent_short(weakest.lossless_passes)}. What would raise it: {report.would_raise}."
    elif report.together.lossless_passes < 0.995:
        yield f"Weakest: {weakest.task}, {percent_short(weakest.lossless_passes)}."
    yield from report.notes


def _no_copies(together: TogetherPower) -> Iterator[str]:
    """What the headline's candidate is not: a checkpoint that changes items for good, replies that are cut off."""
    if together.lasting_passes:
        chances = [f"{percent_short(passes)} if {LASTING_WORDS[share]}" for share, passes in together.lasting_passes.items()]
        yield (
            "A checkpoint that loses nothing on balance, and changes for good which items are right, passes with "
            f"{' and '.join(chances)} of what differs is such change."
        )
    if together.cut_passes is not None:
        yield f"With 1 % of the replies cut off on both sides the copy passes with {percent_short(together.cut_passes)}."


LASTING_WORDS = {"0.5": "half", "0.75": "three quarters"}


def _assumptions(report: PowerReport) -> Iterator[str]:
    """Where the numbers of two runs of one model come from."""
    by_source = groupby(sorted(report.gates, key=lambda gate: gate.assumed_from), key=lambda gate: gate.assumed_from)
    sources = {source: [gate.task for gate in gates] for source, gates in by_source}
    for source, tasks in sources.items():
        if source == FROM_TABLE:
            which = "" if len(sources) == 1 else f" of {', '.join(tasks)}"
            yield (
                f"Assumed{which}: `differ` is the share of replies that differ between two runs of one model; "
                "--discordance TASK=SHARE or --run RUN says better."
            )
        else:
            yield f"{source[0].upper()}{source[1:]}: how often replies to {', '.join(tasks)} differ."
    noise = {gate.reply_noise for gate in report.gates}
    if noise == {1.0}:
        yield "All of it is taken for noise of replies, which more replies average out; --reply-noise SHARE says how much is."
    else:
        low, high = percent_short(min(noise)), percent_short(max(noise))
        yield f"{low if low == high else f'{low} to {high}'} of it is noise of replies, which more replies average out."
    error = 50 / report.num_draws**0.5
    yield f"{report.num_draws:,} draws, seed {report.seed}: a standard error of {error:.1f} points at most."


def _costs(report: PowerReport) -> Iterator[str]:
    for cost in report.costs:
        load = Load(cost.num_requests, cost.prompt_tokens, round(cost.output_tokens[0] / LENGTH_RANGE[0]))
        hours = "" if cost.hours is None else f", {span(cost.hours)} h"
        gpu_hours = "" if cost.gpu_hours is None else f", {span(cost.gpu_hours)} GPU-hours"
        yield f"Cost of {cost.label}: {tokens(load)}{hours}{gpu_hours}."
    gpu_hours_each = [cost.gpu_hours for cost in report.costs if cost.gpu_hours is not None]
    if len(gpu_hours_each) == len(report.costs) > 1:
        least, most = (sum(hours[at] for hours in gpu_hours_each) for at in (0, 1))
        yield f"Together {span((least, most))} GPU-hours on {report.profile}, from assumed lengths of replies and a roofline."
    if report.no_gpu_hours is not None:
        yield f"No GPU-hours: {report.no_gpu_hours}."


def little_power(name: str, passes: float, required: float | None) -> str | None:
    """One line for a suite that is more likely to call a lossless candidate UNDERPOWERED than to pass it. None: it is not."""
    if passes >= ENOUGH:
        return None
    but = "" if required is None else f" ({percent_short(required)} if the reference cannot do the optional tasks)"
    return (
        f"suite {name} passes a candidate that lost nothing with {percent_short(passes)} only{but}, else it is UNDERPOWERED: "
        "`assay power` says what would raise it"
    )
