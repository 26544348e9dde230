"""200 damaged files of every kind (`make fuzz` has 10,000): each is read, or refused in one line, and never for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "trust"))

from fuzz import TARGETS, cases

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", TARGETS)
def test_read_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    found = [(seed, outcome) for seed, outcome in cases(name, range(200), tmp_path)]
    assert [one for one in found if one[1].kind not in ("read", "refused")] == []
