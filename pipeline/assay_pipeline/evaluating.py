"""An evaluation in a run's folder: measure what is missing, judge everything, write report and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.records.measurement import Measurement
from assay.records.run import SuiteIdentity
from assay.records.verdict import GateReport
from assay_pipeline.candidates.of_target import unused_draft_head
from assay_pipeline.gate_choice import ChosenGates, describe_gates, register_gates
from assay_pipeline.interrupted import says_what_is_kept
from assay_pipeline.judging import judge_and_write, load_measurements
from assay_pipeline.run_folders import open_run

if TYPE_CHECKING:
    from assay.recipes.gate import GateRecipe
    from assay.recipes.profile import ProfileRecipe
    from assay.recipes.suite import SuiteRecipe
    from assay_pipeline.candidates.of_target import Comparison
    from assay_pipeline.targets import Target


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
    say: Say = say_nothing,
) -> Judged:
    """Measure what is missing, judge everything, write report and cards.

    gates: registered before the first question; those of an earlier evaluation in this run hold. same_weights: servers that run
    already may have the same. own_texts: candidates write texts of their own, for `assay deployment`; None: if the model's
    recipe names deployment profiles. again: labels that are measured anew.
    """
    from assay_evaluate.run.evaluate import evaluate as run_suite

    about = compared.about.model_copy(update={"suite": SuiteIdentity(name=suite.name, sha256=suite.sha256)})
    with open_run(runs, about, name=name, lock=True, say=say) as run_dir:
        limits = register_gates(gates, run_dir, say)
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
        return Judged(run_dir, measurements, judge_and_write(limits, run_dir, measurements, aim.recipe.published, say))


def little_power(suite: SuiteRecipe, gates: GateRecipe) -> str | None:
    """One line, if the suite is more likely to call a candidate that lost nothing UNDERPOWERED than to pass it."""
    from assay_evaluate.preflight import power_report
    from assay_evaluate.preflight.power import lossless_chances

    if (found := lossless_chances(suite, gates)) is None:
        return None
    all_gates, required = found
    return power_report.little_power(suite.name, all_gates.passes, None if required is None else required.passes)


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
