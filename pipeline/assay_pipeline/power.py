"""`assay power`: whether a suite can reach a verdict, by its gates and what is assumed of two runs of one model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, did_you_mean
from assay.foreign_text import one_line, shown
from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.model import Sampling, Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay.records.screening import load_screening
from assay_pipeline.comparison.planned_run import planned_run
from assay_pipeline.gate_choice import choose_gates, gates_of_suite, load_gates, suite_for
from assay_pipeline.judging import load_measurements
from assay_pipeline.preflight import counted, served_weights_of
from assay_pipeline.run_folders import find_run
from assay_pipeline.targets import resolve_target

if TYPE_CHECKING:
    from assay.records.preflight.power import PowerReport, ScreeningPower
    from assay_evaluate.preflight.power_designs import Assumptions
    from assay_evaluate.roofline.weights import ServedWeights

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


def predict_power(
    suite: str,
    *,
    model: str | None = None,
    gates: str | None = None,
    profile: str | None = None,
    discordance: Sequence[str] = (),
    reply_noise: float | None = None,
    run: str | None = None,
    runs: Path = Path("runs"),
    say: Say = say_nothing,
) -> PowerReport:
    """Chances that a lossless candidate passes and a lossy one fails; nothing is served.

    model: asked as its recipe says, with GPU-hours. discordance: TASK=SHARE of replies that differ between two runs of one
    model, reply_noise: share of that which other replies would not show again; run: both from an earlier run. AssayError: these
    words do not go together, or no chance can be told.
    """
    from assay_evaluate.preflight import power_report
    from assay_evaluate.preflight.known_tasks import UNKNOWN_COUNT
    from assay_evaluate.preflight.power import NO_SCORE_GATE, suite_power

    started = time.monotonic()
    asked = _of_suite(suite, gates, profile) if model is None else _of_model(model, suite, gates, profile, say)
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
    return power_report.report_of(
        chances, asked.suite, asked.gates, assumptions, serving=asked.serving, weights=asked.weights, profile=asked.profile,
        own_texts=asked.own_texts, no_gpu_hours=asked.why_not, model=asked.model, notes=asked.notes,
        started=started,
    )  # fmt: skip


def predict_screening(place: Path, *, limit: float | None = None, tokens: Sequence[int] = ()) -> ScreeningPower:
    """What more tokens would show of the candidates of a screening. place: its record or folder; limit: nats, instead of those
    by bits; tokens: numbers of them. AssayError: no such record, or it tells nothing of that many."""
    from assay_pipeline.comparison.screen_power import screening_power

    return screening_power(load_screening(place), limit=limit, tokens=tokens)


# ------------------------------------------------------------------------------------------------ what is asked
def _of_suite(suite: str, gates: str | None, profile: str | None) -> _Asked:
    """A suite by itself. AssayError: a profile was named, and nothing that it would serve."""
    from assay_evaluate.preflight.power_report import HEADERS_NEEDED

    if profile is not None:
        raise AssayError(f"--profile {shown(profile)}: GPU-hours need --model, too; name it, or leave --profile out")
    recipe = load_recipe(SuiteRecipe, suite)
    asked = as_model_asks(recipe, SAMPLED)
    limits = load_gates(gates or gates_of_suite(recipe), asked)
    sampled = any(task.sampling == "model" for task in recipe.tasks)
    notes = ("Replies are taken to be sampled and short; --model asks as its recipe says.",) if sampled else ()
    return _Asked(asked, limits, Serving(), {"reference": None, "candidate": None}, why_not=HEADERS_NEEDED, notes=notes)


def _of_model(model: str, suite: str, gates: str | None, profile: str | None, say: Say) -> _Asked:
    """A suite as a model is asked; with the weights of every checkpoint of its run where headers can be read."""
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
    no_rates = None
    if run.profile.endpoints:
        no_rates = (
            f"the servers of profile {run.profile.name} run already and have a speed of their own; name another --profile"
        )
    elif run.profile.hardware.device == "cpu":
        no_rates = f"profile {run.profile.name} has no GPU; --profile names one that has"
    weights = served_weights_of(run)
    return _Asked(counted(run), limits, target.recipe.serving, weights, target.recipe.name, run.profile, own_texts, no_rates)


# ------------------------------------------------------------------------------------------------ what is assumed
def _assumptions(
    suite: SuiteRecipe, discordance: Sequence[str], reply_noise: float | None, run: str | None, runs: Path
) -> Assumptions:
    """AssayError: an unknown task, or a share that is none."""
    from assay_evaluate.preflight.power_designs import LARGEST_DISCORDANCE, Assumptions, measured

    assumptions = Assumptions()
    if run is not None:
        folder = find_run(run, runs)
        assumptions = measured(load_measurements(folder), folder.name)
    if reply_noise is not None and not 0 <= reply_noise <= 1:
        raise AssayError(f"--reply-noise {reply_noise:g}: must be a share from 0 to 1")
    given = {}
    names = [task.name for task in suite.tasks]
    for text in discordance:
        task, _, value = text.partition("=")
        if task not in names:
            hint = did_you_mean(task, names)
            raise AssayError(f"--discordance {shown(task)}: no task of suite {suite.name}; {hint}tasks: {', '.join(names)}")
        try:
            given[task] = float(value)
        except ValueError:
            given[task] = -1.0
        if not 0 <= given[task] <= LARGEST_DISCORDANCE:
            raise AssayError(
                f"--discordance {shown(text)}: say TASK=SHARE, with a share from 0 to {LARGEST_DISCORDANCE:g}, as in "
                "gpqa-diamond=0.12"
            )
    return Assumptions(
        {**assumptions.discordance, **given},
        {} if reply_noise is not None else {name: shares for name, shares in assumptions.noise.items() if name not in given},
        {**assumptions.sources, **dict.fromkeys(given, "given")},
        1.0 if reply_noise is None else reply_noise,
        assumptions.losses,
    )
