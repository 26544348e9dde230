"""What `quantize`, `evaluate` and `run` do in a run's folder: make the checkpoints, measure and judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay_pipeline.calibrating.in_run import file_in_run
from assay_pipeline.candidates.of_target import unused_draft_head
from assay_pipeline.deploying.automatic import check_texts_of_mix, choose
from assay_pipeline.gate_choice import ChosenGates, describe_gates, register_gates
from assay_cli.interrupted import says_what_is_kept
from assay_pipeline.run_folders import choose_run, open_run
from assay_pipeline.stages import check_plans_served, choices_of, judge_and_write, load_measurements, plan_for, quantize_one
from assay_cli.terminal import say
from assay.errors import AssayError
from assay.recipes.model import Automatic
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import RunRecord, SourceData, SuiteIdentity
from assay.records.verdict import GateReport
from assay.records.verification import Verification

if TYPE_CHECKING:
    from rich.console import Console

    from assay_pipeline.candidates.of_target import Comparison
    from assay_cli.options import QuantizeOptions
    from assay_pipeline.targets import Target
    from assay.recipes.gate import GateRecipe
    from assay.recipes.profile import ProfileRecipe
    from assay.recipes.suite import SuiteRecipe
    from assay_quantize.checkpoint.checkpoint import Checkpoint


def quantize_in_run(
    aim: Target,
    checkpoint: Checkpoint,
    wanted: Sequence[Plan | Automatic],
    options: QuantizeOptions,
    runs: Path,
    name: str | None,
    out: Console,
    profile: ProfileRecipe | None = None,
) -> list[Verification]:
    """Every precision made and verified in the run of its source: RUN/PRECISION/checkpoint.

    What a precision needs is made before it, and kept in the run: a calibration file, the recipe of `auto-BUDGET`. checkpoint:
    the source, by its headers. profile: whose GPUs must be able to serve what is chosen.
    """
    made_of = [one.name if isinstance(one, Automatic) else one.precision for one in wanted]
    choices = choices_of(aim, made_of, all_of_recipe=set(aim.recipe.precisions) <= set(made_of))
    found: list[Verification] = []
    source = SourceData(location=checkpoint.location, revision=checkpoint.revision, files=dict(checkpoint.data))
    about = RunRecord(model=aim.recipe.name, source=source, choices=choices)
    check_texts_of_mix(aim, wanted, choose_run(runs, about, name)[0])
    with open_run(runs, about, name=name) as run_dir:
        for one in wanted:
            plan = _chosen(aim, checkpoint, one, run_dir, profile) if isinstance(one, Automatic) else one
            plan, file = file_in_run(aim, plan, run_dir, options)
            folder = run_dir / plan.precision / "checkpoint"
            found.append(quantize_one(aim, plan, folder, replace(options, importance=file), out, in_run=True))
    return found


def _chosen(
    aim: Target, checkpoint: Checkpoint, wanted: Automatic, run_dir: Path, profile: ProfileRecipe | None
) -> Plan:  # fmt: skip
    plan = plan_for(aim, checkpoint, choose(aim, wanted, run_dir))
    if profile is not None:
        check_plans_served([plan], aim, profile)
    return plan


@dataclass(frozen=True)
class Judged:
    """A run that was measured and judged; report and cards are written."""

    run_dir: Path
    measurements: list[Measurement]
    gates: GateReport


def evaluate_in_run(
    aim: Target,
    compared: Comparison,
    suite: SuiteRecipe,
    profile: ProfileRecipe,
    gates: ChosenGates,
    runs: Path,
    name: str | None,
    *,
    same_weights: bool = False,
    own_texts: bool | None = None,
    again: Sequence[str] = (),
) -> Judged:
    """Measure what is missing, judge everything, write report and cards.

    gates: registered before the first question; those of an earlier evaluation in this run hold. same_weights: servers that run
    already may have the same. own_texts: candidates write texts of their own, for `assay deployment`; None: if the model's
    recipe names deployment profiles. again: labels that are measured anew.
    """
    from assay_evaluate.run.evaluate import evaluate as run_suite

    about = compared.about.model_copy(update={"suite": SuiteIdentity(name=suite.name, sha256=suite.sha256)})
    with open_run(runs, about, name=name, lock=True) as run_dir:
        limits = register_gates(gates, run_dir)
        say(describe_gates(limits, suite))
        if not any((run_dir / "measurements").glob("*.json")) and (note := little_power(suite, limits)) is not None:
            say(note)
        if (note := unused_draft_head(aim, compared.candidates[0])) is not None:
            say(note)
        with says_what_is_kept(lambda: replies_kept(run_dir)):
            run_suite(
                aim.recipe.name,
                compared.candidates,
                suite=suite,
                profile=profile,
                serving=aim.recipe.serving,
                run_dir=run_dir,
                gates=limits,
                same_weights=same_weights,
                own_texts=bool(aim.recipe.deployment_profiles) if own_texts is None else own_texts,
                again=again,
                on_progress=say,
            )
        measurements = load_measurements(run_dir)
        return Judged(run_dir, measurements, judge_and_write(limits, run_dir, measurements, aim.recipe.published))


def little_power(suite: SuiteRecipe, gates: GateRecipe) -> str | None:
    """One line, if the suite is more likely to call a candidate that lost nothing UNDERPOWERED than to pass it."""
    from assay_evaluate.preflight import power_report
    from assay_evaluate.preflight.power import lossless_chances

    if (found := lossless_chances(suite, gates)) is None:
        return None
    all_gates, required = found
    return power_report.little_power(suite.name, all_gates.passes, None if required is None else required.passes)


def passed(gates: GateReport) -> bool:
    """Whether a command that judges exits 0: every candidate is PASS."""
    return all(status == "PASS" for status in gates.overall.values())


def replies_kept(run_dir: Path) -> str:
    """What an interrupted evaluation leaves for the next."""
    from assay_evaluate.client.journal import Journal

    measured = sorted(path.stem for path in (run_dir / "measurements").glob("*.json"))
    try:
        with Journal(run_dir / "journal.db") as journal:
            num_replies = journal.count("answered")
    except AssayError:
        num_replies = 0
    done = f"; measured: {', '.join(measured)}" if measured else ""
    return f"{num_replies:,} replies are kept in {run_dir / 'journal.db'}{done}; the same command asks only what is missing"
