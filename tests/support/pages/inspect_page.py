"""The table of docs/inspect.md, from the table of defects. `python tests/support/pages/inspect_page.py` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from assay_quantize.inspection.defects import DEFECTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "inspect.md"
BEGIN, END = "<!-- defects: made by tests/support/pages/inspect_page.py -->\n", "<!-- end of defects -->"
SEVERITIES = ("fails", "wrong", "risk", "note")
NEEDS = {"headers": "", "scales": "scales", "weights": "`--deep`", "source": "`--source`"}


def table() -> str:
    """Worst first; in the order of the table."""
    rows = sorted(DEFECTS, key=lambda defect: SEVERITIES.index(defect.severity))
    lines = ["| defect | | looked at | served | reads |", "|---|---|---|---|---|"]
    lines += [
        f"| [`{row.key}`]({row.source}) | {row.severity} | {row.looks_at} | {row.served} | {NEEDS[row.needs]} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda match: BEGIN + table() + END, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
