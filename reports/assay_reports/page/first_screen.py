"""What the first screen of a page says: which checkpoint, why, what is not known, what to do next.

A loss is named where its interval lies above zero; what was not measured is never called "no loss". The English is in
`sentences/page.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, points_short, size
from assay.records.base import Interval
from assay.records.verdict import Verdict
from assay_reports import upgrade
from assay_reports.page.report_rows import (
    candidates,
    name_of,
    scored,
    title_of,
    undecided_verdicts,
    unmeasured_tasks,
)
from assay_reports.rankings import ranked
from assay_reports.run import UNQUANTIZED_LABELS
from assay_reports.schema import Report, Row
from assay_reports.sentences import limits as english_limits
from assay_reports.sentences import page as english
from assay_reports.text import and_list, grouped

COUNTS = re.compile(r"; \d+ gates? (passed|failed|underpowered|not measured).*$")
"""How many gates passed stands at the end of a reason; the first screen leaves it to the table of gates."""
SAID_FIRST = ("foreign_reference", "screened_out", "speed_outdated", "choice_outdated", "context_length")
"""Limits that stand on the first screen as well."""
NO_REASON = "has no score for"
"""Begins a sentence whose reason comes later, and at length."""
LONGEST_REASON = 110
"""Characters of a clause on the first screen; a longer one stands with the gates."""


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
    if report.upgrade is not None:
        headline = upgrade.headline(report.upgrade)
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
