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
from assay_reports import upgrade
from assay_reports.numbers import build_report
from assay_reports.page import charts, findings, first_screen, sensitivity
from assay_reports.page.items import Browser, browser
from assay_reports.run import load_run
from assay_reports.schema import Report, Row, TaskNumbers
from assay_reports.sentences import page as english
from assay_reports.text import FILTERS, NOT_MEASURED, missing_part

SECTIONS = (
    ("upgrade", "Engine upgrade"), ("scores", "Tasks"), ("long-context", "Long context"), ("divergence", "Divergence"),
    ("fidelity", "Serving fidelity"), ("deployment", "Deployment"), ("speed", "Speed"),
    ("sensitivity", "Sensitivity"), ("tensors", "Tensors"), ("verification", "Verification"),
    ("serving", "Fingerprint"), ("limits", "Limits"), ("items", "Items"), ("words", "Glossary"),
)  # fmt: skip
"""Ids of the page's sections in their order, and what the contents call them."""
MAY_LACK = {"upgrade": "upgrade", "deployment": "deployments", "sensitivity": "sensitivity"}
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
    jinja = environment(html=True)
    shared = context(report)
    floor: Row | None = shared["floor"]
    page = jinja.get_template("report.html.j2").render(
        shared,
        browser=items,
        used=[],
        colours=charts.colours(report),
        pictures={
            "quality": charts.quality_and_size(charts.points_of(report)),
            "quality_caption": charts.quality_caption(report),
            "changes": charts.changes(report),
            "drift": charts.drift(report),
            "roles": charts.bytes_per_role(report),
        },
        ladders=charts.speed_ladders(report),
        heats=charts.heat_maps(report),
        floor_unseen=floor is not None
        and floor.divergence is not None
        and not any(course for _, course in charts.courses(floor.divergence)),
        contents=[entry for entry in SECTIONS if entry[0] not in MAY_LACK or getattr(report, MAY_LACK[entry[0]])],
        **document_parts(jinja),
    )
    return in_page(page)


def document_parts(jinja: Environment) -> dict[str, Any]:
    """Definitions, style, script, and the policy that lets in these two and nothing else."""
    style, script = (jinja.get_template(name).render() for name in ("report.css.j2", "page.js.j2"))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return {"style": style, "script": script, "policy": policy, "words": english.WORDS}


@functools.cache  # compiling the templates takes longer than filling them in
def environment(*, html: bool) -> Environment:
    """Jinja with the number formats of `text.py`; an unknown name is an error, not an empty string.

    What an expression gives is text, of HTML or else of Markdown, unless the template says that it is `safe`.
    """
    jinja = Environment(
        loader=PackageLoader("assay_reports"), autoescape=html, finalize=None if html else _markdown_text,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    jinja.filters |= FILTERS
    jinja.globals |= {"NOT_MEASURED": NOT_MEASURED, "english": english}
    return jinja


def _markdown_text(value: object) -> object:
    """One line of text, with the space before and after it that a template has put there."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return f"{' ' if text[:1] == ' ' else ''}{in_markdown(text)}{' ' if text[1:].endswith(' ') else ''}"


def context(report: Report) -> dict[str, Any]:
    """What the templates see: the report, its tables turned the way a page shows them (by task), and what was found."""
    tasks: dict[str, list[tuple[Row, TaskNumbers]]] = {}
    for row in report.rows:
        for task in row.tasks:
            tasks.setdefault(task.task, []).append((row, task))
    first = first_screen.first_screen(report)
    commands = [step.command for step in first.steps]
    return {
        "report": report,
        "upgrade": None if report.upgrade is None else upgrade.shown(report.upgrade),
        "sensitivity": sensitivity.shown(report.sensitivity),
        "first": first,
        "findings": {name: heading(report) for name, heading in findings.HEADINGS.items()},
        "tasks": tasks,
        "verdict_of": {(v.candidate, v.gate.removeprefix("score ")): v for v in report.verdicts if v.gate.startswith("score ")},
        "kept": {plan.precision: findings.kept_roles(plan)[0] for plan in report.plans},
        "published": {comparison.task: comparison for comparison in report.published},
        "floor": next((row for row in report.rows if row.kind == "noise floor"), None),
        "subtitle": english.SUBTITLE.format(model=report.model, suite=report.suite, reference=report.reference),
        "commands_where": english.COMMANDS_WHERE.format(run=report.run) if report.run and any(commands) else "",
        "pairs_notes": findings.pairs_notes(report),
        "served_by": findings.served_by(report),
        "speculation": findings.speculation_of(report),
        "no_divergence": why_none(report, "divergence", report.rows),
        "no_acceptance": why_none(report, "acceptance", report.rows),
    }


def why_none(report: Report, part: str, rows: Sequence[Row]) -> str:
    """What stands where a table of this part would have no row."""
    return missing_part(report.suite, bool(report.suite_recipe.get(part)), (row.not_measured.get(part) for row in rows))
