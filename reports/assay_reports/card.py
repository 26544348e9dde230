"""The model card, `README.md` of a checkpoint folder: metadata the hub understands, and the honest text.

Written twice: right after quantizing (no score yet: it says NOT MEASURED), and again after every judgement; `assay publish`
makes one more that names the repository. The manifest does not list it, so writing it changes no hash. A checkpoint may be
measured in several runs: its card is about the last of them. Its parts are in `cards/`, its English in `sentences/card.py`
and its template. The same records give the same bytes.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from assay.errors import AssayError
from assay.records.base import write_text_atomically
from assay.records.manifest import MANIFEST
from assay.records.plan import Plan
from assay.records.run import CARD
from assay.records.screening import Screening
from assay_reports.cards import columns, metadata, serving
from assay_reports.cards.licence import find_licence
from assay_reports.cards.screened import screened_block
from assay_reports.find_limits import find_limits
from assay_reports.numbers import build_report, describe_calibration, plan_numbers, verification_numbers
from assay_reports.report import environment, why_none
from assay_reports.run import Run, load_checkpoint, load_run
from assay_reports.schema import Limit, PlanNumbers, Report, RoleNumbers, Row
from assay_reports.sentences import card as english
from assay_reports.text import grouped, size

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Whoever may not write into the folder of a checkpoint has left its card to somebody else."""
NUM_LIMITS = 5
FIRST_LIMITS = (
    "unmeasured", "serving_faults", "gates_not_before", "not_measured", "truncation", "failures", "emulated",
    "foreign_reference", "quantized_reference", "second_rounding", "speculation_off", "not_sampled", "non_finite",
    "verification_stale", "external_server", "sample_sizes", "context_length", "languages", "no_load", "kinds_of_work",
    "generated_questions", "nothing_scored_there",
)  # fmt: skip
"""Keys of `LIMITS` in the order in which they can change what somebody who deploys this checkpoint decides; others follow."""


# ------------------------------------------------------------------------------------------------ writing
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


def write_first_card(checkpoint: Path, screening: Screening | None = None) -> None:
    """The card without scores, right after quantizing; a card of these very bytes that has scores stays.

    screening: of these weights, or others. AssayError: there is no manifest.
    """
    run = replace(load_checkpoint(checkpoint, checkpoint.name), screening=screening)
    if checkpoint.name not in run.manifests:
        raise AssayError(
            f"{checkpoint}: has no {MANIFEST}: no finished checkpoint of `assay quantize` is there, and no card is written"
        )
    if _measured_in(checkpoint, run.manifests[checkpoint.name].checkpoint_sha256) is None:
        _write(run, checkpoint.name)


def write_card_of(checkpoint: Path, screening: Screening | None = None) -> Cards:
    """The card of a checkpoint that lies in no run; one with scores stays."""
    write_first_card(checkpoint, screening)
    path = checkpoint / CARD
    if _MEASURED.search(path.read_text(encoding="utf-8", errors="replace")):
        return Cards([], [f"{path}: left as it is: it has the scores of a run; `assay card RUN` writes it"], [], [])
    return Cards([path], [], [], [])


class Cards(NamedTuple):
    """Of a run: paths written, and a line for each card that was left as it is: because it is about a later measurement,
    because nobody may write there, because writing failed."""

    written: list[Path]
    left: list[str]
    refused: list[str]
    failed: list[str]


def write_cards(run_dir: Path, screening: Screening | None = None) -> Cards:
    """Write the card of every checkpoint of the run.

    A checkpoint that another run measured later keeps that run's card. screening: None: the run's own, if it has one.
    """
    run = load_run(run_dir)
    run = run if screening is None else replace(run, screening=screening)
    cards = Cards([], [], [], [])
    for label in sorted(run.plans.keys() & run.manifests.keys()):
        path, manifest = run.checkpoints[label] / CARD, run.manifests[label]
        last = _measured_in(run.checkpoints[label], manifest.checkpoint_sha256)
        measurement = run.measurement_of(label)
        if last is not None and (measurement is None or last.started > measurement.started):
            cards.left.append(f"{path}: left as it is: it is about a later measurement, suite {last.suite} at {last.started}")
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


def _measured_in(checkpoint: Path, checkpoint_sha256: str) -> MeasuredIn | None:
    """Of the card that lies there. None: it has no scores, or those of another checkpoint."""
    path = checkpoint / CARD
    match = _MEASURED.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return MeasuredIn(match[2], match[3]) if match and match[1] == checkpoint_sha256 else None


# ------------------------------------------------------------------------------------------------ rendering
class Card(NamedTuple):
    """eval_results: text of `.eval_results/assay.yaml`; None: no score is one of a benchmark of the hub."""

    text: str
    eval_results: str | None


def render_card(run: Run, label: str, checkpoint: Path) -> str:
    """The text of the card. `checkpoint` is looked at for a licence file only."""
    return render(run, label, checkpoint).text


def render(run: Run, label: str, checkpoint: Path, *, repo: str | None = None) -> Card:
    """The card, from the run's records. repo: `owner/name`, where it is published; None: it stays in its folder."""
    plan, manifest = run.plans[label], run.manifests[label]
    measured = run.measurement_of(label)
    report = build_report(run) if measured is not None and run.reference is not None else None
    row = next((row for row in report.rows if row.label == label), None) if report else None
    measured = measured if row else None
    recipe = serving.recipe_of(plan.model)
    base_model = metadata.base_model_of(plan, recipe)
    licence = find_licence(checkpoint, recipe)
    verification = run.verifications.get(label)
    verification = verification if verification and verification.checkpoint_sha256 == manifest.checkpoint_sha256 else None
    shown_columns = columns.find_columns(report, label, manifest.checkpoint_sha256, plan.bytes_out)
    instead = _instead(report, row) if report and row else None
    emulated = bool(measured and measured.fingerprint.emulated)
    numbers = plan_numbers(plan)
    limits = _limits(run, label) if row else []
    text = (
        environment(html=False)
        .get_template("card.md.j2")
        .render(
            metadata=metadata.card_metadata(plan, row, report, base_model, licence, repo).to_yaml(),
            sentence=english.WHAT.format(
                model=base_model or plan.model, precision=plan.precision, before=size(plan.bytes_in),
                after=size(plan.bytes_out), trust=_trust(row, report, instead, emulated) + _of_copies(run, plan, row),
            ),
            plan=plan,
            numbers=numbers,
            treated=_treated(plan, numbers),
            manifest=manifest,
            calibration=_calibration(run, label, plan),
            row=row,
            measured=measured,
            report=report,
            verdicts=[verdict for verdict in report.verdicts if verdict.candidate == label] if report else [],
            verification=verification_numbers(label, verification, measured) if verification else None,
            base_model=base_model,
            command=serving.serve_command(
                measured.fingerprint if measured else None, recipe, has_mtp=plan.keeps_mtp, place=repo or serving.FOLDER
            ),
            variables=serving.environment_words(measured.fingerprint) if measured and not emulated else "",
            hardware=serving.served_on(measured.fingerprint) if measured else "",
            emulated=emulated,
            columns=shown_columns,
            lines=columns.table(shown_columns, report, run.speed),
            sampling=_sampling(report) if report else (),
            floor=next((other for other in report.rows if other.kind == "noise floor"), None) if report else None,
            screened=None if run.screening is None else screened_block(run.screening, manifest.checkpoint_sha256),
            limits=limits[:NUM_LIMITS],
            num_more_limits=max(0, len(limits) - NUM_LIMITS),
            no_divergence=why_none(report, "divergence", [row]) if report and row else "",
            no_acceptance=why_none(report, "acceptance", [row]) if report and row else "",
            licence=licence,
            reproduction=serving.reproduction(plan, base_model, measured, report),
            repo=repo,
            deployments=[
                record for record in run.deployments if record.label == label and record.outcome != "NOT MEASURED"
            ] if row else [],
        )
    )  # fmt: skip
    results = metadata.eval_results(row, report, measured, repo) if row and report and measured else None
    return Card(text, results)


def _limits(run: Run, label: str) -> list[Limit]:
    """Of the run as if this checkpoint were its only candidate, those first that matter most to who deploys it; how far a
    quantized reference is from the source is said by the whole run."""
    kept = tuple(m for m in run.measurements if m.label == label or m.is_reference or m.is_noise_floor)
    labels = {m.label for m in kept}
    alone = replace(
        run,
        measurements=kept,
        plans={name: plan for name, plan in run.plans.items() if name == label},
        verifications={name: record for name, record in run.verifications.items() if name == label},
        probes=tuple(probes for probes in run.probes if probes.label in labels),
        deployments=tuple(record for record in run.deployments if record.label == label),
        old_deployments=tuple(record for record in run.old_deployments if record.label == label),
    )
    whole = {limit.key: limit for limit in find_limits(run)}
    order = {key: number for number, key in enumerate(FIRST_LIMITS)}
    limits = [whole[limit.key] if limit.key == "quantized_reference" else limit for limit in find_limits(alone)]
    return sorted(limits, key=lambda limit: order.get(limit.key, len(order)))


# ------------------------------------------------------------------------------------------------ sentences
def _trust(row: Row | None, report: Report | None, instead: str | None, emulated: bool) -> str:
    """How far it may be trusted, in a clause without a number that needs a definition."""
    if row is None or report is None:
        return english.NOBODY_MEASURED
    if row.kind == "reference":
        return english.REFERENCE
    templates = {
        "PASS": english.PASS, "FAIL": english.FAIL, "UNDERPOWERED": english.UNDERPOWERED, "not failed": english.NOT_FAILED,
    }  # fmt: skip
    return templates.get(row.status or "", english.NO_VERDICT).format(
        reference=report.reference,
        limits=english.LIMITS_BEFORE if report.gates_chosen == "before the run" else english.LIMITS,
        suite=report.suite,
        served=english.AS_EMULATED if emulated else english.AS_SERVED,
        instead=instead,
    )


def _of_copies(run: Run, plan: Plan, row: Row | None) -> str:
    """That it was made of, or compared with, a quantized copy of the model; nothing, if it was not."""
    made = "" if plan.foreign_source is None else english.OF_COPY.format(how=plan.foreign_source)
    is_compared = row is not None and row.kind == "candidate" and run.foreign_reference is not None
    return made + (english.AGAINST_COPY if is_compared else "")


def _instead(report: Report, row: Row) -> str | None:
    """What to use where this checkpoint did not pass: the smallest that did, and the reference. None: it passed."""
    if row.kind != "candidate" or row.status == "PASS":
        return None
    passed = [
        other
        for other in report.rows
        if other.kind == "candidate" and other.status == "PASS" and other.checkpoint_bytes and other.variant is None
    ]
    smallest = min(passed, key=lambda other: other.checkpoint_bytes or 0, default=None)
    if smallest is None:
        return english.NOTHING_PASSED.format(reference=report.reference)
    return english.SMALLEST_THAT_PASSED.format(
        label=smallest.label, size=size(smallest.checkpoint_bytes), reference=report.reference
    )


class Treated(NamedTuple):
    """A role of a plan, and the reason for which it was kept, if it was."""

    role: RoleNumbers
    reason: str


def _treated(plan: Plan, numbers: PlanNumbers) -> list[Treated]:
    """Roles in the plan's order of size."""
    quantized = {tensor.role for tensor in plan.tensors if tensor.action == "quantize"}
    treated = []
    for role in numbers.roles:
        reason = english.NOT_QUANTIZED.get(role.role, english.RECIPE_KEEPS)
        if role.what.startswith(("quantized", "scales")):
            reason = ""
        elif role.what == "dropped":
            reason = english.LEFT_OUT
        elif role.role in quantized:
            reason = english.SINGLE_TENSORS
        treated.append(Treated(role, reason))
    return treated


def _calibration(run: Run, label: str, plan: Plan) -> str:
    """What text had a part in the weights or in stored scales."""
    record = run.calibrations.get(label)
    scales = None if record is None else english.SCALES.format(tokens=record.num_tokens)
    parts = [part for part in (describe_calibration(plan), scales) if part is not None]
    return "; ".join(parts) or str(plan.precision_recipe.get("calibration") or english.UNKNOWN_CALIBRATION)


def _sampling(report: Report) -> Sequence[str]:
    """`temperature 1, top_p 0.95: gsm8k, aime`: how the suite asked, tasks of one kind together."""
    how_asked = []
    for task in report.suite_recipe.get("tasks", ()):
        how = english.GREEDY
        if temperature := task.get("temperature", 0.0):
            how = english.SAMPLED.format(temperature=temperature, top_p=task.get("top_p", 1.0))
            how += english.TOP_K.format(top_k=task["top_k"]) if task.get("top_k", -1) != -1 else ""
        how_asked.append((how, task["name"]))
    return [english.SAMPLING.format(how=how, tasks=", ".join(names)) for how, names in grouped(how_asked).items()]
