"""The model card, `README.md` of a checkpoint folder: metadata the hub understands, and the honest text.

Written twice: right after quantizing (no score yet: it says NOT MEASURED), and again after every judgement; `assay publish`
makes one more that names the repository. The manifest does not list it, so writing it changes no hash. A checkpoint may be
measured in several runs: its card is about the last of them. Its parts are in `cards/`; each says nothing where its record is
missing. The same records give the same bytes.
"""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from assay.errors import AssayError
from assay.records.base import write_text_atomically
from assay.records.manifest import MANIFEST, Manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import CARD
from assay_reports.cards import columns, metadata, serving, words
from assay_reports.cards.licence import find_licence
from assay_reports.limits import find_limits
from assay_reports.numbers import build_report, calibrated_in_words, plan_numbers, verification_numbers
from assay_reports.report import environment, why_none
from assay_reports.run import Run, load_checkpoint, load_run
from assay_reports.schema import Limit


def write_card(run_dir: Path, label: str) -> Path:
    """Write the card of the checkpoint that is called `label` in the run, from the run's records; its path.

    AssayError if there is no plan or no manifest: what is not a finished checkpoint gets no card.
    """
    run = load_run(run_dir)
    if label not in run.plans or label not in run.manifests:
        raise AssayError(
            f"{run_dir / label}: no finished checkpoint there (plan.json and checkpoint/{MANIFEST} are needed); "
            f"make it with `assay quantize {run.model} --precision {label}`"
        )
    return _write(run, label)


def write_first_card(checkpoint: Path) -> None:
    """The card without scores, right after quantizing; a card of these very bytes that has scores stays."""
    run = load_checkpoint(checkpoint, checkpoint.name)
    if measured_in(checkpoint, run.manifests[checkpoint.name].checkpoint_sha256) is None:
        _write(run, checkpoint.name)


READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Whoever may not write into the folder of a checkpoint has left its card to somebody else."""


class Cards(NamedTuple):
    """Of a run: paths written, and a line for each card that was left as it is: because it is about a later measurement,
    because nobody may write there, because writing failed."""

    written: list[Path]
    left: list[str]
    refused: list[str]
    failed: list[str]


def write_cards(run_dir: Path) -> Cards:
    """Write the card of every checkpoint of the run.

    A checkpoint that another run measured later keeps that run's card.
    """
    run = load_run(run_dir)
    cards = Cards([], [], [], [])
    for label in sorted(run.plans.keys() & run.manifests.keys()):
        path, manifest = run.checkpoints[label] / CARD, run.manifests[label]
        there = measured_in(run.checkpoints[label], manifest.checkpoint_sha256)
        ours = measurement_of(run, label, manifest)
        if there is not None and (ours is None or there.started > ours.started):
            cards.left.append(f"{path}: left as it is: it is about a later measurement, suite {there.suite} at {there.started}")
            continue
        try:
            cards.written.append(_write(run, label))
        except OSError as error:
            lines = cards.refused if error.errno in READ_ONLY else cards.failed
            lines.append(f"{path}: cannot be written: {error.strerror}")
    return cards


def _write(run: Run, label: str) -> Path:
    card = render(run, label, run.checkpoints[label])
    path = run.checkpoints[label] / CARD
    write_text_atomically(path, card.text)
    results = run.checkpoints[label] / metadata.EVAL_RESULTS  # hidden: no loader and no verification reads it
    if card.eval_results is not None:
        write_text_atomically(results, card.eval_results)
    elif results.is_file():
        results.unlink()
    return path


class MeasuredIn(NamedTuple):
    """What the card in a checkpoint's folder says in its last line; `started` in ISO 8601, UTC."""

    suite: str
    started: str


_MEASURED = re.compile(r"<!-- assay: checkpoint ([0-9a-f]{64}), suite (\S+), measured (\S+) -->\s*\Z")


def measured_in(checkpoint: Path, checkpoint_sha256: str) -> MeasuredIn | None:
    """Of the card that lies there. None: it has no scores, or those of another checkpoint."""
    path = checkpoint / CARD
    found = _MEASURED.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return MeasuredIn(found[2], found[3]) if found and found[1] == checkpoint_sha256 else None


class Card(NamedTuple):
    """eval_results: text of `.eval_results/assay.yaml`; None: no score is one of a benchmark of the hub."""

    text: str
    eval_results: str | None


def _calibration(run: Run, label: str, plan: Plan) -> str:
    """What text had a part in the weights or in stored scales."""
    seen = run.calibrations.get(label)
    of_scales = None if seen is None else f"scales on {seen.num_tokens:,} tokens of text"
    said = [one for one in (calibrated_in_words(plan), of_scales) if one is not None]
    return "; ".join(said) or str(plan.precision_recipe.get("calibration") or "unknown")


def render_card(run: Run, label: str, checkpoint: Path) -> str:
    """The text of the card. `checkpoint` is looked at for a licence file only."""
    return render(run, label, checkpoint).text


def render(run: Run, label: str, checkpoint: Path, *, repo: str | None = None) -> Card:
    """The card, from the run's records. repo: `owner/name`, where it is published; None: it stays in its folder."""
    plan, manifest = run.plans[label], run.manifests[label]
    measured = measurement_of(run, label, manifest)
    report = build_report(run) if measured is not None and run.reference is not None else None
    row = next((row for row in report.rows if row.label == label), None) if report else None
    measured = measured if row else None
    recipe = serving.recipe_of(plan.model)
    base_model = metadata.base_model_of(plan, recipe)
    licence = find_licence(checkpoint, recipe)
    verification = run.verifications.get(label)
    verification = verification if verification and verification.checkpoint_sha256 == manifest.checkpoint_sha256 else None
    beside = columns.find_columns(report, label, manifest.checkpoint_sha256, plan.bytes_out)
    instead = words.what_instead(report, row) if report and row else None
    emulated = bool(measured and measured.fingerprint.emulated)
    numbers = plan_numbers(plan)
    limits = _limits(run, _about(run, label)) if row else ()
    first = words.first_limits(limits)
    place = repo or serving.FOLDER
    text = (
        environment(html=False)
        .get_template("card.md.j2")
        .render(
            metadata=metadata.card_metadata(plan, row, report, base_model, licence, repo).to_yaml(),
            sentence=words.plain_sentence(plan, base_model, row, report, instead, emulated),
            plan=plan,
            numbers=numbers,
            treated=words.what_was_kept(plan, numbers),
            manifest=manifest,
            calibration=_calibration(run, label, plan),
            row=row,
            measured=measured,
            report=report,
            verdicts=[verdict for verdict in report.verdicts if verdict.candidate == label] if report else [],
            verification=verification_numbers(label, verification, measured) if verification else None,
            base_model=base_model,
            command=serving.serve_command(
                measured.fingerprint if measured else None, recipe, has_mtp=plan.keeps_mtp, place=place
            ),
            variables=serving.environment_words(measured.fingerprint) if measured and not emulated else "",
            hardware=serving.served_on(measured.fingerprint) if measured else "",
            emulated=emulated,
            columns=beside,
            lines=columns.table(beside, report, run.speed),
            sampling=words.sampling_of(report) if report else (),
            instead=instead,
            limits=first,
            num_more_limits=len(limits) - len(first),
            no_divergence=why_none(report, "divergence", [row]) if report and row else "",
            no_acceptance=why_none(report, "acceptance", [row]) if report and row else "",
            licence=licence,
            reproduction=serving.reproduction(plan, base_model, measured, report),
            repo=repo,
            deployments=[one for one in run.deployments if one.label == label and one.outcome != "NOT MEASURED"] if row else [],
        )
    )
    found = metadata.eval_results(row, report, measured, repo) if row and report and measured else None
    return Card(text, found)


def _about(run: Run, label: str) -> Run:
    """The run as if this checkpoint were its only candidate: a card does not list what happened to others."""
    kept = tuple(m for m in run.measurements if m.label == label or m.is_reference or m.is_noise_floor)
    hashes = {m.label for m in kept}
    return replace(
        run,
        measurements=kept,
        plans={name: plan for name, plan in run.plans.items() if name == label},
        verifications={name: found for name, found in run.verifications.items() if name == label},
        probes=tuple(one for one in run.probes if one.label in hashes),
        deployments=tuple(one for one in run.deployments if one.label == label),
        old_deployments=tuple(one for one in run.old_deployments if one.label == label),
    )


def _limits(run: Run, own: Run) -> tuple[Limit, ...]:
    """Those of this checkpoint; how far a quantized reference is from the source is said by the whole run."""
    whole = {limit.key: limit for limit in find_limits(run)}
    return tuple(whole[one.key] if one.key == "quantized_reference" else one for one in find_limits(own))


def measurement_of(run: Run, label: str, manifest: Manifest) -> Measurement | None:
    """The measurement of these very bytes: one of an older checkpoint with this name does not count."""
    return next((m for m in run.measurements if m.label == label and m.checkpoint_sha256 == manifest.checkpoint_sha256), None)
