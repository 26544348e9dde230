"""The serving environment's Python, with the vLLM plugin of this checkout instead of the installed one."""

from __future__ import annotations

from pathlib import Path

from assay_evaluate.serving.server import find_interpreter

REPOSITORY = Path(__file__).resolve().parents[3]


def with_our_plugin(folder: Path) -> str:
    """Path of a script, made in `folder`, that a profile may name as its interpreter."""
    real = find_interpreter(None)
    assert real is not None, "no .venv-serve here: run `make setup`"
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY}/evaluate exec {real.absolute()} "$@"\n')
    path.chmod(0o755)
    return str(path)
