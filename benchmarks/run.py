"""`make bench-quantize`: this engine, llm-compressor's `model_free_ptq` and `cp` side by side, on generated checkpoints.

Every measured thing is a process of its own, one after the other, in rounds (A B A B); what counts is the best of them, and all
values are kept. Ratios are of this run: absolute numbers depend on the machine, and on who else works on it. What fails
is a row that says so. `make bench` is the same at a size that ends in minutes, printed and not written down.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out

from bench import GROUPS, SHARES, Bench
from jobs import Jobs
from machine import describe
from measured import Results

from assay.errors import AssayError

SCHEMES = ["w4a16", "w4a16_asym", "fp8_block", "fp8_channel", "nvfp4a16", "mxfp4", "mxfp8", "w8a8"]
REPOSITORY = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes, schemes and rounds of `make bench`")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="checkpoint for engine and copy, in shards of 1 GB")
    parser.add_argument("--part", type=float, default=0.8, help="GB of the checkpoint that llm-compressor quantizes, too")
    parser.add_argument(
        "--giant", type=float, nargs="*", default=[5.0, 10.0], help="GB of the single shards for peak memory"
    )  # fmt: skip
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=3, help="at most so many of everything but peak memory")
    parser.add_argument("--minutes", type=float, default=20.0, help="no further round begins that would end later")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="parts to run")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs", help="where to work: the disk that is measured")
    parser.add_argument("--results", type=Path, default=None, help="Markdown file to write the section into")
    args = parser.parse_args()
    if args.small:
        args.gigabytes, args.part, args.giant, args.rounds = 0.3, 0.1, [0.6, 1.2], 2
        args.schemes = ["w4a16", "fp8_block", "nvfp4a16"]
    return args


@contextmanager
def work_folder(parent: Path, needed_bytes: float) -> Iterator[Path]:
    """An empty folder on the disk of `parent`, gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise AssayError(
            f"{parent}: {free_bytes / 1e9:.0f} GB free, {needed_bytes / 1e9:.0f} GB needed; free some, or give "
            "--folder on another disk, or smaller --gigabytes and --giant"
        )
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as name:
        yield Path(name)


def run_groups(bench: Bench, names: list[str], started: float) -> None:
    """One part after the other; what one leaves of its share of the time goes to the next."""
    total, used = sum(SHARES[name] for name in names), 0
    for name in names:
        used += SHARES[name]
        bench.run_group(name, started + (bench.deadline - started) * used / total)


def main() -> int:
    args = arguments()
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {line}", flush=True)

    # what lies there at once: outputs of all schemes; checkpoint, copy, what will be verified; the same, giant and its output
    giant = max(args.giant, default=0)
    needed_bytes = 1e9 * max(10 * args.part, 3.4 * args.gigabytes, 2 * args.gigabytes + 1.4 * giant)
    with work_folder(args.folder, needed_bytes) as folder:
        results = Results(folder / "results.json", say)
        bench = Bench(Jobs(folder, say), results, args, say, started + 60 * args.minutes)
        interrupted = False
        try:
            run_groups(bench, [name for name in GROUPS if name in args.only], started)
        except KeyboardInterrupt:
            interrupted = True
        section = bench.section(describe(folder), with_chart=args.results is not None)
        print("\n" + section)
        if args.results is not None and not interrupted:
            bench.write(args.results, section)
            say(f"written: {args.results}")
    if interrupted:
        say("interrupted: printed, not written")
        return 130
    failed = [result.name for result in results.by_name.values() if result.error is not None]
    different = [comparison.scheme for comparison in bench.comparisons if not comparison.passed]
    if failed or different:
        say(f"failed: {', '.join(failed) or 'nothing'}; different from llm-compressor: {', '.join(different) or 'nothing'}")
    return 1 if failed or different else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssayError as error:
        sys.exit(f"error: {error}")
