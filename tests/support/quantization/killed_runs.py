"""Folders of quantization runs that were killed (SIGKILL) at a chosen moment.

folders = killed_at({"before the index": ("rename", 6)}, plan, source, folder)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from assay.records.plan import Plan

KILLED = """
import json, os, signal, sys
from pathlib import Path
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
import assay_quantize.kernels.fused_fp4, assay_quantize.engine.local_runner  # once, before the forks: numba takes the longest

plan, source = Plan.load(Path(sys.argv[1])), Path(sys.argv[2])

def run(out, kind, count):
    seen, replace = 0, os.replace

    def die(what):
        nonlocal seen
        seen += kind == what
        if kind == what and seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace_or_die(*names):
        die("rename")
        replace(*names)

    os.replace = replace_or_die
    quantize(plan, source, Path(out), on_progress=lambda name, size: die("tensor"))

for out, kind, count in json.loads(sys.argv[3]):
    child = os.fork()
    if not child:
        run(out, kind, count)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def killed_at(moments: Mapping[str, tuple[str, int]], plan: Plan, source: Path, folder: Path) -> dict[str, Path]:
    """Moment -> the folder of a process killed at it.

    moments: name -> (what is counted: `tensor`, a slab that was written, or `rename`, one that is about to happen; which one
    kills). Renames are those of the shards, the copied files, the index, config.json and the manifest, in this order.
    """
    plan.save(folder / "plan.json")
    folders = {moment: folder / str(number) for number, moment in enumerate(moments)}
    jobs = [(str(folders[moment]), kind, count) for moment, (kind, count) in moments.items()]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder / "plan.json"), str(source), json.dumps(jobs)],
        env={**os.environ, "PYTHONSAFEPATH": "1"}, cwd=folder, timeout=600, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(jobs), done.stderr
    return folders
