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
from assay_reports.page.findings import and_, candidates, name_of, tasks
from assay_reports.page.first import answer
from assay_reports.page.svg import SERIES
from assay_reports.page.words import WORDS
from assay_reports.report import document_parts, environment
from assay_reports.run import load_run
from assay_reports.schema import Report


@dataclass(frozen=True)
class Lost:
    """One task of one checkpoint, from the first run to another."""

    task: str
    checkpoint: str
    scores: tuple[Interval | None, Interval | None]
    lost: Interval | None
    num_pairs: int | None
    why_not: str | None


@dataclass(frozen=True)
class Beside:
    """Another run beside the first: what differs between the two, in sentences, and what was lost."""

    run: str
    differences: tuple[str, ...]
    rows: tuple[Lost, ...]

    @property
    def finding(self) -> str:
        """Losses whose interval lies above zero, and gains whose interval lies below."""
        sure = [one for one in self.rows if one.lost is not None and (one.lost.low > 0 or one.lost.high < 0)]
        if not any(one.lost is not None for one in self.rows):
            return f"{self.run}: no item is paired with the first run"
        if not sure:
            return f"{self.run}: no paired task shows a difference from the first run"
        said = [
            f"{one.task} of {one.checkpoint} {change(one.lost.value)}"
            for one in sorted(sure, key=lambda one: -abs(one.lost.value if one.lost else 0))
            if one.lost is not None
        ]
        return f"{self.run} against the first run: {and_(said[:3])}{f', and {len(said) - 3} more' if len(said) > 3 else ''}"


def beside(run: str, comparison: Mapping[str, Any], differences: Sequence[str]) -> Beside:
    """comparison: `assay compare --json` of the first run and this one."""
    rows = [
        Lost(
            task=task["task"], checkpoint=one["label"], scores=(_interval(task["scores"][0]), _interval(task["scores"][1])),
            lost=_interval(task["lost"]), num_pairs=task["num_pairs"], why_not=task["not_paired"],
        )
        for one in comparison["checkpoints"] for task in one["tasks"]
    ]  # fmt: skip
    return Beside(run, tuple(differences), tuple(rows))


def _interval(told: Any) -> Interval | None:
    return None if told is None else Interval.model_validate(told)


def reports_of(folders: Sequence[Path]) -> list[tuple[str, Report]]:
    """Each run's report under a name of its own: the folder's, with as many parents as tell it from the others."""
    paths = [folder.absolute().parts for folder in folders]
    found = []
    for folder, parts in zip(folders, paths, strict=True):
        run = load_run(folder)
        if run.reference is None:
            raise AssayError(f"{folder}: the reference was not measured; `assay evaluate` measures it first")
        alike = (n for n in range(1, len(parts)) if sum(other[-n:] == parts[-n:] for other in paths) == 1)
        found.append(("/".join(parts[-next(alike, len(parts)) :]), build_report(run)))
    return found


def write_comparison(path: Path, runs: Sequence[tuple[str, Report]], others: Sequence[Beside]) -> None:
    """The page. AssayError: it cannot be written there."""
    if not path.parent.is_dir():
        raise AssayError(f"{path}: its folder does not exist; make it, or name another place with --out")
    if path.is_dir():
        raise AssayError(f"{path}: is a folder; name a file in it with --out")
    write_text_atomically(path, render_comparison(runs, others))


def render_comparison(runs: Sequence[tuple[str, Report]], others: Sequence[Beside]) -> str:
    """One file without a script that is needed, under the same policy as a report."""
    made = environment(html=True)
    points = []
    for number, (name, report) in enumerate(runs):
        css = f"s{number % SERIES}"
        for point in charts.points_of(report):
            points.append(replace(point, name=f"{name}: {point.name}", css=css if point.use is not None else "sref"))
    page = made.get_template("compare.html.j2").render(
        runs=[(name, report, answer(report), tasks(report), f"s{i % SERIES}") for i, (name, report) in enumerate(runs)],
        rows=[(name, row, charts.worst_of(report, row)) for name, report in runs for row in candidates(report)],
        others=others, picture=charts.quality_and_size(points), name_of=name_of, words=WORDS, used=[],
        models=list(dict.fromkeys(report.model for _, report in runs)), **document_parts(made),
    )  # fmt: skip
    return in_page(page)
