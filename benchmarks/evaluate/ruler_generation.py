"""How long it takes to generate RULER, and whether it comes out the same: run it with a checkpoint folder.

    python benchmarks/evaluate/ruler_generation.py examples/tiny_glm/checkpoint --workers 2
    python benchmarks/evaluate/ruler_generation.py examples/tiny_glm/checkpoint --long

Prints a table in Markdown; exit code 1 if a repeated subset of the items differs from the first run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from assay_evaluate.tasks.ruler.tasks import TASKS, grid_item, ruler_item
from assay_evaluate.tasks.ruler.tokens import Prompt, TokenCounter

LENGTHS_TOKENS = (1024, 2048, 4096, 8192, 16384)
LONG_TOKENS = (131_072, 1_048_576)
GRID_TOKENS = 936_000
SEED = "eval-benchmark"


@dataclass(frozen=True)
class Made:
    """Items of one task and length: process seconds, whole counts, tokens counted over tokens kept, least fill, hashes."""

    task: str
    length_tokens: int
    cpu_s: float
    counts_per_item: float
    counted_share: float
    least_fill: float
    sha256s: tuple[str, ...]


@cache
def counter(checkpoint: Path) -> TokenCounter:
    return TokenCounter(checkpoint)


def make(checkpoint: Path, task: str, length_tokens: int, num_items: int) -> Made:
    """Make items, counting how often the tokenizer was asked. Task `grid` is the middle cell of the needle grid."""
    counted: list[int] = []

    def count(prompt: Prompt) -> int:
        counted.append(counter(checkpoint)(prompt))
        return counted[-1]

    count("warm")
    counted.clear()
    start = time.process_time()
    items = [
        grid_item(length_tokens, 0.5, index, seed=SEED, style="chat", count_tokens=count)
        if task == "grid"
        else ruler_item(task, length_tokens, index, seed=SEED, style="chat", count_tokens=count)
        for index in range(num_items)
    ]
    cpu_s = time.process_time() - start
    return Made(
        task,
        length_tokens,
        cpu_s,
        len(counted) / num_items,
        sum(counted) / sum(item.prompt_tokens for item in items),
        min(item.fill for item in items),
        tuple(item.sha256 for item in items),
    )


def run(checkpoint: Path, jobs: Sequence[tuple[str, int]], num_items: int, workers: int) -> list[Made]:
    """All jobs, the longest first."""
    ordered = sorted(jobs, key=lambda job: -job[1])
    with ProcessPoolExecutor(workers) as pool:
        made = [pool.submit(make, checkpoint, task, length, num_items) for task, length in ordered]
        return [one.result() for one in made]


def table(made: Sequence[Made]) -> str:
    """One row for each task and length."""
    lines = ["| task | tokens | CPU s/item | counts/item | tokens counted/kept | least fill |", "|---|---|---|---|---|---|"]
    for one in sorted(made, key=lambda one: (one.length_tokens, one.task)):
        per_item = one.cpu_s / len(one.sha256s)
        lines.append(
            f"| {one.task} | {one.length_tokens:,} | {per_item:.3f} | {one.counts_per_item:.1f} | {one.counted_share:.2f} "
            f"| {one.least_fill:.4f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--items", type=int, default=100, help="of each task at each length (1 with --long)")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--long", action="store_true", help="every task at 128K and 1M tokens, and a needle at 936K, once")
    arguments = parser.parse_args()
    num_items = 1 if arguments.long else arguments.items
    jobs = [(task, length) for length in (LONG_TOKENS if arguments.long else LENGTHS_TOKENS) for task in TASKS]
    jobs += [("grid", GRID_TOKENS)] if arguments.long else []

    start = time.perf_counter()
    made = run(arguments.checkpoint, jobs, num_items, arguments.workers)
    wall_s = time.perf_counter() - start
    cpu_s = sum(one.cpu_s for one in made)
    print(table(made))
    print(f"\n{len(jobs) * num_items} items in {wall_s:.0f} s with {arguments.workers} processes ({cpu_s:.0f} CPU s).")

    first = {(one.task, one.length_tokens): one.sha256s for one in made}
    part = [job for job in jobs if job[1] == min(length for _, length in jobs)][::-3]
    again = run(arguments.checkpoint, part, max(1, num_items // 10), 1)
    differ = [one for one in again if first[one.task, one.length_tokens][: len(one.sha256s)] != one.sha256s]
    num_again = sum(len(one.sha256s) for one in again)
    print(f"Made again, alone and in another order: {num_again} items of {len(again)} tasks; {len(differ)} tasks differ.")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
