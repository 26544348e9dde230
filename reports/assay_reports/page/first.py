"""The first screen: which checkpoint, why, what was not measured, what to do next. One clause each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from assay.quantities import capital, percent_short, size
from assay.records.verdict import Verdict
from assay_reports.page.findings import and_, candidates, name_of, unmeasured_tasks
from assay_reports.schema import Report, Row
from assay_reports.speed_limits import CHOSEN_BY

COUNTS = re.compile(r"; \d+ gates? (passed|failed|underpowered|not measured).*$")
"""How many gates passed stands at the end of a reason; the first screen leaves it to the table of gates."""

SAID_FIRST = ("speed_outdated", "choice_outdated", "context_length")
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
class First:
    """All of it, as text."""

    answer: str
    why: tuple[tuple[Row, str], ...]
    """Each candidate, in its order, with one clause."""
    reasons: tuple[str, ...]
    """Of the recommendation, if there is one."""
    unknown: tuple[str, ...]
    steps: tuple[Step, ...]


def first_screen(report: Report) -> First:
    choice = report.choice
    return First(
        answer=choice.sentence if choice else answer(report),
        why=tuple((row, clause(row)) for row in _by_verdict(report)),
        reasons=(*choice.picks, *choice.reasons) if choice else (),
        unknown=tuple(dict.fromkeys((*(choice.not_known if choice else ()), *unknown(report)))),
        steps=tuple(steps(report)),
    )


def _by_verdict(report: Report) -> list[Row]:
    """Smaller than the reference before larger, then the best verdict first."""
    order = {"PASS": 0, "UNDERPOWERED": 1, "NOT MEASURED": 2, "FAIL": 3, None: 4}
    return sorted(candidates(report), key=lambda row: (_is_larger(row), order[row.status], row.checkpoint_bytes or 0))


def _is_larger(row: Row) -> bool:
    """No smaller than the reference, such as the unquantized source: not what one chooses to save memory."""
    return row.share_of_reference is not None and row.share_of_reference >= 1


def clause(row: Row) -> str:
    return COUNTS.sub("", row.sentence.rstrip(".")) + "."


def answer(report: Report) -> str:
    """Which checkpoint, by verdict and size alone."""
    rows = candidates(report)
    if not rows:
        return f"No candidate was measured beside {report.reference}"
    smaller = [row for row in rows if row.share_of_reference is not None and not _is_larger(row)]
    passed = sorted((row for row in smaller if row.status == "PASS"), key=lambda row: row.checkpoint_bytes or 0)
    if passed:
        best = passed[0]
        more = f"; the smallest of {len(passed)} that pass" if len(passed) > 1 else ""
        sized = f"{size(best.checkpoint_bytes or 0)}, {percent_short(best.share_of_reference or 0)} of {report.reference}"
        return f"Use {best.label}: it passes, with {sized}{more}"
    unsized = [row.label for row in rows if row.share_of_reference is None and row.status == "PASS"]
    if not unsized and (smaller or any(row.status == "PASS" for row in rows)):
        said = _said_of(smaller)
        return f"Keep {report.reference}: no smaller checkpoint passes" + (f" ({'; '.join(said)})" if said else "")
    known = f"; whether {and_(unsized)} {'is' if len(unsized) == 1 else 'are'} smaller is not known" if unsized else ""
    return f"{and_(_said_of(rows))}, held against {report.reference}{known}"


def _said_of(rows: Sequence[Row]) -> list[str]:
    """`nvfp4a16 fails`, `w4a16 and w4a16-gptq are undecided`."""
    words = {"PASS": ("passes", "pass"), "FAIL": ("fails", "fail"), "UNDERPOWERED": ("is undecided", "are undecided")}
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        found.setdefault(words.get(row.status or "", ("is not judged", "are not judged")), []).append(row.label)
    return [f"{and_(labels)} {one if len(labels) == 1 else several}" for (one, several), labels in found.items()]


# ------------------------------------------------------------------------------------------------ not measured
def unknown(report: Report) -> list[str]:
    """What the reader may take for measured and was not; one clause each."""
    found = [f"{_undecided(report, verdict)}" for verdict in _open(report)]
    by_reason: dict[str, list[str]] = {}
    for name in unmeasured_tasks(report):
        by_reason.setdefault(_why_none(report, name), []).append(name)
    found += [capital(f"{and_(names)}: no result{f', {why}' if why else ''}") for why, names in by_reason.items()]
    if report.speed is None or not any(row.is_comparable for row in report.speed.rows):
        none = "not measured, so nothing here says which is faster or cheaper"
        found.append(f"Speed: {none if report.choice is None else CHOSEN_BY}")
    if emulated := [row.label for row in candidates(report) if row.emulated]:
        found.append(f"Kernels: {and_(emulated)} ran emulated; these are scores of the format")
    if not report.probes:
        found.append("Faults under load: no server was probed")
    found += [limit.text.rstrip(".") for key in SAID_FIRST for limit in report.limits if limit.key == key]
    return found


def _open(report: Report) -> list[Verdict]:
    labels = {row.label for row in candidates(report)}
    return [v for v in report.verdicts if v.candidate in labels and v.status == "UNDERPOWERED" and v.has_say]


def _undecided(report: Report, verdict: Verdict) -> str:
    allowed = f" more than {verdict.limit * 100:g} points" if verdict.gate.startswith("score") and verdict.limit else ""
    return (
        f"Whether {verdict.candidate} loses{allowed} on {_title(report, verdict)}"
        if allowed
        else (f"{verdict.candidate}, {verdict.gate}: undecided")
    )


def _title(report: Report, verdict: Verdict) -> str:
    task = verdict.gate.removeprefix("score ")
    return verdict.title or next((name_of(t) for row in report.rows for t in row.tasks if t.task == task), task)


def _why_none(report: Report, name: str) -> str:
    """Why a task has no result, in a clause; "" where nobody says it briefly."""
    for row in candidates(report):
        for task in row.tasks:
            if name_of(task) == name:
                verdict = next((v for v in report.verdicts if (v.candidate, v.gate) == (row.label, f"score {task.task}")), None)
                said = re.split(r"; |\. |: | \(", verdict.detail if verdict else task.note or "")[0].rstrip(".")
                return said[:1].lower() + said[1:] if 0 < len(said) <= LONGEST_REASON and NO_REASON not in said else ""
    return ""


# ------------------------------------------------------------------------------------------------ next
def steps(report: Report) -> list[Step]:
    """What the records ask for, most urgent first; what `assay choose` says comes first."""
    made = [Step(one) for one in (report.choice.next_steps if report.choice else ())]
    run = report.model
    if any(limit.key == "serving_faults" for limit in report.limits):
        anew = "then evaluate again, with `--again LABEL` for each label that was measured through it"
        made.append(Step(f"Mend the serving, {anew}"))
    for verdict in _open(report):
        needed = verdict.items_needed_at_loss or verdict.items_needed
        asked = verdict.observed.n if verdict.observed else None
        if needed and asked and needed > asked:
            some = f"about {needed:,} items in all; {asked:,} were asked"
        else:
            some = "what was lost is close to what is allowed, so it may take very many"
        made.append(Step(f"To decide {verdict.candidate}, ask more of {_title(report, verdict)}: {some}"))
    failed = [row for row in candidates(report) if row.status == "FAIL"]
    made += [Step(f"Find what in {row.label} costs that", f"assay locate {report.reference} {row.label}") for row in failed]
    if not report.verdicts:
        made.append(Step("Judge the run", f"assay gate {run}"))
    if report.speed is None:
        made.append(Step("Measure speed where it will be served", f"assay speed {run}"))
    if report.choice is None:
        made.append(Step("Weigh quality against speed and price", f"assay choose {run}"))
    return made
