"""What a page says in sentences: which checkpoint and what to do next, and for each section a heading that says what was found.

A loss is named where its interval lies above zero; what was not measured is never called "no loss". The English is in
`sentences/page.py`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, points_short, size
from assay.records.base import Interval
from assay.records.serving import IMPORTED
from assay.records.speed import SpeedRow
from assay.records.verdict import Verdict
from assay_evaluate.speed.noise import Noise, noise_of_rows
from assay_evaluate.speed.ratio import is_ahead, output_tokens_s
from assay_reports.rankings import ranked
from assay_reports.run import UNQUANTIZED_LABELS
from assay_reports.schema import PlanNumbers, Report, Row, TaskNumbers
from assay_reports.sentences import limits as english_limits
from assay_reports.sentences import page as english
from assay_reports.text import and_list, count_of, grouped, percent

NOISE = 1.5
"""Divergence at one place of the text over that at another, from which a heading calls it a change."""
FEW = 3
"""Names in a heading; of more their number is said."""
COUNTS = re.compile(r"; \d+ gates? (passed|failed|underpowered|not measured).*$")
"""How many gates passed stands at the end of a reason; the first screen leaves it to the table of gates."""
SAID_FIRST = ("foreign_reference", "screened_out", "speed_outdated", "choice_outdated", "context_length")
"""Limits that stand on the first screen as well."""
NO_REASON = "has no score for"
"""Begins a sentence whose reason comes later, and at length."""
LONGEST_REASON = 110
"""Characters of a clause on the first screen; a longer one stands with the gates."""


# ------------------------------------------------------------------------------------------------ of a report
def candidates(report: Report) -> list[Row]:
    return [row for row in report.rows if row.kind == "candidate"]


def is_unjudged(report: Report, label: str, task: str) -> bool:
    """Its gate says NOT MEASURED: its numbers are no result."""
    gate = f"score {task}"
    return any(v.status == "NOT MEASURED" and (v.candidate, v.gate) == (label, gate) for v in report.verdicts)


def scored(report: Report, row: Row) -> list[TaskNumbers]:
    """Tasks of a candidate whose change is a result."""
    return [task for task in row.tasks if task.drop is not None and not is_unjudged(report, row.label, task.task)]


def unmeasured_tasks(report: Report) -> list[str]:
    """Names, as sentences call them, of tasks that no candidate has a result of."""
    rows = candidates(report)
    known = {name_of(task) for row in rows for task in scored(report, row)}
    return [name for name in dict.fromkeys(name_of(task) for row in rows for task in row.tasks) if name not in known]


def name_of(task: TaskNumbers) -> str:
    return task.title or task.task


def title_of(report: Report, task: str) -> str:
    return next((name_of(t) for row in report.rows for t in row.tasks if t.task == task), task)


def undecided_verdicts(report: Report) -> list[Verdict]:
    labels = {row.label for row in candidates(report)}
    return [v for v in report.verdicts if v.candidate in labels and v.status == "UNDERPOWERED" and v.has_say]


def _shortened(names: Sequence[str]) -> str:
    return and_list(names) if len(names) <= FEW else english.MANY_TASKS.format(number=len(names))


# ------------------------------------------------------------------------------------------------ the first screen
@dataclass(frozen=True)
class Step:
    """Something to do next: a sentence, and the command for it if there is one."""

    sentence: str
    command: str | None = None


@dataclass(frozen=True)
class FirstScreen:
    """Which checkpoint, a clause for each candidate, which of them loses less, on what the recommendation rests, what is not
    known, what to do next."""

    answer: str
    clauses: tuple[tuple[Row, str], ...]
    rankings: tuple[str, ...]
    loss_of_reference: str | None
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    steps: tuple[Step, ...]


def first_screen(report: Report) -> FirstScreen:
    """Candidates: smaller than the reference before larger, then the best verdict first."""
    choice = report.choice
    order = {"PASS": 0, "not failed": 1, "UNDERPOWERED": 2, "NOT MEASURED": 3, "FAIL": 4, None: 5}
    rows = sorted(candidates(report), key=lambda row: (_is_larger(row), order[row.status], row.checkpoint_bytes or 0))
    headline = choice.sentence if choice else answer(report)
    if any(limit.key == "foreign_reference" for limit in report.limits):
        headline = english.AGAINST_COPY.format(answer=headline.rstrip("."))
    return FirstScreen(
        answer=headline,
        clauses=tuple((row, COUNTS.sub("", row.sentence.rstrip(".")) + ".") for row in rows),
        rankings=tuple(ranked(report.rankings)),
        loss_of_reference=loss_of_reference(
            report.reference,
            ((row.label, name_of(task), task.drop) for row in candidates(report) for task in scored(report, row)),
        ),
        reasons=(*choice.picks, *choice.reasons) if choice else (),
        unknown=tuple(dict.fromkeys((*(choice.not_known if choice else ()), *_unknown(report)))),
        steps=tuple(_steps(report)),
    )


def _is_larger(row: Row) -> bool:
    """No smaller than the reference, such as the unquantized source: not what one chooses to save memory."""
    return row.share_of_reference is not None and row.share_of_reference >= 1


def answer(report: Report) -> str:
    """Which checkpoint, by verdict and size alone; and of each other way of serving the reference how it did."""
    rows = [row for row in candidates(report) if row.variant is None]
    variants = [row for row in candidates(report) if row.variant is not None]
    of_checkpoints = [_of_checkpoints(report, rows)] if rows or not variants else []
    return ". ".join((*of_checkpoints, *_of_variants(report.reference, variants)))


def _of_variants(reference: str, rows: Sequence[Row]) -> list[str]:
    """What a single one is stands in the sentence; what several are, beside each of them."""
    if len(rows) > 1:
        return [english.VARIANTS.format(statuses=and_list(_statuses(rows)), reference=reference)]
    return [english.VARIANT.format(variant=row.variant, status=_statuses([row])[0]) for row in rows]


def _of_checkpoints(report: Report, rows: Sequence[Row]) -> str:
    reference = report.reference
    if not rows:
        return english.NO_CANDIDATE.format(reference=reference)
    smaller = [row for row in rows if row.share_of_reference is not None and not _is_larger(row)]
    if passed := sorted((row for row in smaller if row.status == "PASS"), key=lambda row: row.checkpoint_bytes or 0):
        return english.USE.format(
            label=passed[0].label,
            size=size(passed[0].checkpoint_bytes or 0),
            share=percent_short(passed[0].share_of_reference or 0),
            reference=reference,
            smallest=english.SMALLEST_OF.format(number=len(passed)) if len(passed) > 1 else "",
        )
    unsized = [row.label for row in rows if row.share_of_reference is None and row.status == "PASS"]
    if not unsized and (smaller or any(row.status == "PASS" for row in rows)):
        statuses = english.KEEP_STATUSES.format(statuses="; ".join(_statuses(smaller))) if smaller else ""
        return english.KEEP.format(reference=reference, statuses=statuses)
    are = "is" if len(unsized) == 1 else "are"
    unknown = english.UNSIZED.format(labels=and_list(unsized), are=are) if unsized else ""
    return english.JUDGED_ONLY.format(statuses=and_list(_statuses(rows)), reference=reference, unsized=unknown)


def _statuses(rows: Sequence[Row]) -> list[str]:
    """`nvfp4a16 fails`, `w4a16 and w4a16-gptq are undecided`."""
    by_status = grouped((english.STATUSES.get(row.status, english.STATUSES[None]), row.label) for row in rows)
    return [
        english.STATUS_OF.format(labels=and_list(labels), status=verbs[len(labels) > 1]) for verbs, labels in by_status.items()
    ]


def _unknown(report: Report) -> list[str]:
    """What the reader may take for measured and was not; one clause each."""
    lines = []
    for verdict in undecided_verdicts(report):
        if verdict.gate.startswith("score") and verdict.limit:
            task = _title_of_gate(report, verdict)
            lines.append(english.UNDECIDED_LOSS.format(label=verdict.candidate, points=verdict.limit * 100, task=task))
        else:
            lines.append(english.UNDECIDED.format(label=verdict.candidate, gate=verdict.gate))
    for reason, names in grouped((_why_no_result(report, name), name) for name in unmeasured_tasks(report)).items():
        clause = english.NO_RESULT_REASON.format(reason=reason) if reason else ""
        lines.append(capital(english.NO_RESULT.format(tasks=and_list(names), reason=clause)))
    if report.speed is None or not any(row.is_comparable for row in report.speed.rows):
        what = english.NO_SPEED_NOTHING if report.choice is None else english_limits.CHOSEN_BY
        lines.append(english.NO_SPEED.format(what=what))
    if emulated := [row.label for row in candidates(report) if row.emulated]:
        lines.append(english.EMULATED.format(labels=and_list(emulated)))
    if not report.probes:
        lines.append(english.NOT_PROBED)
    return lines + [limit.text.rstrip(".") for key in SAID_FIRST for limit in report.limits if limit.key == key]


def loss_of_reference(reference: str, drops: Iterable[tuple[str, str, Interval | None]]) -> str | None:
    """Where the unquantized source scores significantly better than the reference. drops: label, task, loss."""
    gains = [
        (label, english.GAIN.format(task=task, points=points_short(-drop.value)))
        for label, task, drop in drops
        if label in UNQUANTIZED_LABELS and drop is not None and drop.high < 0
    ]
    if not gains:
        return None
    return english.SOURCE_IS_BETTER.format(source=gains[0][0], reference=reference, gains=and_list([gain for _, gain in gains]))


def _title_of_gate(report: Report, verdict: Verdict) -> str:
    return verdict.title or title_of(report, verdict.gate.removeprefix("score "))


def _why_no_result(report: Report, name: str) -> str:
    """Why a task has no result, in a clause; "" where nobody says it briefly."""
    row, task = next((row, task) for row in candidates(report) for task in row.tasks if name_of(task) == name)
    verdict = next((v for v in report.verdicts if (v.candidate, v.gate) == (row.label, f"score {task.task}")), None)
    clause = re.split(r"; |\. |: | \(", verdict.detail if verdict else task.note or "")[0].rstrip(".")
    return clause[:1].lower() + clause[1:] if 0 < len(clause) <= LONGEST_REASON and NO_REASON not in clause else ""


def _steps(report: Report) -> list[Step]:
    """What the records ask for, most urgent first; what `assay choose` says comes first. A command is there only if it works
    as it stands, in the folder of runs: for checkpoints that lie there, and for records that there are."""
    run, folders = report.run or report.model, {row.label: row.folder for row in report.rows}
    made = [Step(line) for line in (report.choice.next_steps if report.choice else ())]
    if any(limit.key == "serving_faults" for limit in report.limits):
        made.append(Step(english.MEND_SERVING))
    made += [Step(_how_to_decide(report, verdict)) for verdict in undecided_verdicts(report)]
    reference = folders.get(report.reference)
    for row in candidates(report):
        if row.status == "FAIL" and row.variant is None:
            sides = f"{shlex.quote(reference)} {shlex.quote(row.folder)}" if reference and row.folder else None
            command = sides and f"assay diagnose locate {sides}"
            made.append(Step(english.LOCATE.format(label=row.label, reference=report.reference), command))
    if any(row.status == "not failed" for row in candidates(report)):
        made.append(Step(english.ASK_TASKS))
    if not report.verdicts:
        made.append(Step(english.JUDGE, f"assay gate {shlex.quote(run)}"))
    if report.speed is None or not any(row.is_comparable for row in report.speed.rows):
        has_files = any(row.checkpoint_bytes is not None for row in report.rows)
        made.append(Step(english.MEASURE_SPEED, f"assay speed {shlex.quote(run)}") if has_files else Step(english.IMPORT_SPEED))
    elif report.choice is None and report.verdicts:
        made.append(Step(english.CHOOSE, f"assay choose {shlex.quote(run)}"))
    return made


def _how_to_decide(report: Report, verdict: Verdict) -> str:
    """What more would decide a gate, with the number of items where it is known."""
    label, drop = verdict.candidate, verdict.observed
    if not verdict.gate.startswith("score ") or drop is None:
        more = english.MORE_TEXTS if verdict.gate.startswith("divergence ") else english.MORE_TO_ANSWER
        return english.DECIDE_GATE.format(label=label, gate=verdict.gate, more=more)
    task, needed = _title_of_gate(report, verdict), verdict.items_needed_at_loss or verdict.items_needed
    if verdict.limit is not None and drop.value >= verdict.limit:
        template = english.DECIDE_AT_LIMIT
    else:
        template = english.DECIDE_BY_ITEMS if needed is not None and needed > drop.n else english.DECIDE_BY_MORE
    return template.format(label=label, task=task, needed=needed, asked=drop.n)


# ------------------------------------------------------------------------------------------------ headings: scores
def tasks(report: Report) -> str:
    """`Chinese code lookup lost 25.0 points (nvfp4a16) and 10.0 (w4a16); no other loss is shown at 95 %`."""
    results = [(row, task) for row in candidates(report) for task in scored(report, row)]
    losses = grouped(
        (name_of(task), (task.drop.value, row.label)) for row, task in results if task.drop is not None and task.drop.low > 0
    )
    missing = unmeasured_tasks(report)
    left = english.NOT_MEASURED_TOO.format(tasks=_shortened(missing)) if missing else ""
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
        return english.ALARMS.format(alarms=count_of(len(alarms), "alarm"), names=_shortened(alarms))
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
