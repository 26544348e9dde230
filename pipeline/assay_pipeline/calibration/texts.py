"""What `--text` and `--withhold` name, for every calibration: sources of text, and items that no text may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.recipes.base import recipe_names
from assay.recipes.load import load_recipe, recipe_file
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.run import RUN_RECORD, RunRecord

if TYPE_CHECKING:
    from assay_quantize.calibration.sources import Source
    from assay_quantize.calibration.text import Text, Weighted
    from assay_quantize.calibration.withheld import Withheld

JOURNAL = "journal.db"


def calibration_text(
    named: Sequence[str], withhold: Sequence[str] | None, runs: Path, model: str, seed: int
) -> tuple[Text, Callable[[], Withheld]]:
    """Text that was asked for, and who finds the items that none of it may hold: they are looked for when text is read.

    named: sources; none: what the model writes. AssayError: a source or a suite that is not there.
    """
    from assay_quantize.calibration.text import Text

    for name in withhold or ():
        if not Path(name).is_dir():
            recipe_file(SuiteRecipe, name)
    words = None if withhold is None else tuple(withhold)
    mixed = Text(seed=seed, mix=text_sources(named), withhold=words)
    return mixed, lambda: withheld_items(words, runs, model, named)


def text_sources(named: Sequence[str]) -> tuple[Weighted, ...]:
    """The mix that `--text` names."""
    from assay_quantize.calibration.text import mix_of

    return mix_of(named, replies_of_run)


def replies_of_run(folder: Path) -> Source:
    """What a run's reference replied. AssayError: no run, or one without a reference's replies."""
    from assay_evaluate.client.journal_reading import conversations
    from assay_quantize.calibration.sources import Conversations

    if not (folder / JOURNAL).is_file():
        raise AssayError(
            f"--text {folder}: a folder is taken for a run, and this one has no {JOURNAL}; name a run that was evaluated, or "
            "files: plain text, .jsonl, .parquet, or a mix in .yaml"
        )
    measured = [Measurement.load(path) for path in sorted((folder / "measurements").glob("*.json"))]
    sha256 = next(
        (
            measurement.checkpoint_sha256
            for measurement in measured
            if measurement.is_reference and not measurement.is_noise_floor
        ),
        None,
    )
    if sha256 is None:
        raise AssayError(f"--text {folder}: no reference was measured in this run; evaluate it first")
    checkpoint_sha256 = sha256
    variants = {measurement.replies_sha256 or "" for measurement in measured if measurement.is_variant}

    def rows() -> Iterator[Mapping[str, Any]]:
        return conversations(folder / JOURNAL, checkpoint_sha256, variants)

    return Conversations(f"replies of the reference in {folder}", rows)


def withheld_items(named: Sequence[str] | None, runs: Path, model: str, sources: Sequence[str]) -> Withheld:
    """Items of the suites and runs that were named, or of all shipped suites and all runs of this model but the sources.

    What is named must be had, and is downloaded if need be; of the shipped suites what is on this machine is taken.
    """
    from assay_quantize.calibration.withheld import Withheld

    items = Withheld()
    if named is None:
        for suite in recipe_names("suites"):
            _add_suite(items, suite, may_download=False)
        taken = {Path(source.rpartition("@")[0] or source).resolve() for source in sources}
        taken |= {Path(source).resolve() for source in sources}
        for record in sorted(runs.glob(f"*/{RUN_RECORD}")):
            has_journal = (record.parent / JOURNAL).is_file() and record.parent.resolve() not in taken
            if has_journal and RunRecord.load(record).model == model:
                _add_run(items, record.parent)
        return items
    for name in named:
        if Path(name).is_dir():
            _add_run(items, Path(name))
        else:
            _add_suite(items, name, may_download=True)
    return items


def _add_suite(withheld: Withheld, name: str, *, may_download: bool) -> None:
    from assay_evaluate.tasks.item_texts import item_texts

    suite = load_recipe(SuiteRecipe, name)
    for task in item_texts(suite, may_download=may_download):
        if task.texts is None:
            withheld.leave_out(suite.name, task.task, task.reason or "not known")
        else:
            withheld.add(suite.name, task.task, task.texts)


def _add_run(withheld: Withheld, folder: Path) -> None:
    from assay_evaluate.client.journal_reading import asked_texts

    if not (folder / JOURNAL).is_file():
        raise AssayError(f"--withhold {folder}: no run that was evaluated, it has no {JOURNAL}; name a suite or a run")
    for task, texts in asked_texts(folder / JOURNAL).items():
        withheld.add(f"run {folder}", task, texts)
