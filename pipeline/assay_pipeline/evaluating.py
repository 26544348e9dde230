"""An evaluation in a run's folder: measure what is missing, judge everything, write report and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.recipes.suite_files import with_swe_options
from assay.recipes.variant import Variant, parse_variants
from assay.records.measurement import BudgetCheck, Measurement
from assay.records.run import RunRecord, SuiteIdentity
from assay.records.verdict import GateReport
from assay_pipeline.comparison.checkpoints import of_target, unused_draft_head
from assay_pipeline.comparison.planned_run import check_released, problem_before
from assay_pipeline.comparison.sides import given_endpoints, model_of, of_sides, parse_sides, profile_of
from assay_pipeline.comparison.variants import with_variants
from assay_pipeline.gate_choice import ChosenGates, choose_gates, describe_gates, register_gates, selected, suite_for
from assay_pipeline.interrupted import interruptible
from assay_pipeline.judging import judge, load_measurements
from assay_pipeline.profiles import check_folder_served, require_hardware
from assay_pipeline.run_folders import open_run
from assay_pipeline.targets import foreign_note, resolve_source

if TYPE_CHECKING:
    from assay.recipes.gate import GateRecipe
    from assay.recipes.profile import ProfileRecipe
    from assay.recipes.suite import SuiteRecipe
    from assay_pipeline.comparison.checkpoints import Comparison
    from assay_pipeline.targets import Target


@dataclass(frozen=True)
class SweOptions:
    """SWE-bench: which instances (`0:50` of those sorted by id; ids that begin with a match), trajectories per instance."""

    slice: str | None = None
    filter: str | None = None
    num_repeats: int | None = None


NO_SWE_OPTIONS = SweOptions()


@dataclass(frozen=True)
class Judged:
    """A run that was measured and judged; report and cards are written."""

    run_dir: Path
    measurements: list[Measurement]
    gates: GateReport


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured and judged, checked before checkpoints are hashed and servers started.

    target: with the precisions that its recipe has for the profile. compared: the reference first. suite: as the model asks it.
    """

    target: Target
    compared: Comparison
    suite: SuiteRecipe
    profile: ProfileRecipe
    gates: ChosenGates

    @property
    def about(self) -> RunRecord:
        """What its run is about."""
        suite = SuiteIdentity(name=self.suite.name, sha256=self.suite.sha256)
        return self.compared.about.model_copy(update={"suite": suite})


def prepare(
    target: str | None = None,
    *,
    reference: str | None = None,
    candidates: Sequence[str] = (),
    variants: Sequence[str | Variant] = (),
    interpreter: str | None = None,
    api_key_env: str | None = None,
    precisions: list[str] | None = None,
    suite: str | None = None,
    gates: str | None = None,
    profile: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
    same_weights: bool = False,
    own_texts: bool | None = None,
    only_reference: bool = False,
    swe: SweOptions = NO_SWE_OPTIONS,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    tensor_parallel_size: int | None = None,
    say: Say = say_nothing,
) -> Evaluation:
    """What `evaluate` with these words would measure; nothing is asked of a model yet.

    target: a model recipe's name, a checkpoint folder or a hub id, whose precisions are compared; or reference and candidates:
    [LABEL=]DIR, URL, or URL,DIR each. tasks, limit: some tasks of the suite, so many items of each of their parts.
    tensor_parallel_size, interpreter: instead of the profile's. variants: other ways of serving the reference's checkpoint, as
    `--variant` has them. AssayError: these words do not go together, a checkpoint or server is not there, or the profile's GPUs
    cannot hold one.
    """
    endpoints = given_endpoints(profile)
    needs_candidate, has_candidate = reference is not None and not only_reference, bool(candidates or variants)
    is_unasked = bool(candidates) and not needs_candidate
    if (target is None and reference is None) or is_unasked or (needs_candidate and not has_candidate):
        raise AssayError(
            "say what to measure: `assay evaluate TARGET`, or `assay evaluate --reference DIR|URL --candidate DIR|URL`"
        )
    sides = None if reference is None else parse_sides(reference, list(candidates), endpoints, api_key_env)
    given = bool(endpoints) if sides is None else sides[0].endpoint is not None
    if same_weights and not given:
        raise AssayError("--same-weights: is for servers that run already; give their URLs, or leave it out")
    if own_texts and given:
        raise AssayError("--own-texts: is for servers that assay starts; leave it out")
    if tensor_parallel_size is not None and given:
        raise AssayError("--tensor-parallel-size: is for servers that assay starts, and these run already; leave it out")
    resolved = resolve_source(str(target)) if sides is None else model_of(sides, target)
    chosen = profile_of(
        resolved, profile, given=given, problem_on=None if sides else problem_before(resolved, precisions, say),
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    if interpreter is not None:
        chosen = chosen.model_copy(update={"interpreter": interpreter})
    known = {**resolved.recipe.variants, **chosen.variants}
    others = parse_variants([each for each in variants if isinstance(each, str)], known)
    others += [each for each in variants if isinstance(each, Variant)]
    resolved = resolved.on_profile(chosen)
    chosen_suite, suite_note = suite_for(resolved, suite, chosen, gates)
    chosen_suite = with_swe_options(chosen_suite, slice_=swe.slice, filter_=swe.filter, num_repeats=swe.num_repeats)
    limits = choose_gates(resolved, chosen_suite, gates).on_tasks(tasks)
    chosen_suite = selected(chosen_suite, tasks, limit, say)
    if sides is None and not given:
        check_released(resolved, chosen)
    if sides is None:
        own = {label: server for label, server in endpoints.items() if label not in {variant.name for variant in others}}
        alone = only_reference or (bool(others) and len(own) == 1)
        compared = of_target(resolved, runs, name, precisions, own, only_reference=alone, say=say)
    else:
        compared = of_sides(resolved, sides, runs)
    compared = with_variants(compared, others, endpoints, api_key_env, chosen)
    if not given:
        for candidate in compared.candidates:
            assert candidate.checkpoint is not None, "what is served here is a folder"
            profile_of_it = chosen.served_as(candidate.variant)
            if candidate.variant is not None:
                require_hardware(profile_of_it)
            check_folder_served(candidate.checkpoint, candidate.label, resolved.recipe.serving, profile_of_it)
    for candidate in compared.candidates:
        for note in candidate.notes:
            say(f"note: {candidate.label}: {note}")
    if compared.about.foreign_reference is not None:
        say(f"note: {foreign_note(compared.candidates[0].label, compared.about.foreign_reference)}")
    if suite_note is not None:
        say(suite_note)
    return Evaluation(resolved, compared, chosen_suite, chosen, limits)


def evaluate(
    evaluation: Evaluation,
    *,
    runs: Path = Path("runs"),
    name: str | None = None,
    same_weights: bool = False,
    own_texts: bool | None = None,
    again: Sequence[str] = (),
    say: Say = say_nothing,
) -> Judged:
    """Measure what is missing, the reference and every candidate served alike; judge everything, write report and cards.

    evaluation: of `prepare`. Its gates are registered before the first question; those of an earlier evaluation in this run
    hold. same_weights: servers that run already may have the same. own_texts: candidates write texts of their own, for
    `assay deployment`; None: if the model's recipe names deployment profiles. again: labels that are measured anew.
    """
    from assay_evaluate.run.evaluate import evaluate as run_suite
    from assay_evaluate.serving.server import environment_for

    for candidate in evaluation.compared.candidates:  # before a run is begun
        if candidate.endpoint is None:
            environment_for(evaluation.profile.served_as(candidate.variant))
    target, suite, compared = evaluation.target, evaluation.suite, evaluation.compared
    with open_run(runs, evaluation.about, name=name, lock=True, say=say) as run_dir:
        limits = register_gates(evaluation.gates, run_dir, say)
        say(f"results go to {run_dir}")
        say(describe_gates(limits, suite))
        is_new = not any((run_dir / "measurements").glob("*.json"))
        for note in (little_power(suite, limits) if is_new else None, unused_draft_head(target, compared.candidates[0])):
            if note is not None:
                say(note)
        with interruptible(lambda: replies_kept(run_dir)):
            run_suite(
                target.recipe.name, compared.candidates, suite=suite, profile=evaluation.profile, serving=target.recipe.serving,
                run_dir=run_dir, gates=limits, same_weights=same_weights, again=again, on_progress=say,
                own_texts=bool(target.recipe.deployment_profiles) if own_texts is None else own_texts,
            )  # fmt: skip
        measurements = load_measurements(run_dir)
        judged = judge(run_dir, limits, measurements=measurements, published=target.recipe.published, say=say)
        return Judged(run_dir, measurements, judged)


def check_budgets(
    evaluation: Evaluation, *, runs: Path = Path("runs"), name: str | None = None, say: Say = say_nothing
) -> BudgetCheck:
    """Twenty items of every task, of the reference alone: whether the token budgets suffice."""
    from assay_evaluate.run.budget_check import check_budgets as check

    target = evaluation.target
    with (
        open_run(runs, evaluation.about, name=name, lock=True, keep_suite=False, say=say) as run_dir,
        interruptible(lambda: replies_kept(run_dir)),
    ):
        return check(
            target.recipe.name, evaluation.compared.candidates[0], suite=evaluation.suite, gates=evaluation.gates.recipe,
            profile=evaluation.profile, serving=target.recipe.serving, run_dir=run_dir, on_progress=say,
        )  # fmt: skip


def little_power(suite: SuiteRecipe, gates: GateRecipe) -> str | None:
    """One line, if the suite is more likely to call a candidate that lost nothing UNDERPOWERED than to pass it."""
    from assay_evaluate.preflight import power_report
    from assay_evaluate.preflight.power import lossless_chances

    if (chances := lossless_chances(suite, gates)) is None:
        return None
    all_gates, required = chances
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
