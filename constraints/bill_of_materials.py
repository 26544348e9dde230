"""Writes docs/bill-of-materials.md: every pinned package by the licence that its own metadata states, with its environments.

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
    "work": ("W", "the work environment, `.venv`"),
    "serve-cpu": ("C", "serving on CPUs"),
    "serve-cuda": ("G", "serving with CUDA"),
    "build": ("B", "building"),
    "docs": ("D", "documentation"),
}
"""File of pins -> letter of its environment on the page, and what it is."""
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
            found.setdefault(key(name), licence_of(*stated))
    return found


def page(licence_by_package: dict[str, str]) -> str:
    pins = {name: pins_in(name) for name in FILES}
    packages_by_licence: dict[str, list[str]] = {}
    for package in sorted(set().union(*pins.values())):
        packages_by_licence.setdefault(licence_by_package.get(package, NOT_READ), []).append(package)
    lines = [
        "# Bill of materials",
        "",
        "Every pinned package by its licence and the environments that have it. Made by `constraints/bill_of_materials.py`",
        "from the pins in `constraints/` and the installed packages' own metadata. Every file of these versions is pinned by",
        "its SHA-256 in `constraints/*.hashes.txt`, PyTorch for CPUs apart.",
        "",
        *(f"- {letter}: {environment}" for letter, environment in FILES.values()),
    ]
    for licence in sorted(packages_by_licence, key=lambda name: (name == NOT_READ, name.lower())):
        lines += ["", f"## {licence}", ""]
        if licence == NOT_READ:
            lines += ["Of the CUDA environment, which was not installed where this page was made.", ""]
        lines += _by_environments(packages_by_licence[licence], pins)
    return "\n".join([*lines, ""])


def _by_environments(packages: list[str], pins: dict[str, dict[str, str]]) -> list[str]:
    """A line for each set of environments, `- WD: a 1.0, b 2.0`: the packages that they have in one version."""
    by_letters: dict[str, list[str]] = {}
    for package in packages:
        letters: dict[str, str] = {}
        for name, (letter, _) in FILES.items():
            if package in pins[name]:
                letters[pins[name][package]] = letters.get(pins[name][package], "") + letter
        for version, environments in letters.items():
            by_letters.setdefault(environments, []).append(f"{package} {version}")
    return [f"- {environments}: {', '.join(by_letters[environments])}" for environments in sorted(by_letters)]


if __name__ == "__main__":
    PAGE.write_text(page(licences(sys.argv[1:])), encoding="utf-8")
