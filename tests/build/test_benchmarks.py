"""Every program of `benchmarks/` finds the modules beside it also when `make` runs it, which exports PYTHONSAFEPATH."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "benchmarks", ROOT / "tests" / "support")
MODULES = {path.stem for folder in FOLDERS for path in folder.rglob("*.py")}
PROGRAMS = [path for path in sorted(FOLDERS[0].rglob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of imports at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name.partition(".")[0]) for name in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


def first_addition(tree: ast.Module) -> int | None:
    """The line at which the program adds to `sys.path`."""
    return next((node.lineno for node in tree.body if "sys.path" in ast.unparse(node)), None)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_of_the_same_folder_are_found(program: Path) -> None:
    tree = ast.parse(program.read_text(encoding="utf-8"))
    line = first_addition(tree)
    assert [name for at, name in imported(tree) if name in MODULES and (line is None or at < line)] == []


def test_there_are_programs() -> None:
    assert len(PROGRAMS) > 25
