"""The tables of docs/inspect.md, from the table of defects and the data of published repositories.

PYTHONPATH=tests/support/quantization:tests/support/models:tests/support .venv/bin/python tests/support/pages/inspect_page.py

writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from published_repositories import REPOSITORIES

from assay_quantize.inspection.defect import Defect
from assay_quantize.inspection.defects import DEFECTS
from assay_quantize.inspection.gguf.defects import GGUF_DEFECTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "inspect.md"
BEGIN, END = "<!-- defects: made by tests/support/pages/inspect_page.py -->\n", "<!-- end of defects -->"
GGUF_BEGIN, GGUF_END = "<!-- GGUF defects: made by tests/support/pages/inspect_page.py -->\n", "<!-- end of GGUF defects -->"
REPOSITORIES_BEGIN = "<!-- repositories: made by tests/support/pages/inspect_page.py -->\n"
REPOSITORIES_END = "<!-- end of repositories -->"
SEVERITIES = ("fails", "wrong", "risk", "note")
NEEDS = {"headers": "", "scales": "scales", "weights": "`--deep`", "source": "`--source`"}


def table(defects: Iterable[Defect[Any]]) -> str:
    """Worst first; in the order of the table."""
    rows = sorted(defects, key=lambda defect: SEVERITIES.index(defect.severity))
    lines = ["| defect | | looked at | served | reads |", "|---|---|---|---|---|"]
    lines += [
        f"| [`{row.key}`]({row.source}) | {row.severity} | {row.looks_at} | {row.served} | {NEEDS[row.needs]} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def repositories() -> str:
    lines = ["| repository | format | rebuilt on | source | found |", "|---|---|---|---|---|"]
    for row in REPOSITORIES:
        found = ", ".join(f"`{defect}`" for defect in row.defects) or "nothing"
        source = "its files" if row.source == row.address else f"[report]({row.source})"
        lines.append(f"| [{row.name}]({row.address}) | {row.format} | {row.config_of} | {source} | {found} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with its tables anew."""
    tables = (
        (BEGIN, table(DEFECTS), END), (GGUF_BEGIN, table(GGUF_DEFECTS), GGUF_END),
        (REPOSITORIES_BEGIN, repositories(), REPOSITORIES_END),
    )  # fmt: skip
    for begin, made, end in tables:
        between = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        page = between.sub(lambda match, whole=begin + made + end: whole, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
