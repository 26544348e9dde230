"""Run folder -> report/{report.json, report.md, index.html}: from records only, the same bytes every time.

The page is one file: styles, figures and plotly's script are inside it, nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from assay.errors import AssayError
from assay.foreign_text import in_markdown
from assay.records.base import write_text_atomically
from assay_reports.numbers import build_report
from assay_reports.plot_layout import Figure
from assay_reports.plots import colours, figures
from assay_reports.run import load_run
from assay_reports.schema import Report, Row, TaskNumbers
from assay_reports.text import FILTERS, NOT_MEASURED, missing_part


def write_report(run_dir: Path) -> Path:
    """Write all three files; the path of `index.html`. AssayError if the run has no reference measurement."""
    run = load_run(run_dir)
    if run.reference is None:
        raise AssayError(f"{run_dir}: the reference was not measured; `assay evaluate` measures it first")
    report = build_report(run)
    folder = run_dir / "report"
    if folder.is_symlink():
        raise AssayError(f"{folder}: is a link, and a report is written into its run only; delete the link")
    report.save(folder / "report.json")
    write_text_atomically(folder / "report.md", render_markdown(report))
    page = folder / "index.html"
    write_text_atomically(page, render_html(report))
    return page


def render_markdown(report: Report) -> str:
    return environment(html=False).get_template("report.md.j2").render(context(report))


def render_html(report: Report) -> str:
    from plotly.offline import get_plotlyjs

    made = figures(report)
    page = environment(html=True).get_template("report.html.j2")
    return page.render(
        context(report), figures=made, colours=colours(report), figures_json=_script_json(made), plotly_js=get_plotlyjs()
    )


def _script_json(data: dict[str, Figure]) -> str:
    """JSON that may stand inside a script element: it holds no `<`, which could begin a tag or a comment there."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def environment(*, html: bool) -> Environment:
    """Jinja with the number formats of `text.py`; an unknown name is an error, not an empty string.

    What an expression gives is text, of HTML or else of Markdown, unless the template says that it is `safe`.
    """
    made = Environment(
        loader=PackageLoader("assay_reports"), autoescape=html, finalize=None if html else _markdown_text,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= FILTERS
    made.globals["NOT_MEASURED"] = NOT_MEASURED
    return made


def _markdown_text(value: object) -> object:
    """One line of text, with the space before and after it that a template has put there."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return f"{' ' if text[:1] == ' ' else ''}{in_markdown(text)}{' ' if text[1:].endswith(' ') else ''}"


def context(report: Report) -> dict[str, Any]:
    """What the templates see: the report, and its tables turned the way a page shows them (by task)."""
    tasks: dict[str, list[tuple[Any, TaskNumbers]]] = {}
    for row in report.rows:
        for task in row.tasks:
            tasks.setdefault(task.task, []).append((row, task))
    return {
        "report": report,
        "tasks": tasks,
        "published": {one.task: one for one in report.published},
        "candidates": [row for row in report.rows if row.kind == "candidate"],
        "floor": next((row for row in report.rows if row.kind == "noise floor"), None),
        "no_divergence": why_none(report, "divergence", report.rows),
        "no_acceptance": why_none(report, "acceptance", report.rows),
        "roles": sorted({role for found in report.verifications for role in found.mean_relative_error}),
    }


def why_none(report: Report, part: str, rows: Sequence[Row]) -> str:
    """What stands where a table of this part would have no row."""
    return missing_part(report.suite, bool(report.suite_recipe.get(part)), (row.not_measured.get(part) for row in rows))
