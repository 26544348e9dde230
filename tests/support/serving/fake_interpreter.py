"""An "interpreter" with a vLLM that is none: what happens around a server, without one."""

from __future__ import annotations

import sys
from pathlib import Path

FAKE = """#!{python}
import json, os, signal, subprocess, sys, time
if "-m" not in sys.argv:
    print(json.dumps({{"vllm": "0.0", "assay": "0"}}))
    sys.exit()
{body}
"""


def fake_python(folder: Path, body: str) -> Path:
    """An "interpreter" that has vLLM 0.0 and runs `body` when asked to start a server."""
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, body=body))
    path.chmod(0o755)
    return path
