"""What an evaluation compares: the checkpoints, whether they were made from one source, and what the run is therefore about."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, CheckpointError
from assay.foreign_text import safe_name
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Automatic, Location, ModelRecipe, automatic_of, is_automatic
from assay.recipes.mtp import mtp_block
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import GivenServer
from assay.records.manifest import MANIFEST, Manifest
from assay.records.run import RunRecord, SourceData, source_of
from assay.safe_files import read_json_object
from assay.safetensors_index import tensor_names
from assay_pipeline.mixes.automatic import chosen_in
from assay_pipeline.planning import as_model_says, precisions_for
from assay_pipeline.run_folders import choose_run, find_runs, folder_data, read_run
from assay_pipeline.targets import Target, local_checkpoint, open_stored, source_label

if TYPE_CHECKING:
    from assay_evaluate.run.candidate import Candidate

NO_ENDPOINTS: Mapping[str, GivenServer] = {}


@dataclass(frozen=True)
class Comparison:
    """The reference first. `about`: what their run is about, without a suite."""

    candidates: list[Candidate]
    about: RunRecord


# ------------------------------------------------------------------------------------------------ of a TARGET
def of_target(
    target: Target,
    runs: Path,
    name: str | None,
    precisions: list[str] | None,
    endpoints: Mapping[str, GivenServer] = NO_ENDPOINTS,
    *,
    only_reference: bool = False,
    say: Say = say_nothing,
) -> Comparison:
    """Reference, then the source (if the recipe wants it), then every precision, from the runs of this model and data.

    endpoints: servers that run already, by label; then only what they have is compared. only_reference: the others are not
    looked for; they need not be made yet. CheckpointError: one was not made yet, or from other data than the source has now, or
    than another of them.
    """
    if endpoints:
        return _of_endpoints(target, runs, name, precisions, endpoints, only_reference=only_reference, say=say)
    from assay_evaluate.run.candidate import Candidate
    from assay_quantize.checkpoint.checkpoint import open_checkpoint

    recipe, source = target.recipe, source_now(target)
    again = functools.partial(quantize_command, target, runs=runs, name=name)
    runs_of_it = _runs_of(RunRecord(model=recipe.name, source=source), runs, name)
    named = precisions_for(target, None, precisions, with_reference=True, say=say)
    if only_reference:  # before the others are looked for: a mix need not be chosen yet
        named = dict(list(named.items())[: recipe.reference.precision is not None])
    asked = {text: _recipe_of(named_precision, runs_of_it, again) for text, named_precision in named.items()}
    if not only_reference:
        check_candidates(recipe, asked)
    candidates = [
        Candidate(precision_recipe.name, _made(target, named, precision_recipe, runs_of_it, runs, again))
        for named, precision_recipe in asked.items()
    ]
    if recipe.reference.precision is not None:
        candidates[0] = replace(candidates[0], is_reference=True)
    else:
        assert recipe.reference.release is not None
        candidates.insert(0, Candidate("reference", local_checkpoint(recipe.reference.release, say=say), is_reference=True))
    source = _one_source(source, candidates, again, {precision_recipe.name: named for named, precision_recipe in asked.items()})
    foreign = None if _is_makers_own(recipe) else foreign_in(candidates[0].checkpoint)
    about = RunRecord(model=recipe.name, source=source, foreign_reference=foreign)
    if only_reference:
        return Comparison(candidates, about)
    if recipe.include_source:
        folder = local_checkpoint(target.location, source, say)  # what the candidates were made from, whatever was pushed since
        candidates.insert(1, Candidate(source_label(open_checkpoint(folder).config), folder))
    return Comparison(candidates, about)


def _of_endpoints(
    target: Target,
    runs: Path,
    name: str | None,
    precisions: list[str] | None,
    endpoints: Mapping[str, GivenServer],
    *,
    only_reference: bool,
    say: Say,
) -> Comparison:
    """The reference and every other label that has a server; each with the folder that is named, or was made here, if any."""
    from assay_evaluate.run.candidate import Candidate

    source, own = source_now(target), _source_folder(target)
    again = functools.partial(quantize_command, target, runs=runs, name=name)
    folders = _runs_of(RunRecord(model=target.recipe.name, source=source), runs, name)
    named = {} if precisions is None else precisions_for(target, None, precisions, with_reference=True, say=say)
    asked = {text: _recipe_of(precision, folders, again) for text, precision in named.items()}
    recipes = {precision_recipe.name: (named, precision_recipe) for named, precision_recipe in asked.items()}
    reference = target.recipe.reference.precision or "reference"
    others = [] if only_reference else [*(label for label in own if label in endpoints), *(recipes or endpoints)]
    labels = list(dict.fromkeys([reference, *others]))
    if missing := [label for label in labels if label not in endpoints]:
        raise AssayError(
            f"the profile's `endpoints` have no server for {', '.join(missing)}, only for {', '.join(endpoints)}; add one: "
            "what runs already is not compared with what is started here"
        )

    def folder_of(label: str) -> Path | None:
        """The folder that a server is said to serve: the one that is named, else the source, or what was made of it here."""
        named = endpoints[label].checkpoint
        if named is not None or label in own:
            return Path(named or own[label])
        if label in recipes:  # what was asked for by its precision is the checkpoint made here
            return _made(target, *recipes[label], folders, runs, again)
        if is_automatic(label):
            chosen = chosen_in(folders, automatic_of(label))
            return None if chosen is None else _find_made(target, label, chosen, folders, runs, again)
        if label not in recipe_names("precisions"):
            return None
        return _find_made(target, label, as_model_says(target, load_recipe(PrecisionRecipe, label)), folders, runs, again)

    candidates = [Candidate(label, folder_of(label), label == reference, endpoint=endpoints[label]) for label in labels]
    if len(candidates) == 1 and not only_reference:
        raise CheckpointError(
            f"{target.recipe.name}: the profile's `endpoints` have only the reference; add a candidate's server"
        )
    source = _one_source(source, candidates, again, {label: named for label, (named, _) in recipes.items()})
    foreign = None if _is_makers_own(target.recipe) else foreign_in(candidates[0].checkpoint)
    return Comparison(candidates, RunRecord(model=target.recipe.name, source=source, foreign_reference=foreign))


def _is_makers_own(recipe: ModelRecipe) -> bool:
    """Whether the reference is made here of the source, or released by who released the source."""
    release = recipe.reference.release
    if release is None:
        return True
    owners = [None if place.hub is None else place.hub.split("/")[0] for place in (release, recipe.source)]
    return owners[0] is not None and owners[0] == owners[1] and release.hub != recipe.source.hub


def foreign_in(folder: Path | None) -> str | None:
    """How the checkpoint in a folder is quantized, if it is a quantized copy of its model; None: it is not, or is not known."""
    from assay_quantize.checkpoint.native import foreign_quantization

    try:
        return None if folder is None else foreign_quantization(open_stored(Location(path=str(folder))))
    except AssayError:
        return None


def _recipe_of(precision: PrecisionRecipe | Automatic, folders: list[Path], again: Callable[[str], str]) -> PrecisionRecipe:
    """The recipe; of `auto-BUDGET` the one that a run has chosen. CheckpointError: none has."""
    if not isinstance(precision, Automatic):
        return precision
    if (chosen := chosen_in(folders, precision)) is None:
        raise CheckpointError(
            f"{precision.name}: no run of this model has chosen its schemes yet; make it: {again(precision.name)}"
        )
    return chosen


def _source_folder(target: Target) -> dict[str, Path]:
    """The source under its label, if it is measured too and lies in a folder."""
    if not target.recipe.include_source or target.location.path is None:
        return {}
    folder = Path(target.location.path)
    return {source_label(read_json_object(folder, "config.json")): folder}


def unused_draft_head(target: Target, reference: Candidate) -> str | None:
    """A note, if the reference can draft and the model's recipe does not ask for it; None: it cannot, or will."""
    folder = reference.checkpoint
    if folder is None or reference.endpoint is not None or not (folder / "config.json").is_file():
        return None
    if target.recipe.serving.num_speculative_tokens is not None:
        return None
    if not mtp_block(read_json_object(folder, "config.json"), tensor_names(folder)).num_layers:
        return None
    return (
        f"note: {reference.label} has an MTP head that is not used, so acceptance is not measured: the recipe of "
        f"{target.recipe.name} sets no `serving: {{num_speculative_tokens: 1}}`"
    )


def check_candidates(recipe: ModelRecipe, precisions: Collection[str]) -> None:
    """CheckpointError if nothing would be compared with the reference. precisions: the reference's among them, if any."""
    own_reference = recipe.reference.precision is not None
    if len(precisions) == own_reference and not recipe.include_source:
        raise CheckpointError(f"{recipe.name}: only the reference is there to measure; add a candidate with --precisions")


def source_now(target: Target) -> SourceData:
    """The source as far as it can be told without asking the hub."""
    if target.location.path is not None:
        return folder_data(Path(target.location.path))
    assert target.location.hub is not None
    return SourceData(location=target.location.hub)


def _runs_of(about: RunRecord, runs: Path, name: str | None) -> list[Path]:
    """Where checkpoints of the target may lie: in the run that was named, then in those of the same model and data."""
    folders = find_runs(runs, about)
    if name is not None:
        named, _ = choose_run(runs, about, name)
        return [named, *folders] if read_run(named) is not None else folders
    commits = {
        record.source.revision: folder for folder in folders if (record := read_run(folder)) is not None and record.source
    }
    if len(commits) > 1:
        raise CheckpointError(
            f"{', '.join(map(str, commits.values()))}: hold checkpoints of different commits of {about.model}; "
            "say which run with --name"
        )
    return folders


def _made(
    target: Target, named: str, precision: PrecisionRecipe, folders: list[Path], runs: Path, again: Callable[[str], str]
) -> Path:
    """The finished checkpoint of a precision, made from this very recipe. named: as the user wrote it. again: what to type."""
    if (folder_made := _find_made(target, named, precision, folders, runs, again)) is not None:
        return folder_made
    folder = (folders[0] if folders else runs / safe_name(target.recipe.name)) / precision.name / "checkpoint"
    raise CheckpointError(f"{folder}: no finished checkpoint there; make it first: {again(named)}")


def _find_made(
    target: Target, named: str, precision: PrecisionRecipe, folders: list[Path], runs: Path, again: Callable[[str], str]
) -> Path | None:
    """The same; None if none was made. CheckpointError: it was made from another recipe or other data."""
    name = precision.name
    finished = [folder for run_dir in folders if ((folder := run_dir / name / "checkpoint") / MANIFEST).is_file()]
    for folder in finished:
        if Manifest.load(folder / MANIFEST).recipe_sha256 == precision.sha256:
            return folder
    if finished:
        raise CheckpointError(
            f"{finished[0]}: made from another recipe called {name} than {named} is now; "
            f"delete it and make it again: {again(named)}"
        )
    usual = runs / safe_name(target.recipe.name) / name / "checkpoint"
    record = read_run(runs / safe_name(target.recipe.name))
    if (usual / MANIFEST).is_file() and record is not None and record.source is not None:
        how = _how_other(Manifest.load(usual / MANIFEST), source_now(target))
        if how is not None:
            raise CheckpointError(
                f"{usual}: made from other data than {target.typed} has ({how}); make it again: {again(named)}"
            )
    return None


def quantize_command(target: Target, precision: str, *, runs: Path, name: str | None) -> str:
    """What to type so that the checkpoint lies where it was looked for."""
    words = ["assay", "quantize", target.typed or target.recipe.name, "--precision", precision]
    words += [] if runs == Path("runs") else ["--runs", str(runs)]
    return shlex.join(words if name is None else [*words, "--name", name])


def _one_source(
    now: SourceData, candidates: Iterable[Candidate], again: Callable[[str], str], named: dict[str, str]
) -> SourceData:
    """The data that all checkpoints were made from; CheckpointError naming two that differ. `now` if none of them says.

    named: label -> the precision as the user called it.
    """
    first: tuple[Path, SourceData] | None = None
    for candidate in candidates:
        if candidate.checkpoint is None or not (candidate.checkpoint / MANIFEST).is_file():
            continue
        manifest = Manifest.load(candidate.checkpoint / MANIFEST)
        remedy = f"delete it and make it again: {again(named.get(candidate.label, candidate.label))}"
        if now.files is not None and (how := _how_other(manifest, now)) is not None:
            raise CheckpointError(f"{candidate.checkpoint}: made from other data than {now.location} has ({how}); {remedy}")
        if first is None:
            first = candidate.checkpoint, source_of(manifest)
        elif (how := _how_other(manifest, first[1])) is not None:
            raise CheckpointError(f"{candidate.checkpoint}: made from other data than {first[0]} ({how}); {remedy}")
    return now if first is None else first[1].model_copy(update={"location": now.location})


def _how_other(manifest: Manifest, source: SourceData) -> str | None:
    """How the data that a checkpoint was made from differs from `source`; None: it does not."""
    from assay.file_data import other_data

    if source.files is None:
        return None
    how = other_data(manifest.source_files, source.files)
    if how is None and manifest.source_revision != source.revision:
        return f"commit {str(manifest.source_revision)[:12]}, not {str(source.revision)[:12]}"
    return how


def other_source(reference: Path, candidate: Path, label: str) -> str | None:
    """A sentence, if both checkpoints say what they were made from and it is not the same."""
    try:
        reference_manifest, candidate_manifest = (Manifest.load(folder / MANIFEST) for folder in (reference, candidate))
    except AssayError:
        return None
    how = _how_other(candidate_manifest, source_of(reference_manifest))
    if how is None:
        return None
    sources = f"{candidate_manifest.source}, not {reference_manifest.source}"
    return f"made from other data than the reference {label}: {sources} ({how})"
