"""Rooms that one can see: no folder holds more than sixteen modules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("assay", "quantize", "evaluate", "reports", "tests", "benchmarks", "examples")
MOST_MODULES = 16
"""`__init__.py` counts."""


def test_no_folder_holds_more_modules_than_one_can_see() -> None:
    modules = [path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")]
    per_folder = Counter(str(path.parent.relative_to(REPOSITORY)) for path in modules)
    assert len(modules) > 500
    assert {folder: count for folder, count in per_folder.items() if count > MOST_MODULES} == {}
