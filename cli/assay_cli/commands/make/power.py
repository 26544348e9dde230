"""The `assay power` command."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import one_line, shown
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.model import Sampling, Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay_cli.options import GatesOption, JsonOption, ProfileOption, RunsOption, completes, named, recipe, several
from assay_cli.terminal import emit, escape, print_rows, results, say

if TYPE_CHECKING:
    from assay_evaluate.preflight.power_designs import Assumptions
    from assay_evaluate.roofline.weights import ServedWeights
    from assay_pipeline.comparison.planned_run import PlannedRun

SAMPLED = Sampling(temperature=1.0)
"""How tasks with `sampling: model` are asked where no model is named; only that they are sampled counts here."""


@dataclass(frozen=True)
class _Asked:
    """What is to be foretold. weights: label -> what is served, the reference first; None: not known."""

    suite: SuiteRecipe
    gates: GateRecipe
    serving: Serving
    weights: dict[str, ServedWeights | None]
    model: str | None = None
    profile: ProfileRecipe | None = None
    own_texts: bool = False
    why_not: str | None = None
    """No GPU-hours, and what would give them."""
    notes: tuple[str, ...] = ()


def power(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="TARGET", autocompletion=completes("models"),
            help="Ask as this model's recipe says, and count GPU-hours: a recipe, a checkpoint folder, or a Hugging Face id.",
        ),
    ] = None,
    gates: GatesOption = None,
    profile: ProfileOption = None,
    discordance: Annotated[
        list[str] | None,
        typer.Option(
            "--discordance", metavar="TASK=SHARE,...", callback=several,
            help="Share of replies that differ between two runs of one model (0.12), instead of what is assumed.",
        ),
    ] = None,
    reply_noise: Annotated[
        float | None,
        typer.Option(
            "--reply-noise", metavar="SHARE",
            help="Share of that which other replies would not show again. Default: 1, all of it.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Take both from an earlier run, for tasks of the same names.")
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Predict whether a suite can reach a verdict (power analysis): would a lossless candidate pass, a lossy one fail?

    From the suite, its gates and what is assumed of two runs of one model; nothing is served. Also what it costs, and what
    would raise it.
    """
    from assay_evaluate.preflight import power_report
    from assay_evaluate.preflight.known_tasks import UNKNOWN_COUNT
    from assay_evaluate.preflight.power import NO_SCORE_GATE, suite_power

    started = time.monotonic()
    asked = _of_suite(suite, gates, profile) if model is None else _of_model(model, suite, gates, profile)
    assumptions = _assumptions(asked.suite, discordance, reply_noise, run, runs)
    try:
        chances = suite_power(asked.suite, asked.gates, assumptions)
    except ValueError:
        raise AssayError(f"gates {asked.gates.name}: {NO_SCORE_GATE}; write a score gate, or name other --gates") from None
    if chances is None:
        gated = [gate.task for gate in asked.gates.gates if isinstance(gate, ScoreGate)]
        raise AssayError(
            f"suite {asked.suite.name}: {', '.join(gated)}: {UNKNOWN_COUNT}, so no chance can be told; gate tasks that are "
            "generated, or that the shipped suites ask"
        )
    report = power_report.report_of(
        chances, asked.suite, asked.gates, assumptions, serving=asked.serving, weights=asked.weights, profile=asked.profile,
        own_texts=asked.own_texts, no_gpu_hours=asked.why_not, model=asked.model, notes=asked.notes,
        started=started,
    )  # fmt: skip
    if as_json:
        emit(report)
        return
    out = results()
    of_model = "" if report.model is None else f", asked of {report.model}"
    out.print(escape(f"power of suite {report.suite} under gates {report.gate_recipe}{of_model}"))
    print_rows(power_report.COLUMNS, [[escape(cell) for cell in row] for row in power_report.rows(report)], out)
    print_rows(power_report.NEEDED_COLUMNS, [[escape(cell) for cell in row] for row in power_report.needed_rows(report)], out)
    for line in power_report.sentences(report):
        out.print(escape(line))


# ------------------------------------------------------------------------------------------------ what is asked
def _of_suite(suite: str, gates: str | None, profile: str | None) -> _Asked:
    """A suite by itself. AssayError: a profile was named, and nothing that it would serve."""
    from assay_evaluate.preflight.power_report import HEADERS_NEEDED
    from assay_pipeline.gate_choice import gates_of_suite, load_gates

    if profile is not None:
        raise AssayError(f"--profile {shown(profile)}: GPU-hours need --model, too; name it, or leave --profile out")
    recipe = load_recipe(SuiteRecipe, suite)
    asked = as_model_asks(recipe, SAMPLED)
    limits = load_gates(gates or gates_of_suite(recipe), asked)
    sampled = any(task.sampling == "model" for task in recipe.tasks)
    notes = ("Replies are taken to be sampled and short; --model asks as its recipe says.",) if sampled else ()
    return _Asked(asked, limits, Serving(), {"reference": None, "candidate": None}, why_not=HEADERS_NEEDED, notes=notes)


def _of_model(model: str, suite: str, gates: str | None, profile: str | None) -> _Asked:
    """A suite as a model is asked; with the weights of every checkpoint of its run where headers can be read."""
    from assay_pipeline.comparison.planned_run import planned_run
    from assay_pipeline.gate_choice import choose_gates, suite_for
    from assay_pipeline.preflight import counted, served_weights_of
    from assay_pipeline.targets import resolve_target

    target = resolve_target(model)
    chosen = load_recipe(ProfileRecipe, profile or target.recipe.profiles[0])
    asked, _ = suite_for(target, suite, chosen, gates)
    limits = choose_gates(target, asked, gates).recipe
    own_texts = bool(target.recipe.deployment_profiles)
    try:
        run = planned_run(model, suite=suite, gates=gates, profile=profile, say=say)
    except AssayError as error:
        reason = f"the headers of its weights cannot be read ({one_line(str(error).partition(chr(10))[0])})"
        weights: dict[str, ServedWeights | None] = {"reference": None, **dict.fromkeys(target.recipe.precisions)}
        return _Asked(asked, limits, target.recipe.serving, weights, target.recipe.name, chosen, own_texts, reason)
    weights = served_weights_of(run)
    return _Asked(
        counted(run), limits, target.recipe.serving, weights, target.recipe.name, run.profile, own_texts, _no_rates(run)
    )


def _no_rates(run: PlannedRun) -> str | None:
    """Why a profile gives no GPU-hours."""
    if run.profile.endpoints:
        return f"the servers of profile {run.profile.name} run already and have a speed of their own; name another --profile"
    if run.profile.hardware.device == "cpu":
        return f"profile {run.profile.name} has no GPU; --profile names one that has"
    return None


# ------------------------------------------------------------------------------------------------ what is assumed
def _assumptions(
    suite: SuiteRecipe, discordance: list[str] | None, reply_noise: float | None, run: str | None, runs: Path
) -> Assumptions:
    """AssayError: an unknown task, or a share that is none."""
    from assay_evaluate.preflight.power_designs import LARGEST_DISCORDANCE, Assumptions, measured
    from assay_pipeline.judging import load_measurements
    from assay_pipeline.run_folders import find_run

    assumptions = Assumptions()
    if run is not None:
        folder = find_run(run, runs)
        assumptions = measured(load_measurements(folder), folder.name)
    if reply_noise is not None and not 0 <= reply_noise <= 1:
        raise AssayError(f"--reply-noise {reply_noise:g}: must be a share from 0 to 1")
    given = {}
    for text in discordance or ():
        task, _, value = text.partition("=")
        given[_task(suite, task)] = _share(text, value, LARGEST_DISCORDANCE)
    return Assumptions(
        {**assumptions.discordance, **given},
        {} if reply_noise is not None else {name: shares for name, shares in assumptions.noise.items() if name not in given},
        {**assumptions.sources, **dict.fromkeys(given, "given")},
        1.0 if reply_noise is None else reply_noise,
        assumptions.losses,
    )


def _task(suite: SuiteRecipe, name: str) -> str:
    names: Collection[str] = [task.name for task in suite.tasks]
    if name not in names:
        hint = did_you_mean(name, names)
        raise AssayError(f"--discordance {shown(name)}: no task of suite {suite.name}; {hint}tasks: {', '.join(names)}")
    return name


def _share(text: str, value: str, most: float) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= most:
        raise AssayError(
            f"--discordance {shown(text)}: say TASK=SHARE, with a share from 0 to {most:g}, as in gpqa-diamond=0.12"
        )
    return share
