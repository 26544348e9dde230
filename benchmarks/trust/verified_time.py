"""What full verification costs: quantizing and verifying every byte against the time of quantizing alone; prints a table.

    python benchmarks/trust/verified_time.py --gigabytes 4 --write benchmarks/trust/verified_time.md

Each measurement is a process of its own; ways take turns, in rounds, and the best round of each counts. The clock starts after
a run over a tiny checkpoint in the same process. `cold`: source and output are evicted from the page cache before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # python is run with PYTHONSAFEPATH
from generated import TINY, Shape, make_checkpoint, weight_bytes  # noqa: E402
from machine import describe  # noqa: E402

from assay.recipes.load import load_recipe  # noqa: E402
from assay.recipes.precision import PrecisionRecipe  # noqa: E402
from assay_quantize.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from assay_quantize.engine.quantize import quantize  # noqa: E402
from assay_quantize.kernels.devices import default_workers  # noqa: E402
from assay_quantize.plan.planner import make_plan  # noqa: E402
from assay_quantize.verify.verify import verify  # noqa: E402

Way = Callable[[Path, Path, str], None]


# ------------------------------------------------------------------------------------------------ the ways
def _plan(source: Path, precision: str):
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="bench", family=None)


def alone(source: Path, out: Path, precision: str) -> None:
    quantize(_plan(source, precision), source, out)


def one_after_the_other(source: Path, out: Path, precision: str) -> None:
    alone(source, out, precision)
    assert verify(out, source=source).passed


def together(source: Path, out: Path, precision: str) -> None:
    from assay_quantize.verify.finished import FinishedShards

    plan = _plan(source, precision)
    with FinishedShards(plan, out, source, workers=default_workers()) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        assert verify(out, source=source, finished=finished).passed


def sampled(source: Path, out: Path, precision: str) -> None:
    alone(source, out, precision)
    assert verify(out, source=source, sample=0.05).passed


WAYS: dict[str, Way] = {
    "quantize alone": alone,
    "quantize, shards verified meanwhile": together,
    "quantize, then verify": one_after_the_other,
    "quantize, then verify --sample 0.05": sampled,
}


# ------------------------------------------------------------------------------------------------ measuring
def child(way: str, source: Path, tiny: Path, out: Path, precision: str, cold: bool) -> None:
    """One measurement, as JSON on stdout."""
    WAYS[way](tiny, out, precision)
    shutil.rmtree(out)
    os.sync()
    if cold:
        evict(source)
    else:
        for path in source.glob("*.safetensors"):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    WAYS[way](source, out, precision)
    seconds, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    print(json.dumps({"s": seconds, "cpu_s": cpu, "peak_mib": now.ru_maxrss / 1024}))
    shutil.rmtree(out)


def evict(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4, help="of BF16 weights (10^9 bytes)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--precisions", default="w4a16,fp8,nvfp4a16")
    parser.add_argument("--ways", default="1,2,3,4", help="of the four, in the order of the table; the first is needed")
    parser.add_argument("--folder", type=Path, help="where the checkpoints lie; made when missing, kept")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, source, tiny, out, precision, cold = arguments.child
        child(way, Path(source), Path(tiny), Path(out), precision, cold == "cold")
        return 0
    ways = [list(WAYS)[int(number) - 1] for number in arguments.ways.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        source, tiny = folder / "source", folder / "tiny"
        for path, shape in ((tiny, TINY), (source, Shape(round(arguments.gigabytes * 1e9), 10**9))):
            if not path.is_dir():
                make_checkpoint(path, shape)
        lines = ["# What full verification costs", ""]
        lines += [f"- {what}: {words}" for what, words in describe(folder).items()]
        lines += [
            f"- source: {weight_bytes(source) / 1e9:.2f} GB of BF16 in shards of 1 GB; best of {arguments.rounds} rounds",
            "",
        ]
        lines += ["| precision | | s | CPU s | peak MiB | against quantizing alone | CPU |", "|---|---|---|---|---|---|---|"]
        for precision in arguments.precisions.split(","):
            for cold in ("warm", "cold"):
                best: dict[str, dict[str, float]] = {}
                for _ in range(arguments.rounds):
                    for way in ways:
                        command = [
                            sys.executable,
                            __file__,
                            "--child",
                            way,
                            *map(str, (source, tiny, folder / "out", precision, cold)),
                        ]
                        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                        kept = best.setdefault(way, found)
                        best[way] = {key: (max if key == "peak_mib" else min)(kept[key], found[key]) for key in found}
                        print(precision, cold, way, found, flush=True)
                base = best["quantize alone"]
                for way, found in best.items():
                    ratios = f"{found['s'] / base['s']:.2f}x | {found['cpu_s'] / base['cpu_s']:.2f}x"
                    row = f"{found['s']:.2f} | {found['cpu_s']:.2f} | {found['peak_mib']:.0f} | {ratios}"
                    lines.append(f"| {precision}, {cold} | {way} | {row} |")
    text = "\n".join(lines) + "\n"
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
