"""From the measurements of a run to verdicts, and to everything that is written from records."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, MeasureError
from assay.foreign_text import shown
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe, PublishedScore
from assay.records.base import sha256_of_file
from assay.records.measurement import Measurement
from assay.records.probe import load_probes
from assay.records.reached import REACHED_NAME, RULE, ReachedAndLost
from assay.records.run import PLAN_INSIDE, RUN_RECORD, RunRecord
from assay.records.screening import Screening
from assay.records.verdict import GateReport
from assay_pipeline.attempts import earlier_attempts, note_attempts
from assay_pipeline.gate_choice import gates_of_run, registered_gates
from assay_pipeline.targets import foreign_note

if TYPE_CHECKING:
    from assay_reports.card import Cards
    from assay_reports.schema import Report


def judge(
    run_dir: Path,
    gates: str | GateRecipe | None = None,
    *,
    measurements: Sequence[Measurement] | None = None,
    published: Mapping[str, PublishedScore] | None = None,
    say: Say = say_nothing,
) -> GateReport:
    """Verdicts of a run, then everything that is written from records: gates.json, report, cards.

    gates: a recipe's name or file, or the recipe as it applies to the run's suite; None: those that were registered before the
    run. measurements: None: those of the run. published: scores of the model's recipe; None: those that the run was judged with
    before, or of the shipped recipe of its model. AssayError: nothing was measured, or the gates do not go with the suite.
    """
    from assay_evaluate.verdicts.gates import judge as judge_measurements

    measured = load_measurements(run_dir) if measurements is None else list(measurements)
    limits = gates if isinstance(gates, GateRecipe) else gates_of_run(run_dir, measured, gates, say)
    judged = judge_measurements(
        measured,
        limits,
        model=measured[0].model,
        registered=registered_gates(run_dir),
        probes=load_probes(run_dir),
        published=_published_before(run_dir, measured[0].model) if published is None else published,
        earlier=earlier_attempts(run_dir, measured),
    )
    judged.save(run_dir / "gates.json")
    try:
        note_attempts(run_dir, measured, judged)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        say(f"note: {run_dir.parent} takes no files: nobody will know of this attempt when the checkpoint is judged again")
    write_again(run_dir, say)
    about = RunRecord.load_if_there(run_dir / RUN_RECORD)
    if about is not None and about.foreign_reference is not None:
        say(f"note: {foreign_note(judged.reference, about.foreign_reference)}")
    return judged


def report(run_dir: Path) -> Path:
    """report/{index.html,report.json,report.md} of a run, from its records and stored replies only; the page. AssayError: gates
    that were changed after they were registered, which `judge` refuses, are not shown either."""
    from assay_reports.report import write_report

    registered_gates(run_dir)
    write_reached(run_dir)
    return write_report(run_dir)


def write_reached(run_dir: Path) -> None:
    """`reached.json`, from measurements and stored replies; left as it is, if it was made of these measurements' replies."""
    from assay_evaluate.reached.measure import measure_reached

    files = sorted((run_dir / "measurements").glob("*.json"))
    measured = [Measurement.load(path) for path in files]
    hashes = {path.stem: sha256_of_file(path) for path in files}
    gates = GateReport.load_if_there(run_dir / "gates.json")
    level = 0.95 if gates is None else float(gates.gate_recipe.get("level", 0.95))
    place, journal = run_dir / REACHED_NAME, run_dir / "journal.db"
    kept = None
    with suppress(AssayError):  # of another rule or version, or damaged: made again
        kept = ReachedAndLost.load_if_there(place)
    if kept is not None and kept.replies_read and (kept.rule, kept.level, kept.measurements) == (RULE, level, hashes):
        return
    is_read = journal.is_file()
    try:
        tasks = measure_reached(measured, journal if is_read else None, level)
    except MeasureError:
        tasks, is_read = measure_reached(measured, None, level), False
    ReachedAndLost(level=level, replies_read=is_read, measurements=hashes, tasks=tasks).save(place)


def load_measurements(run_dir: Path) -> list[Measurement]:
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    if not measurements:
        raise AssayError(f"{run_dir}: nothing was measured yet; run `assay evaluate` first")
    return measurements


def write_again(run_dir: Path, say: Say = say_nothing) -> None:
    """Report and cards, from the records that are there. AssayError, after all others are written, for a card that the disk did
    not take: the one that lies there may say what is no longer true. A folder that is read-only keeps its card."""
    from assay_reports.report import write_report

    write_reached(run_dir)
    write_report(run_dir)
    cards = write_cards(run_dir, say)
    if cards.failed:
        raise AssayError(f"{'; '.join(cards.failed)}; run `assay card {shown(str(run_dir))}` when it can be")


def _published_before(run_dir: Path, model: str) -> Mapping[str, PublishedScore]:
    if (before := GateReport.load_if_there(run_dir / "gates.json")) is not None:
        return {score.task: PublishedScore.model_validate(score.given) for score in before.published}
    return load_recipe(ModelRecipe, model).published if model in recipe_names("models") else {}


def load_report(run_dir: Path) -> Report:
    """`report.json`, as it was written last."""
    from assay_reports.schema import Report

    return Report.load(run_dir / "report" / "report.json")


def write_cards(folder: Path, say: Say = say_nothing, *, screening: Path | None = None) -> Cards:
    """Cards of a run's checkpoints, or of one in no run. Why some were left as they are is said, but for `failed`.

    screening: record that cards of its weights repeat, or its folder. AssayError: it is of none of the weights, or files of one
    of them are not those that were made.
    """
    from assay_reports import card

    is_alone = (folder / PLAN_INSIDE).is_file()
    record = None if screening is None else _screening_of_files(folder, screening, is_alone=is_alone)
    cards = card.write_card_of(folder, record) if is_alone else card.write_cards(folder, record)
    for line in (*cards.left, *cards.refused):
        say(line)
    return cards


def _screening_of_files(folder: Path, screening: Path, *, is_alone: bool) -> Screening:
    """The record, for the checkpoints of a run or for one alone, by their files and not by what their manifests say."""
    from assay_evaluate.run.identity import checkpoint_sha256, not_as_made
    from assay_reports.cards.screened import screening_of
    from assay_reports.run import load_checkpoint, load_run

    run = load_checkpoint(folder, folder.name) if is_alone else load_run(folder)
    weights = {label: manifest.checkpoint_sha256 for label, manifest in run.manifests.items()}
    record = screening_of(screening, weights)
    for place in [run.checkpoints[label] for label, sha256 in weights.items() if record.of_weights(sha256) is not None]:
        if (changed := not_as_made(place, checkpoint_sha256(place, sha256_of_file))) is not None:
            raise AssayError(changed)
    return record


def card_block(checkpoint: Path, screening: Path) -> str:
    """What a screening says of a checkpoint that anybody made, as Markdown for its card; nothing is written.

    AssayError: there is no checkpoint, or the record is of other weights.
    """
    from assay_evaluate.run.identity import checkpoint_sha256
    from assay_reports.cards.screened import render_block, screened_block, screening_of

    sha256 = checkpoint_sha256(checkpoint, sha256_of_file)
    block = screened_block(screening_of(screening, {str(checkpoint): sha256}), sha256)
    assert block is not None, "the record is of these weights"
    return render_block(block)


def passed(gates: GateReport) -> bool:
    """Whether a command that judges exits 0: every candidate is PASS."""
    return all(status == "PASS" for status in gates.overall.values())
