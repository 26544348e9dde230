"""`auto-BUDGET` in a run: damages are measured, schemes chosen, and the recipe is written into the run's folder.

RUN/automatic/sensitivity/               what is measured of each part; a run that is stopped goes on from there
RUN/automatic/sensitivity-HASH.json      the record, named after what was asked for; all budgets share it
RUN/automatic/auto-4.5bpw.yaml           the recipe, written last, with .json (the record) and .svg (the frontier)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.load import load_recipe, parse_recipe
from assay.recipes.model import Automatic
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of, sha256_of_file, write_text_atomically
from assay.records.choice.mix import Mix
from assay.records.diagnosis.sensitivity import Sensitivity
from assay.records.plan import Plan
from assay_pipeline.interrupted import interruptible
from assay_pipeline.mixes.proposal import base_for, propose_for, replayed
from assay_pipeline.planning import automatic_base

if TYPE_CHECKING:
    from assay_pipeline.hardware.plan import Known
    from assay_pipeline.sensitivity.request import Asked
    from assay_pipeline.targets import Target
    from assay_quantize.mixing.build import Proposal

FOLDER = "automatic"
USERS, CONTEXT = 32, 32_768
"""As `assay recipe` asks of hardware by default."""


def chosen_in(folders: Iterable[Path], automatic: Automatic) -> PrecisionRecipe | None:
    """The recipe that a run has chosen; None: none of these has."""
    files = (folder / FOLDER / f"{automatic.name}.yaml" for folder in folders)
    existing = next((file for file in files if file.is_file()), None)
    return None if existing is None else parse_recipe(PrecisionRecipe, existing)


def choose(target: Target, requested: Automatic, run_dir: Path, say: Say = say_nothing) -> PrecisionRecipe:
    """The recipe of a run, chosen before or now.

    AssayError: it was chosen in another way before; the model cannot be measured here; nothing is within the budget.
    """
    folder = run_dir / FOLDER
    file, record = folder / f"{requested.name}.yaml", _record(target, folder)
    if file.is_file():
        return _chosen_before(target, requested, file, record)
    how = target.recipe.automatic
    _check_room(target, requested, say)
    folder.mkdir(parents=True, exist_ok=True)
    sensitivity = _measured(target, record, say)
    made, known = _proposed(target, requested, sensitivity, record, say)
    mixes = [proposal for proposal in (made.candidate, made.control) if proposal is not None]
    if made.candidate is not None and (whole := _measured_whole(target, record, sensitivity, mixes, say)) is not None:
        made, known = _proposed(target, requested, whole, record, say)
    answer, is_taken = replayed(target, known, made, how.hardware, say)
    if not is_taken:
        raise AssayError(f"{requested.name}: vLLM's loaders would not take the mix that was chosen: {answer}")
    from assay_quantize.mixing.build import with_replay
    from assay_reports.page.frontier import frontier_svg

    made = with_replay(made, answer)
    made.mix.save(file.with_suffix(".json"))
    write_text_atomically(file.with_suffix(".svg"), str(frontier_svg(made.mix)))
    write_text_atomically(file, made.text)
    again = parse_recipe(PrecisionRecipe, file)
    assert again.sha256 == made.recipe.sha256, "the file does not say what was chosen"
    kind = "a mix" if made.mix.proposes == "mix" else "the uniform recipe of its control"
    say(f"{requested.name}: {kind}, {made.mix.point.bits_per_weight:.2f} bits per weight: {file}")
    say(f"{requested.name}: {made.mix.reason}")
    return again


def _proposed(target: Target, requested: Automatic, sensitivity: Sensitivity, record: Path, say: Say) -> tuple[Proposal, Known]:
    how = target.recipe.automatic
    return propose_for(
        target,
        sensitivity,
        record,
        budget=requested.budget,
        hardware=how.hardware,
        base=how.base,
        schemes=None,
        users=USERS,
        context=CONTEXT,
        run=None,
        name=requested.name,
        slack=how.slack,
        say=say,
    )


def _check_room(target: Target, requested: Automatic, say: Say) -> None:
    """AssayError, before anything is measured: no choice among the schemes is so small."""
    from assay_pipeline.targets import local_checkpoint
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.sensitivity.parts import find_parts

    checkpoint = open_checkpoint(local_checkpoint(target.location, say=say))
    layout = find_parts(checkpoint, target.recipe.automatic.schemes, model=target.recipe.name)
    has_mtp = automatic_base(target).mtp == "quantize"
    of_parts = (
        sizes["bf16"] if key.role == "mtp" and not has_mtp else min(sizes.values()) for key, sizes in layout.sizes.items()
    )
    least = layout.other_bytes + sum(of_parts)
    if requested.budget.num_bytes is not None and requested.budget.num_bytes < least:
        raise AssayError(
            f"{requested.name}: the smallest choice among {', '.join(layout.plans)} takes at least {size(least)}; ask for "
            "more, or name smaller `automatic: {schemes: [...]}` in the model's recipe"
        )


def _record(target: Target, folder: Path) -> Path:
    """Where the sensitivities lie that the model's recipe asks for."""
    how = target.recipe.automatic
    asked = how.model_dump(mode="json", include={"proxy", "schemes", "texts", "tokens", "length", "seed"})
    asked["texts"] = texts_sha256(target)
    observer, method = _rounding(target)
    return folder / f"sensitivity-{sha256_of([asked, observer, *([] if method == 'none' else [method])])[:12]}.json"


def check_texts_of_mix(target: Target, planned: Sequence[Plan | Automatic], run_dir: Path) -> None:
    """If `run_dir` has yet to choose a mix of `wanted`. AssayError, before anything is made: a file of texts cannot be read,
    or the model is larger than memory and has to write them."""
    plans = [plan_or_mix for plan_or_mix in planned if isinstance(plan_or_mix, Plan)]
    mixes = [plan_or_mix for plan_or_mix in planned if isinstance(plan_or_mix, Automatic)]
    if not mixes or not isinstance(texts_sha256(target), str) or not plans:
        return
    folder = run_dir / FOLDER
    if all((folder / f"{plan_or_mix.name}.yaml").is_file() for plan_or_mix in mixes) or _record(target, folder).is_file():
        return
    from assay_quantize.sensitivity.layered import whole_bytes  # imports transformers: not for what has no mix
    from assay_quantize.storage.resident import available_bytes

    needed, free = whole_bytes(plans[0]), available_bytes()
    if needed > free:
        raise AssayError(
            f"auto-BUDGET: the model takes {size(needed)} in FP32 and {size(free)} of memory are free, so it cannot write the "
            "texts it is measured on; name files in the model's recipe, `automatic: {texts: [FILE]}`"
        )


def texts_sha256(target: Target) -> str | list[str]:
    """What damages are measured on: its name, or the hashes of its files. AssayError: a file cannot be read."""
    texts = target.recipe.automatic.texts
    if isinstance(texts, str):
        return texts
    hashes = []
    for path in map(Path, texts):
        try:
            hashes.append(sha256_of_file(path))
        except OSError as problem:
            raise AssayError(
                f"automatic.texts {path}: cannot be read: {problem.strerror}; name a file of plain text or .jsonl"
            ) from None
    return hashes


def _rounding(target: Target) -> tuple[str, str]:
    """How the base finds scales, and how it rounds INT4 weights."""
    base = automatic_base(target)
    return base.observer, "none" if base.calibration == "none" else base.calibration.method


def _chosen_before(target: Target, requested: Automatic, file: Path, record: Path) -> PrecisionRecipe:
    """AssayError: the recipe that is there was chosen from other sensitivities, or under other limits; or is not the one that
    was chosen."""
    from assay.recipes.profile import ProfileRecipe
    from assay_quantize.mixing.recipe_text import recipe_data

    how, mix = target.recipe.automatic, Mix.load_if_there(file.with_suffix(".json"))
    sensitivity = Sensitivity.load_if_there(record)
    hardware = None if how.hardware is None else load_recipe(ProfileRecipe, how.hardware).name
    if (
        mix is None
        or sensitivity is None
        or mix.sensitivity_sha256 != sensitivity.sha256
        or (mix.budget, mix.hardware) != (requested.budget.text, hardware)
        or (base := base_for(how.base, sensitivity)).name != mix.base
        or mix.slack not in (None, how.slack)
    ):
        raise AssayError(
            f"{file}: was chosen from other sensitivities or within other limits than `automatic` of the model's recipe says "
            f"now; delete it, and {file.parent.parent / requested.name} with its checkpoint, to have it chosen anew"
        )
    existing = parse_recipe(PrecisionRecipe, file)
    schemes: dict[tuple[int, str], str] = {(part.layer, part.role): part.scheme for part in mix.parts}
    chosen = PrecisionRecipe.model_validate(recipe_data(base, mix.name, existing.description, schemes))
    if existing.sha256 != chosen.sha256:
        raise AssayError(
            f"{file}: is not what was chosen, which {file.with_suffix('.json').name} beside it says; either it or "
            f"{mix.base}, which it extends, was edited: name a copy as a precision of its own, or delete it, and "
            f"{file.parent.parent / requested.name} with its checkpoint, to have it chosen anew"
        )
    return existing


def _measured(target: Target, record: Path, say: Say) -> Sensitivity:
    """The sensitivities, measured before or now."""
    if (before := Sensitivity.load_if_there(record)) is not None:
        return before
    sensitivity = _find(_asked(target, record, say))
    sensitivity.save(record)
    return sensitivity


def _measured_whole(
    target: Target, record: Path, before: Sensitivity, mixes: Sequence[PrecisionRecipe], say: Say
) -> Sensitivity | None:
    """The sensitivities with what the mix, and its control, lose with all parts quantized at once. None: nothing else is
    measured so; the texts are others now; or one layer at a time is held, which would run every part's stream once more."""
    from assay_pipeline.sensitivity.by_layer import is_by_layer
    from assay_pipeline.sensitivity.request import OtherTexts, as_measured
    from assay_pipeline.targets import local_checkpoint
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.sensitivity.parts import find_parts

    asked = _asked(target, record, say)
    if not before.uniform:
        return None
    checkpoint = open_checkpoint(local_checkpoint(target.location, say=say))
    if is_by_layer(asked, find_parts(checkpoint, asked.schemes, model=target.recipe.name, observer=asked.observer)):
        say(f"{mixes[0].name}: not measured as a whole, as one layer at a time is held; sums of parts decide")
        return None
    say(f"{mixes[0].name}: the mix is measured as a whole, as the uniform recipes were")
    each = tuple(as_measured(asked, mix) for mix in mixes)
    try:
        whole = _find(replace(asked, mixes=each, parts_of=(record, before.texts_sha256), by_layer=False))
    except OtherTexts as problem:
        say(f"{mixes[0].name}: not measured as a whole, as {problem}; sums of parts decide")
        return None
    if whole.num_texts_of_wholes != before.num_texts_of_wholes:
        say(f"{mixes[0].name}: not compared as a whole: {record} was made before texts were split; sums of parts decide")
        return None
    return before.model_copy(update={"wholes": whole.wholes})


def _asked(target: Target, record: Path, say: Say) -> Asked:
    from assay_pipeline.sensitivity.request import Asked

    how, keep = target.recipe.automatic, record.parent / "sensitivity"
    observer, method = _rounding(target)
    return Asked(
        target=target, schemes=tuple(how.schemes), proxy=how.proxy, observer=observer,  # type: ignore[arg-type]  # of a recipe
        run=None, text=() if isinstance(how.texts, str) else tuple(map(Path, how.texts)), num_tokens=how.tokens,
        length=how.length, served=0, profile=None, seed=how.seed, keep=keep, only_estimate=False,
        own=how.texts == "own", say=say,
        method=method,  # type: ignore[arg-type]  # likewise
    )  # fmt: skip


def _find(asked: Asked) -> Sensitivity:
    from assay_pipeline.sensitivity.measure import find_sensitivity
    from assay_pipeline.sensitivity.request import check_asked

    check_asked(asked)
    with interruptible(lambda: f"what was measured is kept in {asked.keep}; the same command goes on from there"):
        record = find_sensitivity(asked)
    assert record is not None, "more than the estimate was asked for"
    return record
