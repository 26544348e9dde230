"""From a TARGET and options to the inputs of a stage, and from its records to what is written of them.

The layout of a run's folder is known here: RUN/run.json, RUN/PRECISION/{plan.json, verify.json, checkpoint/},
RUN/measurements/*.json, RUN/gates.json, RUN/report/. Stages are imported inside the functions: `assay --help` needs neither
torch nor lm-eval.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.cli.calibrating.layers import calibrated_before, calibrated_layers, keep_calibration
from assay.cli.gate_choice import registered_gates
from assay.cli.interrupted import says_what_is_kept
from assay.cli.judging.attempts import earlier_attempts, note_attempts
from assay.cli.options import QuantizeOptions, TextOptions
from assay.cli.terminal import console, escape, print_verification, say
from assay.errors import AssayError, PlanError
from assay.foreign_text import shown
from assay.quantities import size
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Automatic, ModelRecipe, PublishedScore, Serving, automatic_of, is_automatic
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import BudgetCheck, Measurement
from assay.records.plan import Plan
from assay.records.probe import load_probes
from assay.records.run import CARD, PLAN_INSIDE, VERIFICATION_INSIDE, source_of
from assay.records.verdict import GateReport
from assay.records.verification import Verification, is_as_verified

if TYPE_CHECKING:
    from rich.console import Console

    from assay.cli.targets import Target
    from assay_evaluate.run.candidate import Candidate
    from assay_quantize.checkpoint.checkpoint import Checkpoint
    from assay_quantize.engine.quantize import Runner
    from assay_quantize.verify.finished import FinishedShards
    from assay_reports.card import Cards
    from assay_reports.schema import Report


def precisions_for(
    aim: Target, one: str | None, several: list[str] | None, *, with_reference: bool
) -> dict[str, PrecisionRecipe | Automatic]:  # fmt: skip
    """What was named (a recipe's name, or its file) -> recipe, the reference's first: nothing can be measured without it.

    `auto-BUDGET` has no recipe before a run chooses one. A recipe that is named twice counts once. PlanError: two different
    recipes have one name; it is that of the checkpoint.
    """
    if one is not None and several is not None:
        raise PlanError("say --precision or --precisions, not both")
    reference = aim.recipe.reference.precision
    first = [reference] if with_reference and reference is not None else []
    named = [*first, *([one] if one else several or aim.recipe.precisions)]
    for why in choices_of(aim, first if one or several else named, all_of_recipe=not (one or several)):
        say(f"note: {why}")
    found: dict[str, tuple[str, PrecisionRecipe | Automatic]] = {}
    for text in named:
        recipe = automatic_of(text) if is_automatic(text) else load_recipe(PrecisionRecipe, text)
        before, same_name = found.setdefault(recipe.name, (text, recipe))
        if _meaning(same_name) != _meaning(recipe):
            raise PlanError(
                f"{before} and {text} are different recipes, both called {recipe.name}, which is also the name of the "
                "checkpoint; give one of them another name, and its file too"
            )
    return dict(found.values())


def _meaning(wanted: PrecisionRecipe | Automatic) -> object:
    return wanted if isinstance(wanted, Automatic) else wanted.sha256


def choices_of(aim: Target, precisions: Collection[str], *, all_of_recipe: bool) -> tuple[str, ...]:
    """Why these precisions were chosen, where shapes forbid others. all_of_recipe: and why others are left out."""
    return tuple(why for taken, why in aim.choices if taken in precisions or (taken is None and all_of_recipe))


def source_for(aim: Target) -> Checkpoint:
    """The source by its headers; its notes are said."""
    from assay.cli.targets import open_source

    checkpoint = open_source(aim)
    for note in checkpoint.notes:
        say(f"note: {note}")
    return checkpoint


def plans_for(aim: Target, checkpoint: Checkpoint, recipes: Iterable[PrecisionRecipe | Automatic]) -> list[Plan | Automatic]:
    """The plan of each precision that is there. Of what a run chooses, that it could be made: its base is planned."""
    found: list[Plan | Automatic] = []
    for recipe in recipes:
        if isinstance(recipe, Automatic):
            stand_in(aim, checkpoint, recipe)
            found.append(recipe)
        else:
            found.append(plan_for(aim, checkpoint, recipe))
    return found


def stand_in(aim: Target, checkpoint: Checkpoint, wanted: Automatic) -> Plan:
    """For a precision of which nothing is chosen yet: its base."""
    return plan_for(aim, checkpoint, automatic_base(aim)).model_copy(update={"precision": wanted.name})


def automatic_base(aim: Target) -> PrecisionRecipe:
    """What a run's choices extend: w4a16 unless the model's recipe names another. PlanError: no part is measured so."""
    base = load_recipe(PrecisionRecipe, aim.recipe.automatic.base or "w4a16")
    if base.needs_calibration:
        problem = "has scales that come from a file of `assay calibrate`, with which no part is measured"
    elif base.calibration != "none" and base.calibration.method != "gptq":
        problem = "parts are measured data-free or by gptq"
    else:
        return base
    raise PlanError(f"automatic.base {base.name}: {problem}; take w4a16 or w4a16-gptq")


def plan_for(aim: Target, checkpoint: Checkpoint, recipe: PrecisionRecipe) -> Plan:
    """The plan of one precision. PlanError: what does not fit, and the precision that would, where shapes are the problem."""
    from assay_quantize.plan.planner import make_plan, suggesting_fit

    try:
        return make_plan(checkpoint, recipe, model=aim.recipe.name, family=aim.recipe.family)
    except PlanError as problem:
        raise suggesting_fit(problem, checkpoint, recipe.name) from None


def quantize_options(
    device: str,
    runner: str,
    workers: int | None,
    memory: str | None,
    importance: Path | None = None,
    stream_from: str | None = None,
    *,
    allow_not_finite: bool = False,
    text: TextOptions | None = None,
) -> QuantizeOptions:
    """The command line's options, checked."""
    from assay_quantize.engine.budget import parse_memory

    if runner == "ray" and workers is not None:
        from assay_quantize.remote.ray_runner import CPUS_PER_TASK

        if workers > CPUS_PER_TASK:
            raise PlanError(
                f"--workers {workers}: with --runner ray it is the number of threads that make one shard, "
                f"{CPUS_PER_TASK} at most; the number of shards at once follows from the cluster's cores"
            )
    memory_bytes = None if memory is None else parse_memory(memory)
    return QuantizeOptions(
        device, runner, workers, memory_bytes, importance, allow_not_finite, stream_from, text or TextOptions()
    )


def quantize_one(
    aim: Target, made: Plan, folder: Path, options: QuantizeOptions, out: Console, *, in_run: bool
) -> Verification:  # fmt: skip
    """Make one checkpoint and verify it. Plan and verification go beside it in a run, else into its own folder.

    options: with the calibration file that this plan takes; None where it takes none.
    They are written after it: a plan that is refused leaves what is there as it is.
    """
    from assay.cli.progress import ShardProgress
    from assay_quantize.engine.quantize import check_folder, is_complete
    from assay_quantize.engine.quantize import quantize as run_engine
    from assay_reports.card import write_first_card

    plan_path = folder.parent / "plan.json" if in_run else folder / PLAN_INSIDE
    record_path = folder.parent / "verify.json" if in_run else folder / VERIFICATION_INSIDE
    made = calibrated_before(aim, made, folder, options)
    if not (complete := is_complete(made, folder)):
        check_folder(made, folder)  # before anything of the source is downloaded
    if complete and plan_path.is_file() and record_path.is_file():
        previous = Verification.load(record_path)
        if previous.passed and is_as_verified(folder, previous):
            if not (folder / CARD).is_file():  # killed before it was written
                write_first_card(folder)
            out.print(escape(f"{made.precision:10} done before and verified: {folder}"))
            return previous
    with ExitStack() as opened:
        with (
            says_what_is_kept(lambda: _kept(made, folder)),
            _source_of(aim, made, folder, options) as (source, runner),
        ):
            made, calibrated = calibrated_layers(aim, made, source, folder, options)
            with ShardProgress(console, made) as progress:
                finished = opened.enter_context(_checking_meanwhile(made, folder, source, options))
                manifest = run_engine(
                    made,
                    source,
                    folder,
                    workers=options.workers,
                    memory_bytes=options.memory_bytes,
                    runner=runner,
                    runs_elsewhere=options.runner == "ray" and options.stream_from is None,
                    importance=options.importance,
                    calibrated=calibrated,
                    allow_not_finite=options.allow_not_finite,
                    on_shard=None if finished is None else finished.add,
                    on_slab=None if finished is None else finished.judge,
                    on_progress=progress,
                )
        if calibrated is not None:
            shutil.rmtree(calibrated)
        made.save(plan_path)
        keep_calibration(made, options.importance, folder.parent if in_run else None, folder)
        sizes = f"{size(manifest.bytes_in)} -> {size(manifest.bytes_out)} in {manifest.seconds:.0f} s"
        out.print(escape(f"{made.precision:10} {sizes}: {folder}"))
        for name, count in (found for shard in manifest.shards for found in shard.not_finite.items()):
            say(f"note: {name}: {count} values are NaN or infinite, copied as they are")
        there = None if options.stream_from else source
        result = verify_one(folder, there, importance=options.importance, finished=finished)
    result.save(record_path)
    print_verification(result, out, indent=" " * 11)
    write_first_card(folder)
    return result


MEMORY_TO_CHECK_MEANWHILE_BYTES = 1 << 30
"""Of a smaller `--memory` nothing is left for a second set of slabs, and torch, beside the engine's."""


@contextmanager
def _checking_meanwhile(
    made: Plan, folder: Path, source: Path, options: QuantizeOptions
) -> Iterator[FinishedShards | None]:  # fmt: skip
    """Who checks finished shards while others are made; None: they are checked after the last one."""
    bound = options.memory_bytes
    is_small = bound is not None and bound < MEMORY_TO_CHECK_MEANWHILE_BYTES
    if options.stream_from is not None or options.runner != "local" or is_small:
        yield None
        return
    from assay_quantize.kernels.devices import default_workers
    from assay_quantize.verify.finished import FinishedShards

    workers = options.workers or default_workers()
    with FinishedShards(made, folder, source, workers=workers, importance=options.importance) as finished:
        yield finished


def _kept(made: Plan, folder: Path) -> str:
    """What an interrupted quantization leaves for the next."""
    from assay_quantize.engine.journal import num_finished

    num_shards = len({tensor.shard_out for tensor in made.tensors if tensor.shard_out is not None})
    return f"{folder}: {num_finished(folder)} of {num_shards} shards are finished and kept; the same command makes the rest"


@contextmanager
def _source_of(aim: Target, made: Plan, folder: Path, options: QuantizeOptions) -> Iterator[tuple[Path, Runner]]:
    """The folder the engine reads, and who makes the shards."""
    if options.stream_from is None:
        from assay.cli.targets import local_checkpoint

        yield local_checkpoint(aim.location, source_of(made)), _runner(options.runner)
        return
    from assay_quantize.remote.hub_stream import HubStream

    folder.parent.mkdir(parents=True, exist_ok=True)
    with HubStream(made, folder.with_name(f".{folder.name}.source"), report=say) as stream:
        if options.runner == "ray":
            from assay_quantize.remote.ray_runner import from_hub

            yield stream.folder, from_hub(stream)
        else:
            yield stream.folder, stream.run
        stream.remove()


def _runner(name: str) -> Runner:
    """Who makes the shards of a source that lies in a folder."""
    if name == "ray":
        from assay_quantize.remote.ray_runner import run_ray

        return run_ray
    from assay_quantize.engine.local_runner import run_local

    return run_local


def verify_one(folder: Path, source: Path | None, **options: Any) -> Verification:
    """options: others of `verify`."""
    from assay.cli.progress import ByteProgress
    from assay_quantize.verify.verify import num_bytes_of, verify

    with ByteProgress(console, "verifying", num_bytes_of(folder)) as progress:
        return verify(folder, source=source, on_progress=progress, **options)


def profile_for(
    aim: Target, wanted: str | None, problem_on: Callable[[ProfileRecipe], str | None] | None = None
) -> ProfileRecipe:
    """The profile that was named, if this machine has what it needs; else the first of the recipe's that fits.

    problem_on: why a profile cannot serve what is to be served; None: it can. AssayError: it has not, or the profile names
    servers that run already.
    """
    from assay_evaluate.serving.hardware import choose_profile

    return choose_profile(aim.recipe, problem_on) if wanted is None else profile_named(wanted)


def profile_named(wanted: str) -> ProfileRecipe:
    """The profile of that name. AssayError: this machine has not what it needs, or it names servers that run already."""
    profile = load_recipe(ProfileRecipe, wanted)
    if profile.endpoints:
        raise AssayError(
            f"profile {profile.name}: its `endpoints` run already and are for `assay evaluate`; give the server's URL itself, "
            "or a profile without `endpoints`"
        )
    require_hardware(profile)
    return profile


def require_hardware(profile: ProfileRecipe) -> None:
    """AssayError: the profile's GPUs are not here. Servers that run already have theirs."""
    from assay_evaluate.serving.hardware import describe_hardware, find_gpus, fits

    if not profile.endpoints and not fits(profile.hardware, find_gpus()):
        needed = f"{profile.hardware.num_gpus}x {profile.hardware.gpu or 'NVIDIA GPU'}"
        raise AssayError(
            f"profile {profile.name} needs {needed}, this machine has {describe_hardware().get('gpus', 'no GPU')}; "
            "leave --profile out to have one chosen, or write one under recipes/profiles/"
        )


def check_budgets_of(
    aim: Target, reference: Candidate, suite: SuiteRecipe, gates: GateRecipe, profile: ProfileRecipe, run_dir: Path,
    out: Console,
) -> BudgetCheck:  # fmt: skip
    """A few items of every task on the reference; one line a task, then what to do."""
    from assay_evaluate.run.budget_check import check_budgets

    checked = check_budgets(
        aim.recipe.name,
        reference,
        suite=suite,
        gates=gates,
        profile=profile,
        serving=aim.recipe.serving,
        run_dir=run_dir,
        on_progress=say,
    )
    for task in checked.tasks:
        mark = "[green]ok   [/]" if task.suffices else "[red]short[/]" if task.is_required else "[yellow]note [/]"
        excuse = "" if task.suffices or task.is_required else " (its gate is not required: this fails nothing)"
        out.print(f"{mark} {task.task:16} {escape(task.detail)}{excuse}")
    return checked


def load_measurements(run_dir: Path) -> list[Measurement]:
    found = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    if not found:
        raise AssayError(f"{run_dir}: nothing was measured yet; run `assay evaluate` first")
    return found


def judge_and_write(
    gates: GateRecipe,
    run_dir: Path,
    measurements: list[Measurement],
    published: Mapping[str, PublishedScore] | None = None,
) -> GateReport:
    """Verdicts, then everything that is written from records: gates.json, report, cards.

    gates: as they apply to the run's suite. published: scores of the model's recipe; None: those that the run was judged with
    before, or of the shipped recipe of its model.
    """
    from assay_evaluate.verdicts.gates import judge

    earlier = earlier_attempts(run_dir, measurements)
    judged = judge(
        measurements,
        gates,
        model=measurements[0].model,
        registered=registered_gates(run_dir),
        probes=load_probes(run_dir),
        published=_published_before(run_dir, measurements[0].model) if published is None else published,
        earlier=earlier,
    )
    judged.save(run_dir / "gates.json")
    with suppress(OSError):  # a folder of runs that is read-only keeps no list; the verdict stands
        note_attempts(run_dir, measurements, judged)
    write_again(run_dir)
    return judged


def write_again(run_dir: Path) -> None:
    """Report and cards, from the records that are there. AssayError, after all others are written, for a card that the disk did
    not take: the one that lies there may say what is no longer true. A folder that is read-only keeps its card."""
    from assay_reports.report import write_report

    write_report(run_dir)
    cards = write_cards(run_dir)
    if cards.failed:
        raise AssayError(f"{'; '.join(cards.failed)}; run `assay card {shown(str(run_dir))}` when it can be")


def _published_before(run_dir: Path, model: str) -> Mapping[str, PublishedScore]:
    if (before := GateReport.load_if_there(run_dir / "gates.json")) is not None:
        return {one.task: PublishedScore.model_validate(one.given) for one in before.published}
    return load_recipe(ModelRecipe, model).published if model in recipe_names("models") else {}


def load_report(run_dir: Path) -> Report:
    """`report.json`, as it was written last."""
    from assay_reports.schema import Report

    return Report.load(run_dir / "report" / "report.json")


def write_cards(run_dir: Path) -> Cards:
    """Cards of the run's checkpoints; of those that were left as they are it is said why, but for `failed`."""
    from assay_reports import card

    cards = card.write_cards(run_dir)
    for line in (*cards.left, *cards.refused):
        say(line)
    return cards


def check_plans_served(plans: Iterable[Plan], aim: Target, profile: ProfileRecipe) -> None:
    """PlanError for the first planned checkpoint that the profile's GPUs cannot share or hold."""
    from assay_quantize.plan.fits import check_served
    from assay_quantize.plan.stored import stored_by

    for plan in plans:
        check_served(stored_by(plan), profile, aim.recipe.serving)


def check_checkpoints_served(candidates: Iterable[Candidate], aim: Target, profile: ProfileRecipe) -> None:
    """The same for folders, by their headers."""
    for one in candidates:
        assert one.checkpoint is not None, "what is served here is a folder"
        check_folder_served(one.checkpoint, one.label, aim.recipe.serving, profile)


def check_folder_served(folder: Path, label: str, serving: Serving, profile: ProfileRecipe) -> None:
    """The same for one. A family that assay does not know is not judged: vLLM serves more of them."""
    from assay.recipes.families import family_of
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.fits import check_served
    from assay_quantize.plan.stored import stored_in

    if profile.hardware.device == "cpu":
        return
    checkpoint = open_checkpoint(folder, allow_quantized=True)
    try:
        family = family_of(checkpoint.config)
    except PlanError:
        return
    check_served(stored_in(checkpoint, family, label), profile, serving)
