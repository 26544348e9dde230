"""A replay that is ended from outside leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ASKS = """
import sys
from pathlib import Path
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.replay import Candidate, replay

profile = load_recipe(ProfileRecipe, "8xh200").model_copy(update={"interpreter": sys.argv[1]})
replay([Candidate("m", Path(sys.argv[2]), profile, load_recipe(ModelRecipe, "tiny-glm").serving)])
"""
SLOW = """#!{python}
import os, sys, time
if "-m" not in sys.argv:
    print('{{"vllm": "0.0", "assay": "0"}}')
    sys.exit()
open({started!r}, "w").write(str(os.getpid()) + "\\n")
time.sleep(120)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, -2), (signal.SIGTERM, -15)])
def test_the_program_goes_with_us(tmp_path: Path, number: signal.Signals, status: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "num_hidden_layers": 1}))
    interpreter, started = tmp_path / "python", tmp_path / "started"
    interpreter.write_text(SLOW.format(python=sys.executable, started=str(started)))
    interpreter.chmod(0o755)
    # tests that were started in the background ignore SIGINT, and what they start would, too
    asks = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{ASKS}"
    ours = subprocess.Popen([sys.executable, "-c", asks, str(interpreter), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        program = int(eventually(lambda: started.read_text() if started.exists() and started.stat().st_size else "", ours))
        ours.send_signal(number)
        assert ours.wait(timeout=30) == status
        assert eventually(lambda: "gone" if not Path(f"/proc/{program}/cmdline").exists() or is_zombie(program) else "")
    finally:
        ours.kill()
        for pid in [int(started.read_text())] if started.exists() else []:
            if Path(f"/proc/{pid}").exists() and not is_zombie(pid):
                os.kill(pid, signal.SIGKILL)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(look: Callable[[], str], process: subprocess.Popen[str] | None = None) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := look():
            return found
        if process is not None and process.poll() is not None:
            raise AssertionError(process.stderr.read() if process.stderr else "ended")
        time.sleep(0.05)
    return ""
