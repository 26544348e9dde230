"""What is measured, each in a process of its own: `python child.py REPORT.json KIND '{"source": ...}'`.

The clock starts after a run over a tiny checkpoint, so that imports and just-in-time compilation are outside; their time is
reported apart. Memory is VmHWM of this process at its end: everything it ever held, imports and mapped pages included.
Times in seconds, sizes in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READ_BYTES = 16 << 20
IGNORED_BY_LLMCOMPRESSOR = ["lm_head", r"re:.*embed_tokens$", r"re:.*mlp\.gate$"]
"""What our precisions keep; llm-compressor itself skips whatever ends in `norm`."""


# ------------------------------------------------------------------------------------------------ what is measured
def assay_quantize(source: str, out: str, precision: str, **options: Any) -> None:
    """The engine behind `assay quantize`, without the verification that the command adds. options: its own, e.g. workers."""
    from assay.recipes.load import load_recipe
    from assay.recipes.precision import PrecisionRecipe
    from assay_pipeline.planning import plan_for
    from assay_pipeline.targets import open_source, resolve_target
    from assay_quantize.engine.quantize import quantize

    target = resolve_target(source)
    plan = plan_for(target, open_source(target), load_recipe(PrecisionRecipe, precision))
    quantize(plan, Path(source), Path(out), **options)


def assay_verify(checkpoint: str, source: str | None, **options: Any) -> None:
    """What `assay verify DIR --source SOURCE` does. options: its own, e.g. workers."""
    from assay_quantize.verify.verify import verify

    result = verify(Path(checkpoint), source=None if source is None else Path(source), **options)
    if not result.passed:
        raise RuntimeError(f"verification failed: {result.damages[0]}")


def llmcompressor(source: str, out: str, preset: str, workers: int) -> None:
    from llmcompressor.entrypoints.model_free import model_free_ptq
    from loguru import logger

    logger.remove()
    model_free_ptq(
        source, out, scheme=preset, ignore=IGNORED_BY_LLMCOMPRESSOR, max_workers=workers, device="cpu"
    )  # fmt: skip


def copy(source: str, out: str) -> None:
    """`cp` of every file, then fsync of each copy."""
    subprocess.run(["cp", "--recursive", "--reflink=never", source, out], check=True)
    for path in Path(out).iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def read(source: str) -> None:
    """Every byte of the weights into one buffer, and nothing else: what the disk, or the page cache, can do."""
    buffer = bytearray(READ_BYTES)
    for path in sorted(Path(source).glob("*.safetensors")):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        position = 0
        while count := os.preadv(handle, [buffer], position):
            position += count
        os.close(handle)


KINDS: dict[str, Callable[..., None]] = {
    "assay": assay_quantize,
    "verify": assay_verify,
    "llm-compressor": llmcompressor,
    "cp": copy,
    "read": read,
}


# ------------------------------------------------------------------------------------------------ how
def warm_up(kind: str, arguments: dict[str, Any], tiny: str) -> None:
    """The same over a tiny checkpoint. For `verify`, `tiny` has been quantized by the caller, beside its source."""
    with tempfile.TemporaryDirectory() as name:
        if kind == "verify":
            replaced = {"checkpoint": tiny, "source": None if arguments["source"] is None else f"{tiny}-source"}
        else:
            replaced = {key: value for key, value in {"source": tiny, "out": f"{name}/out"}.items() if key in arguments}
        KINDS[kind](**{**arguments, **replaced})


def cpu_s() -> float:
    """CPU seconds of this process and of children that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def peak_rss_bytes() -> int:
    """VmHWM. `ru_maxrss` would not do: it is inherited from whoever started this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--tiny", help="checkpoint for the run before the clock starts")
    args = parser.parse_args()
    started = time.monotonic()
    if args.tiny:
        warm_up(args.kind, args.arguments, args.tiny)
    began, began_cpu_s = time.monotonic(), cpu_s()
    KINDS[args.kind](**args.arguments)
    report = {
        "seconds": time.monotonic() - began,
        "cpu_s": cpu_s() - began_cpu_s,
        "startup_s": began - started,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    args.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
