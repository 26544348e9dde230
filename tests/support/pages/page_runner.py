"""Runs the commands of a page in a folder that looks like a clone, and holds what they print against the page."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from page_commands import ROOT, Block, commands_of
from warm import WarmVllm

NOT_OF_A_CLONE = {".git", ".venv-serve", "runs", "site", "build", "dist"}


def clone(folder: Path, warm: WarmVllm | None = None) -> None:
    """What a clone with both environments has, by links; a warm serving environment makes its servers start in seconds."""
    for path in ROOT.iterdir():
        if path.name not in NOT_OF_A_CLONE and not path.name.endswith("_cache"):
            (folder / path.name).symlink_to(path)
    if warm is not None:
        warm.link(folder)  # nothing, where servers are not to compute with one thread each
    if (serving := folder / ".venv-serve").exists():
        (serving / ".ready").touch()
    elif (ROOT / ".venv-serve").exists():
        serving.symlink_to(ROOT / ".venv-serve")


def run_block(block: Block, folder: Path) -> None:
    """Writes the block's file, or runs its commands in order. AssertionError says where and what was printed instead."""
    if block.file is not None:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text + "\n", encoding="utf-8")
    if block.language != "sh":
        return
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTEST_"))}
    environment = outer | {"PATH": f"{folder / '.venv' / 'bin'}:{outer['PATH']}", "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
    printed = ""
    commands = commands_of(block)
    for number, command in enumerate(commands, start=1):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed += done.stdout
        expected = block.exit_code if number == len(commands) else 0
        assert done.returncode == expected, f"{block.where}: {command}: exit {done.returncode}\n{done.stdout}"
    if block.output is not None:
        missing = first_not_printed(block.output, printed)
        assert missing is None, f"{block.where}: not printed: {missing}\nprinted was:\n{printed}"


def first_not_printed(shown: str, printed: str) -> str | None:
    """The first line that the page shows and the command did not print, in this order; None: all were printed.

    Numbers, times, sizes' units, blanks and lines of tables may differ; a line that ends in ` ...` goes on; others may lie
    between.
    """
    there = iter([_masked(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        wanted = _masked(line)
        if not wanted or wanted == "...":
            continue
        is_begin = wanted.endswith(" ...")
        wanted = wanted.removesuffix(" ...")
        if not any(one.startswith(wanted) if is_begin else one == wanted for one in there):
            return line
    return None


def _masked(line: str) -> str:
    line = re.sub(r"[0-9a-f]{12,}", "HASH", line)
    line = re.sub(r"[+-]?\d[\d,.]*", "N", line)
    line = re.sub(r"\bN (s|min|h)\b", "TIME", line)
    return re.sub(r"\bN (B|kB|MB|GB|TB)\b", "SIZE", " ".join(re.sub(r"[━─┏┓┡┩┃│└┘┴├┤┼╇╈]+", " ", line).split()))
