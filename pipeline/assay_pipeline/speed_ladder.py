"""Speeds in a run: which checkpoints are measured, how they are served and what they are asked; rows imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.variant import declared_variant
from assay.records.declared import ADDRESS
from assay.records.manifest import MANIFEST
from assay.records.measurement import Measurement
from assay.records.run import RunRecord
from assay.records.speed import SPEED_RECORD, NotMeasured, SpeedRecord, SpeedRow
from assay.safe_files import read_json_object
from assay_pipeline.comparison.checkpoints import source_now
from assay_pipeline.gate_choice import suite_for
from assay_pipeline.interrupted import interruptible
from assay_pipeline.profiles import profile_for
from assay_pipeline.run_folders import choose_run, find_run, locked_run, open_run, read_run
from assay_pipeline.targets import Target, resolve_source, resolve_target, source_label

if TYPE_CHECKING:
    from assay_evaluate.speed.ladder import Ladder


@dataclass(frozen=True)
class Place:
    """A run's folder, and its model as a recipe knows it. about: of its run.json; None: it has one already."""

    run_dir: Path
    target: Target
    measurements: tuple[Measurement, ...]
    about: RunRecord | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the run, made if it is not there yet."""
        if self.about is None:
            with locked_run(self.run_dir):
                yield
        else:
            with open_run(self.run_dir.parent, self.about, name=self.run_dir.name, lock=True):
                yield

    @property
    def reference(self) -> str:
        """Label of the checkpoint that others are compared with."""
        measured = next((measurement.label for measurement in self.measurements if measurement.is_reference), None)
        return measured or self.target.recipe.reference.precision or "reference"


def place_of(target: str, runs: Path) -> Place:
    """The run that is named, or that of a model, which need not be there yet. AssayError: neither a run nor a model, or a
    quantized copy of one: its speed is measured in the run that judges it."""
    try:
        run_dir = find_run(target, runs)
    except AssayError:
        resolved = resolve_source(target)
        about = RunRecord(model=resolved.recipe.name, source=source_now(resolved))
        return Place(choose_run(runs, about)[0], resolved, (), about)
    measured = tuple(Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json")))
    return Place(run_dir, _target_of(run_dir, target), measured)


def _target_of(run_dir: Path, target: str) -> Target:
    """The model of a run: its recipe, or the checkpoint that it was made from."""
    record = read_run(run_dir)
    if record is None:
        return resolve_target(target)
    if record.model in recipe_names("models"):
        return resolve_target(record.model)
    location = record.source.location if record.source is not None else None
    location = record.reference.location if location is None and record.reference is not None else location
    if location is None:
        raise AssayError(
            f"{run_dir}: its run.json does not say what it was made from; give the model or its checkpoint instead"
        )
    return resolve_target(location)


def chosen_folders(place: Place, requested: Sequence[str] | None) -> dict[str, Path]:
    """Label -> checkpoint folder on this machine: the reference first, then the source; of a variant that of the reference.
    Those that were named, else all of the run. AssayError: there is none, or no such one."""
    folders: dict[str, Path] = {}
    source = place.target.location.path
    if source is not None and (Path(source) / "config.json").is_file():
        config = read_json_object(Path(source), "config.json")
        folders[source_label(config)] = Path(source)
    for path in sorted(place.run_dir.glob(f"*/checkpoint/{MANIFEST}")):
        folders[path.parent.parent.name] = path.parent
    for measurement in place.measurements:
        if (
            not measurement.is_noise_floor
            and ADDRESS not in measurement.declared
            and measurement.label not in folders
            and (Path(measurement.checkpoint) / "config.json").is_file()
        ):
            folders[measurement.label] = Path(measurement.checkpoint)
    folders = dict(sorted(folders.items(), key=lambda pair: pair[0] != place.reference))
    elsewhere = {measurement.label for measurement in place.measurements if ADDRESS in measurement.declared}
    for label in requested or ():
        if label in elsewhere:
            raise AssayError(
                f"--checkpoints {shown(label)}: is served by somebody else; measure its speed there, and say --import FILE "
                f"--label {shown(label)}"
            )
        if label not in folders:
            hint = did_you_mean(label, list(folders))
            raise AssayError(
                f"--checkpoints {shown(label)}: {hint}{place.run_dir} has {', '.join(folders) or 'none on this machine'}; name "
                "one of them, or make it first with `assay quantize`"
            )
    if not folders:
        raise AssayError(f"{place.run_dir}: has no checkpoint on this machine; `assay quantize` makes one")
    return {label: folder for label, folder in folders.items() if requested is None or label in requested}


def scheme_of(label: str, folder: Path | None = None) -> str | None:
    """What a label's experts are stored as, `fp8` of fp8_block, `w4a16` of w4a16_g32; `bf16` of itself.

    None: there is no such precision recipe, or it leaves experts as they are, or the folder was not made here.
    """
    if label in {"bf16", "fp16", "fp32"}:
        return label
    if (folder is not None and not (folder / MANIFEST).is_file()) or label not in recipe_names("precisions"):
        return None
    recipe = load_recipe(PrecisionRecipe, label)
    of_experts = recipe.quantize.get("routed_expert") if isinstance(recipe.quantize, dict) else recipe.scheme
    return None if of_experts is None else of_experts.split("_")[0]


@dataclass(frozen=True)
class RunSpeed:
    """The speed record of a run, and where it lies. failed: something that has kernels here could not be measured."""

    place: Place
    record: SpeedRecord
    failed: bool = False


def measure_speed(
    target: str,
    *,
    runs: Path = Path("runs"),
    checkpoints: Sequence[str] | None = None,
    profile: str | None = None,
    tensor_parallel_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    say: Say = say_nothing,
) -> RunSpeed:
    """Measure what is missing of the ladder of a run's checkpoints, by vLLM's own benchmark; RUN/speed.json holds it.

    target: a run's folder, its name under `runs`, or a model, whose run is begun. checkpoints: labels; None: all of the run.
    profile: how vLLM is run; None: from the hardware. options: fields of `Ladder`; others are the model's, or defaults.
    AssayError: the profile serves less at once than is asked for, no such checkpoint, or no such kind of prompts.
    """
    place = place_of(target, runs)
    where = profile_for(place.target, profile, tensor_parallel_size=tensor_parallel_size)
    record = measure_in_run(place, checkpoints, where, options or {}, say)
    known = ("emulated:", "nothing drafts:", "not imported")
    lost = any(row.origin == "measured" and row.why_refused is not None for row in record.rows)
    return RunSpeed(place, record, lost or any(not point.reason.startswith(known) for point in record.not_measured))


def measure_in_run(
    place: Place, checkpoints: Sequence[str] | None, where: ProfileRecipe, options: Mapping[str, Any], say: Say
) -> SpeedRecord:  # fmt: skip
    """The same of a run that is known, which is held meanwhile."""
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.run.identity import checkpoint_sha256, identity_of
    from assay_evaluate.speed.measure import LadderRun, Subject, check_concurrency
    from assay_evaluate.speed.prompts import Prompts, asked_in

    ladder = default_ladder(place.target.recipe, where, options)
    check_concurrency(ladder, where)
    folders, run_dir = chosen_folders(place, checkpoints), place.run_dir
    if place.measurements:  # the journal, which has more kinds of prompts, is asked when the run is held
        suite = SuiteRecipe.model_validate(place.measurements[0].suite_recipe)
    else:
        suite = suite_for(place.target, None, where)[0]
        Prompts(suite, ladder.seed, ladder.prompt_tokens, {}).check(ladder.prompts)
    kept = f"finished repeats are kept in {run_dir / SPEED_RECORD}; the same command measures the rest"
    with interruptible(lambda: kept), place.at_work():
        with Journal(run_dir / "journal.db") as journal:
            asked: dict[str, list[str]] = {}
            for measurement in place.measurements:
                if measurement.is_reference and measurement.suite == suite.name:
                    asked = asked_in(journal, identity_of(measurement))
            prompts = Prompts(suite, ladder.seed, ladder.prompt_tokens, asked)
            prompts.check(ladder.prompts)
            variants = {
                measurement.label: declared_variant(measurement.label, measurement.declared)
                for measurement in place.measurements
                if measurement.is_variant
            }
            subjects = [
                Subject(
                    label, folder, checkpoint_sha256(folder, journal.file_sha256),
                    scheme_of(place.reference if label in variants else label, folder), variants.get(label),
                )
                for label, folder in folders.items()
            ]  # fmt: skip
        return LadderRun(subjects, ladder, prompts, where, place.target.recipe.serving, run_dir, say).run()


def default_ladder(recipe: ModelRecipe, profile: ProfileRecipe, options: Mapping[str, Any]) -> Ladder:
    """As the options say, else the model's recipe (`speed:`); else few requests on a CPU, more where GPUs are, with the
    drafts that the model is served with and without.
    """
    from assay_evaluate.speed.ladder import Ladder

    on_cpu = profile.hardware.device == "cpu"
    drafts = recipe.serving.num_speculative_tokens
    chosen: dict[str, Any] = {
        "concurrency": (1, 4, 8) if on_cpu else (1, 8, 32),
        "speculation": (0,) if drafts is None else (0, drafts),
        "output_tokens": 64 if on_cpu else 512,
    }
    return Ladder(**(chosen | recipe.speed.options() | dict(options)))


def import_speed(
    target: str,
    path: Path,
    *,
    runs: Path = Path("runs"),
    form: str | None = None,
    label: str | None = None,
    names: Mapping[str, str] | None = None,
    hardware: str | None = None,
    num_drafted: int | None = None,
    prompts: str | None = None,
    say: Say = say_nothing,
) -> RunSpeed:
    """Rows of a file that another tool wrote, put into the record of a run; nothing is measured.

    form: of the file; None: detected. label: of all rows; names: what the file calls a checkpoint -> label. hardware,
    num_drafted, prompts: what the file does not say. AssayError: the file cannot be read or lacks what a row needs, or none of
    its rows is a speed.
    """
    from assay_evaluate.speed.imported import notes_of, read_imported, renamed
    from assay_evaluate.speed.stated import Stated

    rows = renamed(read_imported(path, form, Stated(label, hardware, num_drafted, prompts)), names or {}, path.name)
    place = place_of(target, runs)
    believed = [row for row in rows if row.why_refused is None]
    if not believed:
        more = f" (and so of {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise AssayError(
            f"{path.name}: {rows[0].checkpoint} at {rows[0].concurrency}: {rows[0].why_refused}{more}; measure it again"
        )
    known = [measurement.label for measurement in place.measurements if not measurement.is_noise_floor]
    for name in dict.fromkeys(row.checkpoint for row in believed):
        if known and name not in (*known, "reference"):  # nothing is joined by guessing
            say(
                f"note: no checkpoint of the run is called {shown(name)} ({', '.join(known)}): its rows have no verdict; if it "
                f"is one of them, say --label {shown(name)}=LABEL"
            )
    for note in notes_of(believed):
        say(f"note: {note}")
    refused = [
        NotMeasured(
            checkpoint=row.checkpoint, speculation=row.speculation, concurrency=row.concurrency, prompts=row.prompts,
            reason=f"not imported from {path.name}: {row.why_refused}",
        )
        for row in rows if row.why_refused is not None
    ]  # fmt: skip
    record = _with_rows(place, believed, refused)
    say(f"{len(believed)} imported row{'s' if len(believed) != 1 else ''}")
    return RunSpeed(place, record)


def _with_rows(place: Place, rows: Sequence[SpeedRow], left_out: Sequence[NotMeasured]) -> SpeedRecord:
    from assay_evaluate.speed.rows import with_rows

    with place.at_work():
        record = with_rows(SpeedRecord.load_if_there(place.run_dir / SPEED_RECORD), rows, left_out)
        record.save(place.run_dir / SPEED_RECORD)
    return record


def measure_judged(
    run_dir: Path, measurements: Sequence[Measurement], target: Target, profile: ProfileRecipe, say: Say
) -> tuple[SpeedRecord, str]:
    """The default ladder as a phase of a run that was judged, and the label of its reference."""
    place = Place(run_dir, target, tuple(measurements))
    return measure_in_run(place, None, profile, {}, say), place.reference
