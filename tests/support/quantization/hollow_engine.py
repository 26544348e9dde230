"""The engine on a hollow checkpoint, as a child process: everything is real but the reading, rounding and writing of weights.

    python hollow_engine.py SOURCE OUT PRECISION [KILL_AFTER_SLABS]

Two seams: `ShardWork.do` (one slab) hands an empty result to the ordered writer, and the writer, which has got the header of a
shard only, ends it there. Plan, slabs, lanes, worker threads, window, journal, resume, index and manifest are the engine's own.
Prints one line of JSON; with KILL_AFTER_SLABS it ends itself with SIGKILL after so many.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine import quantize as engine
from assay_quantize.engine import shards
from assay_quantize.engine.ordered_writer import OrderedWriter, Result
from assay_quantize.engine.quantize import quantize
from assay_quantize.engine.slab_work import ShardWork, _stored_range
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.slabs import Slab

lock = threading.Lock()
source_bytes: collections.Counter[str] = collections.Counter()
"""Kind of work -> bytes of the source in its slabs."""
shards_seen: set[str] = set()
counts = {"slabs": 0}


class HollowWork(ShardWork):
    kill_after: int | None = None

    def do(self, index: int, slab: Slab, *, ahead: Slab | None) -> None:
        self.writer.wait_for_room(index)
        begin, end = _stored_range(slab)
        with lock:
            counts["slabs"] += 1
            source_bytes[slab.work] += end - begin
            if slab.work != "amax":
                shards_seen.add(str(slab.tensor.shard_out))
            if counts["slabs"] == self.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        self.writer.deliver(index, Result({}, False, lambda: None))


class HollowWriter(OrderedWriter):
    def finish(self) -> tuple[str, int]:
        self._layout.clear()
        return super().finish()


def peak_bytes() -> int:
    """Of this process alone; ru_maxrss begins with what the parent had when it was forked."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def main(source: str, out: str, precision: str, kill_after: str | None = None) -> None:
    patched: Any = shards
    patched.ShardWork, patched.OrderedWriter = HollowWork, HollowWriter
    HollowWork.kill_after = None if kill_after is None else int(kill_after)
    # the checkpoint would be 400 GB: what is free here does not matter
    real: Any = engine
    real.shutil = SimpleNamespace(disk_usage=lambda folder: shutil.disk_usage(folder)._replace(free=1 << 50))
    plan = make_plan(open_checkpoint(Path(source)), load_recipe(PrecisionRecipe, precision), model="glm-5", family=None)
    manifest = quantize(plan, Path(source), Path(out), workers=2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "tensors": len(plan.tensors),
                "bytes_in": plan.bytes_in,
                "shards": len(manifest.shards),
                "slabs": counts["slabs"],
                "source_bytes": dict(source_bytes),
                "shards_seen": sorted(shards_seen),
                "cpu_s": used.ru_utime + used.ru_stime,
                "peak_bytes": peak_bytes(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
