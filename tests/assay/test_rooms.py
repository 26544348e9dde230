"""No folder holds more modules than fit on one screen of a listing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("assay", "quantize", "evaluate", "reports", "pipeline", "cli", "tests", "benchmarks", "examples")
MOST_MODULES = 24
"""`__init__.py` counts. A tighter limit was met by chopping files; 24 lines fill a terminal."""


def test_no_folder_holds_more_modules_than_one_can_see() -> None:
    modules = [path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")]
    per_folder = Counter(str(path.parent.relative_to(REPOSITORY)) for path in modules)
    assert len(modules) > 500
    assert {folder: count for folder, count in per_folder.items() if count > MOST_MODULES} == {}
