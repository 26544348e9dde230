"""Make checkpoints and verify them: one in a folder of its own, or every precision in the run of its source."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.callbacks import Say, Track, say_nothing, track_nothing
from assay.errors import PlanError
from assay.installation import require_extra
from assay.recipes.load import load_recipe
from assay.recipes.model import Automatic
from assay.recipes.profile import ProfileRecipe
from assay.records.manifest import Manifest
from assay.records.plan import Plan
from assay.records.run import CARD, PLAN_INSIDE, VERIFICATION_INSIDE, RunRecord, SourceData, source_of
from assay.records.verification import Verification, is_as_verified
from assay_pipeline.calibration.files import alone, file_in_run, with_files
from assay_pipeline.calibration.layers import calibrated_before, calibrated_layers, keep_calibration
from assay_pipeline.interrupted import interruptible
from assay_pipeline.mixes.automatic import check_texts_of_mix, choose
from assay_pipeline.planning import choices_of, plan_for, precisions_for, stand_in
from assay_pipeline.profiles import check_plans_served
from assay_pipeline.quantize_options import QuantizeOptions, TextOptions
from assay_pipeline.run_folders import choose_run, open_run
from assay_pipeline.targets import Target, local_checkpoint, open_source, resolve_source, take_up_family_of

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint
    from assay_quantize.engine.quantize import Runner
    from assay_quantize.verify.finished import FinishedShards


@dataclass(frozen=True)
class MadeCheckpoint:
    """A checkpoint and its verification. manifest: None: it was there, and verified, before."""

    plan: Plan
    folder: Path
    manifest: Manifest | None
    verification: Verification


DEFAULT_OPTIONS = QuantizeOptions()
OnMade = Callable[[MadeCheckpoint], None]
"""Called for every checkpoint as soon as it is verified."""


def quantize(
    target: str | Target,
    precisions: list[str] | None = None,
    *,
    precision: str | None = None,
    out: Path | None = None,
    options: QuantizeOptions = DEFAULT_OPTIONS,
    profile: str | None = None,
    runs: Path = Path("runs"),
    name: str | None = None,
    base_model: str | None = None,
    mtp: str | None = None,
    reference: str | None = None,
    on_made: OnMade | None = None,
) -> list[MadeCheckpoint]:
    """Make quantized checkpoints, shard by shard, and verify each. An interrupted run resumes.

    precisions: names of recipes or files, the reference's is made first; None: the model's list. precision: one alone, without
    the reference; with `out` in that folder, else in the run of its source under `runs`. profile: the recipe's precisions for
    its GPUs, and an error if they cannot serve them. base_model: hub id of a source in a folder, for the card. mtp: as in a
    model's recipe. reference: what candidates are compared with, instead of the recipe's. Every plan is made before the first
    byte is written. AssayError: what does not fit, a source that is not there, no room.
    """
    resolved = target if isinstance(target, Target) else resolve_source(target, base_model, mtp, reference)
    chosen = None if profile is None else load_recipe(ProfileRecipe, profile)
    if chosen is not None:
        resolved = resolved.on_profile(chosen)
    with_reference = out is None and precision is None
    recipes = precisions_for(resolved, precision, precisions, with_reference=with_reference, say=options.say)
    if out is not None and len(recipes) != 1:
        raise PlanError("--out takes one checkpoint: say --precision P as well")
    checkpoint = open_source(resolved, options.say)
    plans: list[Plan | Automatic] = []
    for recipe in recipes.values():
        if isinstance(recipe, Automatic):  # nothing of it is chosen yet: its base can be made
            stand_in(resolved, checkpoint, recipe)
            plans.append(recipe)
        else:
            plans.append(plan_for(resolved, checkpoint, recipe))
    planned = with_files(resolved, plans, options)
    if chosen is not None:
        check_plans_served([plan for plan in planned if isinstance(plan, Plan)], resolved, chosen)
    if out is None:
        return quantize_in_run(resolved, checkpoint, planned, options, runs, name, chosen, on_made)
    plan, how = alone(resolved, planned[0], options)
    return [quantize_one(resolved, plan, out, how, in_run=False, on_made=on_made)]


def quantize_in_run(
    target: Target,
    checkpoint: Checkpoint,
    planned: Sequence[Plan | Automatic],
    options: QuantizeOptions,
    runs: Path,
    name: str | None,
    profile: ProfileRecipe | None = None,
    on_made: OnMade | None = None,
) -> list[MadeCheckpoint]:
    """Every precision made and verified in the run of its source: RUN/PRECISION/checkpoint.

    What a precision needs is made before it, and kept in the run: a calibration file, the recipe of `auto-BUDGET`. checkpoint:
    the source, by its headers. profile: whose GPUs must be able to serve what is chosen.
    """
    made_of = [plan_or_mix.name if isinstance(plan_or_mix, Automatic) else plan_or_mix.precision for plan_or_mix in planned]
    choices = choices_of(target, made_of, all_of_recipe=set(target.recipe.precisions) <= set(made_of))
    checkpoints: list[MadeCheckpoint] = []
    source = SourceData(location=checkpoint.location, revision=checkpoint.revision, files=dict(checkpoint.data))
    about = RunRecord(model=target.recipe.name, source=source, choices=choices, foreign_reference=checkpoint.foreign)
    chosen_folder = choose_run(runs, about, name)[0]
    check_texts_of_mix(target, planned, chosen_folder)
    if not chosen_folder.exists():
        require_extra("quantize")
    with open_run(runs, about, name=name, say=options.say) as run_dir:
        for plan_or_mix in planned:
            plan = (
                _chosen(target, checkpoint, plan_or_mix, run_dir, profile, options.say)
                if isinstance(plan_or_mix, Automatic)
                else plan_or_mix
            )
            plan, file = file_in_run(target, plan, run_dir, options)
            folder = run_dir / plan.precision / "checkpoint"
            checkpoints.append(
                quantize_one(target, plan, folder, replace(options, importance=file), in_run=True, on_made=on_made)
            )
    return checkpoints


def _chosen(
    target: Target, checkpoint: Checkpoint, automatic: Automatic, run_dir: Path, profile: ProfileRecipe | None, say: Say
) -> Plan:
    plan = plan_for(target, checkpoint, choose(target, automatic, run_dir, say))
    if profile is not None:
        check_plans_served([plan], target, profile)
    return plan


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
    say: Say = say_nothing,
    track: Track = track_nothing,
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
        device, runner, workers, memory_bytes, importance, allow_not_finite, stream_from, text or TextOptions(), say, track
    )


def quantize_one(
    target: Target, made: Plan, folder: Path, options: QuantizeOptions, *, in_run: bool, on_made: OnMade | None = None
) -> MadeCheckpoint:
    """Make one checkpoint and verify it. Plan and verification go beside it in a run, else into its own folder.

    options: with the calibration file that this plan takes; None where it takes none.
    They are written after it: a plan that is refused leaves what is there as it is.
    """
    from assay_quantize.engine.quantize import check_folder, is_complete
    from assay_quantize.engine.quantize import quantize as run_engine
    from assay_reports.card import write_first_card

    plan_path = folder.parent / "plan.json" if in_run else folder / PLAN_INSIDE
    record_path = folder.parent / "verify.json" if in_run else folder / VERIFICATION_INSIDE
    made = calibrated_before(target, made, folder, options)
    if not (complete := is_complete(made, folder)):
        check_folder(made, folder)  # before anything of the source is downloaded
    if complete and plan_path.is_file() and record_path.is_file():
        previous = Verification.load(record_path)
        if previous.passed and is_as_verified(folder, previous):
            before = Plan.load(plan_path)
            if is_renamed := made.base_model not in (None, before.base_model):
                before.model_copy(update={"base_model": made.base_model}).save(plan_path)
            if is_renamed or not (folder / CARD).is_file():  # killed before it was written
                write_first_card(folder)
            return _told(MadeCheckpoint(made, folder, None, previous), on_made)
    with ExitStack() as opened:
        with interruptible(lambda: _kept(made, folder)), _source_of(target, made, folder, options) as (source, runner):
            made, calibrated = calibrated_layers(target, made, source, folder, options)
            read_bytes = sum(tensor.num_bytes for tensor in made.tensors if tensor.shard_out is not None and tensor.outputs)
            with options.track(made.precision, read_bytes) as progress:
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
        for name, count in (count_by_tensor for shard in manifest.shards for count_by_tensor in shard.not_finite.items()):
            options.say(f"note: {name}: {count} values are NaN or infinite, copied as they are")
        source_beside = None if options.stream_from else source
        result = verify(folder, source_beside, options.track, importance=options.importance, finished=finished)
    result.save(record_path)
    checkpoint = _told(MadeCheckpoint(made, folder, manifest, result), on_made)
    write_first_card(folder)
    return checkpoint


def _told(checkpoint: MadeCheckpoint, on_made: OnMade | None) -> MadeCheckpoint:
    if on_made is not None:
        on_made(checkpoint)
    return checkpoint


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
def _source_of(target: Target, made: Plan, folder: Path, options: QuantizeOptions) -> Iterator[tuple[Path, Runner]]:
    """The folder the engine reads, and who makes the shards."""
    if options.stream_from is None:
        yield local_checkpoint(target.location, source_of(made), options.say), _runner(options.runner)
        return
    from assay_quantize.remote.hub_stream import HubStream

    folder.parent.mkdir(parents=True, exist_ok=True)
    with HubStream(made, folder.with_name(f".{folder.name}.source"), report=options.say) as stream:
        if options.runner == "ray":
            from assay_quantize.remote.ray_cluster import require_ray
            from assay_quantize.remote.ray_runner import from_hub

            require_ray()
            yield stream.folder, from_hub(stream)
        else:
            yield stream.folder, stream.run
        stream.remove()


def _runner(name: str) -> Runner:
    """Who makes the shards of a source that lies in a folder."""
    if name == "ray":
        from assay_quantize.remote.ray_cluster import require_ray
        from assay_quantize.remote.ray_runner import run_ray

        require_ray()
        return run_ray
    from assay_quantize.engine.local_runner import run_local

    return run_local


def verify(folder: Path, source: Path | None = None, track: Track = track_nothing, **options: Any) -> Verification:
    """Reopen a quantized checkpoint and check everything anew.

    source: then every byte of every tensor is made again and compared. options: others of `assay_quantize.verify.verify`.
    """
    from assay_quantize.verify.verify import num_bytes_of
    from assay_quantize.verify.verify import verify as verify_files

    take_up_family_of(folder)
    with track("verifying", num_bytes_of(folder)) as progress:
        return verify_files(folder, source=source, on_progress=progress, **options)
