"""Run folder -> report/{report.json, report.md, index.html}: from records only, the same bytes every time.

The page is one file: styles, pictures, script and items are inside it, nothing is loaded from anywhere, and its content
security policy lets no other script or style in.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from assay.errors import AssayError
from assay.foreign_text import in_markdown, in_page
from assay.records.base import write_text_atomically
from assay_reports.numbers import build_report
from assay_reports.page import charts, courses, findings, sensitivity
from assay_reports.page.first import first_screen
from assay_reports.page.items import Browser, browser
from assay_reports.page.words import WORDS
from assay_reports.run import load_run
from assay_reports.schema import Report, Row, TaskNumbers
from assay_reports.text import FILTERS, NOT_MEASURED, missing_part

SECTIONS = (
    ("scores", "Tasks"), ("long-context", "Long context"), ("divergence", "Divergence"), ("fidelity", "Serving fidelity"),
    ("deployment", "Deployment"), ("speed", "Speed"),
    ("sensitivity", "Sensitivity"), ("tensors", "Tensors"), ("verification", "Verification"),
    ("serving", "Fingerprint"), ("limits", "Limits"), ("items", "Items"), ("words", "Words"),
)  # fmt: skip
"""Ids of the page's sections in their order, and what the contents call them."""
MAY_LACK = {"deployment": "deployments", "sensitivity": "sensitivity"}
"""Section -> field of the report without which it is left out."""


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
    write_text_atomically(page, render_html(report, browser(run, run_dir)))
    return page


def render_markdown(report: Report) -> str:
    return environment(html=False).get_template("report.md.j2").render(context(report))


def render_html(report: Report, items: Browser | None = None) -> str:
    """items: for the browser; None where the run's folder is not at hand."""
    made = environment(html=True)
    told = context(report)
    floor = told["floor"]
    mine = {
        "browser": items,
        "words": WORDS,
        "used": [],
        "colours": charts.colours(report),
        "pictures": {
            "quality": charts.quality_and_size(charts.points_of(report)),
            "changes": charts.changes(report),
            "drift": courses.drift(report),
            "roles": charts.bytes_per_role(report),
        },
        "ladders": charts.speed_ladders(report),
        "heats": courses.heat_maps(report),
        "floor_unseen": floor is not None and floor.divergence is not None and not _is_drawn(floor),
        "contents": [entry for entry in SECTIONS if entry[0] not in MAY_LACK or getattr(report, MAY_LACK[entry[0]])],
    }
    return in_page(made.get_template("report.html.j2").render(told, **mine, **document_parts(made)))


def document_parts(made: Environment) -> dict[str, str]:
    """Style, script, and the policy that lets in these two and nothing else."""
    style, script = (made.get_template(name).render() for name in ("report.css.j2", "page.js.j2"))
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return {"style": style, "script": script, "policy": policy}


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _is_drawn(row: Row) -> bool:
    return any(course for _, course in courses.courses(row.divergence))


@functools.cache  # compiling the templates takes longer than filling them in
def environment(*, html: bool) -> Environment:
    """Jinja with the number formats of `text.py`; an unknown name is an error, not an empty string.

    What an expression gives is text, of HTML or else of Markdown, unless the template says that it is `safe`.
    """
    made = Environment(
        loader=PackageLoader("assay_reports"), autoescape=html, finalize=None if html else _markdown_text,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= FILTERS
    made.filters["latency_s"] = findings.latency_s
    made.globals["NOT_MEASURED"] = NOT_MEASURED
    return made


def _markdown_text(value: object) -> object:
    """One line of text, with the space before and after it that a template has put there."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return f"{' ' if text[:1] == ' ' else ''}{in_markdown(text)}{' ' if text[1:].endswith(' ') else ''}"


def context(report: Report) -> dict[str, Any]:
    """What the templates see: the report, its tables turned the way a page shows them (by task), and what was found."""
    tasks: dict[str, list[tuple[Any, TaskNumbers]]] = {}
    for row in report.rows:
        for task in row.tasks:
            tasks.setdefault(task.task, []).append((row, task))
    return {
        "report": report,
        "sensitivity": sensitivity.shown(report.sensitivity),
        "first": first_screen(report),
        "findings": {name: getattr(findings, name)(report) for name in FINDINGS},
        "tasks": tasks,
        "verdict_of": {(v.candidate, v.gate.removeprefix("score ")): v for v in report.verdicts if v.gate.startswith("score ")},
        "kept": {plan.precision: findings.kept(plan)[0] for plan in report.plans},
        "published": {one.task: one for one in report.published},
        "candidates": findings.candidates(report),
        "floor": next((row for row in report.rows if row.kind == "noise floor"), None),
        "no_divergence": why_none(report, "divergence", report.rows),
        "no_acceptance": why_none(report, "acceptance", report.rows),
    }


FINDINGS = (
    "tasks", "languages", "long_context", "drift", "acceptance", "fidelity", "speed", "tensors", "verification", "serving",
    "limits", "gates",
)  # fmt: skip
"""Functions of `findings.py`: a heading each."""


def why_none(report: Report, part: str, rows: Sequence[Row]) -> str:
    """What stands where a table of this part would have no row."""
    return missing_part(report.suite, bool(report.suite_recipe.get(part)), (row.not_measured.get(part) for row in rows))
