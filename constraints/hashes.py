"""Writes the pins with the SHA-256 of every file that pip may take for them: `python constraints/hashes.py [NAME...]`

NAME.txt -> NAME.hashes.txt, for build, work, serve-cpu, serve-cuda and docs. Needs `uv` in the PATH and the package registry,
from which it reads metadata only. Left out are torch where CPUs serve, as its builds for them are other files than the
registry's, and files for Windows, musl, PyPy, processors other than x86-64 and ARM64, and other Pythons than 3.11 to 3.14.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("build", "work", "serve-cpu", "serve-cuda", "docs")
WITH_TORCH = frozenset({"serve-cuda"})
OLDEST_PYTHON = "3.11.9"
PYTHONS = re.compile(r"py[23]|py3\d*|cp3(?:[2-9]|1[0-4])")
"""Tags of wheels; those before cp311 hold for abi3 only."""
PLATFORMS = re.compile(r"any|(?:many)?linux.*_(?:x86_64|aarch64)|macosx_.*_(?:x86_64|arm64|universal2)")


def pins_in(path: Path) -> list[str]:
    """`name==version` of each line that is one."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"[\w.-]+==", line)]


def locked(pins: list[str]) -> list[dict[str, Any]]:
    """What the registry has for each pin (PEP 751)."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "pins.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join(pins) + "\n", encoding="utf-8")
        words = ("--no-deps", "--universal", "--python-version", OLDEST_PYTHON, "--format", "pylock.toml", "--quiet")
        subprocess.run(["uv", "pip", "compile", *words, "-o", str(lock), str(wanted)], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return packages


def is_for_us(wheel: str) -> bool:
    """Whether a wheel of this file name can be installed on a machine that assay is for."""
    pythons, abis, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    for python in pythons.split("."):
        for abi in abis.split("."):
            is_old = python.startswith("cp3") and int(python[3:]) < 11
            if PYTHONS.fullmatch(python) and not abi.endswith("t") and (abi in {"abi3", "none"} or not is_old):
                return any(PLATFORMS.fullmatch(platform) for platform in platforms.split("."))
    return False


def lines_of(package: dict[str, Any]) -> list[str]:
    files = [one for one in package.get("wheels", ()) if is_for_us(one["url"].rpartition("/")[2])]
    files += [package["sdist"]] if "sdist" in package else []
    hashes = sorted({one["hashes"]["sha256"] for one in files})
    return [f"{package['name']}=={package['version']}", *(f"    --hash=sha256:{one}" for one in hashes)]


def write(name: str) -> None:
    pins = [pin for pin in pins_in(HERE / f"{name}.txt") if name in WITH_TORCH or not pin.startswith("torch==")]
    packages = locked(pins)
    if len(packages) != len(pins):
        raise SystemExit(f"error: {name}: {len(pins)} pins, and {len(packages)} packages were found")
    head = f"# Made by constraints/hashes.py from {name}.txt: the files that pip may take (--require-hashes).\n"
    text = head + "".join(" \\\n".join(lines_of(one)) + "\n" for one in sorted(packages, key=lambda one: str(one["name"])))
    (HERE / f"{name}.hashes.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        write(each)
