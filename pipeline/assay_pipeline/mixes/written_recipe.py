"""`assay recipe`: proposes a scheme for every layer and role under a budget, and writes it as a precision recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.atomic_files import remove_leftovers
from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, RecipeError
from assay.foreign_text import safe_name, shown
from assay.quantities import budget_of
from assay.recipes.load import parse_recipe
from assay.recipes.precision import TAKEN_NAMES, PrecisionRecipe
from assay.records.base import write_text_atomically
from assay.records.choice.mix import Mix
from assay.records.diagnosis.sensitivity import SENSITIVITY_NAME, Sensitivity
from assay_pipeline.hardware.plan import tokens_of
from assay_pipeline.mixes.proposal import propose_for, replayed
from assay_pipeline.targets import resolve_source

if TYPE_CHECKING:
    from assay_quantize.mixing.build import Proposal


@dataclass(frozen=True)
class ProposedRecipe:
    """is_taken: nothing that vLLM's loaders say stands against it; else no file was written."""

    proposal: Proposal
    is_taken: bool


def propose_recipe(
    target: str,
    *,
    budget: str | None = None,
    profile: str | None = None,
    sensitivity: Path | None = None,
    run: Path | None = None,
    base: str | None = None,
    schemes: Sequence[str] | None = None,
    users: int = 32,
    context: str = "32k",
    slack: float = 0.02,
    always_mix: bool = False,
    replay: bool = True,
    out: Path | None = None,
    say: Say = say_nothing,
) -> ProposedRecipe:
    """The mix that loses least within a budget, or the uniform recipe that is as good; reads headers only.

    target: a model recipe's name, a checkpoint folder or a hub id. budget: `405GB`, `377GiB` or `4.5bpw`; None: what fits
    `profile` with `users` sequences of `context` tokens. sensitivity: a record of `assay sensitivity`; None: that of `run`, or
    of the model's run. slack: share of the least loss that may be given up so that neighbouring layers are alike. always_mix:
    the mix also where a uniform recipe is proposed. out: FILE.yaml, its record and picture beside it. AssayError: no such
    record, nothing is within the budget, or something else lies where the files go.
    """
    if budget is None and profile is None:
        raise AssayError("say --budget SIZE, such as 405GB or 4.5bpw, or --profile NAME for what fits there")
    length, limit = tokens_of("--context", context), None if budget is None else budget_of(budget, f"--budget {shown(budget)}")
    if out is not None:
        _check_out(out)
    resolved = resolve_source(target)
    folder = run if run is not None else Path("runs") / safe_name(resolved.recipe.name)
    record = sensitivity or folder / SENSITIVITY_NAME
    if not record.is_file():
        raise AssayError(
            f"{shown(str(record))}: no such file; `assay sensitivity {target}` makes it, or say --sensitivity FILE"
        )
    from assay_quantize.mixing.build import with_replay

    made, known = propose_for(
        resolved,
        Sensitivity.load(record),
        record,
        budget=limit,
        hardware=profile,
        base=base,
        schemes=schemes,
        users=users,
        context=length,
        run=run,
        name=None if out is None else out.stem,
        slack=slack,
        always_mix=always_mix,
        say=say,
    )
    if out is not None:
        _check_free(out, made)
    answer, is_taken = replayed(resolved, known, made, profile, say) if replay else ("not asked: --no-replay", True)
    made = with_replay(made, answer)
    if out is not None and is_taken:
        _write(out, made)
        say(f"wrote {out}, {out.with_suffix('.json').name} and {out.with_suffix('.svg').name}")
    return ProposedRecipe(made, is_taken)


# ------------------------------------------------------------------------------------------------ files
def _check_out(out: Path) -> None:
    """AssayError: it cannot be a recipe's file."""
    if out.suffix != ".yaml":
        raise AssayError(f"--out {shown(str(out))}: is no .yaml file; a recipe is one")
    if out.stem in TAKEN_NAMES or out.stem.endswith(("-repeat", ".json")):
        raise AssayError(
            f"--out {shown(str(out))}: {shown(out.stem)} already means something in a run's folder; give another name"
        )
    if not out.parent.is_dir():
        raise AssayError(f"--out {shown(str(out))}: there is no folder {out.parent}; make it, or give another name")


def _check_free(out: Path, made: Proposal) -> None:
    """AssayError: something else than this proposal lies where its files go. What a killed command wrote of it may."""
    for path, text in _files(out, made).items():
        try:
            existing = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError):
            existing = ""
        if existing != text and not (path.suffix == ".json" and _is_but_for_replay(path, made)):
            raise AssayError(f"--out {shown(str(out))}: {path} exists already; give another name, or delete it")


def _is_but_for_replay(path: Path, made: Proposal) -> bool:
    """Whether a record says the same, but for what vLLM's loaders said."""
    try:
        return Mix.load(path).model_copy(update={"replayed": made.mix.replayed}) == made.mix
    except AssayError:
        return False


def _files(out: Path, made: Proposal) -> dict[Path, str]:
    """Where what is written; the recipe last: where it is, the others are."""
    from assay_reports.page.frontier import frontier_svg

    return {out.with_suffix(".json"): made.mix.as_text(), out.with_suffix(".svg"): str(frontier_svg(made.mix)), out: made.text}


def _write(out: Path, made: Proposal) -> None:
    """The recipe, its record and its picture beside it, as far as they are not there; the recipe is read back as any other."""
    _check_free(out, made)
    for path, text in _files(out, made).items():
        if path.exists():  # of a command that was killed, with what it was writing
            remove_leftovers(path)
        if not path.exists() or path.suffix == ".json":
            write_text_atomically(path, text, only_new=not path.exists())
    try:
        again = parse_recipe(PrecisionRecipe, out)
    except RecipeError:
        out.unlink()
        raise
    assert again.sha256 == made.recipe.sha256, "the file does not say what was chosen"
