"""JSON schema of `report.json`, from its types: `python -m assay_reports.json_schema docs/report.schema.json` writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from assay_reports.schema import Report


def report_schema() -> str:
    """JSON Schema 2020-12, as text with a newline at its end; the same bytes for the same types."""
    made = Report.model_json_schema(mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "assay report.json"}
    return (
        json.dumps({**head, **{key: value for key, value in made.items() if key not in head}}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(report_schema(), encoding="utf-8")
