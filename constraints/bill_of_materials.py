"""Writes docs/bill-of-materials.md: every pinned package, where it is installed, and its licence as its own metadata states it.

    .venv/bin/python constraints/bill_of_materials.py .venv/bin/python .venv-serve/bin/python .venv-docs/bin/python

Asks the interpreters of the environments. A package of the CUDA environment that neither has says `not read`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "bill-of-materials.md"
FILES = {
    "work": "work",
    "serve-cpu": "serving on CPUs",
    "serve-cuda": "serving with CUDA",
    "build": "building",
    "docs": "documentation",
}
NOT_READ = "not read"
_ASK = """
import importlib.metadata as m, json
print(json.dumps([[d.metadata["Name"], d.version, d.metadata.get("License-Expression"), d.metadata.get_all("Classifier") or [],
                   d.metadata.get("License")] for d in m.distributions()]))
"""


def key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_in(name: str) -> dict[str, str]:
    """Normalized name -> version of each pin in a file of this folder."""
    lines = (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {key(match[1]): match[2] for line in lines if (match := re.fullmatch(r"([\w.-]+)==(\S+)", line))}


def licence_of(expression: str | None, classifiers: list[str], free: str | None) -> str:
    """SPDX expression, else classifiers, else the first line of the licence field; as the package states them."""
    if expression:
        return expression
    stated = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    stated = [one for one in stated if one != "OSI Approved"]
    first = next((line.strip() for line in (free or "").splitlines() if line.strip()), "")
    return ", ".join(stated) or (first if len(first) <= 60 else first[:57] + "...") or "not stated"


def licences(interpreters: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for interpreter in interpreters:
        told = subprocess.run([interpreter, "-I", "-c", _ASK], capture_output=True, text=True, check=True).stdout
        for name, _, *stated in json.loads(told):
            found.setdefault(key(name), licence_of(*stated).replace("|", "\\|"))
    return found


def page(found: dict[str, str]) -> str:
    columns = {name: pins_in(name) for name in FILES}
    names = sorted(set().union(*columns.values()))
    rows = [
        f"| {name} | {' | '.join(columns[file].get(name, '') for file in FILES)} | {found.get(name, NOT_READ)} |"
        for name in names
    ]
    return "\n".join([
        "# Bill of materials",
        "",
        "Made by `constraints/bill_of_materials.py` from the pins in `constraints/` and the installed packages' own metadata.",
        f"Empty cells: not in that environment. `{NOT_READ}`: of the CUDA environment, which was not installed where this was",
        "written. Every file of these versions is pinned by its SHA-256 in `constraints/*.hashes.txt`, PyTorch for CPUs apart.",
        "",
        f"| package | {' | '.join(FILES.values())} | licence |",
        f"|{'---|' * (len(FILES) + 2)}",
        *rows,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(licences(sys.argv[1:])), encoding="utf-8")
