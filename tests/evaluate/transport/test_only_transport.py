"""HTTP to a server is spoken in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import assay_evaluate

PACKAGE = Path(assay_evaluate.__file__).parent
ELSEWHERE = {
    "diagnosis/levers/reproduction_script.py": {"http.client", "urllib.error", "urllib.request"},  # runs without assay
    "tasks/lm_eval/load.py": {"httpx"},  # what lm-eval's downloads raise
}
LIBRARIES = {"http.client", "urllib.request", "urllib.error", "httpx", "requests", "aiohttp", "urllib3"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if not any(library.partition(".")[0] in text for library in LIBRARIES):
        return names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def test_no_other_room_speaks_http() -> None:
    found = {str(path.relative_to(PACKAGE)): imported(path) & LIBRARIES for path in PACKAGE.rglob("*.py")}
    assert {name: libraries for name, libraries in found.items() if libraries} == ELSEWHERE | {
        "transport/connection.py": {"http.client"},
        "transport/download.py": {"httpx"},  # files, not servers of models
    }
