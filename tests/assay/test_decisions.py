"""The index of docs/decisions: every decision has a number of its own, under which it is listed, and its own title."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def test_every_decision_has_a_number_of_its_own() -> None:
    files = sorted(path.name for path in FOLDER.glob("[0-9]*.md"))
    assert [number for number, times in Counter(name[:3] for name in files).items() if times > 1] == []


def test_the_index_lists_every_decision_once_under_its_number() -> None:
    listed = re.findall(r"^\| \[(\d+)\]\(([^)]+)\)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [(path.name[:3], path.name) for path in sorted(FOLDER.glob("[0-9]*.md"))]


def test_titles_begin_with_the_number() -> None:
    for path in FOLDER.glob("[0-9]*.md"):
        assert path.read_text(encoding="utf-8").startswith(f"# {path.name[:3]}. "), path.name


def test_the_index_has_no_traces_of_a_merge() -> None:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("<<<<<<<", "=======", ">>>>>>>"))] == []
