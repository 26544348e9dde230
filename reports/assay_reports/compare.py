"""Several runs on one page: what each says, their checkpoints in one picture, and pairs where the questions were the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import in_page
from assay.quantities import change
from assay.records.base import Interval, write_text_atomically
from assay_reports.numbers import build_report
from assay_reports.page import charts
from assay_reports.page.findings import tasks
from assay_reports.page.first_screen import answer
from assay_reports.page.report_rows import candidates
from assay_reports.page.svg import SERIES
from assay_reports.report import document_parts, environment
from assay_reports.run import load_run
from assay_reports.schema import Report
from assay_reports.sentences import compare as english
from assay_reports.text import and_list

NAMED = 3
"""Differences in a heading; of more their number is said."""


@dataclass(frozen=True)
class Loss:
    """One task of one checkpoint, from the first run to another. lost: None: not paired, and then `reason` says why."""

    task: str
    checkpoint: str
    scores: tuple[Interval | None, Interval | None]
    lost: Interval | None
    num_pairs: int | None
    reason: str | None


@dataclass(frozen=True)
class Comparison:
    """Another run beside the first: what differs between the two, in sentences, and what was lost."""

    run: str
    differences: tuple[str, ...]
    rows: tuple[Loss, ...]

    @property
    def finding(self) -> str:
        """Losses whose interval lies above zero, and gains whose interval lies below."""
        paired = [(row, row.lost) for row in self.rows if row.lost is not None]
        if not paired:
            return english.NO_PAIR.format(run=self.run)
        certain = [(row, lost) for row, lost in paired if lost.low > 0 or lost.high < 0]
        if not certain:
            return english.NO_DIFFERENCE.format(run=self.run)
        changes = [
            english.CHANGE.format(task=row.task, checkpoint=row.checkpoint, change=change(lost.value))
            for row, lost in sorted(certain, key=lambda pair: -abs(pair[1].value))
        ]
        more = english.MORE.format(number=len(changes) - NAMED) if len(changes) > NAMED else ""
        return english.DIFFERENCES.format(run=self.run, changes=and_list(changes[:NAMED]), more=more)


def differences_of(record: Mapping[str, Any]) -> list[str]:
    """What is not alike in two runs, a sentence each. record: `assay compare --json`."""
    first, second = record["first"], record["second"]
    lines = []
    if first["model"] != second["model"]:
        lines.append(english.OTHER_MODELS.format(first=first["model"], second=second["model"]))
    if first["reference_sha256"] != second["reference_sha256"]:
        lines.append(english.OTHER_REFERENCES.format(first=first["reference_sha256"], second=second["reference_sha256"]))
    if first["suite_sha256"] != second["suite_sha256"]:
        lines.append(
            english.OTHER_SUITES.format(
                first=first["suite"], first_sha256=first["suite_sha256"], second=second["suite"],
                second_sha256=second["suite_sha256"],
            )
        )  # fmt: skip
    if None not in (limits := {first["gate_recipe_sha256"], second["gate_recipe_sha256"]}) and len(limits) > 1:
        lines.append(english.OTHER_LIMITS)
    for which in ("first", "second"):
        if record[which]["only_here"]:
            lines.append(english.ONLY_HERE.format(which=which, checkpoints=", ".join(record[which]["only_here"])))
    lines = lines or [english.ALL_THE_SAME]
    for name, template in (("asked", english.ASKED_DIFFERENTLY), ("served", english.SERVED_DIFFERENTLY)):
        if fields := record[f"{name}_differently"]:
            lines.append(template.format(fields="; ".join(fields)))
    return lines


def comparison_of(run: str, record: Mapping[str, Any]) -> Comparison:
    """record: `assay compare --json` of the first run and this one."""
    rows = [
        Loss(
            task=task["task"], checkpoint=checkpoint["label"],
            scores=(_interval(task["scores"][0]), _interval(task["scores"][1])),
            lost=_interval(task["lost"]), num_pairs=task["num_pairs"], reason=task["not_paired"],
        )
        for checkpoint in record["checkpoints"] for task in checkpoint["tasks"]
    ]  # fmt: skip
    return Comparison(run, tuple(differences_of(record)), tuple(rows))


def _interval(data: Any) -> Interval | None:
    return None if data is None else Interval.model_validate(data)


def reports_of(folders: Sequence[Path]) -> list[tuple[str, Report]]:
    """Each run's report under a name of its own: the folder's, with as many parents as tell it from the others."""
    paths = [folder.absolute().parts for folder in folders]
    reports = []
    for folder, parts in zip(folders, paths, strict=True):
        run = load_run(folder)
        if run.reference is None:
            raise AssayError(f"{folder}: the reference was not measured; `assay evaluate` measures it first")
        unique = (n for n in range(1, len(parts)) if sum(other[-n:] == parts[-n:] for other in paths) == 1)
        reports.append(("/".join(parts[-next(unique, len(parts)) :]), build_report(run)))
    return reports


def write_comparison(path: Path, runs: Sequence[tuple[str, Report]], others: Sequence[Comparison]) -> None:
    """The page. AssayError: it cannot be written there."""
    if not path.parent.is_dir():
        raise AssayError(f"{path}: its folder does not exist; make it, or name another place with --out")
    if path.is_dir():
        raise AssayError(f"{path}: is a folder; name a file in it with --out")
    write_text_atomically(path, render_comparison(runs, others))


def render_comparison(runs: Sequence[tuple[str, Report]], others: Sequence[Comparison]) -> str:
    """One file without a script that is needed, under the same policy as a report."""
    jinja = environment(html=True)
    points = [
        replace(
            point,
            name=english.POINT.format(run=name, checkpoint=point.name),
            css="sref" if point.use is None else f"s{number % SERIES}",
        )
        for number, (name, report) in enumerate(runs)
        for point in charts.points_of(report)
    ]
    page = jinja.get_template("compare.html.j2").render(
        runs=[(name, report, answer(report), tasks(report), f"s{i % SERIES}") for i, (name, report) in enumerate(runs)],
        rows=[(name, row, charts.deciding_gate(report, row)) for name, report in runs for row in candidates(report)],
        others=others, picture=charts.quality_and_size(points), title_of_gate=charts.title_of_gate, used=[],
        models=list(dict.fromkeys(report.model for _, report in runs)), **document_parts(jinja),
    )  # fmt: skip
    return in_page(page)
