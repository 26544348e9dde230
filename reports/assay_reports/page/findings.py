"""What the headings of a page's sections say was found.

A loss is named where its interval lies above zero; what was not measured is never called "no loss". The English is in
`sentences/page.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from assay.quantities import capital, percent_short, points_short
from assay.records.serving import IMPORTED
from assay.records.speed import SpeedRow
from assay_evaluate.speed.noise import Noise, noise_of_rows
from assay_evaluate.speed.ratio import is_ahead, output_tokens_s
from assay_reports.page.report_rows import (
    FEW,
    candidates,
    is_unjudged,
    name_of,
    scored,
    shortened,
    title_of,
    unmeasured_tasks,
)
from assay_reports.schema import PlanNumbers, Report, Row
from assay_reports.sentences import page as english
from assay_reports.text import and_list, count_of, grouped, percent

NOISE = 1.5
"""Divergence at one place of the text over that at another, from which a heading calls it a change."""


# ------------------------------------------------------------------------------------------------ headings: scores
def tasks(report: Report) -> str:
    """`Chinese code lookup lost 25.0 points (nvfp4a16) and 10.0 (w4a16); no other loss is shown at 95 %`."""
    results = [(row, task) for row in candidates(report) for task in scored(report, row)]
    losses = grouped(
        (name_of(task), (task.drop.value, row.label)) for row, task in results if task.drop is not None and task.drop.low > 0
    )
    missing = unmeasured_tasks(report)
    left = english.NOT_MEASURED_TOO.format(tasks=shortened(missing)) if missing else ""
    if not results:
        return english.NOTHING_SCORED + left
    if not losses:
        return english.NO_LOSS.format(answers=sum(task.num_pairs or 0 for _, task in results)) + left
    ordered = sorted(losses.items(), key=lambda entry: -max(entry[1])[0])
    worst = "; ".join(_lost(name, of_task) for name, of_task in ordered[:FEW])
    rest = english.MORE_LOST.format(number=len(ordered) - FEW) if len(ordered) > FEW else english.NO_OTHER_LOSS
    return capital(worst) + rest + left


def _lost(name: str, losses: list[tuple[float, str]]) -> str:
    templates = [english.LOST_FIRST, *[english.LOST_MORE] * (len(losses) - 1)]
    told = [
        template.format(points=points_short(value), label=label)
        for template, (value, label) in zip(templates, sorted(losses, reverse=True), strict=True)
    ]
    return english.LOST.format(task=name, losses=and_list(told))


def reached(report: Report) -> str:
    """Of right answers that were reached and lost: the task with the largest sure increase."""
    measured = [(row, of_task) for row in candidates(report) for of_task in row.reached]
    compared = [(row, of_task, more) for row, of_task in measured if (more := of_task.lost_more) is not None]
    if not compared:
        reasons = dict.fromkeys(of_task.not_measured for row in report.rows for of_task in row.reached if of_task.not_measured)
        return english.REACHED_UNKNOWN.format(reasons="; ".join(reasons) or english.NO_REASON)
    sure = [entry for entry in compared if entry[2].low > 0]
    if not sure:
        return english.REACHED_ALIKE.format(reference=report.reference)
    row, of_task, more = max(sure, key=lambda entry: entry[2].value)
    return english.REACHED_MORE.format(
        label=row.label, points=points_short(more.value), reference=report.reference, task=title_of(report, of_task.task)
    )


def languages(report: Report) -> str:
    parts = [(row, task, part) for row in candidates(report) for task in scored(report, row) for part in task.by_language]
    losses = [
        (part.drop.value, name_of(task), part.language, row.label)
        for row, task, part in parts
        if part.drop is not None and part.drop.low > 0
    ]
    if not losses:
        spoken = dict.fromkeys(part.language for row in report.rows for task in row.tasks for part in task.by_language)
        return english.NO_LANGUAGE.format(languages=", ".join(spoken) or english.NONE_ASKED)
    most, task, language, label = max(losses)
    return english.WORST_LANGUAGE.format(task=task, language=language, label=label, points=points_short(most))


def long_context(report: Report) -> str:
    labels = {row.label for row in candidates(report)}
    cells = [
        (cell, of)
        for of in report.long_context
        if of.candidate in labels and not is_unjudged(report, of.candidate, of.task)
        for cell in of.by_length or of.by_depth
    ]
    if not cells:
        return english.NO_LONG_CONTEXT
    lost = [(cell, of) for cell, of in cells if cell.drop.low > 0]
    if not lost:
        return english.NO_LENGTH.format(longest=max(cell.length_tokens for cell, _ in cells))
    cell, of = max(lost, key=lambda entry: entry[0].drop.value)
    return english.WORST_LENGTH.format(
        label=of.candidate, length=cell.length_tokens, points=points_short(cell.drop.value), task=title_of(report, of.task)
    )


# ------------------------------------------------------------------------------------------------ headings: serving
def drift(report: Report) -> str:
    """Where along the text the furthest candidate is furthest, against the front of the same text."""
    rows = candidates(report)
    courses = {row.label: course for row in rows if (course := _course(row))}
    if not courses:
        return english.NO_COURSE if any(row.divergence for row in rows) else english.NO_DIVERGENCE
    label = max(courses, key=lambda name: max(value for value, _ in courses[name]))
    front, (most, span), end = courses[label][0][0], max(courses[label]), courses[label][-1][0]
    if front <= 0 or most >= NOISE * front:
        spans, checkpoints = sum(map(len, courses.values())), count_of(len(courses), "checkpoint")
        return english.DRIFT_AT.format(span=span, label=label, most=most, spans=spans, checkpoints=checkpoints)
    template = english.DRIFT_FRONT if end * NOISE <= front else english.DRIFT_LEVEL
    return template.format(label=label, front=front, end=end)


def _course(row: Row) -> list[tuple[float, str]]:
    """Mean KL, lower bound, and positions, from the front to the end of sampled texts. Empty: fewer than two spans."""
    if row.divergence is None:
        return []
    curve = next((drift.curve for drift in row.divergence.drift if drift.texts == "all" and drift.curve), ())
    spans = [(span.kl_mean, f"{span.first} to {span.last}") for span in curve]
    spans = spans or [(bucket.kl_mean, f"{bucket.first} to {bucket.last}") for bucket in row.divergence.by_position]
    return spans if len(spans) > 1 else []


def acceptance(report: Report) -> str:
    known = [row for row in candidates(report) if row.acceptance is not None and row.acceptance.rate is not None]
    if not known:
        return english.NO_ACCEPTANCE
    drops = [(row.label, row.acceptance_drop) for row in known if row.acceptance_drop is not None]
    if worse := [(label, drop) for label, drop in drops if drop.low > 0]:
        losses = [english.LOST_FIRST.format(points=points_short(drop.value), label=label) for label, drop in worse]
        return english.FEWER_ACCEPTED.format(losses=and_list(losses), reference=report.reference)
    start = english.ACCEPTED_ALIKE.format(reference=report.reference)
    if not drops:
        return start
    highest = sorted(max(drop.high, 0.0) for _, drop in drops)
    ends = dict.fromkeys((points_short(highest[0]), points_short(highest[-1])))
    return english.ACCEPTED_AT_MOST.format(start=start, points=" to ".join(ends))


def fidelity(report: Report) -> str:
    if not report.probes:
        return english.NO_PROBES
    alarms = [f"{probes.label}: {alarm.name}" for probes in report.probes for alarm in probes.alarms]
    if alarms:
        return english.ALARMS.format(alarms=count_of(len(alarms), "alarm"), names=shortened(alarms))
    number = sum(result.status != "not_run" for probes in report.probes for result in probes.results)
    return english.NO_ALARM.format(number=number, labels=and_list([probes.label for probes in report.probes]))


# ------------------------------------------------------------------------------------------------ headings: speed
def ladders(rows: Iterable[SpeedRow]) -> dict[tuple[object, ...], list[SpeedRow]]:
    """Rows that may stand in one picture: alike but for checkpoint and concurrency, and comparable."""
    return grouped((row.like[:-1], row) for row in rows if row.is_comparable)


def speed(report: Report) -> str:
    if report.speed is None or not report.speed.rows:
        return english.NO_SPEED_HEADING
    groups = ladders(report.speed.rows)
    if not groups:
        return english.NO_SPEED_COMPARED
    rows = max(groups.values(), key=lambda some: (any(row.origin == "measured" for row in some), len(some)))
    noise = noise_of_rows(report.speed.rows, output_tokens_s)
    low, high = min(row.concurrency for row in rows), max(row.concurrency for row in rows)
    (few, of_few), (many, of_many) = (_fastest([row for row in rows if row.concurrency == at], noise) for at in (low, high))
    speeds = english.SPEED_FEW.format(fastest=few, streams=count_of(low, "stream"), speed=of_few)
    if high != low:
        template = english.SPEED_SAME if few == many else english.SPEED_MANY
        speeds += template.format(fastest=many, streams=high, speed=of_many)
    first = rows[0]
    return english.SPEED.format(
        speeds=speeds,
        hardware=first.hardware,
        prompts=first.prompts,
        drafting=f"{first.speculation} drafted" if first.speculation else "speculation off",
        origin="" if first.origin == "measured" else f", {first.origin}",
    )


def _fastest(rows: Sequence[SpeedRow], noise: Noise) -> tuple[str, float]:
    """(`fp8 is fastest`, or `fp8 and bf16 cannot be told apart`; its tokens/s). rows: of one number of streams."""
    first, *others = sorted(rows, key=lambda row: (row.tokens_s, row.checkpoint), reverse=True)
    close = [row.checkpoint for row in others if row.checkpoint != first.checkpoint and not is_ahead(first, row, noise)]
    if close:
        return english.NOT_TOLD_APART.format(labels=and_list([first.checkpoint, *close])), first.tokens_s
    return english.FASTEST.format(label=first.checkpoint), first.tokens_s


# ------------------------------------------------------------------------------------------------ headings: checkpoints
def kept_roles(plan: PlanNumbers) -> tuple[list[str], float]:
    """Roles of which something is not quantized, largest first, and their share of the bytes written."""
    bytes_kept = Counter[str]()
    for role in plan.roles:  # several of one name where its tensors are treated differently
        if not role.what.startswith("quantized") and role.bytes_out:
            bytes_kept[role.role] += role.bytes_out
    names = [name.replace("_", " ") for name, _ in bytes_kept.most_common()]
    return names, bytes_kept.total() / max(plan.bytes_out, 1)


def tensors(report: Report) -> str:
    if not report.plans:
        return english.NO_PLANS
    shares = [f"{plan.precision} {percent_short(kept_roles(plan)[1])}" for plan in report.plans]
    return english.UNQUANTIZED.format(shares=and_list(shares))


def verification(report: Report) -> str:
    records = report.verifications
    if not records:
        return english.NO_VERIFICATION
    if damaged := [record for record in records if not record.passed]:
        labels = [english.DAMAGES.format(label=record.precision, number=len(record.damages)) for record in damaged]
        return english.DAMAGED.format(labels=and_list(labels))
    others = [record.precision for record in records if record.is_measured_checkpoint is False]
    return english.VERIFIED.format(
        labels=and_list([record.precision for record in records]),
        checks=sum(record.num_checked for record in records),
        others=english.NOT_THE_MEASURED.format(labels=and_list(others)) if others else "",
    )


def serving(report: Report) -> str:
    if report.fingerprint.server == IMPORTED:
        return english.SERVING_UNKNOWN
    emulated = [row.label for row in candidates(report) if row.emulated]
    tail = english.SERVED_EMULATED.format(labels=and_list(emulated)) if emulated else ""
    return english.SERVED_ALIKE.format(server=served_by(report), emulated=tail)


def served_by(report: Report) -> str:
    """`vllm 0.33.0, profile 8xh200`, or that nobody here started it."""
    fingerprint = report.fingerprint
    if fingerprint.server == IMPORTED:
        return english.IMPORTED
    template = english.EXTERNAL_SERVER if fingerprint.server == "external" else english.SERVER
    return template.format(server=fingerprint.server, profile=fingerprint.profile)


def speculation_of(report: Report) -> str:
    """What is drafted; of a server that somebody else runs only that something was."""
    if report.fingerprint.server == IMPORTED:
        return english.SPECULATION_UNKNOWN
    if report.fingerprint.speculation:
        return json.dumps(report.fingerprint.speculation)
    is_drafting = any(row.acceptance is not None and row.acceptance.num_draft_tokens for row in report.rows)
    return english.DRAFTS_UNKNOWN if is_drafting else english.NO_SPECULATION


def pairs_notes(report: Report) -> dict[str, str]:
    """Task -> why a score, the reference's and the change between them do not add up: the reference answered more items."""
    notes = {}
    for row in report.rows:
        for task in row.tasks if row.kind == "reference" else ():
            fewer = [(other, t) for other in report.rows for t in other.tasks if t.task == task.task and t.reference_on_pairs]
            groups = grouped(((t.num_pairs or 0, t.reference_on_pairs), other.label) for other, t in fewer)
            if groups:
                parts = [
                    english.ON_PAIRS.format(pairs=pairs, labels=and_list(labels), reference=row.label, score=percent(score))
                    for (pairs, score), labels in groups.items()
                ]
                title = capital(name_of(task))
                items = task.num_items - task.num_failed
                notes[task.task] = english.MORE_ITEMS.format(
                    task=title, reference=row.label, items=items, parts=" ".join(parts)
                )
    return notes


def limits(report: Report) -> str:
    return english.ONE_LIMIT if len(report.limits) == 1 else english.LIMITS.format(number=len(report.limits))


def gates(report: Report) -> str:
    if not report.verdicts:
        return english.NOT_JUDGED
    labels = {row.label for row in candidates(report)}
    by_label = grouped((v.candidate, v.status.lower()) for v in report.verdicts if v.candidate in labels and v.has_say)
    counts = [
        f"{label}: {', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses))}"
        for label, statuses in by_label.items()
    ]
    return english.GATES.format(counts="; ".join(counts) or english.NO_GATES)


HEADINGS = {
    function.__name__: function
    for function in (
        tasks, reached, languages, long_context, drift, acceptance, fidelity, speed, tensors, verification, serving, limits,
        gates,
    )
}  # fmt: skip
"""Section -> what its heading says of a report."""
